//! The commit before, built: what a change is compared with.

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, ensure};

use crate::perf::programs::Programs;
use crate::steps::run_command;
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

/// For cargo to delete what it built.
const FORGET_LIMIT: Duration = Duration::from_secs(60);

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
            let built = programs.release(&Workspace::in_folder(&tree), "adit");
            let fresh = binary.with_extension("fresh");
            let kept = built.and_then(|built| {
                fs::create_dir_all(workspace.path(FOLDER).join(commit))?;
                Ok(fs::copy(built, &fresh)?)
            });
            // Cargo tells packages of two trees apart by the age of their files alone: what was built last, if only in part,
            // would pass for this tree's. Before the binary has its name, or a run that is cut off here would not do it.
            let mut forget = workspace.cargo(&["clean", "--release", "--workspace", "--quiet"]);
            run_command(&mut forget, FORGET_LIMIT)?;
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
        let changed = git(workspace, &[&status[..], &SOURCES[..]].concat())?;
        let name = if changed.is_empty() { "HEAD~1" } else { "HEAD" };
        let query = format!("{name}^{{commit}}");
        let commit = git(workspace, &["rev-parse", "--quiet", "--verify", &query])
            .with_context(|| format!("there is no {name} here"))?;
        let binary = workspace.path(FOLDER).join(&commit).join("adit");
        Ok(Self { commit, binary })
    }
}

/// Output of git, without its end of line.
fn git(workspace: &Workspace, args: &[&str]) -> anyhow::Result<String> {
    let output = workspace.command("git").args(args).output();
    let output = output.context("starting git")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "git {}: {}",
        args.join(" "),
        said.trim()
    );
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Writes the files of a commit to a folder, which has nothing else then. Git itself does not learn of the folder, so
/// nothing of it is left to prune.
fn unpack(workspace: &Workspace, commit: &str, to: &std::path::Path) -> anyhow::Result<()> {
    if to.exists() {
        fs::remove_dir_all(to)?;
    }
    fs::create_dir_all(to)?;
    let mut archive = workspace
        .command("git")
        .args(["archive", "--format=tar", commit])
        .stdout(Stdio::piped())
        .spawn()
        .context("starting git")?;
    let bytes = archive.stdout.take().context("stdout is piped")?;
    // Without -m files would be as old as the commit, and cargo would take an earlier build for theirs.
    let unpacked = workspace
        .command("tar")
        .args(["-x", "-m", "-f", "-", "-C"])
        .arg(to)
        .stdin(Stdio::from(bytes))
        .status()
        .context("starting tar")?;
    let archived = archive.wait()?;
    ensure!(
        archived.success() && unpacked.success(),
        "git archive {commit} failed"
    );
    Ok(())
}
