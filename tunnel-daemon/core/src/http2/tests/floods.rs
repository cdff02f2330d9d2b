//! What a hostile client may cost.

use super::*;

/// A few octets refer to a long field again and again: neither memory nor an unbounded list.
///
/// Limit (sizes): Header list of a gRPC client's request | 256 KiB, then answered with status 431
#[test]
fn a_header_bomb_gets_431() {
    let mut peer = Peer::greeted();
    let mut bomb = block(&CALL);
    bomb.extend_from_slice(b"\x40\x01a\x7f\x81\x1e");
    bomb.extend_from_slice(&[b'v'; 3968]);
    bomb.extend_from_slice(&[0xbe; 100]);
    peer.feed(&frame(HEADERS, END_HEADERS, 1, &bomb));
    assert_eq!(peer.0.next_call(), None);
    let said = peer.said();
    assert_eq!(
        said[0],
        (
            HEADERS,
            END_HEADERS | END_STREAM,
            1,
            b"\x20\x08\x03431".to_vec()
        )
    );
    assert_eq!(said[1], (RST_STREAM, 0, 1, vec![0; 4]));
    peer.call(3);
}

/// Section 5.1.2. Half of the streams are there to be refused by their owner.
#[test]
fn streams_beyond_the_limit_are_refused() {
    let mut peer = Peer::greeted();
    let mut ids = Vec::new();
    for number in 0..8 {
        peer.feed(&frame(HEADERS, END_HEADERS, 2 * number + 1, &block(&CALL)));
        let call = peer.0.next_call().expect("a call");
        assert_eq!(call.is_excess, number >= 4);
        ids.push(call.stream);
    }
    peer.feed(&frame(HEADERS, END_HEADERS, 17, &block(&CALL)));
    assert_eq!(peer.reset(17), code::REFUSED_STREAM);
    assert_eq!(peer.0.next_call(), None);
    peer.0.finish(ids[0], "0", "");
    peer.0.detach(ids[0]);
    assert_eq!(peer.0.streams(), 7);
    peer.call(19);
}

/// CVE-2023-44487: calls that are cancelled at once leave nothing, and are counted.
///
/// Limit (memory): Bodies of a gRPC client's calls that have not begun | 128 KiB on one connection, and 1 KiB for each
#[test]
fn rapid_resets_leave_nothing() {
    let mut peer = Peer::greeted();
    for n in 0..10_000 {
        let id = 2 * n + 1;
        peer.feed(&frame(HEADERS, END_HEADERS, id, &block(&CALL)));
        peer.feed(&frame(RST_STREAM, 0, id, &[0, 0, 0, 8]));
    }
    assert_eq!((peer.0.streams(), peer.0.next_call()), (0, None));
    assert_eq!(
        (peer.0.take_cancelled(), peer.0.take_cancelled()),
        (10_000, 0)
    );
    assert_eq!(peer.said(), []);
    assert!(peer.0.turns.is_empty() && peer.0.closed.is_empty());
    assert!(peer.0.arrived.len() <= 2 * LEFT_BEHIND_MAX);
    // Those that wait are bounded, and so are the bytes of their bodies.
    let streams = |peer: &Peer| (peer.0.streams(), peer.0.untaken);
    for n in 10_000..10_010 {
        peer.feed(&frame(HEADERS, END_HEADERS, 2 * n + 1, &block(&CALL)));
    }
    assert_eq!(streams(&peer), (8, 8));
    let refused = peer.said();
    assert!(refused.iter().all(|it| (it.0, it.3[3]) == (RST_STREAM, 7)));
    for n in 10_000..10_004 {
        peer.feed(&frame(DATA, 0, 2 * n + 1, &[0; 16_000]).repeat(4));
    }
    assert_eq!(streams(&peer), (6, 6));
    assert!(peer.0.untaken_bytes <= UNTAKEN_BYTES_MAX);
    while let Some(call) = peer.0.next_call() {
        peer.0.detach(call.stream);
    }
    assert_eq!((streams(&peer), peer.0.untaken_bytes), ((0, 0), 0));
}

