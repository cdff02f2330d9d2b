//! The cases of RFC 9113 and RFC 7541 that a server can break, over raw frames.

mod floods;
mod header_blocks;
mod sending;

use std::task::{Context, Waker};

use bytes::{Buf as _, BytesMut};

use super::frame::{CONTINUATION, END_HEADERS, HEADER_LEN, HEADERS, PADDED, PREFACE, PRIORITY};
use super::*;
use crate::ids::ConnId;
use crate::wire::packet::Packet;

const LIMITS: ServerLimits = ServerLimits {
    calls_max: 4,
    window_bytes: 100_000,
    output_bytes: 128 * 1024,
};
const PADDED_DATA: u8 = PADDED;

/// Type, flags, stream and payload.
type Frame = (u8, u8, u32, Vec<u8>);

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut out = BytesMut::new();
    head(&mut out, payload.len(), kind, flags, stream);
    out.extend_from_slice(payload);
    out.to_vec()
}

fn cx() -> Context<'static> {
    Context::from_waker(Waker::noop())
}

/// A block of literals that no table keeps.
fn block(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut out = BytesMut::new();
    for (name, value) in fields {
        request::field(name, value.as_bytes(), &mut out);
    }
    out.to_vec()
}

const CALL: [(&str, &str); 6] = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/ProxyService/Proxy"),
    (":authority", "%2Frun%2Fsocket"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
];

struct Peer(Http2Server);

impl Peer {
    /// A client before its first byte.
    fn new() -> Self {
        Self(Http2Server::new(LIMITS))
    }

    /// A client that has greeted, whose settings are acknowledged, as are ours.
    fn greeted() -> Self {
        let mut peer = Self::new();
        peer.feed(PREFACE);
        peer.feed(&frame(SETTINGS, 0, 0, &[]));
        peer.feed(&frame(SETTINGS, ACK, 0, &[]));
        peer.said();
        peer
    }

    fn try_feed(&mut self, bytes: &[u8]) -> Result<(), u32> {
        let mut input = BytesMut::from(bytes);
        let result = self.0.receive(&mut input, 4096);
        if result.is_ok() {
            assert_eq!(input.len(), 0, "whole frames are taken");
        }
        result.map_err(|error| error.code)
    }

    #[track_caller]
    fn feed(&mut self, bytes: &[u8]) {
        assert_eq!(self.try_feed(bytes), Ok(()));
    }

    /// All frames that wait, answers last.
    fn said(&mut self) -> Vec<Frame> {
        let mut out = std::mem::take(self.0.output());
        while !self.0.output().is_empty() {
            let more = std::mem::take(self.0.output());
            out.unsplit(more);
        }
        self.0.release_answers();
        out.extend_from_slice(&std::mem::take(self.0.output()));
        let mut frames = Vec::new();
        while let Some(header) = FrameHeader::read(&out) {
            out.advance(HEADER_LEN);
            let payload = out.split_to(header.payload_len).to_vec();
            frames.push((header.kind, header.flags, header.stream, payload));
        }
        assert!(out.is_empty(), "whole frames are sent");
        frames
    }

    /// The only frame that waits is a reset of this stream.
    #[track_caller]
    fn reset(&mut self, stream: u32) -> u32 {
        match &self.said()[..] {
            [(RST_STREAM, 0, id, reason)] if *id == stream => {
                u32::from_be_bytes(reason.as_slice().try_into().unwrap())
            }
            other => panic!("{other:?}"),
        }
    }

    /// Opens a stream and takes its call.
    #[track_caller]
    fn call(&mut self, stream: u32) -> StreamId {
        self.feed(&frame(HEADERS, END_HEADERS, stream, &block(&CALL)));
        let call = self.0.next_call().expect("a call");
        assert_eq!(call.stream, StreamId(stream));
        assert_eq!(&call.head.path[..], b"/ProxyService/Proxy");
        assert!(call.head.is_grpc);
        call.stream
    }

    fn data(&mut self, id: StreamId) -> Poll<Option<Result<Bytes, StreamEnd>>> {
        self.0.poll_data(id, &cx())
    }
}

fn message(bytes: usize) -> MessageBuf {
    MessageBuf::packet(Packet::Data {
        conn: ConnId(1),
        bytes: vec![7; bytes].into(),
    })
}

