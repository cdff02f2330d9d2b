//! Tells the program which commit it is made of: `ADIT_COMMIT` of the environment, else what git says.
//!
//! Debug builds do not ask git: each commit would rebuild them.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=ADIT_COMMIT");
    let given = std::env::var("ADIT_COMMIT").ok();
    let commit = given.filter(|commit| !commit.is_empty()).or_else(|| {
        let is_release = std::env::var("PROFILE").is_ok_and(|profile| profile == "release");
        is_release.then(of_git).flatten()
    });
    let commit = commit.unwrap_or_else(|| "unknown".to_owned());
    println!("cargo::rustc-env=ADIT_COMMIT={commit}");
}

/// The first 12 digits of the commit that is checked out; none outside a repository.
fn of_git() -> Option<String> {
    // Its reflog grows with every commit and every checkout.
    println!(
        "cargo::rerun-if-changed={}",
        git(&["rev-parse", "--git-path", "logs/HEAD"])?
    );
    git(&["rev-parse", "--short=12", "HEAD"])
}

fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (output.status.success() && !text.is_empty()).then_some(text)
}
