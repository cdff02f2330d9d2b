//! Tests of tunnel ends: half-close, graceful close, reset, lingering, and the packets of both ends.

use super::*;

#[test]
fn half_close_leaves_the_other_direction_open() {
    let mut rig = Rig::server(true);
    let (key, conn) = rig.open(1_000);
    rig.endpoint_data(key, bytes(10));
    rig.link.endpoint_fin(key, rig.now);
    assert_eq!(rig.packets(), [payload(conn, 10), fin(conn, Side::Client)]);
    assert!(!rig.endpoint_data(key, bytes(1)), "it had finished");
    rig.data(conn, 20);
    rig.receive(fin(conn, Side::Target));
    let actions = rig.actions();
    assert_eq!(actions.len(), 2);
    assert_eq!(actions[1], Action::PeerFin { key });
    assert_eq!(rig.packets(), [close_req(conn)], "both have finished");
    rig.receive(close_rsp(conn, ""));
    assert!(rig.end_of(key).is_some_and(|end| end.delivers_rest()));
    rig.gone(key);
    assert_eq!((rig.link.tunnels(), rig.link.held_bytes()), (0, 0));
}

/// A process that shuts down waits for these tunnels.
#[test]
fn a_closed_tunnel_lingers_until_its_close_is_confirmed() {
    let mut rig = Rig::server(true);
    let (key, conn) = rig.open(5);
    rig.endpoint_data(key, bytes(10));
    rig.link.endpoint_close(key, String::new(), rig.now);
    assert_eq!(rig.link.lingering(), 0, "its endpoint is there");
    rig.gone(key);
    assert_eq!(rig.packets(), [payload(conn, 5)]);
    assert_eq!(rig.link.lingering(), 1);
    rig.receive(window(conn, 5));
    assert_eq!(rig.packets(), [payload(conn, 5), close_req(conn)]);
    assert_eq!(rig.link.lingering(), 1);
    rig.receive(close_rsp(conn, ""));
    assert_eq!((rig.link.lingering(), rig.link.tunnels()), (0, 0));

    let (cut, _conn) = rig.open(5);
    rig.gone(cut);
    assert_eq!(rig.link.lingering(), 0, "nothing of it is to arrive");
}

#[test]
fn without_credit_a_fin_closes_the_tunnel() {
    let mut server = Rig::server(false);
    let (key, conn) = server.open(0);
    server.endpoint_data(key, bytes(10));
    server.link.endpoint_fin(key, server.now);
    assert_eq!(server.packets(), [payload(conn, 10), close_req(conn)]);
}

/// After the target's close the peer receives an empty text, and the id is free again.
///
/// Upstream (packets): An agent answers dial, data and the target's close with the right ids.
#[test]
fn eof_of_a_target_is_a_close_with_an_empty_text() {
    let mut rig = Rig::agent(false);
    let (key, conn) = rig.open(0);
    rig.endpoint_data(key, bytes(10));
    rig.link.endpoint_fin(key, rig.now);
    assert_eq!(rig.packets(), [payload(conn, 10), close_rsp(conn, "")]);
    assert_eq!(rig.end_of(key), Some(TunnelEnd::Confirmed));
    rig.gone(key);
    assert_eq!((rig.link.tunnels(), rig.link.conns.len()), (0, 0));
}

/// This holds even when both requests arrive before the first answer is sent.
///
/// Upstream (packets): An agent confirms a close; a second close names an unknown connID.
#[test]
fn the_second_close_request_finds_an_unknown_connection() {
    let mut rig = Rig::agent(true);
    let (key, conn) = rig.open(1_000);
    rig.endpoint_data(key, bytes(10));
    rig.receive(close_req(conn));
    rig.receive(close_req(conn));
    assert_eq!(
        rig.packets(),
        [
            payload(conn, 10),
            close_rsp(conn, ""),
            close_rsp(conn, "Unknown connectID")
        ]
    );
    rig.receive(close_req(conn));
    assert_eq!(rig.packets(), [close_rsp(conn, "Unknown connectID")]);
    rig.gone(key);
    assert_eq!(rig.link.tunnels(), 0);
}

