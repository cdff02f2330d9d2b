//! Environment variables of the real binary.

use std::process::Command;

use super::processes::Processes;
use crate::support::process::{Process, program};
use crate::support::wait::until;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_variable_without_effect_is_named_at_the_start_and_an_empty_permission_ends_it() {
    let processes = Processes::start(&[]).await;
    let start = |name: &str, variable: &str, value: &str| {
        let args = processes
            .world
            .agent_args(name, processes.agents.port(), &[]);
        let mut command = Command::new(program());
        command.args(&args[1..]).env(variable, value);
        Process::start_command(name, command, processes.world.dir.path())
    };
    let named = start("named", "ADIT_ALOW_TARGET", "s3cret");
    let warning = "ADIT_ALOW_TARGET has no effect: adit agent has no such flag; did you mean ADIT_ALLOW_TARGET?";
    until("a warning", || named.log().contains(warning)).await;
    assert!(!named.log().contains("s3cret"));
    let mut empty = start("empty", "ADIT_ALLOW_TARGET", " ");
    until("its end", || empty.ended().is_some()).await;
    let text = "ADIT_ALLOW_TARGET: it is empty; write a value, all or none, or leave it out";
    assert!(empty.log().contains(text), "{}", empty.log());
}
