//! An agent against a stub server that sends scripted packets.

use crate::support::certs::Certs;
use crate::support::combo::Combo;
use crate::support::peer::Peer;
use crate::support::process::Process;
use crate::support::stack::{Agent, Targets};
use crate::support::wait::{secs, until};
use tempfile::TempDir;

/// An agent that connects to a stub server.
struct Stage {
    agent: Agent,
    stub: Process,
    _targets: Targets,
    _dir: TempDir,
}

/// Starts a stub server in a mode, a target for its script, and an agent.
fn stage(combo: Combo, mode: &str, target: &str) -> Stage {
    let dir = TempDir::new().expect("a temporary directory can be made");
    let certs = Certs::write(dir.path());
    let targets = Targets::start(dir.path());
    let stub = Peer::new("server-stub", dir.path())
        .flag("ca", certs.ca.display())
        .flag("cert", certs.server_cert.display())
        .flag("key", certs.server_key.display())
        .flag("mode", mode)
        .flag("target", targets.address(target))
        .start();
    let port = stub.named_event("listening", secs(10))["port"]
        .as_u64()
        .expect("a port");
    let port = u16::try_from(port).expect("ports fit");
    let agent = Agent::start(
        combo.agent,
        "agent",
        "the-agent",
        port,
        dir.path(),
        &certs,
        &["--agent-identifiers=host=a.test&ipv4=1.2.3.4"],
    );
    Stage {
        agent,
        stub,
        _targets: targets,
        _dir: dir,
    }
}

impl Stage {
    /// Waits until the stub's script has succeeded.
    fn script_passes(&self) {
        let end = self.stub.named_event("script", secs(20));
        assert_eq!(end["ok"], true, "{end}: {:?}", self.stub.events());
    }

    /// Waits until the agent has called Connect this often.
    fn connects(&self, times: u64) {
        self.stub.event("repeated connect", secs(20), |event| {
            event["event"] == "connect" && event["n"] == times
        });
    }

    /// Waits until the agent holds no socket to a target.
    fn nothing_open(&self) {
        until("no target connection is open", secs(5), || {
            (self.agent.metric("open_endpoint_connections", &[]) == 0.0).then_some(())
        });
    }
}

fn agent_sends_its_id_and_identifiers(combo: Combo) {
    let stage = stage(combo, "listen", "echo");
    let connect = stage.stub.named_event("connect", secs(10));
    assert_eq!(connect["agentid"], serde_json::json!(["the-agent"]));
    let identifiers = connect["agentidentifiers"][0].as_str().expect("one value");
    let mut parts: Vec<&str> = identifiers.split('&').collect();
    parts.sort_unstable();
    assert_eq!(parts, ["host=a.test", "ipv4=1.2.3.4"]);
    stage.agent.await_ready();
}
rows!(agent_sends_its_id_and_identifiers: go_go go_adit);

/// Upstream (packets): An agent answers dial, data and the target's close with the right ids.
fn agent_dials_carries_data_and_reports_the_targets_close(combo: Combo) {
    let stage = stage(combo, "dial-data", "source");
    stage.script_passes();
    stage.nothing_open();
}
rows!(agent_dials_carries_data_and_reports_the_targets_close: go_go go_adit);

/// Upstream (packets): An agent confirms a close; a second close names an unknown connID.
fn second_close_request_is_answered_as_unknown(combo: Combo) {
    let stage = stage(combo, "close-twice", "echo");
    stage.script_passes();
    stage.nothing_open();
}
rows!(second_close_request_is_answered_as_unknown: go_go go_adit);

/// Upstream (packets): An agent answers data for an unknown connID with a close.
fn data_for_an_unknown_connection_is_answered_with_its_close(combo: Combo) {
    stage(combo, "data-unknown", "echo").script_passes();
}
rows!(data_for_an_unknown_connection_is_answered_with_its_close: go_go go_adit);

/// Upstream (agents): A link that breaks during a dial leaves nothing behind at the agent.
fn broken_stream_closes_the_targets_and_the_agent_comes_back(combo: Combo) {
    let stage = stage(combo, "break-after-dial", "echo");
    stage.script_passes();
    stage.connects(2);
    drop(stage.stub);
    until("no target connection is open", secs(10), || {
        (stage.agent.metric("open_endpoint_connections", &[]) == 0.0).then_some(())
    });
}
rows!(broken_stream_closes_the_targets_and_the_agent_comes_back: go_go go_adit);

/// Upstream v0.36.0 announces the drain with its next packet only, so it is no baseline.
///
/// Upstream (agents): An agent announces its drain at once, also on an idle link.
fn drain_is_announced_on_an_idle_stream(combo: Combo) {
    let stage = stage(combo, "listen", "echo");
    stage.agent.await_ready();
    stage.agent.drain();
    stage
        .stub
        .event("DRAIN", secs(3), |event| event["type"] == "DRAIN");
}
rows!(drain_is_announced_on_an_idle_stream: go_adit);

/// An invalid handshake fails the attempt, and the agent retries.
fn bad_greetings_are_refused_and_tried_again(combo: Combo) {
    for mode in ["no-serverid", "two-serverids", "bad-count", "refuse"] {
        let stage = stage(combo, mode, "echo");
        stage.connects(2);
        assert_ne!(
            stage.agent.ready_status(),
            200,
            "ready with greeting {mode}"
        );
    }
}
rows!(bad_greetings_are_refused_and_tried_again: go_go go_adit);

/// Upstream waits forever.
///
/// Limit (times): Response headers of a link
fn missing_greeting_is_not_waited_for_without_limit(combo: Combo) {
    let stage = stage(combo, "no-headers", "echo");
    stage.connects(2);
}
rows!(missing_greeting_is_not_waited_for_without_limit: go_adit);

/// Malformed packets crash upstream's agent.
///
/// Upstream (packets): Empty, mismatched and unknown packets, and those with id 0, hurt no other tunnel.
fn malformed_packets_of_a_server_do_not_hurt_the_agent(combo: Combo) {
    let mut stage = stage(combo, "malformed", "echo");
    stage.script_passes();
    assert!(stage.agent.process.is_running());
}
rows!(malformed_packets_of_a_server_do_not_hurt_the_agent: go_adit);
