//! Agents that are connected and do not respond, as when they are stopped or the network drops everything. New dials go to
//! other agents, and the server reports the silence.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::processes::Processes;
use crate::support::process::{Process, ask, metric};
use crate::support::wait::{until, within};
use crate::support::{connect, targets};

const SILENT: &str = "adit_links_silent";
/// Less than the 25 s after which a dial to a stopped agent fails, with room for a busy machine.
const AT_ONCE: Duration = Duration::from_secs(15);

async fn serves(processes: &Processes, target: &str) {
    let began = Instant::now();
    let socket = processes.world.connect();
    let mut stream = within("a tunnel", connect::open(&socket, target)).await;
    connect::echo(&mut stream, b"still served").await;
    assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());
}

/// Sends SIGSTOP, and waits until the kernel has stopped the process.
pub(super) async fn stop(agent: &Process) {
    agent.signal(Signal::STOP);
    until("it to be stopped", || {
        agent.status_field("State").starts_with('T')
    })
    .await;
}

/// Limit (times): A silent agent
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_agent_is_avoided_until_it_responds_again() {
    let (target, _echo) = targets::local_echo().await;
    let processes = Processes::start(&[]).await;
    let (one, other) = (processes.agent("one", &[]), processes.agent("other", &[]));
    processes.links(2.0).await;
    serves(&processes, &target).await;
    stop(&one).await;
    // The tests of `adit_net::grpc` cover how soon this happens, with a clock of their own.
    metric(processes.health, SILENT, 1.0).await;
    let ready = ask(processes.health, "/readyz?verbose").await;
    assert!(
        ready.contains(" 200 ") && ready.contains("[-]links 1 silent"),
        "{ready}"
    );
    for _dial in 0..30 {
        serves(&processes, &target).await;
    }
    one.signal(Signal::CONT);
    metric(processes.health, SILENT, 0.0).await;
    let log = processes.server.log();
    assert!(log.contains("agent is silent") && log.contains("agent responds again"));
    // The agents change roles.
    stop(&other).await;
    metric(processes.health, SILENT, 1.0).await;
    for _dial in 0..10 {
        serves(&processes, &target).await;
    }
    other.signal(Signal::CONT);
}

/// Limit (times): A silent agent
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_whose_only_agent_is_silent_is_not_ready_until_it_responds() {
    let (processes, agent) = Processes::linked(&[], &[]).await;
    stop(&agent).await;
    metric(processes.health, SILENT, 1.0).await;
    let ready = ask(processes.health, "/readyz").await;
    let text = "agents are connected, but none of them responds";
    assert!(ready.contains(" 500 ") && ready.ends_with(text), "{ready}");
    agent.signal(Signal::CONT);
    let began = Instant::now();
    metric(processes.health, SILENT, 0.0).await;
    assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());
    let ready = ask(processes.health, "/readyz").await;
    assert!(ready.contains(" 200 "), "{ready}");
}
