//! The test binaries of the workspace: cargo builds them, and each binary lists its tests.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};

use crate::steps::{MINUTES_5, output_of};
use crate::workspace::Workspace;

/// Time limit to build all of them from scratch.
const BUILD: Duration = Duration::from_secs(30 * 60);

/// One test binary.
#[derive(Debug)]
pub(super) struct Binary {
    /// The package, followed by `::` and the target unless that is the library: `adit-core`, `adit::loopback`.
    pub(super) label: String,
    /// Path of the binary.
    pub(super) path: PathBuf,
    /// Folder of its package, in which cargo runs it.
    pub(super) folder: PathBuf,
    /// Names of its tests, without ignored ones.
    pub(super) tests: Vec<String>,
}

/// Builds the test binaries that `which` (flags of `cargo test`) selects, and lists their tests.
///
/// # Errors
/// A binary does not build, or does not list its tests.
pub(super) fn build(workspace: &Workspace, which: &[&str]) -> anyhow::Result<Vec<Binary>> {
    let artifacts = workspace.artifacts(&[&["test", "--no-run"], which].concat(), BUILD)?;
    let mut binaries = Vec::new();
    for artifact in artifacts.iter().filter(|artifact| artifact.is_test()) {
        let (package, target) = (artifact.package(), &artifact.target);
        let label = if target.kind.iter().any(|kind| kind == "lib") {
            package.to_owned()
        } else {
            format!("{package}::{}", target.name)
        };
        let folder = artifact.folder().context("a package has a folder")?;
        let path = &artifact.program;
        let mut tests = names(path, folder, &["--list", "--format=terse"])?;
        let ignored = names(path, folder, &["--list", "--format=terse", "--ignored"])?;
        tests.retain(|name| !ignored.contains(name));
        binaries.push(Binary {
            label,
            path: path.clone(),
            folder: folder.to_owned(),
            tests,
        });
    }
    ensure!(!binaries.is_empty(), "cargo built no test binary");
    Ok(binaries)
}

fn names(path: &Path, folder: &Path, flags: &[&str]) -> anyhow::Result<Vec<String>> {
    let mut list = Command::new(path);
    let output = output_of(list.args(flags).current_dir(folder), MINUTES_5)
        .with_context(|| format!("{} does not list its tests", path.display()))?;
    let names = output.stdout.lines();
    let names = names.filter_map(|line| line.strip_suffix(": test"));
    Ok(names.map(str::to_owned).collect())
}
