//! Ties a program's life to its parent's: whatever becomes of the harness, nothing it started stays behind.

use std::io::Read as _;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use anyhow::{Context as _, bail};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};

/// Becomes `program`; its process id stays this one's.
///
/// # Errors
/// The parent is already gone, or the program cannot be run. It does not return otherwise.
pub(crate) fn become_program(parent: u32, program: &[String]) -> anyhow::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL)).context("asking for the parent's death")?;
    // A parent that died before the call above sends no signal any more.
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

/// Blocks until whoever holds the other end of standard input is done with this process.
///
/// # Errors
/// Standard input cannot be read.
pub(crate) fn until_stdin_closes() -> anyhow::Result<()> {
    let mut unused = [0; 64];
    while std::io::stdin().read(&mut unused)? > 0 {}
    Ok(())
}