/// Each change of the window costs a step for each stream; the same value again costs nothing.
///
/// Limit (peers): Changes of INITIAL_WINDOW_SIZE by a gRPC client | 1,000 on one connection, then it ends
#[test]
fn a_flood_of_settings_is_bounded() {
    let mut peer = Peer::greeted();
    let window = |bytes: u8| frame(SETTINGS, 0, 0, &[0, 4, 0, 1, 0, bytes]);
    for _same in 0..5_000 {
        peer.feed(&window(1));
    }
    // Only the last value of a frame counts.
    let many = [0, 4, 0, 1, 0, 2, 0, 4, 0, 1, 0, 1].repeat(1_000);
    peer.feed(&frame(SETTINGS, 0, 0, &many));
    assert_eq!(peer.said().len(), 5_001);
    let ended = [2, 3]
        .repeat(500)
        .into_iter()
        .find_map(|it| peer.try_feed(&window(it)).err());
    assert_eq!(ended, Some(code::ENHANCE_YOUR_CALM));
}

/// Streams that ended while they had a turn leave nothing, though the connection's window stays closed.
#[test]
fn turns_of_streams_that_are_gone_do_not_pile_up() {
    let mut peer = Peer::greeted();
    let first = peer.call(1);
    peer.0.send(first, message(70_000));
    peer.said();
    for n in 1..5_000 {
        let id = peer.call(2 * n + 1);
        peer.0.send(id, message(1));
        peer.feed(&frame(RST_STREAM, 0, 2 * n + 1, &[0, 0, 0, 8]));
        peer.0.detach(id);
        peer.said();
    }
    assert_eq!(peer.0.streams(), 1);
    assert!(
        peer.0.turns.len() <= 2 * LEFT_BEHIND_MAX,
        "{}",
        peer.0.turns.len()
    );
}

/// Single octets take little more room than octets: they are joined while they wait.
#[test]
fn small_frames_that_wait_are_joined() {
    let mut peer = Peer::greeted();
    let id = peer.call(1);
    peer.feed(&frame(DATA, 0, 1, b"x").repeat(50_000));
    peer.feed(&frame(DATA, 0, 1, &[]).repeat(50_000));
    let mut pieces = Vec::new();
    while let Poll::Ready(Some(Ok(piece))) = peer.data(id) {
        pieces.push(piece.len());
    }
    assert_eq!(pieces, [1, 49_999]);
}

/// What nobody holds waits for the socket, and is bounded.
///
/// Limit (memory): Answers of ended gRPC calls that wait for their client | 1 MiB on one connection, 128 KiB where memory is bounded; one message always
#[test]
fn few_bytes_wait_in_streams_that_nobody_holds() {
    let mut peer = Peer::greeted();
    peer.feed(&frame(WINDOW_UPDATE, 0, 0, &[0, 0x7f, 0, 0]));
    peer.feed(&frame(SETTINGS, 0, 0, &[0, 4, 0, 0x7f, 0, 0]));
    let full = peer.call(1);
    peer.0.send(full, message(500_000));
    for n in 1..8 {
        let id = peer.call(2 * n + 1);
        peer.0.send(id, message(300_000));
        peer.0.finish(id, "0", "");
        peer.0.detach(id);
    }
    assert!(peer.0.detached_bytes <= DETACHED_SHARE * LIMITS.output_bytes);
    assert_eq!(peer.0.streams(), 1 + peer.0.detached_bytes / 300_000);
    let said = peer.said();
    let ended = said
        .iter()
        .filter(|it| it.1 & END_STREAM != 0 && it.0 == HEADERS);
    assert_eq!(ended.count(), 3);
    assert_eq!((peer.0.streams(), peer.0.detached_bytes), (1, 0));
}
