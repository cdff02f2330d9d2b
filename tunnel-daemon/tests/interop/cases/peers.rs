//! Servers that know each other, and agents in Go beside ours: none of them is linked to the server that clients ask.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::thread;

use adit_testkit::args;
use adit_testkit::certificates::ThrowawayFiles;
use adit_testkit::peers::PeerFiles;
use rustix::process::Signal;
use tempfile::TempDir;

use super::agents::Balancer;
use crate::support::combo::{Combo, Maker};
use crate::support::go::Release;
use crate::support::peer::{Peer, Report};
use crate::support::ports;
use crate::support::process::Process;
use crate::support::wait::{secs, until};

/// Slowest dial while there is a path, in milliseconds.
const SLOWEST_MS: f64 = 4_000.0;
/// The agents, half of them in Go. Each is alone in charge of one address.
const AGENTS: [Maker; 4] = [
    Maker::Upstream(Release::V0360),
    Maker::Adit,
    Maker::Upstream(Release::V0360),
    Maker::Adit,
];

fn address(agent: usize) -> String {
    format!("127.1.0.{}", agent + 1)
}

/// A target that answers one HTTP request for each connection, on all addresses of this host.
fn target() -> u16 {
    let listener = TcpListener::bind("0.0.0.0:0").expect("a port is free");
    let port = listener.local_addr().expect("it is bound").port();
    thread::spawn(move || {
        for mut client in listener.incoming().map_while(Result::ok) {
            let lines = BufReader::new(client.try_clone().expect("sockets clone")).lines();
            let asked = lines
                .map_while(Result::ok)
                .take_while(|line| !line.is_empty());
            if asked.count() > 0 {
                let answer =
                    b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\nhi\n";
                client.write_all(answer).ok();
            }
        }
    });
    port
}

/// The command line of a server of this installation, with both of kube-apiserver's dialects.
fn server(name: &str, files: &ThrowawayFiles, peers: &PeerFiles, dir: &Path) -> Vec<String> {
    let mut flags = args::server(files, "127.0.0.1", "0");
    flags.extend(peers.flags(name));
    flags.extend([
        format!(
            "--frontend=grpc=unix:{}",
            dir.join(format!("{name}.grpc")).display()
        ),
        format!(
            "--frontend=http-connect=unix:{}",
            dir.join(format!("{name}.http-connect")).display()
        ),
        format!("--server-id={name}"),
        "--proxy-strategies=destHost".to_owned(),
        "--admin-socket=off".to_owned(),
        "--log-format=json".to_owned(),
    ]);
    flags
}

/// A server that agents link to.
fn holder(name: &str, files: &ThrowawayFiles, peers: &PeerFiles, dir: &Path) -> Process {
    let mut flags = server(name, files, peers, dir);
    flags.extend(["--peer-bind=127.0.0.1:0", "--server-count=2"].map(str::to_owned));
    Process::start(name, &flags, dir)
}

fn agent(number: usize, port: u16, files: &ThrowawayFiles, dir: &Path) -> Process {
    let id = format!("agent-{number}");
    let (program, mut argv) = AGENTS[number].agent();
    argv.extend([
        "--proxy-server-host=127.0.0.1".to_owned(),
        format!("--proxy-server-port={port}"),
        format!("--ca-cert={}", files.ca_file().display()),
        format!("--agent-cert={}", files.cert("agent").display()),
        format!("--agent-key={}", files.key("agent").display()),
        format!("--agent-id={id}"),
        format!("--agent-identifiers=ipv4={}", address(number)),
        format!("--health-server-port={}", ports::free()),
        format!("--admin-server-port={}", ports::free()),
        "--sync-interval=200ms".to_owned(),
        "--sync-interval-cap=1s".to_owned(),
    ]);
    Process::service(&id, &program, &argv, dir)
}

/// Asks for the target of an agent at the server `front`, in one dialect.
fn ask(dialect: &str, agent: usize, port: u16, dir: &Path) -> Report {
    Peer::new("get", dir)
        .flag("mode", dialect)
        .flag("uds", dir.join(format!("front.{dialect}")).display())
        .flag(
            "target",
            SocketAddr::new(address(agent).parse().expect("an address"), port),
        )
        .run()
}

/// Asks for the targets of all agents in both dialects.
#[track_caller]
fn assert_reached(port: u16, dir: &Path, when: &str) {
    for agent in 0..AGENTS.len() {
        for dialect in ["grpc", "http-connect"] {
            let report = ask(dialect, agent, port, dir).good();
            let took = report.number("elapsed_ms");
            assert!(
                took <= SLOWEST_MS,
                "agent {agent} by {dialect} after {took} ms: {when}"
            );
        }
    }
}

/// Two servers have the agents, a third has none and asks the two. No dial fails while one of the two stands still or is gone.
fn agents_in_go_and_ours_are_reached_through_peers(_combo: Combo) {
    let dir = TempDir::new().expect("a temporary directory can be made");
    let files = ThrowawayFiles::create(&["127.0.0.1".to_owned()]).expect("certificates");
    let peers = PeerFiles::new();
    let at = dir.path();
    let a = holder("a", &files, &peers, at);
    let mut b = holder("b", &files, &peers, at);
    let mut flags = server("front", &files, &peers, at);
    let asked = [&a, &b].map(|holder| format!("--peer={}", holder.address("peers")));
    flags.extend(asked);
    let _front = Process::start("front", &flags, at);
    let ports = [&a, &b].map(|holder| holder.address("agents").port());
    let balancer = Balancer::start(ports.to_vec());
    let _agents: Vec<Process> = (0..AGENTS.len())
        .map(|number| agent(number, balancer.port, &files, at))
        .collect();
    until("links of all agents at both servers", secs(60), || {
        // An agent that looks for the other server may connect to the same one several times.
        let has_linked = |log: &str, number: usize| {
            let agent = format!("\"agent-{number}\"");
            log.lines()
                .any(|line| line.contains("agent connected") && line.contains(&agent))
        };
        let all = |holder: &Process| {
            let log = holder.log();
            (0..AGENTS.len()).all(|number| has_linked(&log, number))
        };
        (all(&a) && all(&b)).then_some(())
    });
    let port = target();
    for number in 0..AGENTS.len() {
        until("an agent is reached", secs(20), || {
            (*ask("grpc", number, port, at).get("ok") == true).then_some(())
        });
    }
    assert_reached(port, at, "both servers run");
    a.signal(Signal::STOP);
    assert_reached(port, at, "one stands still");
    a.signal(Signal::CONT);
    b.kill();
    assert_reached(port, at, "the other is gone");
}
rows!(agents_in_go_and_ours_are_reached_through_peers: adit_go);
