//! `cargo xtask miri`: runs the relay's unit tests that need no kernel in Miri, which detects undefined behaviour.

use std::time::Duration;

use anyhow::bail;

use crate::fuzz::nightly;
use crate::steps::{first_line, run_command};
use crate::workspace::Workspace;

/// Time limit to build Miri's standard library and run the tests.
const LIMIT: Duration = Duration::from_secs(15 * 60);

/// Whether Miri can run here; otherwise what is missing.
pub(crate) fn availability() -> Result<(), String> {
    if first_line(nightly().args(["cargo", "miri", "--version"])).is_some() {
        return Ok(());
    }
    Err(
        "no nightly toolchain with miri: `rustup component add miri rust-src --toolchain nightly`"
            .to_owned(),
    )
}

/// Runs the unit tests of `adit-relay`, except those marked as needing the kernel.
///
/// # Errors
/// Miri is missing, a test fails, or Miri finds undefined behaviour or a leak.
pub(crate) fn run(workspace: &Workspace) -> anyhow::Result<()> {
    if let Err(why) = availability() {
        bail!("{why}");
    }
    let mut command = nightly();
    command
        .current_dir(workspace.root())
        .args(["cargo", "miri", "test", "--quiet"])
        .args(["--package", "adit-relay", "--lib"])
        .env("MIRIFLAGS", "-Zmiri-strict-provenance");
    run_command(&mut command, LIMIT)
}
