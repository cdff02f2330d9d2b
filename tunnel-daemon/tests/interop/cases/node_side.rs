//! Node to control plane with upstream's servers, which have no lanes. The agent refuses connections to its listeners with a
//! reason, and tunnels work as before. A server of ours beside them serves the listeners.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use crate::support::combo::{Combo, Maker};
use crate::support::metrics::Scrape;
use crate::support::ports;
use crate::support::process::Process;
use crate::support::stack::{Agent, Stack, get};
use crate::support::wait::{secs, until};

/// The reason in log and probe for a server without lanes.
const WHY: &str = "no connected server takes lanes";
/// Longest time for which a connection waits for a lane.
const HELD_MAX_SECS: u64 = 5;

/// Starts our agent with native flags, because upstream has none for listeners. Returns the port of its listener for
/// `destination`.
fn add_node_agent(stack: &mut Stack, servers: &[u16], destination: &str) -> u16 {
    let [health_port, local] = [(); 2].map(|()| ports::free());
    let servers: Vec<String> = servers
        .iter()
        .map(|port| format!("127.0.0.1:{port}"))
        .collect();
    let args = [
        "agent".to_owned(),
        format!("--proxy-server-host={}", servers.join(",")),
        format!("--ca-cert={}", stack.certs.ca.display()),
        format!("--agent-cert={}", stack.certs.agent_cert.display()),
        format!("--agent-key={}", stack.certs.agent_key.display()),
        "--agent-id=node-agent".to_owned(),
        "--sync-interval=200ms".to_owned(),
        "--sync-interval-cap=1s".to_owned(),
        "--health-server-host=127.0.0.1".to_owned(),
        format!("--health-server-port={health_port}"),
        "--admin-server-port=off".to_owned(),
        format!("--target={local}:{destination}"),
    ];
    let process = Process::service(
        "node-agent",
        &Maker::Adit.agent().0,
        &args,
        stack.dir.path(),
    );
    let agent = Agent {
        process,
        health_port,
    };
    agent.await_ready();
    stack.agents.push(agent);
    local
}

/// The agent's readiness report, which covers its listeners.
fn told(stack: &Stack) -> String {
    let answer = get(stack.agents[0].health_port, "/readyz?verbose");
    let answer = answer.expect("the agent answers");
    assert_eq!(answer.status, 200, "not a matter of readiness");
    answer.text
}

/// Waits until the agent has counted `count` connections that it refused without lanes.
fn await_refused(stack: &Stack, count: u32) {
    let want = f64::from(count);
    until(
        &format!("{count} refusals are counted"),
        secs(HELD_MAX_SECS),
        || {
            let answer = get(stack.agents[0].health_port, "/metrics")?;
            let scrape = Scrape::parse(answer.body());
            let of = |labels: &[(&str, &str)]| scrape.value("adit_node_refusals_total", labels);
            (of(&[("reason", "no_lanes")]) == want && of(&[]) == want).then_some(())
        },
    );
}

/// Checks that a connection to an agent's listener is reset before the wait for a lane would end.
fn assert_reset(port: u16) {
    let since = Instant::now();
    // The reset may arrive before `connect` returns.
    let outcome = TcpStream::connect(("127.0.0.1", port)).and_then(|mut stream| {
        stream.set_read_timeout(Some(secs(HELD_MAX_SECS)))?;
        stream.read(&mut [0; 1])
    });
    let error = outcome.expect_err("nothing comes");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
    assert!(since.elapsed() < secs(HELD_MAX_SECS));
}

/// Checks an echo over a connection to an agent's listener.
fn assert_echoes(port: u16) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("the agent listens");
    stream
        .set_read_timeout(Some(secs(15)))
        .expect("the socket takes a timeout");
    stream.write_all(b"ping").expect("the tunnel takes bytes");
    let mut back = [0; 4];
    stream.read_exact(&mut back).expect("an echo");
    assert_eq!(&back, b"ping");
}

