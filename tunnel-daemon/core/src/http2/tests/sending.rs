//! Windows, turns, and the ends of calls.

use super::*;

/// Sections 5.5, 6.3, 6.7, 6.5.3: unknown frames and settings are ignored, priorities too, PING and SETTINGS are answered.
#[test]
fn answers_wait_for_other_frames_and_the_rest_is_ignored() {
    let mut peer = Peer::greeted();
    peer.feed(&frame(0x42, 0xff, 7, b"new"));
    peer.feed(&frame(PRIORITY_FRAME, 0, 9, &[0; 5]));
    peer.feed(&frame(GOAWAY, 0, 0, &[0; 8]));
    peer.feed(&frame(SETTINGS, 0, 0, &[0, 0x99, 1, 2, 3, 4]));
    let said = peer.0.output().len();
    assert_eq!(said, HEADER_LEN, "SETTINGS are acknowledged at once");
    peer.said();
    peer.feed(&frame(PING, ACK, 0, b"12345678"));
    peer.feed(&frame(PING, 0, 0, b"12345678"));
    assert!(peer.0.has_answers() && peer.0.output().is_empty());
    let id = peer.call(1);
    peer.0.send(id, message(5));
    let kinds: Vec<_> = peer.said().iter().map(|frame| (frame.0, frame.1)).collect();
    let expected = [(HEADERS, END_HEADERS), (DATA, 0), (PING, ACK)];
    assert_eq!(kinds, expected);
    // Many are not kept back.
    peer.feed(&frame(PING, 0, 0, b"12345678").repeat(5));
    assert!(!peer.0.output().is_empty());
    assert_eq!(peer.said().len(), 5);
}

/// Sections 5.2 and 6.9: the client gets a window back by halves, padding at once, and streams that nobody reads get none.
#[test]
fn windows_open_as_calls_take_their_bytes() {
    let mut peer = Peer::greeted();
    let id = peer.call(1);
    peer.feed(&frame(DATA, 0, 1, &[0; 10_000]).repeat(9));
    peer.0.release(id, 50_000);
    assert_eq!(peer.said(), []);
    peer.0.release(id, 1);
    let more = 50_001_u32.to_be_bytes().to_vec();
    assert_eq!(peer.said(), [(WINDOW_UPDATE, 0, 1, more)]);
    peer.feed(&frame(DATA, 0, 1, &[0; 10_000]).repeat(6));
    peer.feed(&frame(DATA, 0, 1, &[0; 10_000]));
    assert_eq!(peer.reset(1), code::FLOW_CONTROL_ERROR);
}

/// Sections 6.5.3 and 6.9.2: a size counts once the client has acknowledged it.
#[test]
fn own_windows_change_when_the_client_acknowledges() {
    let mut peer = Peer::greeted();
    let id = peer.call(1);
    assert!(peer.0.resize_windows(10_000));
    assert!(!peer.0.resize_windows(20_000), "one at a time");
    assert_eq!(
        peer.said(),
        [(SETTINGS, 0, 0, vec![0, 4, 0, 0, 0x27, 0x10])]
    );
    peer.feed(&frame(DATA, 0, 1, &[0; 15_000]).repeat(2));
    peer.feed(&frame(SETTINGS, ACK, 0, &[]));
    let late = peer.call(3);
    peer.feed(&frame(DATA, 0, 3, &[0; 10_001]));
    assert_eq!(peer.reset(3), code::FLOW_CONTROL_ERROR);
    assert!(matches!(peer.data(late), Poll::Ready(Some(Err(_)))));
    assert!(matches!(peer.data(id), Poll::Ready(Some(Ok(_)))));
    assert!(peer.0.resize_windows(20_000));
    // No window is left, and none is needed for the end alone.
    peer.feed(&frame(DATA, END_STREAM, 1, b""));
    while let Poll::Ready(Some(piece)) = peer.data(id) {
        assert!(piece.is_ok());
    }
    assert_eq!(peer.data(id), Poll::Ready(None));
    // What was taken before is returned once it is more than half of the smaller window: the client could not send otherwise.
    let mut peer = Peer::greeted();
    let id = peer.call(1);
    peer.feed(&frame(DATA, 0, 1, &[0; 15_000]).repeat(3));
    peer.0.release(id, 45_000);
    assert!(peer.0.resize_windows(10_000));
    peer.said();
    peer.feed(&frame(SETTINGS, ACK, 0, &[]));
    let returned = 45_000_u32.to_be_bytes().to_vec();
    assert_eq!(peer.said(), [(WINDOW_UPDATE, 0, 1, returned)]);
}

/// Sections 6.9.1 and 6.9.2: no more than both windows allow, which may fall below zero.
#[test]
fn a_message_waits_for_the_windows_of_stream_and_connection() {
    let mut peer = Peer::greeted();
    let id = peer.call(1);
    peer.0.send(id, message(100_000));
    assert_eq!(payload_bytes(&peer.said(), 1), 65_535);
    assert!(!peer.0.is_drained(id) && peer.0.poll_drained(id, &cx()).is_pending());
    // Of the connection alone, then of the stream as well.
    peer.feed(&frame(WINDOW_UPDATE, 0, 0, &[0, 0, 0x10, 0]));
    assert_eq!(peer.said(), []);
    peer.feed(&frame(WINDOW_UPDATE, 0, 1, &[0, 0, 0x20, 0]));
    assert_eq!(payload_bytes(&peer.said(), 1), 0x1000);
    // Smaller windows for all, and larger ones again.
    peer.feed(&frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 0]));
    peer.feed(&frame(WINDOW_UPDATE, 0, 0, &[0, 1, 0, 0]));
    peer.feed(&frame(WINDOW_UPDATE, 0, 1, &[0, 0, 0x20, 0]));
    assert_eq!(payload_bytes(&peer.said(), 1), 0);
    peer.feed(&frame(SETTINGS, 0, 0, &[0, 4, 0, 2, 0, 0]));
    let whole = message(100_000).remaining();
    assert_eq!(payload_bytes(&peer.said(), 1), whole - 65_535 - 0x1000);
    assert!(peer.0.is_drained(id));
}

