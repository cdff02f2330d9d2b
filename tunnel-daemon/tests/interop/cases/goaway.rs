//! A Go agent closes all its tunnels on a GOAWAY. So a server sends none while the agent holds tunnels: not under load, not
//! for pings, not when it stops.
//!
//! A tap between agent and server records the frames. Rows with upstream's server show that it sends a GOAWAY there, and
//! that the tap detects it.

use rustix::process::Signal;
use serde_json::Value;

use crate::support::combo::Combo;
use crate::support::peer::{Peer, Running};
use crate::support::process::Process;
use crate::support::stack::{Agent, Stack};
use crate::support::wait::{secs, until};

/// Pings that the tap sends, ten a second. Upstream's server permits one in 30 s, and sends a GOAWAY after three pings too
/// many.
const PINGS: u32 = 50;

/// A proxy between agent and server that records frames.
struct Tap {
    process: Process,
    port: u16,
}

impl Tap {
    fn start(stack: &Stack, pings: u32) -> Self {
        let process = Peer::new("tap", stack.dir.path())
            .flag("server", format!("127.0.0.1:{}", stack.server.agent_port))
            .flag("ca", stack.certs.ca.display())
            .flag("cert", stack.certs.agent_cert.display())
            .flag("key", stack.certs.agent_key.display())
            .flag("server-cert", stack.certs.server_cert.display())
            .flag("server-key", stack.certs.server_key.display())
            .flag("pings", pings)
            .start();
        let port = process.named_event("listening", secs(10))["port"]
            .as_u64()
            .expect("a port");
        let port = u16::try_from(port).expect("ports fit");
        Self { process, port }
    }

    /// Waits for the first GOAWAY of the server.
    fn goaway(&self) -> Value {
        self.process.named_event("goaway", secs(20))
    }

    /// Checks that no GOAWAY was sent and no connection has ended.
    #[track_caller]
    fn assert_calm(&self) {
        let events = self.process.events();
        let seen: Vec<&Value> = events
            .iter()
            .filter(|event| event["event"] == "goaway" || event["event"] == "closed")
            .collect();
        assert!(seen.is_empty(), "{seen:?}");
    }
}

/// Starts a server, and an agent that connects through a tap.
fn tapped(combo: Combo, pings: u32, server_flags: &[&str]) -> (Stack, Tap) {
    let mut stack = Stack::with(combo, 0, server_flags);
    let tap = Tap::start(&stack, pings);
    let agent = Agent::start(
        combo.agent,
        "agent",
        "agent-0",
        tap.port,
        stack.dir.path(),
        &stack.certs,
        &[],
    );
    agent.await_ready();
    stack.agents.push(agent);
    stack.await_backends(1);
    (stack, tap)
}

/// Opens a tunnel and completes one request. The client sends another request when it reads a line; what comes before that takes 15 s
/// on a quiet machine.
fn held(stack: &Stack) -> Running {
    let mut client = stack.begin("get http requests=2 pause=true timeout=60s");
    client.process().named_event("paused", secs(10));
    client
}

/// Checks that the tunnel still serves.
#[track_caller]
fn assert_held(mut client: Running) {
    client.process().line("go on");
    let report = client.report().good();
    assert_eq!(report.text("body"), "hello from the target\n");
    assert_eq!(report.number("tunnels"), 1.0);
}

/// Bulk data in both directions and hundreds of short tunnels, while one tunnel stays open.
///
/// Upstream (agents): A server sends no GOAWAY while an agent holds tunnels.
fn a_loaded_agent_gets_no_goaway(combo: Combo) {
    let (stack, tap) = tapped(combo, 0, &[]);
    let kept = held(&stack);
    stack.good("bulk-up sink bytes=16777216 streams=3");
    stack.good("slow-read source rate=20000000 for=2s");
    for _ in 0..3 {
        stack.good("concurrent http tunnels=100 requests=3");
    }
    assert_held(kept);
    tap.assert_calm();
}
rows!(a_loaded_agent_gets_no_goaway: go_go adit_go adit_go034 adit_go0303 adit_go_connect);

/// An agent pings often while a tunnel is open and idle. The server answers each ping and sends nothing else.
///
/// Upstream (agents): A server sends no GOAWAY while an agent holds tunnels.
fn an_agent_that_pings_ten_times_a_second_gets_no_goaway(combo: Combo) {
    let (stack, tap) = tapped(combo, PINGS, &[]);
    if !combo.server.is_ours() {
        let goaway = tap.goaway();
        assert_eq!(goaway["debug"], "too_many_pings", "{goaway}");
        return;
    }
    let kept = held(&stack);
    tap.process.event("all are answered", secs(30), |event| {
        event["event"] == "answered" && event["n"] == PINGS
    });
    assert_held(kept);
    tap.assert_calm();
}
rows!(an_agent_that_pings_ten_times_a_second_gets_no_goaway: go_go adit_go);

/// Tunnels of a Go agent finish within the grace period. Then the server exits without waiting for the rest of it.
///
/// Upstream (agents): A server sends no GOAWAY while an agent holds tunnels.
fn a_stopping_server_sends_no_goaway_while_an_agent_holds_tunnels(combo: Combo) {
    let (mut stack, tap) = tapped(combo, 0, &["--graceful-shutdown-timeout=30s"]);
    let kept = held(&stack);
    // The download takes much longer than the agent's probe interval, which is 100 ms here.
    let download = stack.begin("slow-read source rate=2000000 for=3s");
    stack.await_server_metric("established_connections", &[], 2.0);
    stack.server.process.signal(Signal::TERM);
    if !combo.server.is_ours() {
        tap.goaway();
        return;
    }
    until("readiness is withdrawn", secs(5), || {
        (stack.server.ready_status() != 200).then_some(())
    });
    download.report().good();
    tap.assert_calm();
    assert_held(kept);
    let status = stack.server.process.wait(secs(10));
    assert_eq!(status.code(), Some(0));
}
rows!(a_stopping_server_sends_no_goaway_while_an_agent_holds_tunnels: go_go adit_go adit_go034 adit_go0303 adit_go_connect);
