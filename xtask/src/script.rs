//! Scripts of `xtask/scripts`: sequences of commands, which people can also run by hand.

use std::process::Command;
use std::time::Duration;

use anyhow::ensure;

use crate::steps::{Outcome, shown, status_of};
use crate::workspace::Workspace;

/// Longest time for a script: most of it builds from nothing.
const LIMIT: Duration = Duration::from_secs(60 * 60);
/// The same for a script that people start: fuzzing lasts as long as they say.
const ASKED_LIMIT: Duration = Duration::from_secs(7 * 24 * 60 * 60);
/// Exit code of a script that cannot run here; see `common.sh`.
const SKIPPED: i32 = 77;

/// Arguments that a script reads itself.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Arguments of the script; its first lines describe them.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

/// A command that runs a script of this workspace.
pub(crate) fn command(workspace: &Workspace, name: &str) -> Command {
    let mut command = workspace.command("bash");
    command.arg(
        workspace
            .path("xtask/scripts")
            .join(name)
            .with_extension("sh"),
    );
    command
}

/// Runs a script with arguments from the command line.
///
/// # Errors
/// As [`outcome`].
pub(crate) fn run(workspace: &Workspace, name: &str, args: &Args) -> anyhow::Result<Outcome> {
    outcome_within(command(workspace, name).args(&args.args), ASKED_LIMIT)
}

/// Runs a line of shell in the root folder, with the functions of the scripts.
///
/// # Errors
/// As [`outcome`].
pub(crate) fn line(workspace: &Workspace, line: &str) -> anyhow::Result<Outcome> {
    let script = format!(". xtask/scripts/common.sh; {line}");
    outcome(workspace.command("bash").args(["-c", &script, "xtask"]))
}

/// Runs a script, which may report that it cannot run here.
///
/// # Errors
/// It fails, or runs for too long.
pub(crate) fn outcome(command: &mut Command) -> anyhow::Result<Outcome> {
    outcome_within(command, LIMIT)
}

fn outcome_within(command: &mut Command, limit: Duration) -> anyhow::Result<Outcome> {
    let reason = tempfile::NamedTempFile::new()?;
    let status = status_of(command.env("SKIPPED_TO", reason.path()), limit)?;
    if status.code() == Some(SKIPPED) {
        let why = std::fs::read_to_string(reason.path())?;
        return Ok(Outcome::Skipped(why.trim().to_owned()));
    }
    ensure!(status.success(), "`{}` ended with {status}", shown(command));
    Ok(Outcome::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_is_done_is_skipped_with_its_reason_or_fails() {
        let workspace = Workspace::here().unwrap();
        assert!(matches!(line(&workspace, "need sh"), Ok(Outcome::Done)));
        let skipped = line(&workspace, "need no-such-program");
        assert!(
            matches!(skipped, Ok(Outcome::Skipped(why)) if why == "no-such-program is not installed")
        );
        assert!(line(&workspace, "false; true").is_err());
    }
}
