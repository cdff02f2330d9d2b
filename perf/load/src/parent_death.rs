//! Ties a program's life to its parent's, so that no process outlives the harness.

use std::os::unix::process::CommandExt as _;
use std::process::Command;

use anyhow::{Context as _, bail};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};

/// Replaces this process by `program`; the process id stays.
///
/// # Errors
/// The parent is already gone, or the program cannot be run. The function does not return otherwise.
pub(crate) fn become_program(parent: u32, program: &[String]) -> anyhow::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL)).context("asking for the parent's death")?;
    // A parent that ended before the call above sends no signal.
    let now = getppid().map(|id| id.as_raw_nonzero().get());
    if now.and_then(|id| u32::try_from(id).ok()) != Some(parent) {
        bail!("process {parent} is not the parent any more");
    }
    let [name, args @ ..] = program else {
        bail!("no program given");
    };
    let error = Command::new(name).args(args).exec();
    Err(error).with_context(|| format!("starting {name}"))
}

/// Blocks until the other end of standard input is closed.
///
/// # Errors
/// Standard input cannot be read.
pub(crate) fn until_stdin_closes() -> anyhow::Result<()> {
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    Ok(())
}
