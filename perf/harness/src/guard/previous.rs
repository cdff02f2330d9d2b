//! Builds the previous commit, with which a change is compared.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use crate::programs::Programs;
use crate::steps::{MINUTES_5, output_of, run_command};
use crate::workspace::{Workspace, fresh};

/// A binary of another commit.
pub(super) struct Previous {
    /// The commit's hash.
    pub(super) commit: String,
    /// The program.
    pub(super) binary: PathBuf,
}

/// Folder of other commits' binaries.
const FOLDER: &str = "target/perf/previous";

/// Paths that affect the binary. A tree without changes in them equals its commit.
const SOURCES: [&str; 4] = [
    "tunnel-daemon",
    "Cargo.toml",
    "Cargo.lock",
    "rust-toolchain.toml",
];

impl Previous {
    /// Finds and builds the commit to compare with: HEAD if the tree has changes, else its parent. Each commit is built once.
    ///
    /// # Errors
    /// There is no such commit, as in a shallow clone, or it does not build.
    pub(super) fn find(programs: &Programs) -> anyhow::Result<Self> {
        let workspace = &programs.workspace;
        let previous = Self::meant(workspace)?;
        let Self { commit, binary } = &previous;
        if !binary.is_file() {
            eprintln!("guard: building commit {commit}, once");
            // The same place for all commits, so that cargo reuses its build state.
            let tree = workspace.path(FOLDER).join("tree");
            unpack(workspace, commit, &tree)?;
            let built = programs.release(&Workspace::at(&tree), "adit");
            let fresh = binary.with_extension("fresh");
            let kept = built.and_then(|built| {
                fs::create_dir_all(workspace.path(FOLDER).join(commit))?;
                Ok(fs::copy(built, &fresh)?)
            });
            // Cargo distinguishes packages of two trees only by the age of their files: the last build, even a partial one,
            // would pass for this tree's. Clean before the binary gets its name, so that an interrupted run does not skip this
            // step.
            let mut forget = workspace.cargo(&["clean", "--release", "--workspace", "--quiet"]);
            run_command(&mut forget, MINUTES_5)?;
            kept.context("it does not build")?;
            fs::rename(fresh, binary)?;
        }
        Ok(previous)
    }

    /// The commit to compare with, and the path of its binary, which may not exist yet.
    ///
    /// # Errors
    /// There is no such commit.
    pub(super) fn meant(workspace: &Workspace) -> anyhow::Result<Self> {
        let status = ["status", "--porcelain", "--untracked-files=no", "--"];
        let changed = workspace.git(&[&status[..], &SOURCES[..]].concat())?;
        let name = if changed.is_empty() { "HEAD~1" } else { "HEAD" };
        let query = format!("{name}^{{commit}}");
        let commit = workspace
            .git(&["rev-parse", "--quiet", "--verify", &query])
            .with_context(|| format!("there is no {name} here"))?;
        let binary = workspace.path(FOLDER).join(&commit).join("adit");
        Ok(Self { commit, binary })
    }
}

/// Writes the files of a commit to a folder, replacing its contents. Git does not register the folder, so there is no worktree
/// to prune.
fn unpack(workspace: &Workspace, commit: &str, to: &Path) -> anyhow::Result<()> {
    fresh(to)?;
    let archive = tempfile::NamedTempFile::new()?;
    let mut git = workspace.command("git");
    git.args(["archive", "--format=tar", commit, "-o"]);
    output_of(git.arg(archive.path()), MINUTES_5)?;
    // Without -m files would get the commit's time, and cargo would take an earlier build for theirs.
    let mut tar = workspace.command("tar");
    tar.args(["-x", "-m", "-C"]).arg(to).arg("-f");
    output_of(tar.arg(archive.path()), MINUTES_5).map(drop)
}
