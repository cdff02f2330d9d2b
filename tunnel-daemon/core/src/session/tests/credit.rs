//! Tests of credit: the amount granted, the time of each announcement, and violations.

use super::*;
use crate::session::{Event, LinkFailure, WINDOW_MAX_BYTES, WINDOW_MIN_BYTES, WINDOW_START_BYTES};

const HALF: u64 = WINDOW_START_BYTES / 2;

/// Advances 1 s: more than `WINDOW_GROWS_WITHIN`, less than `WINDOW_AT_LEAST_EVERY`.
fn calm(rig: &mut Rig) {
    rig.now = rig.now.after(seconds(1));
}

fn dial_window(packet: &Packet) -> u64 {
    match packet {
        Packet::DialReq { window, .. } | Packet::DialRsp { window, .. } => *window,
        other => panic!("a dial, not {other:?}"),
    }
}

/// A link caps the sum of credit; tunnels above the cap start with the smallest window.
///
/// Limit (memory): Initial credit of a tunnel between Adit ends | 256 KiB each way; 16 KiB while credit is short
#[test]
fn a_link_short_of_credit_starts_tunnels_at_sixteen_kibibytes() {
    let mut small = config(Role::Server, true);
    small.isolation.link_budget_bytes = 2 * WINDOW_START_BYTES + 100;
    let mut rig = Rig::new(small);
    for expected in [WINDOW_START_BYTES, WINDOW_START_BYTES, WINDOW_MIN_BYTES] {
        rig.dial();
        assert_eq!(dial_window(&rig.packets()[0]), expected);
    }
}

/// A process caps the sum of credit as well, over all its links.
///
/// Limit (memory): Initial credit of a tunnel between Adit ends
#[test]
fn a_process_short_of_credit_starts_tunnels_at_sixteen_kibibytes() {
    let budget = Arc::new(ProcessBudget::new(WINDOW_START_BYTES));
    let mut one = Rig::with_budget(config(Role::Server, true), &budget);
    let mut other = Rig::with_budget(config(Role::Agent, true), &budget);
    one.dial();
    assert_eq!(dial_window(&one.packets()[0]), WINDOW_START_BYTES);
    let key = other.dial_req(1, 1_000);
    assert!(other.link.dialed(key, Ok(()), other.now));
    assert_eq!(dial_window(&other.packets()[0]), WINDOW_MIN_BYTES);
    drop(one);
    drop(other);
    assert_eq!(budget.granted_bytes(), 0);
}

/// Limit (memory): Tunnels while `--process-budget` is in use | from 50 %: 16 KiB of queue, credit and socket buffers
/// per tunnel. At 100 %: dials are refused
#[test]
fn a_process_half_full_starts_tunnels_at_sixteen_kibibytes() {
    let budget = Arc::new(ProcessBudget::new(8 * WINDOW_START_BYTES));
    let mut rig = Rig::with_budget(config(Role::Server, true), &budget);
    for (fill, window) in [
        (budget.max_bytes() / 2, WINDOW_START_BYTES),
        (1, WINDOW_MIN_BYTES),
    ] {
        // Bytes in the kernel and queued bytes count as much as held bytes.
        budget.enter_kernel(fill - fill / 2);
        budget.queue(fill / 2);
        rig.dial();
        assert_eq!(dial_window(&rig.packets()[0]), window);
    }
}

/// WINDOW is sent once half the window is drained, and covers all drained bytes.
#[test]
fn window_is_sent_when_half_is_drained() {
    for mut rig in [Rig::server(true), Rig::agent(true)] {
        let (key, conn) = rig.open(1_000);
        calm(&mut rig);
        rig.data(conn, WINDOW_START_BYTES);
        rig.link.endpoint_drained(key, HALF - 1, rig.now);
        assert_eq!(rig.packets(), []);
        rig.link.endpoint_drained(key, HALF, rig.now);
        assert_eq!(rig.packets(), [window(conn, HALF)]);
        rig.link.endpoint_drained(key, HALF, rig.now);
        rig.link.endpoint_drained(key, HALF - 1, rig.now);
        assert_eq!(rig.packets(), [], "a repeat changes nothing");
    }
}

#[test]
fn windows_not_yet_sent_are_added_up() {
    let mut rig = Rig::server(true);
    let (key, conn) = rig.open(1_000);
    calm(&mut rig);
    rig.data(conn, WINDOW_START_BYTES);
    rig.link.endpoint_drained(key, HALF, rig.now);
    calm(&mut rig);
    rig.link.endpoint_drained(key, 2 * HALF, rig.now);
    assert_eq!(rig.packets(), [window(conn, 2 * HALF)]);
}

