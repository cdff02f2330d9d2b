//! Well-behaved clients, from a first request to cancelled ones.

use crate::support::combo::{Combo, Mode};
use crate::support::peer::Peer;
use crate::support::stack::Stack;
use crate::support::wait::{secs, until};

/// Counter of dial failures, with a label for the reason.
const DIAL_FAILURES: &str = "dial_failure_count";

/// In HTTP-CONNECT mode the client also rejects bytes that arrive together with the 200.
///
/// Upstream (tunnels): A GET through a single-use tunnel returns the body.
/// Upstream (tunnels): CONNECT and a GET work over a unix socket, and over TCP with mutual TLS.
fn get_through_a_tunnel_brings_the_body(combo: Combo) {
    let stack = Stack::start(combo);
    let report = stack.good("get http requests=3");
    assert_eq!(report.text("body"), "hello from the target\n");
    assert_eq!(report.number("tunnels"), 1.0);
    assert_eq!(report.get("done"), true);
}
rows!(get_through_a_tunnel_brings_the_body: skew);

/// Upstream (dials): A closed port fails the dial with `connection refused`. Server and agent count one failure each.
fn refused_target_is_named_and_counted_on_both_ends(combo: Combo) {
    let stack = Stack::start(combo);
    let report = stack.bad("dial-fail closed");
    report.error_has("connection refused");
    assert_eq!(report.text("reason"), "endpoint");
    stack.await_server_metric(DIAL_FAILURES, &[("reason", "error_response")], 1.0);
    stack.await_agent_metric("endpoint_dial_failure_total", &[("reason", "unknown")], 1.0);
}
rows!(refused_target_is_named_and_counted_on_both_ends: go_go adit_go go_adit adit_adit adit_go034 adit_go0303
    adit_aditprevious aditprevious_adit);

/// Upstream (dials): A tunnel is not opened when its context has expired.
fn tunnel_from_an_ended_context_fails_with_its_deadline(combo: Combo) {
    let stack = Stack::start(combo);
    stack
        .bad("get http expired=true")
        .error_has("context deadline exceeded");
    stack.assert_serves();
}
rows!(tunnel_from_an_ended_context_fails_with_its_deadline: go_go adit_go);

/// Upstream (tunnels): A request to a target that never answers ends at its deadline and leaves nothing behind.
fn request_deadline_ends_the_tunnel_without_leak(combo: Combo) {
    let stack = Stack::start(combo);
    let report = stack.bad("get http path=/wait?ms=60000 timeout=1s");
    report.error_has("context deadline exceeded");
    assert_eq!(report.get("done"), true);
    stack.await_server_metric("established_connections", &[], 0.0);
    stack.await_agent_metric("open_endpoint_connections", &[], 0.0);
}
rows!(request_deadline_ends_the_tunnel_without_leak: grpc);

/// Upstream (dials): A dial that its client cancels is cancelled at the agent and counted once on both ends.
fn client_that_gives_up_on_a_silent_agent_is_counted_once(combo: Combo) {
    let (stack, _stub) = Stack::with_stub(combo, "silent");
    let report = stack.bad("dial-fail 10.0.0.1:80 timeout=1s");
    assert_eq!(report.text("reason"), "context");
    assert_eq!(report.get("done"), true);
    stack.await_server_metric(DIAL_FAILURES, &[("reason", "frontend_close")], 1.0);
    stack.await_server_metric("pending_backend_dials", &[], 0.0);
}
rows!(client_that_gives_up_on_a_silent_agent_is_counted_once: go_go adit_go);

/// Upstream (dials): 50 requests cancelled while they wait leave no tunnel and no socket.
fn fifty_cancelled_requests_leave_nothing_behind(combo: Combo) {
    let stack = Stack::start(combo);
    let report =
        stack.run("concurrent http tunnels=50 path=/wait?ms=3000 cancel-min=1s cancel-max=2s");
    assert_eq!(report.number("good"), 0.0);
    assert_eq!(report.number("ended"), 50.0);
    stack.await_agent_metric("open_endpoint_connections", &[], 0.0);
    stack.assert_serves();
}
rows!(fifty_cancelled_requests_leave_nothing_behind: both);

/// Limit (times): Dial of a target at an agent, over all addresses
/// Upstream (dials): An agent gives up a target that never accepts after 5 s and says so.
fn agent_gives_up_on_a_black_hole_after_five_seconds(combo: Combo) {
    let stack = Stack::start(combo);
    let report = stack.bad("dial-fail black_hole timeout=25s");
    let took = report.number("dial_ms");
    assert!(
        (4_000.0..8_000.0).contains(&took),
        "the dial took {took} ms: {report:?}"
    );
    report.error_has("i/o timeout");
    if stack.is_grpc() {
        assert_eq!(report.text("reason"), "endpoint");
    } else {
        assert_eq!(report.number("status"), 504.0);
    }
    stack.await_server_metric(DIAL_FAILURES, &[("reason", "error_response")], 1.0);
    stack.await_agent_metric("endpoint_dial_failure_total", &[("reason", "timeout")], 1.0);
}
rows!(agent_gives_up_on_a_black_hole_after_five_seconds: both);

