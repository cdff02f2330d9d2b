//! Entry point of the fuzz target `packet`: checks the decoder against cuts, prost, re-encoding and memory limits.

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};

use super::{DATA_HEAD_MAX, Decoder, DecoderState, Head, StreamError, judge, parse_head};
use crate::wire::encode::MessageBuf;
use crate::wire::packet::{Packet, Received};
use crate::wire::{COLLECTED_BYTES_MAX, GRPC_PREFIX_BYTES, MESSAGE_BYTES_MAX};

/// Most piece lengths that an input may set.
const CUTS_MAX: usize = 15;

/// For the fuzz target and the test that replays its corpus. The low four bits of the first byte are the number of
/// piece lengths that follow, one byte each, used in turn. The rest is the stream.
///
/// # Panics
///
/// When the outcome depends on the piece lengths, differs from prost's, or changes after encoding and decoding, or when
/// the decoder holds more bytes than its state needs.
#[doc(hidden)]
pub fn fuzz_entry(data: &[u8]) {
    let [count, rest @ ..] = data else { return };
    let Some((cuts, stream)) = rest.split_at_checked(usize::from(*count) & CUTS_MAX) else {
        return;
    };
    let whole = decoded([stream]);
    let pieces = decoded(cut(stream, cuts));
    assert_eq!(whole, pieces, "the outcome depends on how the input is cut");
    if let Some(expected) = by_prost(stream) {
        assert_eq!(whole, (expected, Ok(())), "prost reads it differently");
    }
    let packets = packets(whole.0);
    let sent = encoded(&packets);
    let (again, end) = decoded([&sent[..]]);
    assert_eq!(end, Ok(()), "our own messages end in the middle");
    assert_eq!(self::packets(again), packets, "encoding changed a meaning");
}

/// `stream` in pieces of the given lengths, in turn; a length of 0 is an empty frame.
fn cut<'a>(mut stream: &'a [u8], lengths: &[u8]) -> impl Iterator<Item = &'a [u8]> {
    // Lengths that are all 0 would never reach the end.
    let mut lengths = lengths.iter().chain(&[1]).cycle();
    std::iter::from_fn(move || {
        if stream.is_empty() {
            return None;
        }
        let length = usize::from(*lengths.next()?).min(stream.len());
        stream.split_off(..length)
    })
}

/// The output of a new decoder for the pieces, with data of one connection joined, and the result at the end.
fn decoded<'a>(
    pieces: impl IntoIterator<Item = &'a [u8]>,
) -> (Vec<Received>, Result<(), StreamError>) {
    let mut decoder = Decoder::default();
    let mut found = Vec::new();
    for piece in pieces {
        decoder.push(Bytes::copy_from_slice(piece));
        loop {
            match decoder.next() {
                Ok(None) => break,
                Ok(Some(received)) => found.push(received),
                Err(error) => return (joined(found), Err(error)),
            }
        }
        assert_held_is_explained(&decoder);
    }
    let end = decoder.finish();
    (joined(found), end)
}

fn assert_held_is_explained(decoder: &Decoder) {
    let (held, state) = (decoder.available(), &decoder.state);
    let explained = match state {
        DecoderState::Prefix => held < GRPC_PREFIX_BYTES,
        DecoderState::Head { .. } => held < DATA_HEAD_MAX,
        DecoderState::Payload { .. } | DecoderState::Skip { .. } => held == 0,
        DecoderState::Whole { length } => held < *length && *length <= COLLECTED_BYTES_MAX,
    };
    assert!(explained, "{held} bytes held in {state:?}");
    if let DecoderState::Whole { length } = state {
        let room = decoder.joined.capacity();
        let most = 2 * (*length + usize::from(u8::MAX)).max(64);
        assert!(room <= most, "room for {room} bytes in {state:?}");
    }
}

/// Joins neighbouring data of one connection and drops empty data.
fn joined(found: Vec<Received>) -> Vec<Received> {
    let mut out: Vec<Received> = Vec::new();
    for received in found {
        if let Received::Packet(Packet::Data { conn, bytes }) = &received {
            if bytes.is_empty() {
                continue;
            }
            if let Some(Received::Packet(Packet::Data {
                conn: last,
                bytes: have,
            })) = out.last_mut()
                && last == conn
            {
                *have = [&have[..], &bytes[..]].concat().into();
                continue;
            }
        }
        out.push(received);
    }
    out
}

/// The stream decoded by prost; `None` unless it consists of whole, uncompressed messages within the size limits.
fn by_prost(mut stream: &[u8]) -> Option<Vec<Received>> {
    let mut out = Vec::new();
    while !stream.is_empty() {
        let (prefix, rest) = stream.split_first_chunk::<GRPC_PREFIX_BYTES>()?;
        let [0, a, b, c, d] = *prefix else {
            return None;
        };
        let length = u32::from_be_bytes([a, b, c, d]) as usize;
        if length > MESSAGE_BYTES_MAX {
            return None;
        }
        let (message, after) = rest.split_at_checked(length)?;
        let is_collected = matches!(parse_head(message, length), Head::Other);
        if is_collected && length > COLLECTED_BYTES_MAX {
            return None;
        }
        out.push(judge(Bytes::copy_from_slice(message), length));
        stream = after;
    }
    Some(joined(out))
}

/// The packets, without unknown types and violations.
fn packets(found: Vec<Received>) -> Vec<Received> {
    joined(
        found
            .into_iter()
            .filter(|received| matches!(received, Received::Packet(_)))
            .collect(),
    )
}

/// Encodes all packets.
fn encoded(packets: &[Received]) -> BytesMut {
    let mut out = BytesMut::new();
    for received in packets {
        if let Received::Packet(packet) = received {
            let mut message = MessageBuf::packet(packet.clone());
            assert!(message.has_remaining(), "{packet:?} is nothing on the wire");
            while message.has_remaining() {
                let chunk = message.chunk();
                out.put_slice(chunk);
                let written = chunk.len();
                message.advance(written);
            }
        }
    }
    out
}
