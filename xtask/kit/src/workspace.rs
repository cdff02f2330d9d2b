//! The repository: its files, its commit, and what cargo builds from it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde::Deserialize;
use walkdir::{DirEntry, WalkDir};

use crate::steps::{MINUTES_5, output_of, stdout_of};

/// Folders of build products and recorded inputs, and the marker of a worktree.
const SKIPPED: &[&str] = &["target", ".git", "artifacts", "coverage", "corpus"];

/// The repository from which this program was built.
#[derive(Clone, Debug)]
pub struct Workspace {
    root: PathBuf,
}

/// A program built by cargo: a line of `cargo --message-format=json`.
#[derive(Debug, Deserialize)]
pub struct Artifact {
    package_id: String,
    manifest_path: PathBuf,
    pub target: Target,
    profile: Profile,
    #[serde(rename = "executable")]
    pub program: PathBuf,
}

/// A target of a package.
#[derive(Debug, Deserialize)]
pub struct Target {
    pub kind: Vec<String>,
    pub name: String,
    pub src_path: PathBuf,
}

#[derive(Debug, Deserialize)]
struct Profile {
    test: bool,
}

impl Artifact {
    /// Whether this is a test binary.
    pub fn is_test(&self) -> bool {
        self.profile.test
    }

    /// Folder of the package, in which cargo runs tests.
    pub fn folder(&self) -> Option<&Path> {
        self.manifest_path.parent()
    }

    /// Name of the package, from an id `path+file:///folder/name#0.1.0` or `path+file:///folder#name@0.1.0`.
    pub fn package(&self) -> &str {
        let (url, version) = self.package_id.rsplit_once('#').unwrap_or_default();
        match version.split_once('@') {
            Some((name, _version)) => name,
            None => url.rsplit('/').next().unwrap_or(url),
        }
    }
}

impl Workspace {
    /// The workspace that contains this package.
    ///
    /// # Errors
    /// The folder was moved or deleted since the build.
    pub fn here() -> anyhow::Result<Self> {
        let package = Path::new(env!("CARGO_MANIFEST_DIR"));
        let root = package
            .ancestors()
            .nth(2)
            .context("the package is two folders below the root")?;
        ensure!(
            root.join("Cargo.toml").is_file(),
            "{} holds no Cargo.toml: the repository was moved, build again with `cargo clean -p xtask-kit`",
            root.display()
        );
        Ok(Self::at(root))
    }

    /// A tree at another place: another commit, or a sample in a test.
    pub fn at(root: &Path) -> Self {
        Self {
            root: root.to_path_buf(),
        }
    }

    /// The folder of the top `Cargo.toml`.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// A path below the root.
    pub fn path(&self, below: &str) -> PathBuf {
        self.root.join(below)
    }

    /// Cargo's target folder, which other trees may share.
    pub fn target(&self) -> PathBuf {
        let folder = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
        // Cargo resolves a relative folder against its working folder, which may be another tree.
        self.root.join(folder)
    }

    /// A command that runs in the root folder.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.root);
        command
    }

    /// Cargo of the toolchain that runs this program.
    pub fn cargo(&self, args: &[&str]) -> Command {
        let cargo = std::env::var("CARGO").unwrap_or_else(|_unset| "cargo".to_owned());
        let mut command = self.command(&cargo);
        command.args(args);
        command
    }

    /// Runs a cargo build command, and returns the programs it has built or found up to date.
    ///
    /// # Errors
    /// The build fails, or takes longer than `limit`.
    pub fn artifacts(&self, args: &[&str], limit: Duration) -> anyhow::Result<Vec<Artifact>> {
        let mut command = self.cargo(args);
        command.arg("--message-format=json-render-diagnostics");
        let messages = stdout_of(&mut command, limit)?;
        // Messages about libraries and others lack a required field, so they fail to parse.
        let artifacts = messages.lines().map(serde_json::from_str);
        Ok(artifacts.filter_map(Result::ok).collect())
    }

    /// Git's output without the final newline.
    ///
    /// # Errors
    /// Git is not installed, or fails; carries its output.
    pub fn git(&self, args: &[&str]) -> anyhow::Result<String> {
        let output = output_of(self.command("git").args(args), MINUTES_5)?;
        Ok(output.stdout.trim().to_owned())
    }

    /// The short hash of the commit, or `unknown`, followed by `with changes` if the tree was changed since.
    pub fn commit(&self) -> String {
        let commit = self.git(&["rev-parse", "--short", "HEAD"]);
        let commit = commit.unwrap_or_else(|_error| "unknown".to_owned());
        match self.git(&["status", "--porcelain", "--untracked-files=no"]) {
            Ok(changes) if !changes.is_empty() => format!("{commit} with changes"),
            Ok(_) | Err(_) => commit,
        }
    }

    /// Every source below `folder`, as paths relative to the root, sorted. Links are not followed.
    ///
    /// # Errors
    /// A folder cannot be listed.
    pub fn files(&self, folder: &str) -> anyhow::Result<Vec<String>> {
        let is_source = |entry: &DirEntry| SKIPPED.iter().all(|name| entry.file_name() != *name);
        let mut found = Vec::new();
        let entries = WalkDir::new(self.root.join(folder)).into_iter();
        for entry in entries.filter_entry(is_source) {
            let entry = entry.with_context(|| format!("list {folder}"))?;
            if entry.file_type().is_file() {
                let below = entry.path().strip_prefix(&self.root)?;
                found.push(below.to_string_lossy().into_owned());
            }
        }
        found.sort();
        Ok(found)
    }

    /// The text of a file, or `None` when it is not UTF-8.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn text(&self, below: &str) -> anyhow::Result<Option<String>> {
        let bytes =
            std::fs::read(self.root.join(below)).with_context(|| format!("read {below}"))?;
        Ok(String::from_utf8(bytes).ok())
    }
}

/// SHA-256 of a file, in hexadecimal.
///
/// # Errors
/// It cannot be read.
pub fn sha256(file: &Path) -> anyhow::Result<String> {
    let sum = output_of(
        Command::new("sha256sum").arg("--binary").arg(file),
        MINUTES_5,
    )?
    .stdout;
    let (sum, _name) = sum.split_once(' ').context("sha256sum prints a sum")?;
    Ok(sum.to_owned())
}

/// Creates an empty folder, removing an existing one first.
///
/// # Errors
/// The folder cannot be removed or created.
pub fn fresh(folder: &Path) -> anyhow::Result<()> {
    if folder.exists() {
        std::fs::remove_dir_all(folder).with_context(|| format!("remove {}", folder.display()))?;
    }
    std::fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_have_the_name_of_their_id_or_their_folder() {
        for (id, name) in [
            ("path+file:///a/xtask#0.1.0", "xtask"),
            ("path+file:///a/core#adit-core@0.1.0", "adit-core"),
        ] {
            let line = format!(
                r#"{{"reason":"compiler-artifact","package_id":"{id}","manifest_path":"/a/Cargo.toml",
                "target":{{"kind":["bin"],"name":"x","src_path":"/a/x.rs"}},"profile":{{"test":false}},"executable":"/t/x"}}"#
            );
            let artifact: Artifact = serde_json::from_str(&line).unwrap();
            assert_eq!(artifact.package(), name);
        }
    }
}
