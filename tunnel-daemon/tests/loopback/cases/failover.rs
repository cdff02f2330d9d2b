//! Dials while an agent, a server or the connection between them does not respond.

use std::time::{Duration, Instant};

use adit::agent::RunningAgent;
use rustix::process::Signal;
use tokio::net::UnixStream;
use tokio::task::JoinSet;

use super::processes::Processes;
use super::silent_agents::stop;
use crate::support::balancer::Balancer;
use crate::support::connect::say;
use crate::support::lanes::{self, IDLE};
use crate::support::process::{ask, metric, scrape, sum, value};
use crate::support::wait::{eventually, until, within};
use crate::support::world::{World, sample};
use crate::support::{connect, targets};

const SILENT: &str = "adit_links_silent";
const PENDING: &str = "konnectivity_network_proxy_server_pending_backend_dials";
const ANSWERED: &str = "konnectivity_network_proxy_server_dial_duration_seconds_count";
/// Dials per test.
const DIALS: usize = 60;
/// Interval between the starts of two dials.
const EVERY: Duration = Duration::from_millis(100);

/// Dials `target`. Returns the response head and the time until it arrived.
async fn dial(socket: std::path::PathBuf, target: String) -> (String, Duration) {
    let began = Instant::now();
    let mut stream = UnixStream::connect(socket).await.expect("a server");
    say(&mut stream, &connect::head(&target)).await;
    let head = connect::read_head(&mut stream).await;
    let took = began.elapsed();
    if head.contains(" 200 ") {
        connect::echo(&mut stream, b"served").await;
    }
    (head, took)
}

/// Starts ten dials per second. Returns the heads of failed dials and the longest duration.
async fn dials(world: &World, target: &str) -> (Vec<String>, Duration) {
    let mut dials = JoinSet::new();
    let mut every = tokio::time::interval(EVERY);
    for _dial in 0..DIALS {
        every.tick().await;
        dials.spawn(dial(world.connect(), target.to_owned()));
    }
    let (mut failed, mut slowest) = (Vec::new(), Duration::ZERO);
    while let Some(dialed) = dials.join_next().await {
        let (head, took) = dialed.expect("no panic");
        slowest = slowest.max(took);
        if !head.contains(" 200 ") {
            failed.push(head);
        }
    }
    (failed, slowest)
}

/// The kernel of a stopped process still acknowledges data.
///
/// Limit (times): Hedge of an unanswered dial
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_dial_fails_while_one_of_two_agents_is_stopped() {
    let (target, _echo) = targets::local_echo().await;
    for flags in [&[][..], &["--lanes-per-link=0"]] {
        let processes = Processes::start(flags).await;
        let stopped = processes.agent("stopped", &[]);
        let _other = processes.agent("other", &[]);
        processes.links(2.0).await;
        stop(&stopped).await;
        let (failed, slowest) = dials(&processes.world, &target).await;
        println!(
            "{flags:?}: of {DIALS} dials {} failed, the slowest took {slowest:?}",
            failed.len()
        );
        assert!(failed.is_empty(), "{failed:?}");
        // Well below the dial timeout of 25 s.
        assert!(slowest < Duration::from_secs(15), "{slowest:?}");
        processes.server.logs("stopped,other").await;
        let health = processes.health;
        let retries = value(health, "adit_dial_retries_total{reason=\"slow\"}").await
            + value(health, "adit_dial_retries_total{reason=\"silent\"}").await;
        assert!(retries >= 1.0, "{retries}");
        stopped.signal(Signal::CONT);
        metric(processes.health, SILENT, 0.0).await;
        // Late answers of the stopped agent open no tunnel and do not count as failures.
        let text = scrape(health).await;
        let failures = sum(
            &text,
            "konnectivity_network_proxy_server_dial_failure_count",
        );
        assert_eq!(failures, 0.0, "{text}");
    }
}

/// Dials that it has not answered go to the other one, which answers long before they would have been hedged.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_dial_fails_when_one_of_two_agents_is_killed() {
    let (target, _echo) = targets::local_echo().await;
    for flags in [&[][..], &["--lanes-per-link=0"]] {
        let processes = Processes::start(flags).await;
        let mut killed = processes.agent("killed", &[]);
        let _other = processes.agent("other", &[]);
        processes.links(2.0).await;
        stop(&killed).await;
        let began = Instant::now();
        let dials: JoinSet<_> = (0..DIALS)
            .map(|_dial| dial(processes.world.connect(), target.clone()))
            .collect();
        let health = processes.health;
        eventually("only dials of the stopped agent wait", async || {
            let text = scrape(health).await;
            let [waiting, answered] =
                [PENDING, ANSWERED].map(|it| sample(&text, it).unwrap_or(0.0));
            waiting >= 1.0 && waiting + answered == DIALS as f64
        })
        .await;
        let waited = began.elapsed();
        killed.kill();
        let heads = dials.join_all().await;
        let took = began.elapsed() - waited;
        let opened = |(head, _): &(String, Duration)| head.contains(" 200 ");
        assert!(heads.iter().all(opened), "{heads:?}");
        println!("{flags:?}: {waited:?} before, {took:?} after the kill");
        let lost = "adit_dial_retries_total{reason=\"lost\"}";
        eventually("it is counted", async || {
            sample(&scrape(health).await, lost) > Some(0.0)
        })
        .await;
    }
}

