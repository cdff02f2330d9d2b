//! Which commit is built, for `--version`.
//!
//! A release build asks git, or takes `ADIT_COMMIT` and `ADIT_COMMIT_DATE` from the environment where the sources have no repository.
//! Other builds record no commit: every commit would have them compile the library again.

use std::env;
use std::path::Path;
use std::process::Command;

const COMMIT: &str = "ADIT_COMMIT";
const DATE: &str = "ADIT_COMMIT_DATE";

fn main() {
    // A path that is there as seen from either package that this is built for.
    println!("cargo::rerun-if-changed=../config/build.rs");
    println!("cargo::rerun-if-env-changed={COMMIT}");
    println!("cargo::rerun-if-env-changed={DATE}");
    let given = env::var(COMMIT).ok().zip(env::var(DATE).ok());
    let is_release = env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let found = given.or_else(|| is_release.then(of_repository).flatten());
    let text = match &found {
        Some((commit, date)) => format!("commit {commit} of {date}"),
        None => "no commit recorded".to_owned(),
    };
    let (commit, date) = found.unwrap_or_default();
    println!("cargo::rustc-env={COMMIT}={commit}");
    println!("cargo::rustc-env={DATE}={date}");
    println!("cargo::rustc-env=ADIT_COMMIT_TEXT={text}");
}

/// Hash and date of the commit that is checked out.
fn of_repository() -> Option<(String, String)> {
    let folder = git(&["rev-parse", "--absolute-git-dir"])?;
    for file in ["HEAD", "logs/HEAD"] {
        let path = Path::new(&folder).join(file);
        if path.exists() {
            println!("cargo::rerun-if-changed={}", path.display());
        }
    }
    let told = git(&["log", "-1", "--format=%h %cs", "--abbrev=12"])?;
    let (commit, date) = told.split_once(' ')?;
    Some((commit.to_owned(), date.to_owned()))
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
