//! A Go agent drops all its tunnels on a GOAWAY, so it gets none while it holds any: not under load,
//! not for pings, not from a server that is told to stop.
//!
//! A tap between the two sees the frames. Rows with upstream's server show what it does in the same place, and so that the tap
//! would see it.

use rustix::process::Signal;
use serde_json::Value;

use crate::support::combo::Combo;
use crate::support::peer::{Peer, Running};
use crate::support::process::Process;
use crate::support::stack::{Agent, Stack};
use crate::support::wait::{secs, until};

/// Pings of the tap, ten a second: upstream takes one in thirty seconds, and after three too many sends a GOAWAY.
const PINGS: u32 = 50;

/// What stands between an agent and its server.
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

    /// The first GOAWAY of a server.
    fn goaway(&self) -> Value {
        self.process.named_event("goaway", secs(20))
    }

    /// No GOAWAY has passed, and no connection has ended.
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

/// A server and an agent that reaches it through a tap.
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

/// A tunnel that has served one request, and serves another when it is given a line.
fn held(stack: &Stack) -> Running {
    let mut client = stack
        .client("get", "http")
        .flag("requests", 2)
        .flag("pause", true)
        .begin();
    client.process().named_event("paused", secs(10));
    client
}

/// It still serves.
#[track_caller]
fn assert_held(mut client: Running) {
    client.process().line("go on");
    let report = client.report().good();
    assert_eq!(report.text("body"), "hello from the target\n");
    assert_eq!(report.number("tunnels"), 1.0);
}

/// Bytes both ways at full speed, and hundreds of tunnels that come and go, beside one that stays.
///
/// Upstream (agents): A server sends no GOAWAY while an agent holds tunnels.
fn a_loaded_agent_gets_no_goaway(combo: Combo) {
    let (stack, tap) = tapped(combo, 0, &[]);
    let kept = held(&stack);
    stack
        .client("bulk-up", "sink")
        .flag("bytes", 16 << 20)
        .flag("streams", 3)
        .run()
        .good();
    stack
        .client("slow-read", "source")
        .flag("rate", 20_000_000)
        .flag("for", "2s")
        .run()
        .good();
    for _ in 0..3 {
        stack
            .client("concurrent", "http")
            .flag("tunnels", 100)
            .flag("requests", 3)
            .run()
            .good();
    }
    assert_held(kept);
    tap.assert_calm();
}
rows!(a_loaded_agent_gets_no_goaway: go_go adit_go adit_go034 adit_go0303 adit_go_connect);

/// However often an agent pings, beside an open tunnel and without a byte in it, every ping is answered and nothing else comes.
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

/// Within the grace, tunnels of a Go agent finish; then the server leaves, and does not wait for the rest of it.
///
/// Upstream (agents): A server sends no GOAWAY while an agent holds tunnels.
fn a_stopping_server_sends_no_goaway_while_an_agent_holds_tunnels(combo: Combo) {
    let (mut stack, tap) = tapped(combo, 0, &["--graceful-shutdown-timeout=30s"]);
    let kept = held(&stack);
    // Many times longer than an agent takes to look at its connection, which it does each 100 ms here.
    let download = stack
        .client("slow-read", "source")
        .flag("rate", 2_000_000)
        .flag("for", "3s")
        .begin();
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
