//! Raw stub clients, from merely early to malicious.

use serde_json::{Value, json};

use crate::support::combo::Combo;
use crate::support::peer::Report;
use crate::support::stack::Stack;
use crate::support::wait::secs;

/// Sends one kind of invalid packets to the echo target.
fn misbehave(stack: &Stack, kind: &str) -> Report {
    stack.run(&format!("wrong echo kind={kind}"))
}

/// Received packets of one type.
fn packets(report: &Report, kind: &str) -> Vec<Value> {
    let all = report
        .get("packets")
        .as_array()
        .cloned()
        .unwrap_or_default();
    all.into_iter()
        .filter(|packet| packet["type"] == kind)
        .collect()
}

/// Upstream (choice): Without an agent a dial fails with `No agent available`, counted as `no_agent`.
fn dial_without_an_agent_fails_with_no_agent_available(combo: Combo) {
    let stack = Stack::with(combo, 0, &[]);
    let report = stack.bad("dial-fail 127.0.0.1:80");
    report.error_has("No agent available");
    assert_eq!(report.text("reason"), "endpoint");
    stack.await_server_metric("dial_failure_count", &[("reason", "no_agent")], 1.0);
}
rows!(dial_without_an_agent_fails_with_no_agent_available: go_go adit_go);

/// The server forwards the dial unchanged, and sends a close when the client abandons it. Our server does not forward DATA
/// and CLOSE_REQ that precede the answer; upstream's server does.
///
/// Upstream (dials): A dial reaches the agent unchanged, and so does its cancellation. Data and close before the answer
/// stay at the server.
fn agent_receives_the_clients_packets_unchanged(combo: Combo) {
    let (stack, stub) = Stack::with_stub(combo, "silent");
    let mut client = stack.begin("wrong some.host:1234 kind=unanswered");
    let dial = stub.event("DIAL_REQ", secs(5), |event| event["type"] == "DIAL_REQ");
    // The client waits for the dial: if a client leaves before its dial was written, the server does not dial.
    client.process().line("the agent has the dial");
    client.report();
    stub.event("DIAL_CLS", secs(5), |event| {
        event["type"] == "DIAL_CLS" && event["random"] == 4242
    });
    assert_eq!(dial["address"], "some.host:1234");
    assert_eq!(dial["protocol"], "tcp");
    assert_eq!(dial["random"], 4242);
    if combo.server.is_ours() {
        let mut events = stub.events();
        events.retain(|event| event["type"] == "DATA" || event["type"] == "CLOSE_REQ");
        assert_eq!(events, Vec::<Value>::new());
    }
}
rows!(agent_receives_the_clients_packets_unchanged: go_go adit_go);

/// Upstream (packets): Data behind a close request is discarded.
fn data_behind_a_close_request_is_discarded(combo: Combo) {
    let stack = Stack::start(combo);
    let report = misbehave(&stack, "data-after-close").good();
    assert_eq!(report.get("ended"), true, "{report:?}");
    assert_eq!(report.text("code"), "OK");
    stack.await_agent_metric("open_endpoint_connections", &[], 0.0);
    stack.assert_serves();
}
rows!(data_behind_a_close_request_is_discarded: grpc);

/// Upstream (packets): Data before a dial is answered with a close.
fn data_before_a_dial_is_answered_with_a_close(combo: Combo) {
    let stack = Stack::start(combo);
    let report = misbehave(&stack, "data-before-dial").good();
    assert_eq!(
        packets(&report, "CLOSE_RSP"),
        [json!({"type": "CLOSE_RSP", "conn_id": 5, "error": "backend not initialized"})]
    );
    let report = misbehave(&stack, "close-before-dial").good();
    assert_eq!(
        packets(&report, "CLOSE_RSP"),
        [json!({"type": "CLOSE_RSP", "conn_id": 5, "error": "backend uninitialized"})]
    );
    misbehave(&stack, "dial-cls-unknown").good();
    stack.assert_serves();
}
rows!(data_before_a_dial_is_answered_with_a_close: go_go adit_go);

/// Upstream (packets): A second connID on a client's stream closes both tunnels on both sides.
fn second_conn_id_on_a_stream_closes_both(combo: Combo) {
    let stack = Stack::start(combo);
    let report = misbehave(&stack, "second-conn").good();
    let closes = packets(&report, "CLOSE_RSP");
    let mismatched: Vec<_> = closes
        .iter()
        .filter(|close| close["error"] == "mismatched connection IDs")
        .collect();
    assert_eq!(mismatched.len(), 2, "{report:?}");
    stack.await_agent_metric("open_endpoint_connections", &[], 0.0);
    stack.assert_serves();
}
rows!(second_conn_id_on_a_stream_closes_both: go_go adit_go adit_adit);