/// A reader that needs minutes for half a window makes progress that the sender's linger timer must see.
#[test]
fn a_slow_reader_sends_small_windows_while_its_peer_waits() {
    let mut rig = Rig::server(true);
    let (key, conn) = rig.open(1_000);
    rig.data(conn, WINDOW_START_BYTES);
    rig.pass(seconds(5));
    rig.link.endpoint_drained(key, 1_000, rig.now);
    assert_eq!(rig.packets(), [window(conn, 1_000)]);
    rig.pass(seconds(1));
    rig.link.endpoint_drained(key, 2_000, rig.now);
    assert_eq!(rig.packets(), []);
}

/// Limit (memory): Largest credit of one tunnel | 16 MiB
#[test]
fn a_fast_endpoint_gets_a_larger_window_up_to_sixteen_mebibytes() {
    let mut rig = Rig::server(true);
    let (key, conn) = rig.open(1_000);
    let mut credit = WINDOW_START_BYTES;
    let mut total = 0;
    for _round in 0..20 {
        rig.data(conn, credit);
        total += credit;
        rig.link.endpoint_drained(key, total, rig.now);
        credit = match rig.packets()[..] {
            [Packet::Window { bytes, .. }] => bytes,
            ref other => panic!("credit, not {other:?}"),
        };
    }
    assert_eq!(credit, WINDOW_MAX_BYTES);
    assert_eq!(rig.link.granted, WINDOW_MAX_BYTES);
}

/// The full credit arrives as one burst per round trip. The endpoint reports drained bytes once much of a burst is gone,
/// and again once all is gone.
///
/// Limit (memory): Longest round trip for which credit grows | 0.5 s. Credit of a slow endpoint does not grow
#[test]
fn credit_grows_on_bursty_paths_of_400_milliseconds() {
    let mut rig = Rig::server(true);
    let (key, conn) = rig.open(1_000);
    let (mut burst, mut total) = (WINDOW_START_BYTES, 0);
    let mut trips = 0;
    while burst < 8 << 20 {
        trips += 1;
        assert!(trips < 20, "{burst} bytes after {trips} round trips");
        rig.data(conn, burst);
        let mut credit = 0;
        for drained in [burst / 4 * 3, burst] {
            rig.link.endpoint_drained(key, total + drained, rig.now);
            for packet in rig.packets() {
                match packet {
                    Packet::Window { bytes, .. } => credit += bytes,
                    other => panic!("credit, not {other:?}"),
                }
            }
        }
        total += burst;
        burst = credit;
        rig.now = rig.now.after(Duration::from_millis(400));
    }
}

/// A larger window would only make an endpoint that is behind hold more bytes.
///
/// Limit (memory): Longest round trip for which credit grows
#[test]
fn a_window_does_not_grow_for_an_endpoint_that_is_behind() {
    let mut rig = Rig::server(true);
    let (key, conn) = rig.open(1_000);
    rig.data(conn, WINDOW_START_BYTES);
    for half in 1..20 {
        rig.link.endpoint_drained(key, half * HALF, rig.now);
        assert_eq!(rig.packets(), [window(conn, HALF)], "refill {half}");
        rig.data(conn, HALF);
        rig.now = rig.now.after(Duration::from_millis(10));
    }
}

/// Credit is never promised twice; a window that had grown shrinks.
#[test]
fn a_grown_window_is_not_refilled_when_the_budget_is_short() {
    let mut small = config(Role::Server, true);
    small.isolation.link_budget_bytes = 4 * WINDOW_START_BYTES;
    let cap = small.isolation.link_budget_bytes;
    let mut rig = Rig::new(small);
    let (grown, conn) = rig.open(1_000);
    rig.data(conn, WINDOW_START_BYTES);
    rig.link
        .endpoint_drained(grown, WINDOW_START_BYTES, rig.now);
    assert_eq!(rig.packets(), [window(conn, 2 * WINDOW_START_BYTES)]);
    rig.data(conn, 2 * WINDOW_START_BYTES);
    // One byte short of half: no refill yet, and other tunnels take the returned credit.
    rig.link
        .endpoint_drained(grown, 2 * WINDOW_START_BYTES - 1, rig.now);
    while rig.link.granted + WINDOW_START_BYTES <= cap {
        rig.open(1_000);
    }
    while rig.link.granted + WINDOW_MIN_BYTES <= cap {
        rig.open(1_000);
    }
    rig.link
        .endpoint_drained(grown, 2 * WINDOW_START_BYTES, rig.now);
    assert!(
        rig.link.granted <= cap,
        "granted {} of {cap}",
        rig.link.granted
    );
    // The window shrinks towards the smallest window, never to zero.
    rig.link
        .endpoint_drained(grown, 3 * WINDOW_START_BYTES, rig.now);
    let inc = &rig.link.tunnels.get(grown).unwrap().inc;
    assert!(inc.open_credit() >= WINDOW_MIN_BYTES, "{inc:?}");
}