/// The probe reports it before the first connection. A connection causes one warning and is counted.
fn a_server_without_lanes_is_named_and_tunnels_from_it_go_on(combo: Combo) {
    let mut stack = Stack::with(combo, 0, &[]);
    let server = stack.server.agent_port;
    let local = add_node_agent(&mut stack, &[server], "10.96.0.1:443");
    stack.await_backends(1);
    let told = told(&stack);
    assert!(
        told.contains(&format!("[-]node-to-control-plane {WHY}")),
        "{told}"
    );
    let log = stack.dir.path().join("node-agent.log");
    let warnings = |text: &str| {
        let log = fs::read_to_string(&log).unwrap_or_default();
        let lines = log.lines().filter(|line| line.contains("level=warn"));
        // Each failed dial has its own log line in addition.
        let lines = lines.filter(|line| !line.contains("dial failed"));
        lines.filter(|line| line.contains(text)).count()
    };
    let at_start = "this server takes no lanes";
    until("a warning at the start", secs(5), || {
        (warnings(at_start) > 0).then_some(())
    });
    let witness = stack.begin("echo echo messages=100 gap=20ms");
    for count in 1..=3 {
        assert_reset(local);
        await_refused(&stack, count);
    }
    witness.report().good();
    stack.assert_serves();
    until("a warning", secs(5), || (warnings(WHY) > 0).then_some(()));
    assert_eq!(warnings(WHY), 1, "one for three connections");
}
rows!(a_server_without_lanes_is_named_and_tunnels_from_it_go_on: go_adit go_adit_connect go034_adit go0303_adit aditlink_adit);

/// Starts our server with native flags at its own agent port. It permits agents to reach `destination`.
fn start_our_server(stack: &Stack, destination: &str, agent_port: u16) -> Process {
    let health_port = ports::free();
    let socket = stack.dir.path().join("ours.sock");
    let args = [
        "server".to_owned(),
        format!("--frontend=grpc=unix:{}", socket.display()),
        format!("--cluster-cert={}", stack.certs.server_cert.display()),
        format!("--cluster-key={}", stack.certs.server_key.display()),
        format!("--cluster-ca-cert={}", stack.certs.ca.display()),
        "--agent-bind-address=127.0.0.1".to_owned(),
        format!("--agent-port={agent_port}"),
        "--health-bind-address=127.0.0.1".to_owned(),
        format!("--health-port={health_port}"),
        "--admin-port=off".to_owned(),
        "--server-id=ours".to_owned(),
        "--server-count=2".to_owned(),
        format!("--allowed-destination={destination}"),
    ];
    let program = Maker::Adit.server().0;
    let process = Process::service("ours", &program, &args, stack.dir.path());
    until("our server answers /healthz", secs(20), || {
        get(health_port, "/healthz").filter(|answer| answer.status == 200)
    });
    process
}

/// During a migration from upstream's servers to ours, the listeners work while one of our servers is connected.
fn beside_a_server_without_lanes_ours_takes_the_connections(combo: Combo) {
    let mut stack = Stack::with(combo, 0, &["--server-count=2"]);
    let destination = stack.targets.address("echo");
    let (theirs, ours) = (stack.server.agent_port, ports::free());
    let mut server = start_our_server(&stack, &destination, ours);
    let local = add_node_agent(&mut stack, &[theirs, ours], &destination);
    stack.await_agent_metric("open_server_connections", &[], 2.0);
    for _ in 0..5 {
        assert_echoes(local);
    }
    let told_first = told(&stack);
    assert!(
        told_first.contains("[+]node-to-control-plane a server takes lanes"),
        "{told_first}"
    );
    // Without our server connections are refused with a reason, and the other server's tunnels work.
    server.kill();
    stack.await_agent_metric("open_server_connections", &[], 1.0);
    assert_reset(local);
    let told_then = told(&stack);
    assert!(
        told_then.contains(&format!("[-]node-to-control-plane {WHY}")),
        "{told_then}"
    );
    stack.assert_serves();
    let _again = start_our_server(&stack, &destination, ours);
    stack.await_agent_metric("open_server_connections", &[], 2.0);
    assert_echoes(local);
}
rows!(beside_a_server_without_lanes_ours_takes_the_connections: go_adit aditlink_adit);