/// No packet overtakes the bytes that the close response waits for.
#[test]
fn late_data_for_a_closing_connection_is_not_answered_before_the_close() {
    let mut rig = Rig::agent(false);
    let (key, conn) = rig.open(0);
    rig.endpoint_data(key, bytes(10));
    rig.receive(close_req(conn));
    rig.data(conn, 5);
    assert_eq!(rig.packets(), [payload(conn, 10), close_rsp(conn, "")]);
}

/// Upstream (tunnels): An upload before an immediate close reaches the target completely.
#[test]
fn bytes_before_a_close_are_delivered_and_then_the_end() {
    let mut rig = Rig::agent(true);
    let (key, conn) = rig.open(1_000);
    rig.data(conn, 100);
    rig.receive(close_req(conn));
    let actions = rig.actions();
    assert!(matches!(actions[0], Action::Deliver { .. }));
    let end = TunnelEnd::PeerClosing;
    assert_eq!(actions[1..], [Action::Ended { key, end }]);
    assert_eq!(rig.packets(), [close_rsp(conn, "")]);
    assert_eq!(rig.link.held_bytes(), 100, "the endpoint still has them");
    rig.link.endpoint_drained(key, 100, rig.now);
    rig.gone(key);
    assert_eq!((rig.link.tunnels(), rig.link.held_bytes()), (0, 0));
}

/// After 30 s without progress the endpoint is reset; progress restarts the 30 s.
///
/// Limit (times): Remaining bytes of a closed tunnel without progress | 30 s, then cut
#[test]
fn an_endpoint_lingers_thirty_seconds_without_progress() {
    let mut rig = Rig::server(true);
    let (key, conn) = rig.open(1_000);
    rig.data(conn, 100);
    rig.pass(seconds(500));
    rig.receive(close_rsp(conn, ""));
    rig.actions();
    rig.pass(seconds(25));
    rig.link.endpoint_drained(key, 10, rig.now);
    rig.pass(seconds(29));
    assert_eq!(rig.actions(), []);
    rig.pass(seconds(2));
    let end = TunnelEnd::LingerExpired;
    assert_eq!(rig.actions(), [Action::Abort { key, end }]);
    assert_eq!(rig.link.held_bytes(), 0);
    rig.gone(key);
    assert_eq!((rig.link.tunnels(), rig.link.next_deadline()), (0, None));
}

/// Bytes queued before a close wait 30 s for credit; the close that follows a cut has an error text.
///
/// Limit (times): Remaining bytes of a closed tunnel without progress
#[test]
fn queued_bytes_linger_thirty_seconds_and_a_cut_is_reported() {
    let mut rig = Rig::agent(true);
    let (key, conn) = rig.open(10);
    rig.endpoint_data(key, bytes(40));
    rig.link.endpoint_close(key, String::new(), rig.now);
    assert_eq!(rig.packets(), [payload(conn, 10)]);
    rig.pass(seconds(25));
    rig.receive(window(conn, 10));
    // Bytes of the other direction are no progress of this direction.
    rig.data(conn, 5);
    assert_eq!(rig.packets(), [payload(conn, 10)]);
    rig.pass(seconds(29));
    rig.data(conn, 5);
    assert_eq!(rig.packets(), []);
    rig.pass(seconds(2));
    match &rig.packets()[..] {
        [Packet::CloseRsp { error, .. }] => assert!(!error.is_empty()),
        other => panic!("a close with a text, not {other:?}"),
    }
}

/// A truncated upload would look complete to the target.
#[test]
fn a_reset_tunnel_does_not_look_complete_to_the_target() {
    let mut rig = Rig::agent(true);
    let (key, conn) = rig.open(1_000);
    rig.data(conn, 100);
    rig.actions();
    rig.receive(reset(conn));
    rig.receive(close_req(conn));
    let error = String::new();
    let end = TunnelEnd::Reset { error };
    assert_eq!(rig.actions(), [Action::Ended { key, end }]);
    assert_eq!(rig.link.held_bytes(), 0, "the endpoint drops what it has");
    assert_eq!(rig.packets(), [close_rsp(conn, "")]);
    rig.gone(key);
    assert_eq!(rig.link.tunnels(), 0);
}

/// For uploads: a reset precedes the close when queued bytes were dropped.
#[test]
fn lingering_client_bytes_are_dropped_with_a_reset() {
    let mut rig = Rig::server(true);
    let (key, conn) = rig.open(10);
    rig.endpoint_data(key, bytes(40));
    rig.link.endpoint_close(key, String::new(), rig.now);
    assert_eq!(rig.packets(), [payload(conn, 10)]);
    rig.pass(seconds(32));
    assert_eq!(rig.packets(), [reset(conn), close_req(conn)]);
}

