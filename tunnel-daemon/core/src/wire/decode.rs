//! A streaming decoder: HTTP/2 payload in, packets out; `DATA` payload is passed on as it arrives.
//!
//! A `DATA` message in the field order of all known peers is not collected first: each piece that arrives becomes a
//! separate `DATA`, which the protocol allows. Other messages of up to [`COLLECTED_BYTES_MAX`] are collected and
//! decoded by prost. So the decoder holds at most [`COLLECTED_BYTES_MAX`].

#[doc(hidden)]
pub mod fuzz;

use bytes::{Buf, Bytes, BytesMut};
use prost::Message as _;

use super::packet::{Packet, Received, Violation};
use super::{COLLECTED_BYTES_MAX, GRPC_PREFIX_BYTES, MESSAGE_BYTES_MAX, packets as raw};
use crate::ids::ConnId;

/// Longest head of a `DATA` message before its payload; see the encoder.
const DATA_HEAD_MAX: usize = 25;

/// Smaller pieces are copied, so that a few bytes do not pin a whole receive buffer.
const COPY_BELOW_BYTES: usize = 1024;

/// Pieces below one part in this many of their receive buffer are copied, too: budgets count only the piece, and the peer
/// chooses the bytes around it.
const COPY_BELOW_SHARE: usize = 4;

/// A longer message is not skipped: the stream ends. Upstream ends the stream at a sixteenth of this.
const SKIPPED_BYTES_MAX: usize = 16 * MESSAGE_BYTES_MAX;

/// Why the rest of the stream cannot be decoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum StreamError {
    /// The compression flag was set although no encoding was negotiated.
    #[error("compressed gRPC message without a negotiated encoding (flag {0})")]
    Compressed(u8),
    /// A message that is too long to skip.
    #[error(
        "gRPC message of {0} bytes announced; the stream is not read on beyond {SKIPPED_BYTES_MAX}"
    )]
    TooLong(usize),
    /// The stream ended inside a message.
    #[error("stream ended inside a gRPC message")]
    Truncated,
}

#[derive(Debug)]
enum DecoderState {
    Prefix,
    /// The first bytes of a message of this length decide how the message is decoded.
    Head {
        length: usize,
    },
    Payload {
        conn: ConnId,
        left: usize,
    },
    Whole {
        length: usize,
    },
    Skip {
        left: usize,
    },
}

/// Decoder of one direction of one stream.
#[derive(Debug)]
pub struct Decoder {
    state: DecoderState,
    /// Unconsumed bytes, joined because a head was split. Frees its memory when empty.
    joined: BytesMut,
    input: Bytes,
    /// Length of `input` when pushed.
    pushed: usize,
}

impl Default for Decoder {
    fn default() -> Self {
        Self {
            state: DecoderState::Prefix,
            joined: BytesMut::new(),
            input: Bytes::new(),
            pushed: 0,
        }
    }
}

enum Head {
    More,
    Data {
        conn: ConnId,
        head: usize,
        payload: usize,
    },
    Other,
}

impl Decoder {
    /// Adds the next piece of the stream. Call [`Self::next`] until it returns `None` before the next push.
    pub fn push(&mut self, bytes: Bytes) {
        if self.joined.is_empty() && self.input.is_empty() {
            self.pushed = bytes.len();
            self.input = bytes;
        } else {
            self.joined.extend_from_slice(&self.input);
            self.joined.extend_from_slice(&bytes);
            self.input = Bytes::new();
        }
    }

    /// Whether the stream may end here.
    ///
    /// # Errors
    /// [`StreamError::Truncated`] inside a message.
    pub fn finish(&self) -> Result<(), StreamError> {
        match self.state {
            DecoderState::Prefix if self.available() == 0 => Ok(()),
            _ => Err(StreamError::Truncated),
        }
    }