/// Limit (peers): Calls on one HTTP/2 connection of a client
/// Upstream (tunnels): 1,000 streams on one HTTP/2 connection are served.
fn a_thousand_streams_on_one_connection_are_served(combo: Combo) {
    let stack = Stack::start(combo);
    let report = stack.good("many-streams echo streams=1000 timeout=60s");
    assert_eq!(report.number("good"), 1000.0);
    stack.await_agent_metric("open_endpoint_connections", &[], 0.0);
}
rows!(a_thousand_streams_on_one_connection_are_served: grpc);

/// Unread streams must not block the others of the same HTTP/2 connection.
fn unread_streams_do_not_stop_the_others_of_their_connection(combo: Combo) {
    let stack = Stack::start(combo);
    let source = stack.targets.address("source");
    stack.good(&format!(
        "many-streams echo streams=50 unread=20 source={source} timeout=20s"
    ));
}
rows!(unread_streams_do_not_stop_the_others_of_their_connection: our_server);

/// Upstream tolerates these packets, too.
fn harmless_packets_have_no_effect(combo: Combo) {
    let stack = Stack::start(combo);
    misbehave(&stack, "harmless").good();
    stack.assert_serves();
}
rows!(harmless_packets_have_no_effect: grpc);

/// Malformed packets crash upstream's server.
///
/// Upstream (packets): Empty, mismatched and unknown packets, and those with id 0, hurt no other tunnel.
fn malformed_packets_hurt_nobody_else(combo: Combo) {
    let mut stack = Stack::start(combo);
    let witness = stack.begin("echo echo messages=100 gap=20ms");
    misbehave(&stack, "malformed");
    misbehave(&stack, "malformed-later");
    witness.report().good();
    assert!(stack.server.process.is_running());
    assert!(stack.agents[0].process.is_running());
    stack.assert_serves();
}
rows!(malformed_packets_hurt_nobody_else: our_server);

/// Upstream (packets): Packets of 4 MiB pass; a larger one ends its own tunnel only.
fn largest_message_passes_and_a_larger_one_hurts_only_itself(combo: Combo) {
    let stack = Stack::start(combo);
    misbehave(&stack, "largest").good();
    let witness = stack.begin("echo echo messages=100 gap=20ms");
    let report = misbehave(&stack, "oversized");
    assert_eq!(report.get("ended"), true, "{report:?}");
    witness.report().good();
    stack.await_agent_metric("open_endpoint_connections", &[], 0.0);
    stack.assert_serves();
}
rows!(largest_message_passes_and_a_larger_one_hurts_only_itself: grpc);

/// Upstream forwards empty packets, so its server is no baseline.
///
/// Upstream (packets): No empty DATA packet is sent.
fn data_without_bytes_is_never_passed_on(combo: Combo) {
    let (stack, stub) = Stack::with_stub(combo, "echo");
    // The stub's echo carries a tag, so the client's own check fails. The test checks what the stub received.
    stack.run("wrong 10.0.0.1:80 kind=empty-data timeout=2s");
    stub.event("the honest DATA", secs(5), |event| {
        event["data"] == "after nothing"
    });
    let empty = stub
        .events()
        .iter()
        .filter(|event| event["type"] == "DATA" && event["length"] == 0)
        .count();
    assert_eq!(empty, 0);
}
rows!(data_without_bytes_is_never_passed_on: adit_go);

/// Dataplane notes 10: thousands of tiny messages are not treated as an attack.
fn ten_thousand_tiny_messages_are_echoed(combo: Combo) {
    let stack = Stack::start(combo);
    misbehave(&stack, "tiny").good();
}
rows!(ten_thousand_tiny_messages_are_echoed: grpc);

/// In upstream, any stream can write into any tunnel.
///
/// Upstream (packets): An answer or data of an agent for a tunnel of another one is refused.
fn client_cannot_touch_tunnels_of_others(combo: Combo) {
    let stack = Stack::start(combo);
    let witness = stack.begin("echo echo messages=100 gap=20ms");
    misbehave(&stack, "foreign-conn");
    misbehave(&stack, "foreign-conn");
    witness.report().good();
}
rows!(client_cannot_touch_tunnels_of_others: our_server);