fn payload_bytes(frames: &[Frame], stream: u32) -> usize {
    let data = frames
        .iter()
        .filter(|(kind, _, id, _)| *kind == DATA && *id == stream);
    data.map(|(_, _, _, payload)| payload.len()).sum()
}

/// Section 3.4.
#[test]
fn a_connection_begins_with_preface_and_settings() {
    for begin in [&b"GET / HTTP/1.1\r\n"[..], b"PRI * HTTP/2.0\r\n\r\nXX"] {
        assert_eq!(Peer::new().try_feed(begin), Err(code::PROTOCOL_ERROR));
    }
    for first in [
        frame(PING, 0, 0, &[0; 8]),
        frame(SETTINGS, ACK, 0, &[]),
        frame(HEADERS, END_HEADERS, 1, &block(&CALL)),
    ] {
        let mut peer = Peer::new();
        peer.feed(PREFACE);
        assert_eq!(
            peer.try_feed(&first),
            Err(code::PROTOCOL_ERROR),
            "{first:?}"
        );
    }
    let mut peer = Peer::new();
    let mut input = BytesMut::new();
    for byte in [PREFACE, &frame(SETTINGS, 0, 0, &[])].concat() {
        assert!(!peer.0.is_greeted());
        input.extend_from_slice(&[byte]);
        assert_eq!(peer.0.receive(&mut input, 4096), Ok(()));
    }
    assert!(peer.0.is_greeted());
    let said = peer.said();
    assert_eq!(said[0].0, SETTINGS);
    assert_eq!(said[0].3.len(), 18);
    assert_eq!(said[1], (WINDOW_UPDATE, 0, 0, vec![0x7f, 0xff, 0, 0]));
    assert_eq!(said[2], (SETTINGS, ACK, 0, vec![]));
}