    /// The next packet or violation; `None` if more input is needed.
    ///
    /// # Errors
    /// [`StreamError`] if the rest of the stream cannot be decoded.
    #[expect(
        clippy::should_implement_trait,
        reason = "an iterator would hide the error and the need for more input"
    )]
    pub fn next(&mut self) -> Result<Option<Received>, StreamError> {
        loop {
            match self.state {
                DecoderState::Prefix => {
                    let Some([flag, a, b, c, d]) = self.peek::<GRPC_PREFIX_BYTES>() else {
                        return Ok(None);
                    };
                    if flag != 0 {
                        return Err(StreamError::Compressed(flag));
                    }
                    let length = u32::from_be_bytes([a, b, c, d]) as usize;
                    if length > SKIPPED_BYTES_MAX {
                        return Err(StreamError::TooLong(length));
                    }
                    self.skip(GRPC_PREFIX_BYTES);
                    self.state = DecoderState::Head { length };
                }
                DecoderState::Head { length } => match parse_head(self.readable(), length) {
                    Head::More => return Ok(None),
                    Head::Data {
                        conn,
                        head,
                        payload,
                    } => {
                        self.skip(head);
                        if length > MESSAGE_BYTES_MAX {
                            self.state = DecoderState::Skip { left: payload };
                            return Ok(Some(Received::Violation(Violation::Oversize(Some(conn)))));
                        }
                        if conn.0 == 0 {
                            self.state = DecoderState::Skip { left: payload };
                            return Ok(Some(Received::Violation(Violation::DataWithoutConn)));
                        }
                        self.state = DecoderState::Payload {
                            conn,
                            left: payload,
                        };
                    }
                    Head::Other if length > COLLECTED_BYTES_MAX => {
                        self.state = DecoderState::Skip { left: length };
                        return Ok(Some(Received::Violation(Violation::Oversize(None))));
                    }
                    Head::Other => self.state = DecoderState::Whole { length },
                },
                DecoderState::Payload { left: 0, .. } | DecoderState::Skip { left: 0 } => {
                    self.state = DecoderState::Prefix
                }
                DecoderState::Payload { conn, left } => {
                    let bytes = self.take_up_to(left);
                    if bytes.is_empty() {
                        return Ok(None);
                    }
                    self.state = DecoderState::Payload {
                        conn,
                        left: left - bytes.len(),
                    };
                    return Ok(Some(Received::Packet(Packet::Data { conn, bytes })));
                }
                DecoderState::Skip { left } => {
                    let count = left.min(self.available());
                    if count == 0 {
                        return Ok(None);
                    }
                    self.skip(count);
                    self.state = DecoderState::Skip { left: left - count };
                }
                DecoderState::Whole { length } => {
                    if self.available() < length {
                        return Ok(None);
                    }
                    let message = self.take_up_to(length);
                    self.state = DecoderState::Prefix;
                    return Ok(Some(judge(message, length.max(self.pushed))));
                }
            }
        }
    }

    /// Whether [`Self::next`] has just returned a piece of an incomplete `DATA` message. Counters count a message at its last
    /// piece, since a truncated message does not count.
    #[must_use]
    pub fn is_inside_data(&self) -> bool {
        matches!(self.state, DecoderState::Payload { left: 1.., .. })
    }

    fn available(&self) -> usize {
        self.joined.len() + self.input.len()
    }

    fn readable(&self) -> &[u8] {
        if self.joined.is_empty() {
            &self.input
        } else {
            &self.joined
        }
    }

    fn peek<const N: usize>(&self) -> Option<[u8; N]> {
        self.readable().first_chunk::<N>().copied()
    }

    fn skip(&mut self, count: usize) {
        // Frees the memory of consumed bytes.
        if self.joined.is_empty() {
            self.input.advance(count);
            if self.input.is_empty() {
                self.input = Bytes::new();
            }
        } else {
            self.joined.advance(count);
            if self.joined.is_empty() {
                self.joined = BytesMut::new();
            }
        }
    }

    fn take_up_to(&mut self, count: usize) -> Bytes {
        if self.joined.is_empty() {
            let piece = self.input.split_to(count.min(self.input.len()));
            alone(piece, self.pushed)
        } else {
            // Rare; copied because the joined buffer may be much larger than the piece.
            let count = count.min(self.joined.len());
            let piece = Bytes::copy_from_slice(self.joined.get(..count).unwrap_or_default());
            self.skip(count);
            piece
        }
    }
}

