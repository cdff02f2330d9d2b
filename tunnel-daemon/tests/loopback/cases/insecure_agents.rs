//! Agents that nobody authenticates: only if asked for, by the real binary, and then said loudly.

use std::time::Duration;

use serde_json::Value;

use super::processes::{Processes, free_ports, linked, upstreams_flags};
use crate::support::process::{Process, metric, scrape};
use crate::support::raw::Connection;
use crate::support::targets;
use crate::support::world::{World, sample};

const INSECURE: &str = "--insecure-allow-unauthenticated-agents";
const GAUGE: &str = "adit_insecure_flags{flag=\"insecure-allow-unauthenticated-agents\"}";
/// What the warning says, in both modes.
const WARNING: &str = "agents are not authenticated";
const LINKS: &str = "adit_links{peer=\"adit\"}";

/// The one warning of a log in JSON that says so.
fn warnings(log: &str) -> usize {
    let lines = log
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let says = |line: &Value| {
        let message = line["message"].as_str();
        line["level"] == "WARN" && message.is_some_and(|message| message.contains(WARNING))
    };
    lines.filter(says).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_lets_anyone_register_warns_once_and_exports_it() {
    let (port, _target) = targets::echo().await;
    let mut world = World::start(&["--log-format=json"]).await;
    world.stop_server(Duration::ZERO).await;
    let mut args = world.server_args("0");
    args.retain(|arg| !arg.starts_with("--cluster-ca-cert="));
    args.push(INSECURE.to_owned());
    let server = Process::start("server", &args, world.dir.path());
    let (agents, health) = (server.address("agents"), server.address("health"));
    metric(health, GAUGE, 1.0).await;
    assert_eq!(warnings(&server.log()), 1, "{}", server.log());

    // That is what was asked for: an agent without a certificate serves.
    let mut args = world.agent_args("anyone", agents.port(), &[]);
    args.retain(|arg| !arg.starts_with("--agent-cert=") && !arg.starts_with("--agent-key="));
    let _agent = Process::start("anyone", &args, world.dir.path());
    metric(health, LINKS, 1.0).await;
    world.assert_serves(&format!("127.0.0.1:{port}")).await;
    assert_eq!(warnings(&server.log()), 1, "once, not for each agent");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_authenticates_agents_neither_warns_nor_exports_it() {
    let processes = Processes::start(&[]).await;
    let text = scrape(processes.health).await;
    assert_eq!(sample(&text, GAUGE), None);
    assert_eq!(warnings(&processes.server.log()), 0);
}

/// Upstream's program lets anyone in without a word when it is given no CA. Ours has to be asked to.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_ca_and_without_the_flag_no_server_starts_and_both_flags_are_named() {
    let mut world = World::start(&[]).await;
    world.stop_server(Duration::ZERO).await;
    let mut native = world.server_args("0");
    native.retain(|arg| !arg.starts_with("--cluster-ca-cert="));
    let [agents, health, admin] = free_ports();
    let compat = [
        "adit".to_owned(),
        "server".to_owned(),
        "--compat".to_owned(),
        format!("--uds-name={}", world.grpc().display()),
        "--server-port=0".to_owned(),
        format!("--agent-port={agents}"),
        format!("--health-port={health}"),
        format!("--admin-port={admin}"),
        format!("--cluster-cert={}", world.files.cert("server").display()),
        format!("--cluster-key={}", world.files.key("server").display()),
    ];
    for (name, args) in [("native", &native[..]), ("compat", &compat)] {
        let mut server = Process::start(name, args, world.dir.path());
        let status = server.end(Duration::from_secs(20));
        let log = server.log();
        assert_eq!(status.code(), Some(1), "{name}: {log}");
        let first = log.lines().next().unwrap_or_default();
        for part in ["refusing to start", "--cluster-ca-cert", INSECURE] {
            assert!(first.contains(part), "{name}: {part} in {first}");
        }
    }
}

/// Rule 10. Under upstream's name the flag is ours, and does the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn upstreams_name_takes_the_insecure_flag_and_says_the_same() {
    let (port, _target) = targets::echo().await;
    let mut world = World::start(&[]).await;
    world.stop_server(Duration::ZERO).await;
    linked(&world);
    // The last one of a flag counts.
    let flags = ["--cluster-ca-cert=", INSECURE];
    let (server, _agent, health) = upstreams_flags(&world, "--mode=grpc", &flags).await;
    metric(health, GAUGE, 1.0).await;
    let warned = server.log().matches(WARNING).count();
    assert_eq!(warned, 1, "{}", server.log());
    let connection = Connection::client(&world).await;
    let mut call = connection.proxy().await;
    let conn = call.open(1, &format!("127.0.0.1:{port}")).await;
    call.echo(conn, b"from anyone").await;
}