/// Each of these ends the connection with this code, and GOAWAY says so.
///
/// Sections 4.2, 5.1, 5.1.1, 5.4.1, 6.1 to 6.10.
///
/// Limit (memory): Incomplete header block of a gRPC client | 256 KiB, and 24 frames, per connection
#[test]
fn broken_frames_end_the_connection() {
    use code::{
        COMPRESSION_ERROR, ENHANCE_YOUR_CALM, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR, PROTOCOL_ERROR,
    };
    let call = frame(HEADERS, END_HEADERS, 1, &block(&CALL));
    let open_block = frame(HEADERS, 0, 3, &block(&CALL[..2]));
    let continued = |times: usize, bytes: usize| {
        let more = frame(CONTINUATION, 0, 3, &vec![0x82; bytes]);
        [open_block.clone(), more.repeat(times)].concat()
    };
    let window = |value: u32| {
        let value = value.to_be_bytes();
        frame(SETTINGS, 0, 0, &[&[0, 4][..], &value].concat())
    };
    for (what, bytes, code) in [
        (
            "a frame of more than 16 KiB",
            frame(DATA, 0, 1, &vec![0; 16_385])[..9].to_vec(),
            FRAME_SIZE_ERROR,
        ),
        (
            "DATA without a stream",
            frame(DATA, 0, 0, b"x"),
            PROTOCOL_ERROR,
        ),
        (
            "DATA for an idle stream",
            frame(DATA, 0, 5, b"x"),
            PROTOCOL_ERROR,
        ),
        (
            "padding as long as the payload",
            frame(DATA, PADDED_DATA, 1, &[1]),
            PROTOCOL_ERROR,
        ),
        (
            "padding without its length",
            frame(DATA, PADDED_DATA, 1, &[]),
            PROTOCOL_ERROR,
        ),
        (
            "HEADERS without a stream",
            frame(HEADERS, END_HEADERS, 0, &block(&CALL)),
            PROTOCOL_ERROR,
        ),
        (
            "HEADERS for an even stream",
            frame(HEADERS, END_HEADERS, 2, &block(&CALL)),
            PROTOCOL_ERROR,
        ),
        (
            "HEADERS too short for a priority",
            frame(HEADERS, END_HEADERS | PRIORITY, 3, &[0; 4]),
            FRAME_SIZE_ERROR,
        ),
        (
            "HEADERS with too much padding",
            frame(HEADERS, END_HEADERS | PADDED, 3, &[9, 0x82]),
            PROTOCOL_ERROR,
        ),
        (
            "PRIORITY without a stream",
            frame(PRIORITY_FRAME, 0, 0, &[0; 5]),
            PROTOCOL_ERROR,
        ),
        (
            "RST_STREAM without a stream",
            frame(RST_STREAM, 0, 0, &[0; 4]),
            PROTOCOL_ERROR,
        ),
        (
            "RST_STREAM for an idle stream",
            frame(RST_STREAM, 0, 5, &[0; 4]),
            PROTOCOL_ERROR,
        ),
        (
            "RST_STREAM of 3 octets",
            frame(RST_STREAM, 0, 1, &[0; 3]),
            FRAME_SIZE_ERROR,
        ),
        (
            "SETTINGS for a stream",
            frame(SETTINGS, 0, 1, &[]),
            PROTOCOL_ERROR,
        ),
        (
            "SETTINGS of 5 octets",
            frame(SETTINGS, 0, 0, &[0; 5]),
            FRAME_SIZE_ERROR,
        ),
        (
            "SETTINGS with ACK and a payload",
            frame(SETTINGS, ACK, 0, &[0; 6]),
            FRAME_SIZE_ERROR,
        ),
        (
            "ENABLE_PUSH of 2",
            frame(SETTINGS, 0, 0, &[0, 2, 0, 0, 0, 2]),
            PROTOCOL_ERROR,
        ),
        (
            "INITIAL_WINDOW_SIZE of 2^31",
            window(1 << 31),
            FLOW_CONTROL_ERROR,
        ),
        (
            "MAX_FRAME_SIZE of 16383",
            frame(SETTINGS, 0, 0, &[0, 5, 0, 0, 0x3f, 0xff]),
            PROTOCOL_ERROR,
        ),
        (
            "MAX_FRAME_SIZE of 2^24",
            frame(SETTINGS, 0, 0, &[0, 5, 1, 0, 0, 0]),
            PROTOCOL_ERROR,
        ),
        (
            "PUSH_PROMISE",
            frame(PUSH_PROMISE, END_HEADERS, 1, &[0; 4]),
            PROTOCOL_ERROR,
        ),
        (
            "PING of 7 octets",
            frame(PING, 0, 0, &[0; 7]),
            FRAME_SIZE_ERROR,
        ),
        (
            "PING for a stream",
            frame(PING, 0, 1, &[0; 8]),
            PROTOCOL_ERROR,
        ),
        (
            "GOAWAY for a stream",
            frame(GOAWAY, 0, 1, &[0; 8]),
            PROTOCOL_ERROR,
        ),
        (
            "WINDOW_UPDATE of 3 octets",
            frame(WINDOW_UPDATE, 0, 0, &[0; 3]),
            FRAME_SIZE_ERROR,
        ),
        (
            "WINDOW_UPDATE of 0",
            frame(WINDOW_UPDATE, 0, 0, &[0; 4]),
            PROTOCOL_ERROR,
        ),
        (
            "WINDOW_UPDATE for an idle stream",
            frame(WINDOW_UPDATE, 0, 5, &[0, 0, 0, 1]),
            PROTOCOL_ERROR,
        ),
        (
            "a connection's window above 2^31-1",
            frame(WINDOW_UPDATE, 0, 0, &[0x7f, 255, 255, 255]),
            FLOW_CONTROL_ERROR,
        ),
        (
            "CONTINUATION alone",
            frame(CONTINUATION, END_HEADERS, 1, &[]),
            PROTOCOL_ERROR,
        ),
        (
            "a frame inside a block",
            [open_block.clone(), frame(PING, 0, 0, &[0; 8])].concat(),
            PROTOCOL_ERROR,
        ),
        (
            "an unknown frame inside a block",
            [open_block.clone(), frame(0xff, 0, 3, &[])].concat(),
            PROTOCOL_ERROR,
        ),
        (
            "a block continued for another stream",
            [open_block.clone(), frame(CONTINUATION, 0, 5, &[])].concat(),
            PROTOCOL_ERROR,
        ),
        (
            "CONTINUATION without end",
            continued(24, 0),
            ENHANCE_YOUR_CALM,
        ),
        (
            "a block of 256 KiB",
            continued(17, 16_384),
            ENHANCE_YOUR_CALM,
        ),
        (
            "a table entry that is not there",
            frame(HEADERS, END_HEADERS, 3, &[0xc6]),
            COMPRESSION_ERROR,
        ),
        (
            "a string beyond the block",
            frame(HEADERS, END_HEADERS, 3, &[0x00, 5, b'a']),
            COMPRESSION_ERROR,
        ),
    ] {
        let mut peer = Peer::greeted();
        peer.feed(&call);
        peer.said();
        assert_eq!(peer.try_feed(&bytes), Err(code), "{what}");
        let said = peer.said();
        let (kind, _, _, payload) = said.last().expect("GOAWAY");
        assert_eq!(
            (*kind, &payload[4..]),
            (GOAWAY, &code.to_be_bytes()[..]),
            "{what}"
        );
    }
}

