//! Client libraries of other releases, as in the kube-apiserver of an older or newer control plane.
//!
//! Only the gRPC dialect has such a library. Older agents and servers are rows of the other tests.

use crate::support::combo::Combo;
use crate::support::go::Release;
use crate::support::stack::Stack;

/// Checks bodies, echoes and concurrent tunnels.
fn assert_serves_clients_of(combo: Combo, release: Release) {
    let stack = Stack::start(combo);
    let report = stack
        .client("get", "http")
        .on(release)
        .flag("requests", 3)
        .run()
        .good();
    assert_eq!(report.text("body"), "hello from the target\n");
    assert_eq!(report.number("tunnels"), 1.0);
    assert_eq!(report.get("done"), true);
    let report = stack
        .client("get", "http")
        .on(release)
        .flag("path", "/bytes?n=20971520")
        .run()
        .good();
    assert_eq!(report.number("length"), 20_971_520.0);
    let report = stack
        .client("echo", "echo")
        .on(release)
        .flag("messages", 3)
        .flag("size", 25)
        .flag("read", 10)
        .run()
        .good();
    assert_eq!(report.get("reads").to_string(), "[10,10,5,10,10,5,10,10,5]");
    assert!(report.get("close_error").is_null(), "{report:?}");
    assert_eq!(report.get("done"), true);
    let report = stack
        .client("concurrent", "http")
        .on(release)
        .flag("tunnels", 50)
        .flag("requests", 3)
        .run()
        .good();
    assert_eq!(report.number("good"), 150.0);
    assert_eq!(report.number("ended"), 50.0);
    assert_eq!(stack.server.metric("dial_failure_count", &[]), 0.0);
    stack.await_server_metric("established_connections", &[], 0.0);
    stack.await_agent_metric("open_endpoint_connections", &[], 0.0);
}

/// Upstream (tunnels): Clients with the library of 0.37.0, 0.34.0 and 0.30.3 are served, and learn why a dial failed.
fn clients_of_v0_34_0_are_served(combo: Combo) {
    assert_serves_clients_of(combo, Release::V0340);
}
rows!(clients_of_v0_34_0_are_served: go_go adit_go adit_adit adit_aditlink);

/// Upstream (tunnels): Clients with the library of 0.37.0, 0.34.0 and 0.30.3 are served, and learn why a dial failed.
fn clients_of_v0_30_3_are_served(combo: Combo) {
    assert_serves_clients_of(combo, Release::V0303);
}
rows!(clients_of_v0_30_3_are_served: go_go adit_go adit_adit adit_aditlink);

/// Upstream (tunnels): Clients with the library of 0.37.0, 0.34.0 and 0.30.3 are served, and learn why a dial failed.
fn clients_of_v0_37_0_are_served(combo: Combo) {
    assert_serves_clients_of(combo, Release::V0370);
}
rows!(clients_of_v0_37_0_are_served: go_go adit_go adit_adit);

/// The library of 0.37.0 has a connection that opens a stream for each tunnel.
fn tunnels_of_one_connection_are_served(combo: Combo) {
    let stack = Stack::start(combo);
    let client = stack.client("concurrent", "http").on(Release::V0370);
    let client = client.flag("reuse", true).flag("tunnels", 200);
    let report = client.flag("requests", 5).run().good();
    assert_eq!(report.number("good"), 1_000.0);
    stack.await_server_metric("established_connections", &[], 0.0);
    stack.await_agent_metric("open_endpoint_connections", &[], 0.0);
}
rows!(tunnels_of_one_connection_are_served: go_go adit_go adit_adit);

/// Checks a target that refuses, and a server without agents.
fn assert_tells_clients_of(combo: Combo, release: Release) {
    let mut stack = Stack::with(combo, 0, &[]);
    let report = stack
        .client_to("dial-fail", "127.0.0.1:80")
        .on(release)
        .run()
        .bad();
    report.error_has("No agent available");
    assert_eq!(report.text("reason"), "endpoint");
    stack.add_agent("agent-0", &[]);
    stack.await_backends(1);
    let report = stack.client("dial-fail", "closed").on(release).run().bad();
    report.error_has("connection refused");
    assert_eq!(report.text("reason"), "endpoint");
    stack.await_server_metric("dial_failure_count", &[("reason", "no_agent")], 1.0);
    stack.await_server_metric("dial_failure_count", &[("reason", "error_response")], 1.0);
}

/// Upstream (tunnels): Clients with the library of 0.37.0, 0.34.0 and 0.30.3 are served, and learn why a dial failed.
fn clients_of_v0_34_0_are_told_why_a_dial_failed(combo: Combo) {
    assert_tells_clients_of(combo, Release::V0340);
}
rows!(clients_of_v0_34_0_are_told_why_a_dial_failed: go_go adit_go adit_adit);

/// Upstream (tunnels): Clients with the library of 0.37.0, 0.34.0 and 0.30.3 are served, and learn why a dial failed.
fn clients_of_v0_37_0_are_told_why_a_dial_failed(combo: Combo) {
    assert_tells_clients_of(combo, Release::V0370);
}
rows!(clients_of_v0_37_0_are_told_why_a_dial_failed: go_go adit_go);

/// Upstream (tunnels): Clients with the library of 0.37.0, 0.34.0 and 0.30.3 are served, and learn why a dial failed.
fn clients_of_v0_30_3_are_told_why_a_dial_failed(combo: Combo) {
    assert_tells_clients_of(combo, Release::V0303);
}
rows!(clients_of_v0_30_3_are_told_why_a_dial_failed: go_go adit_go adit_adit);

/// A cancelled dial of an older client is cancelled at the agent, too.
///
/// Upstream (dials): A dial that its client cancels is cancelled at the agent and counted once on both ends.
fn an_older_client_that_gives_up_is_counted_once(combo: Combo) {
    let (stack, _stub) = Stack::with_stub(combo, "silent");
    for (release, count) in [(Release::V0340, 1.0), (Release::V0303, 2.0)] {
        let report = stack
            .client_to("dial-fail", "10.0.0.1:80")
            .on(release)
            .flag("timeout", "1s")
            .run()
            .bad();
        assert_eq!(report.text("reason"), "context");
        stack.await_server_metric("dial_failure_count", &[("reason", "frontend_close")], count);
        stack.await_server_metric("pending_backend_dials", &[], 0.0);
    }
}
rows!(an_older_client_that_gives_up_is_counted_once: go_go adit_go);
