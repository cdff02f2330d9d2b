//! Packets as gRPC messages for the HTTP/2 layer: a small head, then the payload without copying.

use std::collections::VecDeque;
use std::io::IoSlice;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use prost::Message as _;
use prost::encoding::{encode_varint, encoded_len_varint};

use super::GRPC_PREFIX_BYTES;
use super::packet::Packet;
use crate::ids::ConnId;
use crate::session::QueuedFrame;

/// gRPC prefix (5) + type (2) + data tag and length (6) + id (11) + payload tag and length (6).
const HEAD_BYTES_MAX: usize = 30;

/// Size of gRPC-Go's pooled buffers, and most bytes that it writes at once.
const GO_BUFFER_BYTES: usize = 32 * 1024;
/// Headers of the two HTTP/2 frames that carry such a message, bytes.
const FRAME_HEADS_BYTES: usize = 2 * 9;

/// Most payload of a `DATA` message to a Go peer: 32 KiB with all headers. gRPC-Go takes a buffer for each message that it
/// decodes or encodes and clears the whole buffer; the next larger buffers have 1 MiB. This size also fits two full frames
/// and one write.
pub const GO_PAYLOAD_BYTES_MAX: usize = GO_BUFFER_BYTES - 64;

const _: () = assert!(FRAME_HEADS_BYTES + HEAD_BYTES_MAX + GO_PAYLOAD_BYTES_MAX <= GO_BUFFER_BYTES);

/// One gRPC message to send: a `Buf` over a head and any number of payload pieces, without copying.
#[derive(Debug)]
pub struct MessageBuf {
    head: [u8; HEAD_BYTES_MAX],
    head_at: u8,
    head_end: u8,
    parts: VecDeque<Bytes>,
    parts_bytes: usize,
    frame: Option<QueuedFrame>,
}

impl MessageBuf {
    /// Encodes a packet. The payload of `DATA` is not copied; other packets are small and copied.
    #[must_use]
    pub fn packet(packet: Packet) -> Self {
        match packet {
            Packet::Data { conn, bytes } => Self::data(conn, VecDeque::from([bytes])),
            other => {
                let raw = other.into_raw();
                let length = raw.encoded_len();
                let mut out = BytesMut::with_capacity(GRPC_PREFIX_BYTES + length);
                out.put_u8(0);
                out.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
                // Encoding into a growable buffer cannot run out of space.
                let _infallible = raw.encode(&mut out);
                Self::from_parts(VecDeque::from([out.freeze()]))
            }
        }
    }

    /// No bytes: ends a stream without a further message.
    #[must_use]
    pub fn empty() -> Self {
        Self::from_parts(VecDeque::new())
    }

    /// One `DATA` message whose payload is `parts` in order.
    #[must_use]
    pub fn data(conn: ConnId, parts: VecDeque<Bytes>) -> Self {
        let payload: usize = parts.iter().map(Bytes::len).sum();
        let id = if conn.0 == 0 {
            0
        } else {
            1 + encoded_len_varint(conn.0.cast_unsigned())
        };
        let inner = id + 1 + encoded_len_varint(payload as u64) + payload;
        let message = 2 + 1 + encoded_len_varint(inner as u64) + inner;
        let mut buf = Self::from_parts(parts);
        let mut head = &mut buf.head[..];
        head.put_u8(0);
        head.put_u32(u32::try_from(message).unwrap_or(u32::MAX));
        head.put_slice(&[0x08, 0x04, 0x22]);
        encode_varint(inner as u64, &mut head);
        if conn.0 != 0 {
            head.put_u8(0x08);
            encode_varint(conn.0.cast_unsigned(), &mut head);
        }
        head.put_u8(0x1a);
        encode_varint(payload as u64, &mut head);
        let left = head.len();
        buf.head_end = u8::try_from(HEAD_BYTES_MAX - left).unwrap_or(u8::MAX);
        buf
    }

    /// Counts the message among the frames of its link until it is written and dropped.
    #[must_use]
    pub fn counted(mut self, frame: QueuedFrame) -> Self {
        self.frame = Some(frame);
        self
    }

