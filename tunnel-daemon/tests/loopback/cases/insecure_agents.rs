//! Unauthenticated agents: accepted only with an explicit flag, and with a warning. Uses the real binary.

use std::time::Duration;

use adit_core::ids::LinkId;
use adit_core::wire::metadata::{LANE_SECRET_BYTES, LaneGrant};
use serde_json::Value;

use super::processes::{Processes, compat_server, free_ports, linked, upstreams_flags};
use crate::support::lanes::{BUSY, HITS, IDLE, MISSES};
use crate::support::process::{Process, json_lines, metric, scrape, value};
use crate::support::raw::Connection;
use crate::support::stub_lane::Stub;
use crate::support::wait::until;
use crate::support::world::{World, sample};
use crate::support::{targets, tls};

const INSECURE: &str = "--insecure-allow-unauthenticated-agents";
const GAUGE: &str = "adit_insecure_flags{flag=\"insecure-allow-unauthenticated-agents\"}";
/// Text of the warning, in native and compatibility mode.
const WARNING: &str = "agents are not authenticated";

/// Number of such warnings in a JSON log.
fn warnings(log: &str) -> usize {
    let lines = json_lines(log);
    let says = |line: &Value| {
        let message = line["message"].as_str();
        line["level"] == "WARN" && message.is_some_and(|message| message.contains(WARNING))
    };
    lines.filter(says).count()
}

/// A server that accepts unauthenticated agents.
async fn open_to_anyone() -> Processes {
    Processes::start(&["!--cluster-ca-cert", INSECURE]).await
}

/// An agent without a certificate.
fn anyone(processes: &Processes) -> Process {
    processes.agent("anyone", &["!--agent-cert", "!--agent-key"])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_agent_authentication_warns_once_and_exports_it() {
    let (target, _echo) = targets::local_echo().await;
    let processes = open_to_anyone().await;
    let server = &processes.server;
    metric(processes.health, GAUGE, 1.0).await;
    until("the warning", || warnings(&server.log()) == 1).await;

    // As the flag asks, an agent without a certificate serves.
    let _agent = anyone(&processes);
    processes.links(1.0).await;
    processes.world.assert_serves(&target).await;
    assert_eq!(warnings(&server.log()), 1, "once, not for each agent");
}

/// A lane belongs to its link by their common certificate. Without certificates the server offers no lanes, dials look for
/// none, and requests for lanes are refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_without_a_certificate_has_no_lanes() {
    let (target, _echo) = targets::local_echo().await;
    let processes = open_to_anyone().await;
    let (world, agents, health) = (&processes.world, processes.agents, processes.health);
    let _agent = anyone(&processes);
    processes.links(1.0).await;
    world.assert_serves(&target).await;

    // A hand-made greeting that requests lanes. The server grants `adit-link`, but no lanes.
    let secured = tls::dial_to(world, b"h2", agents, None).await;
    let connection = Connection::over(secured.expect("welcome")).await;
    let headers = [
        ("agentid", "nobody"),
        ("adit-link", "1"),
        ("adit-lanes", "1"),
    ];
    let mut call = connection.call("/AgentService/Connect", &headers).await;
    let answer = call.headers().await.expect("an answer");
    assert!(answer.contains_key("adit-link"), "{answer:?}");
    let offered = answer.keys().any(|name| name.as_str().contains("lane"));
    assert!(!offered, "{answer:?}");

    // Link numbers are easy to guess. The agent's link is number 1.
    for link in [1, 2] {
        let mut stub = Stub::nobody(agents, world).await;
        let guess = LaneGrant {
            link: LinkId(link),
            secret: [7; LANE_SECRET_BYTES].into(),
            lanes_max: 1,
        };
        assert!(!stub.bind(&guess).await, "link {link}");
    }
    metric(health, "adit_lanes_refused_total{reason=\"no_link\"}", 2.0).await;
    for series in [IDLE, BUSY, HITS, MISSES] {
        assert_eq!(value(health, series).await, 0.0, "{series}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_authenticates_agents_neither_warns_nor_exports_it() {
    let processes = Processes::start(&[]).await;
    let text = scrape(processes.health).await;
    assert_eq!(sample(&text, GAUGE), None);
    assert_eq!(warnings(&processes.server.log()), 0);
}

/// Without a CA, upstream accepts any agent silently. Adit needs an explicit flag.
///
/// Upstream (agents): A server without agent authentication does not start, and names both flags.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_a_ca_and_the_flag_does_not_start_and_names_both_flags() {
    let mut world = World::start(&[]).await;
    world.stop_server(Duration::ZERO).await;
    let mut native = world.server_args("0");
    let [agents, health, admin] = free_ports();
    let mut compat = ["adit", "server", "--compat"].map(str::to_owned).to_vec();
    compat.extend(compat_server(&world, world.grpc(), [agents, health, admin]));
    for args in [&mut native, &mut compat] {
        args.retain(|arg| !arg.starts_with("--cluster-ca-cert="));
    }
    for (name, args) in [("native", &native), ("compat", &compat)] {
        let mut server = Process::start(name, args, world.dir.path());
        let status = server.wait(Duration::from_secs(20));
        let log = server.log();
        assert_eq!(status.code(), Some(1), "{name}: {log}");
        let first = log.lines().next().unwrap_or_default();
        for part in ["refusing to start", "--cluster-ca-cert", INSECURE] {
            assert!(first.contains(part), "{name}: {part} in {first}");
        }
    }
}

/// Under upstream's program name Adit's flag works the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_insecure_flag_works_under_upstreams_program_name() {
    let (target, _echo) = targets::local_echo().await;
    let mut world = World::start(&[]).await;
    world.stop_server(Duration::ZERO).await;
    linked(&world);
    // The last occurrence of a flag wins.
    let flags = ["--cluster-ca-cert=", INSECURE];
    let (server, _agent, health) = upstreams_flags(&world, "--mode=grpc", &flags).await;
    metric(health, GAUGE, 1.0).await;
    let (_connection, mut call) = Connection::proxied(&world).await;
    let conn = call.open(1, &target).await;
    call.echo(conn, b"from anyone").await;
    until("the warning", || server.log().contains(WARNING)).await;
    assert_eq!(server.log().matches(WARNING).count(), 1);
}
