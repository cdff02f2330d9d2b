//! `cargo xtask perf`: builds and starts the harness in `perf/harness`, which knows all flags.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};

use crate::steps::stdout_of;
use crate::workspace::Workspace;

/// Time limit of a question that may need release builds.
const BUILD_LIMIT: Duration = Duration::from_secs(25 * 60);

/// The command line, which the harness parses.
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Args {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

/// Runs the command.
///
/// # Errors
/// The harness does not build, or reports a failure.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> anyhow::Result<()> {
    let status = harness(workspace).args(&args.args).status()?;
    ensure!(status.success(), "the harness ended with {status}");
    Ok(())
}

/// Name and binary of the previous commit, as an earlier run of the guard has built it.
///
/// # Errors
/// There is no previous commit, or no run has built it.
pub(crate) fn commit_before(workspace: &Workspace) -> anyhow::Result<(String, PathBuf)> {
    let told = stdout_of(harness(workspace).arg("--commit-before"), BUILD_LIMIT)?;
    let (commit, binary) = told.trim().split_once(' ').context("a commit and a path")?;
    Ok((commit.to_owned(), binary.into()))
}

/// Why the cost of accounting cannot be measured here; `None` if it can.
///
/// # Errors
/// The build fails, or `adit check` cannot be read.
pub(crate) fn why_not_accounted(workspace: &Workspace) -> anyhow::Result<Option<String>> {
    let told = stdout_of(harness(workspace).arg("--why-not-accounted"), BUILD_LIMIT)?;
    let why = told.trim();
    Ok((!why.is_empty()).then(|| why.to_owned()))
}

/// The harness, in the caller's folder, against which paths on the command line count.
fn harness(workspace: &Workspace) -> Command {
    // Without `--package`, as in the alias of `cargo xtask`.
    let mut cargo = workspace.cargo(&["run", "--quiet", "--bin", "adit-perf"]);
    if let Ok(folder) = std::env::current_dir() {
        cargo.current_dir(folder);
    }
    cargo
        .arg("--manifest-path")
        .arg(workspace.path("Cargo.toml"));
    cargo.arg("--");
    cargo
}