/// Upstream (tunnels): Cancelling the context of a tunnel ends the request in progress.
fn ending_the_tunnel_context_fails_the_request(combo: Combo) {
    let stack = Stack::start(combo);
    let report = stack.bad("get http path=/wait?ms=60000 cancel-tunnel-after=700ms");
    let took = report.number("elapsed_ms");
    assert!(
        took < 5_000.0,
        "the request outlived its tunnel: {report:?}"
    );
    stack.await_agent_metric("open_endpoint_connections", &[], 0.0);
}
rows!(ending_the_tunnel_context_fails_the_request: grpc);

/// Upstream (tunnels): 20 MiB arrive complete, up to the last bytes before the close.
fn twenty_mebibytes_arrive_whole(combo: Combo) {
    let stack = Stack::start(combo);
    let report = stack.good("get http path=/bytes?n=20971520");
    assert_eq!(report.number("length"), 20_971_520.0);
}
rows!(twenty_mebibytes_arrive_whole: skew);

/// The target closes right after its last byte. Upstream's agent up to v0.36.0 may close before it has sent all data, so
/// only rows with our agent run.
///
/// Upstream (tunnels): 20 MiB arrive complete, up to the last bytes before the close.
fn last_bytes_before_the_targets_close_arrive(combo: Combo) {
    let stack = Stack::start(combo);
    for _ in 0..5 {
        stack.good("bulk-down source bytes=1000003 streams=4");
    }
}
rows!(last_bytes_before_the_targets_close_arrive: go_adit adit_adit go_adit_connect adit_adit_connect
    adit_aditprevious aditprevious_adit_connect);

/// Upstream (tunnels): 100 concurrent POSTs through two agents get their own bodies back.
fn a_hundred_posts_through_two_agents_get_their_own_bodies_back(combo: Combo) {
    let stack = Stack::with(combo, 2, &[]);
    let report = stack.good("concurrent http tunnels=100 requests=3");
    assert_eq!(report.number("good"), 300.0);
    assert_eq!(report.number("ended"), 100.0);
}
rows!(a_hundred_posts_through_two_agents_get_their_own_bodies_back: both);

/// Upstream (tunnels): Ten concurrent downloads of 10 MiB complete.
fn ten_downloads_at_once_complete(combo: Combo) {
    let stack = Stack::start(combo);
    let report = stack.good("concurrent http tunnels=10 path=/bytes?n=10485760");
    assert_eq!(report.number("good"), 10.0);
}
rows!(ten_downloads_at_once_complete: both);

/// Checks each byte against its offset, in both directions.
///
/// Limit (memory): Drain rate above which a full link waits for its slow readers
fn bulk_bytes_arrive_in_order_in_both_directions(combo: Combo) {
    let stack = Stack::start(combo);
    stack.good("bulk-up sink bytes=16777216 streams=3");
    stack.good("slow-read source rate=20000000 for=2s");
}
rows!(bulk_bytes_arrive_in_order_in_both_directions: both);

/// Upstream (tunnels): Short reads of an echo give 10, 10 and 5 bytes, and the close is clean.
fn small_reads_split_a_message_and_never_merge_two(combo: Combo) {
    let stack = Stack::start(combo);
    let report = stack.good("echo echo messages=3 size=25 read=10");
    // A CONNECT tunnel is a byte stream without message boundaries, so the client checks the content only.
    if combo.mode == Mode::Grpc {
        assert_eq!(report.get("reads").to_string(), "[10,10,5,10,10,5,10,10,5]");
    }
    assert!(
        report.get("close_error").is_null(),
        "closing failed: {report:?}"
    );
    assert_eq!(report.get("done"), true);
}
rows!(small_reads_split_a_message_and_never_merge_two: skew);

/// Upstream (configuration): After runs without errors every dial failure metric is 0.
fn clean_runs_count_no_dial_failure(combo: Combo) {
    let stack = Stack::start(combo);
    for _ in 0..3 {
        stack.assert_serves();
    }
    assert_eq!(stack.server.metric(DIAL_FAILURES, &[]), 0.0);
    assert_eq!(
        stack.agents[0].metric("endpoint_dial_failure_total", &[]),
        0.0
    );
    until("no tunnel is counted", secs(5), || {
        (stack.server.metric("established_connections", &[]) == 0.0).then_some(())
    });
}
rows!(clean_runs_count_no_dial_failure: both);

/// gRPC-Go derives a percent-encoded authority from the path. Older releases sent it unescaped.
///
/// Upstream (tunnels): A socket path is accepted as `:authority`, raw and percent-encoded.
fn any_authority_is_taken_on_the_socket(combo: Combo) {
    let stack = Stack::start(combo);
    let socket = stack.socket();
    let encoded = socket.replace('/', "%2F");
    for authority in [
        socket.as_str(),
        encoded.as_str(),
        "localhost",
        "not a host at all %zz",
    ] {
        stack
            .client("get", "http")
            .flag("authority", authority)
            .run()
            .good();
    }
}
rows!(any_authority_is_taken_on_the_socket: go_go adit_go);

/// If no server listens, the client fails at once.
fn client_without_a_server_fails_by_itself(combo: Combo) {
    let stack = Stack::with(combo, 0, &[]);
    let report = Peer::new("dial-fail", stack.dir.path())
        .flag("mode", combo.mode.flag())
        .flag("uds", stack.dir.path().join("nobody.sock").display())
        .flag("target", "127.0.0.1:1")
        .flag("timeout", "2s")
        .run()
        .bad();
    report.error_has("connect");
}
rows!(client_without_a_server_fails_by_itself: go_go);
