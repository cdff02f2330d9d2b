//! `cargo xtask docs`: writes the drawing of packages, and the pages below docs/reference: some from doc comments here, the others by tests of the daemon, which
//! compare them otherwise.

pub(crate) mod packages;
pub(crate) mod promises;

use std::time::Duration;

use crate::steps::run_command;
use crate::workspace::Workspace;

/// Longest time to build and run them.
const LIMIT: Duration = Duration::from_secs(15 * 60);

/// Writes the pages.
///
/// # Errors
/// When the package does not build, or a page cannot be written.
pub(crate) fn run(workspace: &Workspace) -> anyhow::Result<()> {
    packages::write(workspace)?;
    promises::write(workspace)?;
    let mut command = workspace.cargo(&[
        "test",
        "--quiet",
        "--package",
        "adit-config",
        "--package",
        "adit-telemetry",
        "--lib",
        "reference::",
    ]);
    run_command(command.env("ADIT_WRITE_REFERENCE", "1"), LIMIT)
}
