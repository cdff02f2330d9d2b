//! `cargo xtask loom`: explores the interleavings of the relay's hand-over, each model up to a number of preemptions.

use std::time::Duration;

use crate::steps::run_command;
use crate::workspace::Workspace;

/// Time limit to build and run the models; they need well under a minute.
const LIMIT: Duration = Duration::from_secs(15 * 60);

/// Runs the models of `adit-relay`.
///
/// # Errors
/// An interleaving violates an assertion, or the models do not build.
pub(crate) fn run(workspace: &Workspace) -> anyhow::Result<()> {
    // Release build: without optimisation the models take minutes.
    let mut command = workspace.cargo(&["test", "--quiet", "--package", "adit-relay"]);
    command.args(["--release", "--lib", "loom"]);
    command.env("RUSTFLAGS", rustflags());
    run_command(&mut command, LIMIT)
}

/// Flags from the environment, and the models' cfg.
fn rustflags() -> String {
    let asked = std::env::var("RUSTFLAGS").unwrap_or_default();
    format!("{asked} --cfg loom").trim_start().to_owned()
}
