//! A server against stub agents that send arbitrary packets.

use crate::support::combo::Combo;
use crate::support::process::Process;
use crate::support::stack::Stack;
use crate::support::wait::secs;

/// Starts a stub agent with two links, of which only the first serves `victim.test`.
fn two_links(stack: &Stack, mode: &str) -> Process {
    let stub = stack
        .stub_agent(mode)
        .flag("identifiers", "host=victim.test")
        .flag("second", "start")
        .flag("second-identifiers", "host=thief.test")
        .start();
    stub.event("linked b", secs(10), |event| {
        event["event"] == "linked" && event["link"] == "b"
    });
    stack.await_server_metric("ready_backends", &[("proxy_strategy", "destHost")], 2.0);
    stub
}

/// Upstream accepts an answer from any agent.
///
/// Upstream (packets): An answer or data of an agent for a tunnel of another one is refused.
fn another_agents_answer_to_a_dial_is_refused(combo: Combo) {
    let stack = Stack::with(combo, 0, &["--proxy-strategies=destHost"]);
    let _stub = two_links(&stack, "forge-dial");
    let report = stack.bad("dial-fail victim.test:80 timeout=5s");
    report.error_has("refused by the agent that was asked");
}
rows!(another_agents_answer_to_a_dial_is_refused: adit_go adit_go_connect);

/// Upstream (packets): An answer or data of an agent for a tunnel of another one is refused.
fn another_agents_data_does_not_reach_the_tunnel(combo: Combo) {
    let stack = Stack::with(combo, 0, &["--proxy-strategies=destHost"]);
    let stub = two_links(&stack, "forge-data");
    stack.good("wrong victim.test:80 kind=tagged");
    stub.named_event("forged", secs(1));
}
rows!(another_agents_data_does_not_reach_the_tunnel: go_go adit_go);

/// Both links have one id, so a table keyed by (id, connID) would fail.
///
/// Upstream (packets): An answer or data of an agent for a tunnel of another one is refused.
fn another_links_data_does_not_reach_the_tunnel_under_the_same_id(combo: Combo) {
    let stack = Stack::with(combo, 0, &["--proxy-strategies=destHost"]);
    let stub = stack
        .stub_agent("forge-data")
        .flag("identifiers", "host=victim.test")
        .flag("second", "start")
        .flag("second-id", "stub-a")
        .flag("second-identifiers", "host=thief.test")
        .start();
    stub.event("linked b", secs(10), |event| {
        event["event"] == "linked" && event["link"] == "b"
    });
    stack.await_server_metric("ready_backends", &[("proxy_strategy", "destHost")], 2.0);
    stack.good("wrong victim.test:80 kind=tagged");
}
rows!(another_links_data_does_not_reach_the_tunnel_under_the_same_id: adit_go);

/// Malformed packets crash upstream's server.
///
/// Upstream (packets): Empty, mismatched and unknown packets, and those with id 0, hurt no other tunnel.
fn malformed_packets_of_an_agent_affect_no_other_tunnel(combo: Combo) {
    let mut stack = Stack::start(combo);
    let witness = stack.begin("echo echo messages=100 gap=20ms");
    // The witness has its tunnel, through the well-behaved agent, before the stub connects.
    stack.await_server_metric("established_connections", &[], 1.0);
    let stub = stack.stub_agent("malformed").start();
    stub.named_event("sent", secs(10));
    witness.report().good();
    drop(stub);
    stack.await_backends(1);
    assert!(stack.server.process.is_running());
    stack.assert_serves();
}
rows!(malformed_packets_of_an_agent_affect_no_other_tunnel: our_server_both);

/// Upstream tolerates these packets, too.
fn harmless_packets_of_an_agent_have_no_effect(combo: Combo) {
    let stack = Stack::with(combo, 0, &[]);
    let stub = stack.stub_agent("harmless").start();
    stub.named_event("sent", secs(10));
    stack.await_backends(1);
    stack.good("wrong 10.0.0.1:80 kind=tagged");
}
rows!(harmless_packets_of_an_agent_have_no_effect: go_go adit_go);

/// A message beyond the limit ends at most the link on which it arrived.
///
/// Upstream (packets): Packets of 4 MiB pass; a larger one ends its own tunnel only.
fn oversized_packet_of_an_agent_spares_the_other_agent(combo: Combo) {
    let mut stack = Stack::with(combo, 0, &["--proxy-strategies=destHost"]);
    let stub = stack
        .stub_agent("oversized")
        .flag("identifiers", "host=big.test")
        .start();
    stub.named_event("linked", secs(10));
    stack.add_agent("honest", &["--agent-identifiers=host=127.0.0.1"]);
    stack.await_server_metric("ready_backends", &[("proxy_strategy", "destHost")], 2.0);
    let witness = stack.begin("echo echo messages=100 gap=20ms");
    stack.bad("wrong big.test:80 kind=tagged timeout=3s");
    witness.report().good();
    stack.assert_serves();
}
rows!(oversized_packet_of_an_agent_spares_the_other_agent: go_go adit_go);

/// In upstream, a gRPC dial keeps waiting after its agent has disconnected.
///
/// Upstream (dials): A dial fails at once when its agent is lost.
fn dial_fails_at_once_when_its_agent_goes(combo: Combo) {
    let (stack, mut stub) = Stack::with_stub(combo, "silent");
    let client = stack.begin("dial-fail 10.0.0.1:80 timeout=20s");
    stub.event("DIAL_REQ", secs(5), |event| event["type"] == "DIAL_REQ");
    stub.kill();
    let report = client.report().bad();
    let took = report.number("dial_ms");
    assert!(
        took < 3_000.0,
        "the dial took {took} ms to fail: {report:?}"
    );
    if !stack.is_grpc() {
        assert_eq!(report.number("status"), 502.0);
    }
    stack.await_server_metric("pending_backend_dials", &[], 0.0);
    stack.await_server_metric("dial_failure_count", &[("reason", "backend_close")], 1.0);
}
rows!(dial_fails_at_once_when_its_agent_goes: go_go_connect adit_go adit_go_connect);