#[test]
fn an_unconfirmed_close_ends_after_ten_seconds() {
    let mut rig = Rig::server(true);
    let (key, conn) = rig.open(1_000);
    rig.link.endpoint_close(key, String::new(), rig.now);
    assert_eq!(rig.packets(), [close_req(conn)]);
    rig.pass(seconds(9));
    assert_eq!(rig.actions(), []);
    rig.pass(seconds(2));
    assert_eq!(rig.end_of(key), Some(TunnelEnd::Unconfirmed));
    rig.gone(key);
    assert_eq!(rig.link.tunnels(), 0);
    rig.data(conn, 5);
    assert_eq!(rig.packets(), [], "it was closed once");
}

/// The limit is five minutes without a byte; a byte, or a reader that drains, restarts the five minutes.
///
/// Limit (times): A half-closed and silent tunnel | reset after 5 min
#[test]
fn a_half_closed_tunnel_without_a_byte_for_five_minutes_is_reset() {
    for mut rig in [Rig::server(true), Rig::agent(true)] {
        let (key, conn) = rig.open(1_000);
        rig.link.endpoint_fin(key, rig.now);
        rig.packets();
        rig.pass(seconds(299));
        rig.data(conn, 100);
        rig.pass(seconds(299));
        rig.actions();
        rig.link.endpoint_drained(key, 1, rig.now);
        rig.pass(seconds(299));
        assert_eq!(rig.actions(), []);
        rig.pass(seconds(2));
        assert_eq!(rig.end_of(key), Some(TunnelEnd::HalfClosedIdle));
        match &rig.packets()[..] {
            [told, end] => assert_eq!((told, end), (&reset(conn), &close_req(conn))),
            [Packet::CloseRsp { error, .. }] => assert!(!error.is_empty()),
            other => panic!("an end that looks like one: {other:?}"),
        }
    }
}

/// An end may be queued behind bytes that the peer never takes. Its time runs from the notification of that end, and
/// restarts with each byte that moves.
///
/// Limit (times): A half-closed and silent tunnel
#[test]
fn an_eof_queued_behind_bytes_counts_as_a_half_close() {
    for mut rig in [Rig::server(true), Rig::agent(true)] {
        let (key, conn) = rig.open(1_000);
        assert!(rig.endpoint_data(key, bytes(2_000)));
        rig.packets();
        rig.pass(seconds(600));
        rig.link.endpoint_end_waits(key, rig.now);
        rig.pass(seconds(299));
        rig.receive(window(conn, 1_000));
        assert_eq!(rig.packets(), [payload(conn, 1_000)]);
        rig.pass(seconds(200));
        rig.link.endpoint_end_waits(key, rig.now);
        rig.pass(seconds(99));
        assert_eq!(rig.actions(), []);
        rig.pass(seconds(2));
        assert_eq!(rig.end_of(key), Some(TunnelEnd::HalfClosedIdle));
    }
}

#[test]
fn a_fully_open_tunnel_may_stay_idle_forever() {
    let mut rig = Rig::server(true);
    let (key, conn) = rig.open(1_000);
    rig.data(conn, 100);
    rig.actions();
    rig.pass(seconds(3_000));
    assert_eq!((rig.actions(), rig.packets()), (vec![], vec![]));
    assert!(rig.endpoint_data(key, bytes(1)));
}

#[test]
fn a_half_close_during_the_dial_times_out_too() {
    let mut rig = Rig::server(true);
    let key = rig.dial();
    rig.link.endpoint_fin(key, rig.now);
    rig.pass(seconds(5));
    rig.packets();
    rig.dial_rsp(1, 1, 1_000);
    rig.pass(seconds(301));
    assert_eq!(rig.end_of(key), Some(TunnelEnd::HalfClosedIdle));
}

#[test]
fn a_fin_of_the_wrong_side_ends_the_tunnel() {
    let mut rig = Rig::server(true);
    let (key, conn) = rig.open(1_000);
    rig.receive(fin(conn, Side::Client));
    assert_eq!(rig.end_of(key), Some(TunnelEnd::CreditViolation));
}