/// Copies a piece out of its buffer of `around` bytes unless the piece is a large part of the buffer.
fn alone(piece: Bytes, around: usize) -> Bytes {
    if piece.len() < COPY_BELOW_BYTES.max(around / COPY_BELOW_SHARE) {
        Bytes::copy_from_slice(&piece)
    } else {
        piece
    }
}

/// Decodes a whole message that arrived in a buffer of `around` bytes.
fn judge(message: Bytes, around: usize) -> Received {
    match raw::Packet::decode(message) {
        Ok(mut packet) => {
            if let Some(raw::packet::Payload::Data(data)) = &mut packet.payload {
                // The payload is a slice of the message, whose other fields may be long.
                data.data = alone(std::mem::take(&mut data.data), around);
            }
            Packet::from_raw(packet)
        }
        Err(_malformed) => Received::Violation(Violation::Malformed),
    }
}

/// Recognises `type=DATA, data{connectID, data}` with the payload at the end of the message.
fn parse_head(readable: &[u8], length: usize) -> Head {
    let seen = readable
        .get(..length.min(readable.len()).min(DATA_HEAD_MAX))
        .unwrap_or_default();
    let complete = seen.len() == length.min(DATA_HEAD_MAX);
    match data_head(seen, length) {
        Some(Some((conn, head, payload))) => Head::Data {
            conn,
            head,
            payload,
        },
        None if !complete => Head::More,
        Some(None) | None => Head::Other,
    }
}

/// `None`: more bytes are needed. `Some(None)`: not such a message.
#[expect(
    clippy::option_option,
    reason = "two ways of not being a DATA head that the caller treats differently"
)]
fn data_head(seen: &[u8], length: usize) -> Option<Option<(ConnId, usize, usize)>> {
    let mut at = 0;
    for expected in [0x08, 0x04, 0x22] {
        if *seen.get(at)? != expected {
            return Some(None);
        }
        at += 1;
    }
    let Some(inner) = varint(seen, &mut at)? else {
        return Some(None);
    };
    let inner_ends_message =
        usize::try_from(inner).is_ok_and(|inner| at.checked_add(inner) == Some(length));
    if !inner_ends_message {
        return Some(None);
    }
    let mut conn = 0;
    if *seen.get(at)? == 0x08 {
        at += 1;
        let Some(id) = varint(seen, &mut at)? else {
            return Some(None);
        };
        conn = id;
    }
    if *seen.get(at)? != 0x1a {
        return Some(None);
    }
    at += 1;
    let Some(payload) = varint(seen, &mut at)? else {
        return Some(None);
    };
    match usize::try_from(payload) {
        Ok(payload) if at.checked_add(payload) == Some(length) => {
            Some(Some((ConnId(conn.cast_signed()), at, payload)))
        }
        _ => Some(None),
    }
}

/// `None`: more bytes are needed. `Some(None)`: more than 64 bits, which is invalid protobuf.
#[expect(
    clippy::option_option,
    reason = "too short and not a varint are different answers"
)]
fn varint(seen: &[u8], at: &mut usize) -> Option<Option<u64>> {
    let mut value = 0_u64;
    for shift in 0..10 {
        let byte = *seen.get(*at)?;
        *at += 1;
        if shift == 9 && byte > 1 {
            return Some(None);
        }
        value |= u64::from(byte & 0x7f) << (7 * shift);
        if byte & 0x80 == 0 {
            return Some(Some(value));
        }
    }
    Some(None)
}

#[cfg(test)]
mod tests;