/// Each of these resets the stream with this code, and others go on.
///
/// Sections 5.1, 6.1, 6.9, 8.1.1.
#[test]
fn broken_streams_are_reset_alone() {
    use code::{FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR, PROTOCOL_ERROR, STREAM_CLOSED};
    let ended = || frame(DATA, END_STREAM, 1, b"");
    let too_much = frame(DATA, 0, 1, &[0; 16_000]).repeat(7);
    for (what, bytes, code) in [
        (
            "DATA behind the end",
            [ended(), frame(DATA, 0, 1, b"x")].concat(),
            STREAM_CLOSED,
        ),
        (
            "HEADERS behind the end",
            [ended(), frame(HEADERS, END_HEADERS, 1, &[])].concat(),
            STREAM_CLOSED,
        ),
        (
            "trailers that do not end the stream",
            frame(HEADERS, END_HEADERS, 1, &block(&[("a", "b")])),
            PROTOCOL_ERROR,
        ),
        (
            "trailers with a pseudo-header",
            frame(
                HEADERS,
                END_HEADERS | END_STREAM,
                1,
                &block(&[(":path", "/")]),
            ),
            PROTOCOL_ERROR,
        ),
        ("DATA beyond the window", too_much, FLOW_CONTROL_ERROR),
        (
            "WINDOW_UPDATE of 0",
            frame(WINDOW_UPDATE, 0, 1, &[0; 4]),
            PROTOCOL_ERROR,
        ),
        (
            "a window above 2^31-1",
            frame(WINDOW_UPDATE, 0, 1, &[0x7f, 255, 255, 255]),
            FLOW_CONTROL_ERROR,
        ),
        (
            "PRIORITY of 4 octets",
            frame(PRIORITY_FRAME, 0, 1, &[0; 4]),
            FRAME_SIZE_ERROR,
        ),
    ] {
        let mut peer = Peer::greeted();
        let (id, other) = (peer.call(1), peer.call(3));
        peer.feed(&bytes);
        assert_eq!(peer.reset(1), code, "{what}");
        while let Poll::Ready(Some(Ok(_))) = peer.data(id) {}
        assert_eq!(
            peer.data(id),
            Poll::Ready(Some(Err(StreamEnd::Reset(code)))),
            "{what}"
        );
        peer.feed(&frame(DATA, 0, 3, b"on"));
        assert_eq!(
            peer.data(other),
            Poll::Ready(Some(Ok("on".into()))),
            "{what}"
        );
    }
}

/// Section 5.1: what is on its way when a stream ends does no harm. A stream that never was is another matter.
#[test]
fn late_frames_of_ended_streams_are_dropped() {
    let mut peer = Peer::greeted();
    let id = peer.call(1);
    peer.0.reset(id);
    peer.0.detach(id);
    assert_eq!(peer.reset(1), code::CANCEL);
    peer.feed(&frame(WINDOW_UPDATE, 0, 1, &[0, 0, 0, 9]));
    peer.feed(&frame(RST_STREAM, 0, 1, &[0, 0, 0, 8]));
    peer.feed(&frame(
        HEADERS,
        END_HEADERS | END_STREAM,
        1,
        &block(&[("a", "b")]),
    ));
    assert_eq!(peer.said(), []);
    peer.feed(&frame(DATA, 0, 1, b"late"));
    assert_eq!(peer.reset(1), code::STREAM_CLOSED);
    let mut peer = Peer::greeted();
    peer.call(5);
    let lower = frame(HEADERS, END_HEADERS, 3, &block(&CALL));
    assert_eq!(peer.try_feed(&lower), Err(code::PROTOCOL_ERROR));
}

