//! `cargo xtask docs`: writes the package diagram and the pages below docs/reference. This program generates some pages from
//! doc comments; tests of the daemon, which otherwise compare their pages, write the others.

pub(crate) mod packages;
pub(crate) mod promises;

use std::time::Duration;

use crate::steps::run_command;
use crate::workspace::Workspace;

/// Time limit to build and run these tests.
const LIMIT: Duration = Duration::from_secs(15 * 60);

/// Writes the pages.
///
/// # Errors
/// The package does not build, or a page cannot be written.
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
