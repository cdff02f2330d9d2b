//! Tests of packet order, packet size, and fairness between tunnels.

use super::*;

const TUNNELS: usize = 1_000;

fn is_dial(transmit: &Transmit) -> bool {
    matches!(
        transmit,
        Transmit::Control(Packet::DialReq { .. } | Packet::DialRsp { .. })
    )
}

#[test]
fn control_packets_and_fins_overtake_data_of_other_tunnels_only() {
    let mut rig = Rig::server(true);
    let (busy, busy_conn) = rig.open(1 << 20);
    let (ends, ends_conn) = rig.open(1 << 20);
    let (reads, reads_conn) = rig.open(1 << 20);
    rig.endpoint_data(busy, bytes(40 << 10));
    rig.link.endpoint_close(busy, String::new(), rig.now);
    rig.link.endpoint_fin(ends, rig.now);
    rig.data(reads_conn, 200 << 10);
    rig.now = rig.now.after(seconds(1));
    rig.link.endpoint_drained(reads, 200 << 10, rig.now);
    rig.dial();
    let packets = rig.packets();
    assert!(matches!(packets[0], Packet::DialReq { .. }));
    assert_eq!(
        packets[1..],
        [
            window(reads_conn, 200 << 10),
            fin(ends_conn, Side::Client),
            payload(busy_conn, 32 << 10),
            payload(busy_conn, 8 << 10),
            close_req(busy_conn),
        ]
    );
}

/// An endpoint needs the count to know how many pieces it may queue again.
#[test]
fn a_packet_counts_the_pieces_it_completes() {
    let mut rig = Rig::server(true);
    let (key, _conn) = rig.open(1 << 20);
    for length in [1, 1, 70 << 10, 1] {
        rig.endpoint_data(key, bytes(length));
    }
    let transmits = rig.transmits();
    let pieces: Vec<usize> = transmits
        .iter()
        .map(|transmit| match transmit {
            Transmit::Data { pieces, .. } => *pieces,
            Transmit::Control(packet) => panic!("no payload but {packet:?}"),
        })
        .collect();
    assert_eq!(pieces, [2, 0, 2]);
}

/// An endpoint that vanishes without a close causes a reset.
#[test]
fn an_endpoint_that_vanishes_discards_its_queued_bytes() {
    for mut rig in [Rig::server(true), Rig::agent(true)] {
        let (key, conn) = rig.open(1 << 20);
        rig.endpoint_data(key, bytes(100));
        rig.gone(key);
        match &rig.packets()[..] {
            [told, end] => assert_eq!((told, end), (&reset(conn), &close_req(conn))),
            [Packet::CloseRsp { error, .. }] => assert!(!error.is_empty()),
            other => panic!("an end that looks like one: {other:?}"),
        }
    }
}

/// Go agents know no reset.
#[test]
fn without_credit_an_endpoint_that_vanishes_is_a_close() {
    let mut rig = Rig::server(false);
    let (key, conn) = rig.open(0);
    rig.endpoint_data(key, bytes(100));
    rig.gone(key);
    assert_eq!(rig.packets(), [close_req(conn)]);
}

/// Peer to endpoint: paused readers do not delay the link.
///
/// Limit (isolation): New dials beside 1,000 paused tunnels | not delayed
#[test]
fn a_thousand_paused_readers_do_not_delay_a_dial() {
    for credit in [true, false] {
        let mut server = Rig::server(credit);
        let mut agent = Rig::agent(credit);
        for rig in [&mut server, &mut agent] {
            for _tunnel in 0..TUNNELS {
                let (_, conn) = rig.open(16 << 10);
                rig.data(conn, 16 << 10);
                assert_eq!(rig.actions().len(), 1, "delivered, not held back");
            }
            assert_eq!(rig.packets(), []);
        }
        server.dial();
        assert!(is_dial(&server.transmits()[0]));
        let key = agent.dial_req(9_999, 1_000);
        assert!(agent.link.dialed(key, Ok(()), agent.now));
        assert!(is_dial(&agent.transmits()[0]));
    }
}

/// Endpoint to peer: bytes that wait for credit or for scheduling do not delay the link either.
///
/// Limit (isolation): New dials beside 1,000 paused tunnels
#[test]
fn a_thousand_tunnels_with_bytes_to_send_do_not_delay_a_dial() {
    for window in [0, 1 << 20] {
        for mut rig in [Rig::server(true), Rig::agent(true)] {
            let keys: Vec<_> = (0..TUNNELS).map(|_| rig.open(window).0).collect();
            for key in keys {
                rig.endpoint_data(key, bytes(1_000));
            }
            let fresh = if rig.link.config.role == Role::Server {
                rig.dial();
                None
            } else {
                let key = rig.dial_req(9_999, 1_000);
                assert!(rig.link.dialed(key, Ok(()), rig.now));
                rig.endpoint_data(key, bytes(5));
                Some(key)
            };
            let sent = rig.transmits();
            assert!(is_dial(&sent[0]));
            assert_eq!(
                sent.len() - 1,
                if window == 0 { 0 } else { TUNNELS } + usize::from(fresh.is_some())
            );
        }
    }
}

#[test]
fn tunnels_send_packets_round_robin() {
    let mut rig = Rig::server(true);
    let (first, a) = rig.open(1 << 20);
    let (second, b) = rig.open(1 << 20);
    rig.endpoint_data(first, bytes(96 << 10));
    rig.endpoint_data(second, bytes(64 << 10));
    let full = 32 << 10;
    assert_eq!(
        rig.packets(),
        [
            payload(a, full),
            payload(b, full),
            payload(a, full),
            payload(b, full),
            payload(a, full)
        ]
    );
}

/// Pieces are joined up to the limit, never beyond it; no packet is empty.
///
/// Limit (sizes): DATA payload to Go agents and servers | 32,704 bytes; 32 KiB with all headers
/// Upstream (packets): No empty DATA packet is sent.
#[test]
fn small_pieces_share_a_packet_up_to_the_limit() {
    let mut rig = Rig::server(false);
    let (key, conn) = rig.open(0);
    for length in [0, 10_000, 20_000, 0, 10_000, 0] {
        assert!(rig.endpoint_data(key, bytes(length)));
    }
    let packets = rig.packets();
    assert_eq!(
        packets,
        [payload(conn, 32 << 10), payload(conn, 40_000 - (32 << 10))]
    );
}

/// Regression: an empty piece blocked the close forever.
#[test]
fn an_empty_piece_does_not_block_the_close() {
    for mut rig in [Rig::server(true), Rig::agent(true)] {
        let (key, _) = rig.open(1 << 20);
        assert!(rig.endpoint_data(key, Bytes::new()));
        rig.link.endpoint_close(key, String::new(), rig.now);
        assert_eq!(rig.packets().len(), 1);
    }
}

/// Upstream (packets): No empty DATA packet is sent.
#[test]
fn empty_data_from_the_peer_is_ignored() {
    let mut rig = Rig::server(true);
    let (_, conn) = rig.open(1_000);
    rig.data(conn, 0);
    rig.data(999, 0);
    assert_eq!((rig.actions(), rig.packets()), (vec![], vec![]));
}