/// As [`World::linked`], with an agent behind a load balancer.
pub(super) async fn balanced(flags: &[&str]) -> (World, Balancer, RunningAgent) {
    let world = World::start(flags).await;
    let balancer = Balancer::to(&[world.server().agents]).await;
    let agent = world.agent_of(balancer.address.port(), "agent", &[]).await;
    world.links(1).await;
    (world, balancer, agent)
}

/// The same address may be another machine behind an agent of the next strategy.
///
/// Limit (isolation): Agents of other keys
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dial_for_the_host_of_a_silent_agent_goes_to_no_agent_of_the_next_strategy() {
    let (port, _target) = targets::echo().await;
    let flags = ["--proxy-strategies=destHost,default", "--dial-timeout=6s"];
    let processes = Processes::start(&flags).await;
    let silent = processes.agent("silent", &["--agent-identifiers=ipv4=127.0.0.1"]);
    let _answers_all = processes.agent("default", &[]);
    processes.links(2.0).await;
    stop(&silent).await;
    let target = format!("127.0.0.1:{port}");
    // Before the agent is suspected, while it is, and after its link is declared dead.
    for _dial in 0..3 {
        let (head, _took) = dial(processes.world.connect(), target.clone()).await;
        assert!(head.contains(" 504 "), "{head}");
    }
    let (head, _took) = dial(processes.world.connect(), format!("127.0.0.2:{port}")).await;
    assert!(head.contains(" 200 "), "{head}");
    silent.signal(Signal::CONT);
    metric(processes.health, SILENT, 0.0).await;
    processes.world.assert_serves(&target).await;
}

/// The kernel resets the connections of a process that it kills, so the agent is gone and not silent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_strategy_takes_the_dials_of_a_silent_agent_that_is_killed() {
    let (target, _echo) = targets::local_echo().await;
    let processes = Processes::start(&["--proxy-strategies=destHost,default"]).await;
    let mut silent = processes.agent("silent", &["--agent-identifiers=ipv4=127.0.0.1"]);
    let _answers_all = processes.agent("default", &[]);
    processes.links(2.0).await;
    stop(&silent).await;
    metric(processes.health, SILENT, 1.0).await;
    silent.kill();
    processes.links(1.0).await;
    let (head, _took) = dial(processes.world.connect(), target).await;
    assert!(head.contains(" 200 "), "{head}");
}

/// The agent detects the dead connection and reconnects. The pending dial waits for the new link.
///
/// Limit (times): A dial on a silent link
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dial_on_a_dead_connection_waits_for_the_only_agents_new_link() {
    let (target, _echo) = targets::local_echo().await;
    // The agent's lanes also pass through the balancer, so they freeze too.
    let (world, balancer, _agent) = balanced(&[]).await;
    world.assert_serves(&target).await;
    // A lane that the agent opens after the freeze would take the dial.
    until("all warm lanes", || lanes::value(&world, IDLE) >= 16.0).await;
    balancer.freeze();
    let (head, took) = dial(world.connect(), target.clone()).await;
    println!("the first dial took {took:?}");
    assert!(head.contains(" 200 "), "{head}");
    assert!(took < Duration::from_secs(15), "{took:?}");
    assert_eq!(world.server().links(), 2, "nothing is cut");
}

/// Limit (times): A silent server | the agent opens another connection after 4 s; for a Go server 4 s or 31 s
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replaced_link_stays_open_until_its_tunnels_end() {
    let (target, _echo) = targets::local_echo().await;
    let (world, balancer, _agent) = balanced(&["--lanes-per-link=0"]).await;
    let mut old = within("a tunnel", connect::open(&world.connect(), &target)).await;
    balancer.freeze();
    // This dial uses the new link, which is then no longer provisional.
    let (head, _took) = dial(world.connect(), target.clone()).await;
    assert!(head.contains(" 200 "), "{head}");
    balancer.thaw();
    connect::echo(&mut old, b"on the old link").await;
    assert_eq!(world.server().links(), 2);
    connect::echo(&mut old, b"still there").await;
    drop(old);
    world.links(1).await;
    world.assert_serves(&target).await;
}

/// Limit (times): A silent server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_whose_only_server_is_silent_is_not_ready_until_it_responds() {
    let (processes, agent) = Processes::linked(&[], &[]).await;
    let health = agent.address("health");
    stop(&processes.server).await;
    not_ready(health, "servers are connected, but none of them responds").await;
    let told = ask(health, "/readyz?verbose").await;
    assert!(told.contains("[-]servers 1 silent"), "{told}");
    processes.server.signal(Signal::CONT);
    eventually("readiness", async || {
        ask(health, "/readyz").await.contains(" 200 ")
    })
    .await;
    until("the log tells of both", || {
        let log = agent.log();
        log.contains("server is silent") && log.contains("server responds again")
    })
    .await;
}

async fn not_ready(health: std::net::SocketAddr, text: &str) {
    eventually("the agent is not ready", async || {
        let ready = ask(health, "/readyz").await;
        ready.contains(" 503 ") && ready.contains(text)
    })
    .await;
}
