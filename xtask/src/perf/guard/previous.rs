//! The commit before, built: what a change is compared with.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};

use crate::perf::programs::Programs;
use crate::steps::{MINUTES_5, output_of, run_command};
use crate::workspace::Workspace;

/// A binary of another commit.
pub(super) struct Previous {
    /// Its commit.
    pub(super) commit: String,
    /// The program.
    pub(super) binary: PathBuf,
}

/// Where binaries of other commits are kept.
const FOLDER: &str = "target/perf/previous";

/// What changes the binary. A tree in which none of it differs from its commit is that commit.
const SOURCES: [&str; 4] = [
    "tunnel-daemon",
    "Cargo.toml",
    "Cargo.lock",
    "rust-toolchain.toml",
];

impl Previous {
    /// Finds and builds it: the commit itself while there are changes on top of it, else the one before. Built once for
    /// each commit.
    ///
    /// # Errors
    /// There is none, as in a shallow clone, or it does not build.
    pub(super) fn find(programs: &Programs) -> anyhow::Result<Self> {
        let workspace = programs.workspace();
        let previous = Self::meant(workspace)?;
        let Self { commit, binary } = &previous;
        if !binary.is_file() {
            eprintln!("guard: building commit {commit}, once");
            // Always the same place: what cargo knows about it is used again for the next commit.
            let tree = workspace.path(FOLDER).join("tree");
            unpack(workspace, commit, &tree)?;
            let built = programs.release(&Workspace::at(&tree), "adit");
            let fresh = binary.with_extension("fresh");
            let kept = built.and_then(|built| {
                fs::create_dir_all(workspace.path(FOLDER).join(commit))?;
                Ok(fs::copy(built, &fresh)?)
            });
            // Cargo tells packages of two trees apart by the age of their files alone: what was built last, if only in part,
            // would pass for this tree's. Before the binary has its name, or a run that is cut off here would not do it.
            let mut forget = workspace.cargo(&["clean", "--release", "--workspace", "--quiet"]);
            run_command(&mut forget, MINUTES_5)?;
            kept.context("it does not build")?;
            fs::rename(fresh, binary)?;
        }
        Ok(previous)
    }

    /// The same, and nothing is built for it.
    ///
    /// # Errors
    /// There is none, or it was not built yet.
    pub(super) fn built(workspace: &Workspace) -> anyhow::Result<Self> {
        let previous = Self::meant(workspace)?;
        let commit = &previous.commit;
        ensure!(previous.binary.is_file(), "commit {commit} was not built");
        Ok(previous)
    }

    /// Which one it is and where its binary belongs, whether that is there or not.
    fn meant(workspace: &Workspace) -> anyhow::Result<Self> {
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

/// Writes the files of a commit to a folder, which has nothing else then. Git itself does not learn of the folder, so
/// nothing of it is left to prune.
fn unpack(workspace: &Workspace, commit: &str, to: &Path) -> anyhow::Result<()> {
    if to.exists() {
        fs::remove_dir_all(to)?;
    }
    fs::create_dir_all(to)?;
    let archive = tempfile::NamedTempFile::new()?;
    let mut git = workspace.command("git");
    git.args(["archive", "--format=tar", commit, "-o"]);
    output_of(git.arg(archive.path()), MINUTES_5)?;
    // Without -m files would be as old as the commit, and cargo would take an earlier build for theirs.
    let mut tar = workspace.command("tar");
    tar.args(["-x", "-m", "-C"]).arg(to).arg("-f");
    output_of(tar.arg(archive.path()), MINUTES_5).map(drop)
}
