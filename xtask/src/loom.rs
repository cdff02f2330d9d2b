//! `cargo xtask loom`: tries out the interleavings of the relay's hand-over, each model up to a number of preemptions.

use std::time::Duration;

use crate::steps::run_command;
use crate::workspace::Workspace;

/// Longest time to build the models and to run them; they take well under a minute.
const LIMIT: Duration = Duration::from_secs(15 * 60);

/// Runs the models of `adit-relay`.
///
/// # Errors
/// When an interleaving breaks a promise, or the models do not build.
pub(crate) fn run(workspace: &Workspace) -> anyhow::Result<()> {
    // Without optimisation it takes minutes.
    let mut command = workspace.cargo(&["test", "--quiet", "--package", "adit-relay"]);
    command.args(["--release", "--lib", "loom"]);
    command.env("RUSTFLAGS", rustflags());
    run_command(&mut command, LIMIT)
}

/// What was asked for anyway, and the models.
fn rustflags() -> String {
    let asked = std::env::var("RUSTFLAGS").unwrap_or_default();
    format!("{asked} --cfg loom").trim_start().to_owned()
}
