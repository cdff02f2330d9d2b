//! `cargo xtask codegen`: runs the generator of the protobuf code, a package of its own.

use std::time::Duration;

use crate::steps::run_command;
use crate::workspace::Workspace;

/// Time limit to build and run the generator.
const LIMIT: Duration = Duration::from_secs(15 * 60);

/// Whether to write.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Write nothing; fail when a committed file differs from what would be written.
    #[arg(long)]
    pub(crate) check: bool,
}

/// Regenerates the files, or with `check` fails when a committed one differs.
///
/// # Errors
/// The generator does not build, or fails with its reason.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> anyhow::Result<()> {
    let mut command = workspace.cargo(&["run", "--quiet", "--package", "codegen", "--"]);
    if args.check {
        command.arg("--check");
    }
    run_command(&mut command, LIMIT)
}