/// Zero and overflow are violations by that tunnel only.
#[test]
fn an_invalid_window_ends_its_own_tunnel_only() {
    for useless in [0, WINDOW_MAX_BYTES, u64::MAX] {
        for mut rig in [Rig::server(true), Rig::agent(true)] {
            let (bad, bad_conn) = rig.open(1_000);
            let (good, good_conn) = rig.open(1_000);
            rig.receive(window(bad_conn, useless));
            assert_eq!(rig.end_of(bad), Some(TunnelEnd::CreditViolation));
            let told = match rig.link.config.role {
                Role::Server => vec![reset(bad_conn), close_req(bad_conn)],
                Role::Agent => {
                    let text = "closed by the agent: credit_violation";
                    vec![close_rsp(bad_conn, text)]
                }
            };
            assert_eq!(rig.packets(), told, "the peer is told");
            rig.receive(window(good_conn, 500));
            rig.endpoint_data(good, bytes(1_500));
            assert_eq!(rig.packets(), [payload(good_conn, 1_500)]);
        }
    }
}

#[test]
fn data_beyond_the_credit_ends_its_own_tunnel_only() {
    let mut rig = Rig::agent(true);
    let (bad, bad_conn) = rig.open(1_000);
    let (good, good_conn) = rig.open(1_000);
    rig.data(bad_conn, WINDOW_START_BYTES);
    rig.actions();
    rig.data(bad_conn, 1);
    assert_eq!(rig.end_of(bad), Some(TunnelEnd::CreditViolation));
    rig.data(good_conn, 5);
    let bytes = bytes(5);
    assert_eq!(rig.actions(), [Action::Deliver { key: good, bytes }]);
    assert_eq!(rig.link.held_bytes(), 5, "what it held is forgotten");
}

#[test]
fn bytes_wait_for_credit_and_go_on_with_it() {
    for mut rig in [Rig::server(true), Rig::agent(true)] {
        let (key, conn) = rig.open(10);
        rig.endpoint_data(key, bytes(25));
        assert_eq!(rig.packets(), [payload(conn, 10)]);
        rig.receive(window(conn, 7));
        assert_eq!(rig.packets(), [payload(conn, 7)]);
        rig.receive(window(conn, 100));
        assert_eq!(rig.packets(), [payload(conn, 8)]);
    }
}

#[test]
fn credit_for_a_tunnel_already_gone_is_counted_and_ignored() {
    let mut rig = Rig::server(true);
    rig.receive(window(5, 100));
    rig.receive(fin(5, Side::Target));
    assert_eq!(
        rig.link.poll_action(),
        Some(Action::Count(Event::LateCredit))
    );
    assert_eq!(
        rig.link.poll_action(),
        Some(Action::Count(Event::LateCredit))
    );
    assert_eq!(rig.packets(), []);
}

/// A peer without credit gets none, and its WINDOW packets are ignored.
#[test]
fn without_credit_window_and_fin_are_unknown_packets() {
    let mut rig = Rig::server(false);
    let (key, conn) = rig.open(0);
    rig.receive(window(conn, 0));
    rig.receive(fin(conn, Side::Client));
    assert_eq!(rig.actions(), []);
    rig.data(conn, 4 << 20);
    rig.link.endpoint_drained(key, 4 << 20, rig.now);
    assert_eq!(rig.packets(), []);
}

/// Upstream (packets): An agent answers data for an unknown connID with a close.
#[test]
fn an_unknown_connection_is_closed_once() {
    let mut server = Rig::server(true);
    let mut agent = Rig::agent(true);
    for rig in [&mut server, &mut agent] {
        for _again in 0..3 {
            rig.data(77, 10);
        }
    }
    assert_eq!(server.packets(), [close_req(77)]);
    assert_eq!(agent.packets(), [close_rsp(77, "unrecognized connectID")]);
}

/// Limit (peers): Control packets queued for the peer of a link | 65,536, then the link ends
#[test]
fn a_peer_that_reads_no_control_packets_loses_the_link() {
    let mut rig = Rig::new(LinkConfig {
        control_max: 8,
        ..config(Role::Server, true)
    });
    for conn in 1..=8 {
        rig.data(conn, 1);
    }
    assert_eq!(rig.actions(), []);
    for conn in 9..=30 {
        rig.data(conn, 1);
    }
    let overflow = Action::Failed(LinkFailure::ControlOverflow);
    assert_eq!(rig.actions(), [overflow], "said once");
    assert_eq!(rig.link.control.len(), 8);
}