/// Streams take turns of one frame, however much one of them has.
#[test]
fn streams_take_turns() {
    let mut peer = Peer::greeted();
    peer.feed(&frame(WINDOW_UPDATE, 0, 0, &[0, 0x7f, 0, 0]));
    peer.feed(&frame(SETTINGS, 0, 0, &[0, 4, 0, 0x7f, 0, 0]));
    peer.said();
    let (bulk, other, small) = (peer.call(1), peer.call(3), peer.call(5));
    peer.0.send(bulk, message(1_000_000));
    assert!(peer.0.out.len() < LIMITS.output_bytes + 20_000 && !peer.0.is_full());
    peer.0.send(other, message(1_000_000));
    peer.0.send(small, message(10));
    let _full = std::mem::take(&mut peer.0.out);
    let said = peer.said();
    let order: Vec<u32> = said
        .iter()
        .filter(|it| it.0 == DATA)
        .map(|it| it.2)
        .collect();
    assert_eq!(order[..6], [1, 3, 5, 1, 3, 1]);
    assert_eq!(payload_bytes(&said, 3), message(1_000_000).remaining());
}

/// gRPC over HTTP/2: headers with the first message, trailers behind the last, or trailers alone.
#[test]
fn calls_are_answered_and_ended_with_a_status() {
    let accepted = b"\x88\x0f\x10\x10application/grpc";
    let mut peer = Peer::greeted();
    // The first block says that no table is used.
    peer.0.has_sent_block = true;
    let id = peer.call(1);
    peer.0.send(id, message(3));
    peer.0.finish(id, "14", "no agent");
    peer.0.detach(id);
    let said = peer.said();
    assert_eq!(said[0], (HEADERS, END_HEADERS, 1, accepted.to_vec()));
    assert_eq!((said[1].0, said[1].1), (DATA, 0));
    let trailers = b"\0\x0bgrpc-status\x0214\0\x0cgrpc-message\x08no agent";
    assert_eq!(
        said[2],
        (HEADERS, END_HEADERS | END_STREAM, 1, trailers.to_vec())
    );
    // The client has not ended its side.
    assert_eq!(said[3], (RST_STREAM, 0, 1, vec![0; 4]));
    assert_eq!(peer.0.streams(), 0);
    let id = peer.call(3);
    peer.feed(&frame(DATA, END_STREAM, 3, b""));
    assert_eq!(peer.data(id), Poll::Ready(None));
    peer.0.finish(id, "0", "");
    let only = [&accepted[..], b"\0\x0bgrpc-status\x010"].concat();
    assert_eq!(peer.said(), [(HEADERS, END_HEADERS | END_STREAM, 3, only)]);
    peer.0.detach(id);
    let id = peer.call(5);
    peer.0.refuse(id, "415");
    peer.0.detach(id);
    assert_eq!(
        peer.said()[0],
        (
            HEADERS,
            END_HEADERS | END_STREAM,
            5,
            b"\x08\x03415".to_vec()
        )
    );
    assert_eq!(peer.0.streams(), 0);
}

/// Section 6.9: only DATA waits for windows.
#[test]
fn calls_end_while_the_window_of_the_connection_is_closed() {
    let mut peer = Peer::greeted();
    let (bulk, other) = (peer.call(1), peer.call(3));
    peer.0.send(other, message(1));
    peer.0.send(bulk, message(70_000));
    peer.said();
    peer.0.finish(other, "0", "");
    peer.0.detach(other);
    assert_eq!(peer.said()[0].0, HEADERS);
    assert_eq!(peer.0.streams(), 1);
}

/// What a closed window keeps back would stay as long as the connection.
#[test]
fn a_call_that_ends_behind_a_closed_window_is_reset() {
    let mut peer = Peer::greeted();
    let id = peer.call(1);
    peer.0.send(id, message(70_000));
    peer.said();
    peer.0.finish(id, "0", "");
    peer.0.detach(id);
    assert_eq!(peer.reset(1), code::CANCEL);
    assert_eq!(peer.0.streams(), 0);
    // Behind one that has no room for all.
    let id = peer.call(5);
    peer.0.send(id, message(10));
    peer.feed(&frame(WINDOW_UPDATE, 0, 0, &[0, 0, 0, 5]));
    peer.0.finish(id, "0", "");
    peer.0.detach(id);
    assert_eq!(peer.0.streams(), 0);
    assert_eq!(peer.said().last().map(|it| it.0), Some(RST_STREAM));
    // A call that is dropped without an end, too.
    let id = peer.call(7);
    peer.0.detach(id);
    assert_eq!(peer.reset(7), code::CANCEL);
}