    fn from_parts(mut parts: VecDeque<Bytes>) -> Self {
        // An empty `chunk` before the end would make the writer of this buffer wait forever.
        parts.retain(|part| !part.is_empty());
        let parts_bytes = parts.iter().map(Bytes::len).sum();
        Self {
            head: [0; HEAD_BYTES_MAX],
            head_at: 0,
            head_end: 0,
            parts,
            parts_bytes,
            frame: None,
        }
    }

    fn head_rest(&self) -> &[u8] {
        self.head
            .get(usize::from(self.head_at)..usize::from(self.head_end))
            .unwrap_or_default()
    }
}

impl Buf for MessageBuf {
    fn remaining(&self) -> usize {
        usize::from(self.head_end - self.head_at) + self.parts_bytes
    }

    fn chunk(&self) -> &[u8] {
        let head = self.head_rest();
        if head.is_empty() {
            self.parts.front().map_or(&[][..], |part| part)
        } else {
            head
        }
    }

    fn chunks_vectored<'a>(&'a self, dst: &mut [IoSlice<'a>]) -> usize {
        let head = self.head_rest();
        let pieces = (!head.is_empty())
            .then_some(head)
            .into_iter()
            .chain(self.parts.iter().map(|part| &part[..]));
        let mut used = 0;
        for (slot, piece) in dst.iter_mut().zip(pieces) {
            *slot = IoSlice::new(piece);
            used += 1;
        }
        used
    }

    fn advance(&mut self, mut count: usize) {
        assert!(
            count <= self.remaining(),
            "advance {count} past {}",
            self.remaining()
        );
        let head = self.head_rest().len().min(count);
        // `head` is at most HEAD_BYTES_MAX, which fits.
        self.head_at += u8::try_from(head).unwrap_or(0);
        count -= head;
        self.parts_bytes -= count;
        while count > 0 {
            let Some(front) = self.parts.front_mut() else {
                break;
            };
            if front.len() > count {
                front.advance(count);
                return;
            }
            count -= front.len();
            self.parts.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn collect(mut buf: MessageBuf, step: usize) -> Vec<u8> {
        let mut out = Vec::new();
        while buf.has_remaining() {
            let mut slices = [IoSlice::new(&[]); 3];
            let used = buf.chunks_vectored(&mut slices);
            assert!(used > 0 && slices[0].len() == buf.chunk().len());
            let take = buf.chunk().len().min(step);
            out.extend_from_slice(&buf.chunk()[..take]);
            buf.advance(take);
        }
        out
    }

    proptest! {
        #[test]
        fn data_head_and_payload_equal_what_prost_encodes(
            conn in any::<i64>(),
            parts in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..300), 1..5),
            step in 1usize..64,
        ) {
            let whole: Vec<u8> = parts.concat();
            let raw = Packet::Data { conn: ConnId(conn), bytes: whole.into() }.into_raw().encode_to_vec();
            let buf = MessageBuf::data(ConnId(conn), parts.into_iter().map(Bytes::from).collect());
            prop_assert_eq!(buf.remaining(), raw.len() + GRPC_PREFIX_BYTES);
            let sent = collect(buf, step);
            prop_assert_eq!(&sent[1..5], &u32::try_from(raw.len()).unwrap().to_be_bytes());
            prop_assert_eq!(&sent[5..], &raw[..]);
        }
    }

    #[test]
    fn every_head_fits_the_longest_id_and_payload() {
        let sent = MessageBuf::data(ConnId(-1), VecDeque::from([Bytes::from(vec![1; 5 << 20])]));
        assert!(usize::from(sent.head_end) <= HEAD_BYTES_MAX);
    }

    /// Limit (sizes): DATA payload to Go agents and servers
    #[test]
    fn the_largest_message_to_a_go_peer_fits_its_buffers() {
        for conn in [1, i64::MAX, -1] {
            let parts = VecDeque::from([Bytes::from(vec![1; GO_PAYLOAD_BYTES_MAX])]);
            let sent = collect(MessageBuf::data(ConnId(conn), parts), usize::MAX);
            let frames = sent.chunks(16 * 1024).count();
            assert_eq!(frames, 2, "of 16 KiB");
            assert!(sent.len() + 9 * frames <= 32 * 1024, "{}", sent.len());
        }
    }
}
