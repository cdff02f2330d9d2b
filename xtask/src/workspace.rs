//! Where the repository is and which files belong to it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};

/// Folders that hold build products or recorded inputs, never sources of ours.
const SKIPPED: &[&str] = &["target", ".git", "artifacts", "coverage", "corpus"];

/// The repository this program was built from.
#[derive(Clone, Debug)]
pub(crate) struct Workspace {
    root: PathBuf,
}

impl Workspace {
    /// The workspace that holds this package.
    ///
    /// # Errors
    /// When the folder was moved or deleted since the build.
    pub(crate) fn here() -> anyhow::Result<Self> {
        let package = Path::new(env!("CARGO_MANIFEST_DIR"));
        let root = package
            .parent()
            .context("the xtask package has a parent folder")?;
        ensure!(
            root.join("Cargo.toml").is_file(),
            "{} holds no Cargo.toml: the repository was moved, build again with `cargo clean -p xtask`",
            root.display()
        );
        Ok(Self {
            root: root.to_path_buf(),
        })
    }

    /// Another tree of this repository, unpacked somewhere.
    pub(crate) fn in_folder(root: &Path) -> Self {
        Self {
            root: root.to_path_buf(),
        }
    }

    /// A workspace at another place, for tests of the checks.
    #[cfg(test)]
    pub(crate) fn at(root: &Path) -> Self {
        Self {
            root: root.to_path_buf(),
        }
    }

    /// The folder of the top `Cargo.toml`.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// A path below the root.
    pub(crate) fn path(&self, below: &str) -> PathBuf {
        self.root.join(below)
    }

    /// Cargo's target folder, which other trees may share.
    pub(crate) fn target(&self) -> PathBuf {
        let folder = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
        // Cargo takes a relative one as seen from where it runs, which is another tree at times.
        self.root.join(folder)
    }

    /// A command that runs in the root folder.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.root);
        command
    }

    /// Cargo, as the toolchain that runs us names it.
    pub(crate) fn cargo(&self, args: &[&str]) -> Command {
        let cargo = std::env::var("CARGO").unwrap_or_else(|_unset| "cargo".to_owned());
        let mut command = self.command(&cargo);
        command.args(args);
        command
    }

    /// The commit that this tree is of, in short, and whether it was changed since.
    pub(crate) fn commit(&self) -> String {
        let said = |args: &[&str]| {
            let output = self.command("git").args(args).output();
            let text = output.map(|out| String::from_utf8_lossy(&out.stdout).trim().to_owned());
            text.unwrap_or_default()
        };
        let changes = said(&["status", "--porcelain", "--untracked-files=no"]);
        commit_named(&said(&["rev-parse", "--short", "HEAD"]), &changes)
    }

    /// Every file below `folder` that is a source, as paths relative to the root, sorted. Links are not followed.
    ///
    /// # Errors
    /// When a folder cannot be listed.
    pub(crate) fn files(&self, folder: &str) -> anyhow::Result<Vec<String>> {
        let mut found = Vec::new();
        let mut open = vec![self.root.join(folder)];
        while let Some(dir) = open.pop() {
            let entries =
                std::fs::read_dir(&dir).with_context(|| format!("list {}", dir.display()))?;
            for entry in entries {
                let entry = entry?;
                let name = entry.file_name();
                let kind = entry.file_type()?;
                if kind.is_dir() && !SKIPPED.iter().any(|skipped| *skipped == name) {
                    open.push(entry.path());
                } else if kind.is_file() && name != ".git" {
                    let path = entry.path();
                    let below = path.strip_prefix(&self.root).unwrap_or(&path);
                    found.push(below.to_string_lossy().into_owned());
                }
            }
        }
        found.sort();
        Ok(found)
    }

    /// The text of a file, or `None` when it is not UTF-8.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub(crate) fn text(&self, below: &str) -> anyhow::Result<Option<String>> {
        let bytes =
            std::fs::read(self.root.join(below)).with_context(|| format!("read {below}"))?;
        Ok(String::from_utf8(bytes).ok())
    }
}

fn commit_named(commit: &str, changes: &str) -> String {
    let commit = if commit.is_empty() { "unknown" } else { commit };
    if changes.is_empty() {
        return commit.to_owned();
    }
    format!("{commit} with changes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commit_of_a_changed_tree_says_so() {
        assert_eq!(commit_named("abc1234", ""), "abc1234");
        assert_eq!(
            commit_named("abc1234", "M README.md"),
            "abc1234 with changes"
        );
        assert_eq!(commit_named("", ""), "unknown");
    }
}
