//! The test binaries of the workspace: cargo builds them, and each lists its tests.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde::Deserialize;

use crate::steps;
use crate::workspace::Workspace;

/// Longest time to build all of them from nothing.
const BUILD: Duration = Duration::from_secs(30 * 60);

/// One test binary.
#[derive(Debug)]
pub(super) struct Binary {
    /// The package, and behind two colons the target unless that is the library: `adit-core`, `adit::loopback`.
    pub(super) label: String,
    /// The program.
    pub(super) path: PathBuf,
    /// Where cargo runs it: the folder of its package.
    pub(super) folder: PathBuf,
    /// Names of its tests, without those that are ignored.
    pub(super) tests: Vec<String>,
}

/// A line of `cargo --message-format=json`, as far as it matters here.
#[derive(Deserialize)]
struct Message {
    reason: String,
    package_id: Option<String>,
    manifest_path: Option<PathBuf>,
    target: Option<Target>,
    profile: Option<Profile>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    kind: Vec<String>,
    name: String,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

/// Builds the test binaries that `which`, flags of `cargo test`, selects, and lists their tests.
///
/// # Errors
/// When one does not build or does not list its tests.
pub(super) fn build(workspace: &Workspace, which: &[&str]) -> anyhow::Result<Vec<Binary>> {
    let mut command = workspace.cargo(&["test", "--no-run"]);
    command
        .arg("--message-format=json-render-diagnostics")
        .args(which)
        .stdout(Stdio::piped());
    let grouped = steps::in_ci();
    let mut child = steps::spawn(&mut command, grouped)?;
    let output = child.stdout.take().context("the child's output is piped")?;
    let reader = std::thread::spawn(move || {
        let lines = BufReader::new(output).lines();
        lines.collect::<Result<Vec<_>, _>>()
    });
    let outcome = steps::wait(&mut child, &command, BUILD, grouped);
    let lines = reader.join().ok().context("cargo's output was not read")?;
    outcome?;
    let mut binaries = Vec::new();
    for line in lines? {
        if let Some((label, path, folder)) = test_binary(&line) {
            binaries.push(listed(label, path, folder)?);
        }
    }
    ensure!(!binaries.is_empty(), "cargo built no test binary");
    Ok(binaries)
}

/// Label, program and folder, if a line tells of a test binary.
fn test_binary(line: &str) -> Option<(String, PathBuf, PathBuf)> {
    let message: Message = serde_json::from_str(line).ok()?;
    let is_test = message.reason == "compiler-artifact" && message.profile?.test;
    let target = message.target.filter(|_| is_test)?;
    let package = package(&message.package_id?);
    let label = if target.kind.iter().any(|kind| kind == "lib") {
        package
    } else {
        format!("{package}::{}", target.name)
    };
    let folder = message.manifest_path?.parent()?.to_path_buf();
    Some((label, message.executable?, folder))
}

/// The name in a package id: `path+file:///folder/name#0.1.0` or `path+file:///folder#name@0.1.0`.
fn package(id: &str) -> String {
    let (url, version) = id.rsplit_once('#').unwrap_or((id, ""));
    let name = match version.split_once('@') {
        Some((name, _version)) => name,
        None => url.rsplit('/').next().unwrap_or(url),
    };
    name.to_owned()
}

fn listed(label: String, path: PathBuf, folder: PathBuf) -> anyhow::Result<Binary> {
    let all = names(&path, &folder, &["--list", "--format=terse"])?;
    let ignored = names(&path, &folder, &["--list", "--format=terse", "--ignored"])?;
    let is_run = |name: &String| !ignored.contains(name);
    Ok(Binary {
        label,
        path,
        folder,
        tests: all.into_iter().filter(is_run).collect(),
    })
}

fn names(path: &Path, folder: &Path, flags: &[&str]) -> anyhow::Result<Vec<String>> {
    let output = Command::new(path)
        .args(flags)
        .current_dir(folder)
        .output()
        .with_context(|| format!("start {}", path.display()))?;
    ensure!(
        output.status.success(),
        "{} does not list its tests: {}",
        path.display(),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    let text = String::from_utf8_lossy(&output.stdout);
    let names = text.lines().filter_map(|line| line.strip_suffix(": test"));
    Ok(names.map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_binaries_are_told_from_what_else_cargo_builds() {
        let line = |kind: &str, name: &str, test: bool| {
            format!(
                r#"{{"reason":"compiler-artifact","package_id":"path+file:///a/tunnel#adit@0.1.0","manifest_path":"/a/tunnel/Cargo.toml",
                "target":{{"kind":["{kind}"],"name":"{name}"}},"profile":{{"test":{test}}},"executable":"/a/t/x"}}"#
            )
        };
        let found = test_binary(&line("test", "loopback", true)).unwrap();
        assert_eq!(found.0, "adit::loopback");
        assert_eq!(found.2, Path::new("/a/tunnel"));
        assert_eq!(test_binary(&line("lib", "adit", true)).unwrap().0, "adit");
        assert!(test_binary(&line("bin", "adit", false)).is_none());
        assert!(test_binary(r#"{"reason":"build-finished","success":true}"#).is_none());
    }

    #[test]
    fn packages_have_the_name_of_their_id_or_their_folder() {
        assert_eq!(package("path+file:///a/xtask#0.1.0"), "xtask");
        assert_eq!(package("path+file:///a/core#adit-core@0.1.0"), "adit-core");
    }
}
