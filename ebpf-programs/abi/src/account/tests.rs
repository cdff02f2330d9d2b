//! Tests of the conversion of kernel counts to payload, and of the encoding of map values.

use super::*;

const ESTABLISHED: u32 = 1;

fn reading(state: u32, bytes_acked: u64, bytes_received: u64) -> Reading {
    Reading {
        state,
        bytes_acked,
        bytes_received,
        snd_una: 500,
        snd_nxt: 500,
        srtt: 8_000,
        retransmits: 3,
        segments_out: 20,
        segments_in: 10,
    }
}

fn payload(flags: u32, reading: &Reading) -> (u64, u64) {
    let mut account = Account {
        flags,
        ..Account::default()
    };
    account.half_closed(&self::reading(TCP_FIN_WAIT1, 0, 200));
    account.update(reading);
    (account.sent_bytes, account.received_bytes)
}

#[test]
fn syn_and_fin_are_not_payload() {
    let connected = FLAG_ESTABLISHED | FLAG_CONNECTED;
    for (flags, state, acked, received, expected) in [
        // Open: only the SYN of the side that connected counts.
        (connected, ESTABLISHED, 101, 200, (100, 200)),
        (FLAG_ESTABLISHED, ESTABLISHED, 100, 200, (100, 200)),
        // The peer closed first, then we did.
        (connected, TCP_LAST_ACK, 102, 201, (100, 200)),
        // We closed first; the peer sent one byte more and its FIN.
        (connected, TCP_FIN_WAIT2, 102, 202, (100, 201)),
        // We closed first and the peer sent only its FIN.
        (connected, TCP_FIN_WAIT2, 102, 201, (100, 200)),
        // We closed, and the kernel freed the socket before the peer's FIN.
        (connected, TCP_FIN_WAIT2, 102, 200, (100, 200)),
        // Both closed at once.
        (FLAG_ESTABLISHED, TCP_CLOSING, 101, 201, (100, 200)),
        // The peer closed, then the connection was reset.
        (FLAG_ESTABLISHED, TCP_CLOSE_WAIT, 100, 201, (100, 200)),
        // Never established.
        (0, 2, 0, 0, (0, 0)),
    ] {
        assert_eq!(
            payload(flags, &reading(state, acked, received)),
            expected,
            "state {state}, {acked} acknowledged, {received} received"
        );
    }
}

#[test]
fn an_unacknowledged_fin_is_not_subtracted() {
    for state in [TCP_FIN_WAIT1, TCP_CLOSING, TCP_LAST_ACK] {
        let cut = Reading {
            snd_nxt: 501,
            ..reading(state, 100, 200)
        };
        assert_eq!(payload(FLAG_ESTABLISHED, &cut).0, 100, "state {state}");
    }
}

#[test]
fn times_come_in_whole_microseconds() {
    let mut account = Account::default();
    account.update(&reading(ESTABLISHED, 0, 0));
    assert_eq!((account.rtt_us, account.retransmits), (1_000, 3));
    assert_eq!((account.segments_out, account.segments_in), (20, 10));
}

#[test]
fn map_values_are_decoded_from_their_bytes() {
    let account = Account {
        class: 1,
        flags: 2,
        since_ns: 3,
        sent_bytes: 4,
        received_bytes: 5,
        half_closed_bytes: 6,
        rtt_us: 7,
        retransmits: 8,
        segments_out: 9,
        segments_in: 10,
    };
    let bytes = account.to_bytes();
    assert_eq!(Account::from_bytes(&bytes), account);
    let mut event = [0; CLOSED_BYTES];
    event[0] = 11;
    event[8] = 12;
    event[16..].copy_from_slice(&bytes);
    let closed = Closed {
        cookie: u64::from_ne_bytes([11, 0, 0, 0, 0, 0, 0, 0]),
        closed_ns: u64::from_ne_bytes([12, 0, 0, 0, 0, 0, 0, 0]),
        account,
    };
    assert_eq!(Closed::from_bytes(&event), Some(closed));
    assert_eq!(Closed::from_bytes(&event[1..]), None);
}

#[test]
fn a_connection_is_sampled_at_first_and_then_ten_times_a_second() {
    const MS: u64 = 1_000_000;
    // Cookies start at 1, and the clock does not start at 0.
    let first = look(0, 7, 5_000 * MS).expect("the first");
    assert_eq!(look(first, 7, 5_001 * MS), None);
    assert_eq!(look(first, 7, 5_099 * MS), None);
    let second = look(first, 7, 5_102 * MS).expect("later");
    assert_eq!(look(second, 7, 5_110 * MS), None);
    // An entry of an ended or colliding connection does not suppress the update of this one.
    assert_eq!(look_place(7 + u64::from(LOOKS)), look_place(7));
    assert!(look(second, 7 + u64::from(LOOKS), 5_110 * MS).is_some());
    // The entry's clock wraps after some weeks.
    let late = look(0, 7, u64::from(u32::MAX) << 20).expect("the first");
    assert_eq!(look(late, 7, (u64::from(u32::MAX) + 2) << 20), None);
    assert!(look(late, 7, (u64::from(u32::MAX) + 200) << 20).is_some());
}

#[test]
fn daemon_is_woken_when_an_eighth_of_the_ring_is_full() {
    assert!(!wakes(0, 512 * 1024));
    assert!(!wakes(64 * 1024 - 1, 512 * 1024));
    assert!(wakes(64 * 1024, 512 * 1024));
}