/// Sections 6.8 and 8.1: streams that are on their way begin, later ones do not.
#[test]
fn a_connection_that_drains_takes_what_is_on_its_way() {
    let mut peer = Peer::greeted();
    let first = peer.call(1);
    peer.0.drain();
    let said = peer.said();
    assert_eq!(
        said[0],
        (GOAWAY, 0, 0, vec![0x7f, 255, 255, 255, 0, 0, 0, 0])
    );
    assert_eq!((said[1].0, said[1].1), (PING, 0));
    let second = peer.call(3);
    peer.feed(&frame(PING, ACK, 0, &said[1].3));
    assert_eq!(peer.said(), [(GOAWAY, 0, 0, vec![0, 0, 0, 3, 0, 0, 0, 0])]);
    peer.feed(&frame(HEADERS, END_HEADERS, 5, &block(&CALL)));
    peer.feed(&frame(DATA, 0, 5, b"x"));
    peer.feed(&frame(HEADERS, END_HEADERS | END_STREAM, 5, &[]));
    assert_eq!((peer.0.next_call(), peer.said()), (None, vec![]));
    for id in [first, second] {
        assert!(!peer.0.is_over());
        peer.0.detach(id);
    }
    assert!(peer.0.is_over());
}

#[test]
fn a_ping_of_this_end_is_answered() {
    let mut peer = Peer::greeted();
    peer.0.ask();
    let said = peer.said();
    assert!(!peer.0.take_pong());
    peer.feed(&frame(PING, ACK, 0, &said[0].3));
    assert!(peer.0.take_pong() && !peer.0.take_pong());
}

#[test]
fn calls_are_told_of_resets_and_of_the_end() {
    let mut peer = Peer::greeted();
    let (reset, gone) = (peer.call(1), peer.call(3));
    assert!(peer.0.poll_end(reset, &cx()).is_pending());
    peer.feed(&frame(RST_STREAM, 0, 1, &[0, 0, 0, 8]));
    assert_eq!(
        peer.0.poll_end(reset, &cx()),
        Poll::Ready(StreamEnd::Reset(8))
    );
    peer.0.send(reset, message(1));
    peer.0.detach(reset);
    assert_eq!(peer.said(), []);
    peer.0.gone();
    assert_eq!(peer.data(gone), Poll::Ready(Some(Err(StreamEnd::Gone))));
    assert_eq!(
        peer.0.poll_drained(gone, &cx()),
        Poll::Ready(Err(StreamEnd::Gone))
    );
}

proptest::proptest! {
    /// Whatever comes, nothing panics, and what is sent are whole frames.
    #[test]
    fn arbitrary_frames_do_no_harm(
        frames in proptest::collection::vec(
            (0_u8..11, proptest::prelude::any::<u8>(), 0_u32..6, proptest::collection::vec(proptest::prelude::any::<u8>(), 0..40)),
            0..60,
        ),
        cut in 1_usize..50,
    ) {
        let mut peer = Peer::greeted();
        let mut bytes = frame(HEADERS, END_HEADERS, 1, &block(&CALL));
        for (kind, flags, stream, payload) in &frames {
            bytes.extend(frame(*kind, *flags, *stream, payload));
        }
        let mut input = BytesMut::new();
        let mut calls = Vec::new();
        for part in bytes.chunks(cut) {
            input.extend_from_slice(part);
            let result = peer.0.receive(&mut input, 4096);
            calls.extend(peer.0.next_call().map(|call| call.stream));
            for id in &calls {
                while let Poll::Ready(Some(Ok(piece))) = peer.0.poll_data(*id, &cx()) {
                    peer.0.release(*id, piece.len());
                    peer.0.send(*id, message(piece.len()));
                }
            }
            peer.said();
            if result.is_err() {
                break;
            }
        }
        for id in calls {
            peer.0.detach(id);
        }
    }
}
