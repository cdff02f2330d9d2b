//! HTTP/2 frame headers (RFC 9113, section 4.1), and header blocks with the frames that carry them.

use bytes::{BufMut, Bytes, BytesMut};

/// The client's connection preface (RFC 9113, section 3.4).
pub(super) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Octets of a frame header.
pub(super) const HEADER_LEN: usize = 9;
/// Octets of the stream dependency and weight in a HEADERS frame with the PRIORITY flag.
const PRIORITY_LEN: usize = 5;

/// Payload octets of the frames this filter writes: the size that every HTTP/2 endpoint must accept (RFC 9113, section 4.2).
pub const FRAME_PAYLOAD_LEN_MAX: usize = 16_384;

pub(super) const HEADERS: u8 = 0x1;
pub(super) const CONTINUATION: u8 = 0x9;

pub(super) const END_HEADERS: u8 = 0x4;
pub(super) const PADDED: u8 = 0x8;
pub(super) const PRIORITY: u8 = 0x20;

/// The nine octets before every payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct FrameHeader {
    /// Payload octets, 24 bits.
    pub(super) payload_len: usize,
    pub(super) kind: u8,
    pub(super) flags: u8,
    /// Stream id, with the reserved bit unchanged.
    pub(super) stream: u32,
}

impl FrameHeader {
    /// Reads the header at the front of `bytes`; `None` while the header is incomplete.
    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let &[l0, l1, l2, kind, flags, s0, s1, s2, s3] = bytes.first_chunk::<HEADER_LEN>()?;
        let payload_len = usize::try_from(u32::from_be_bytes([0, l0, l1, l2])).ok()?;
        Some(Self {
            payload_len,
            kind,
            flags,
            stream: u32::from_be_bytes([s0, s1, s2, s3]),
        })
    }

    /// Octets of the whole frame.
    pub(super) fn frame_len(self) -> usize {
        HEADER_LEN + self.payload_len
    }

    pub(super) fn has(self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    pub(super) fn write(self, output: &mut BytesMut) {
        output.put_uint(u64::try_from(self.payload_len).unwrap_or(u64::MAX), 3);
        output.put_u8(self.kind);
        output.put_u8(self.flags);
        output.put_u32(self.stream);
    }
}

/// A header block with the flags and priority of its HEADERS frame. Padding is dropped.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct HeaderBlock {
    stream: u32,
    /// Flags of the HEADERS frame, without PADDED and END_HEADERS, which belong to the framing.
    flags: u8,
    /// Stream dependency and weight, if the frame had them.
    priority: Bytes,
    pub(super) fragment: BytesMut,
}

impl HeaderBlock {
    /// Parses the payload of a HEADERS frame; `None` if padding or priority exceed the payload.
    pub(super) fn open(header: FrameHeader, mut payload: BytesMut) -> Option<Self> {
        if header.has(PADDED) {
            let (&padding_len, rest) = payload.split_first()?;
            let kept = rest.len().checked_sub(usize::from(padding_len))?;
            let _padding_len = payload.split_to(1);
            payload.truncate(kept);
        }
        let priority = if header.has(PRIORITY) {
            if payload.len() < PRIORITY_LEN {
                return None;
            }
            payload.split_to(PRIORITY_LEN).freeze()
        } else {
            Bytes::new()
        };
        let flags = header.flags & !(PADDED | END_HEADERS);
        Some(Self {
            stream: header.stream,
            flags,
            priority,
            fragment: payload,
        })
    }

    /// Whether a frame with this `header` may follow while the block is incomplete.
    pub(super) fn is_continued_by(&self, header: FrameHeader) -> bool {
        header.kind == CONTINUATION && header.stream == self.stream
    }

    /// Writes one HEADERS frame and as many CONTINUATION frames as the length requires. With `complete` the last frame
    /// ends the block.
    pub(super) fn write(&self, complete: bool, output: &mut BytesMut) {
        let mut rest: &[u8] = &self.fragment;
        let mut priority: &[u8] = &self.priority;
        let (mut kind, mut flags) = (HEADERS, self.flags);
        loop {
            let room = FRAME_PAYLOAD_LEN_MAX - priority.len();
            let (part, after) = rest.split_at(rest.len().min(room));
            let end = if complete && after.is_empty() {
                END_HEADERS
            } else {
                0
            };
            let payload_len = priority.len() + part.len();
            FrameHeader {
                payload_len,
                kind,
                flags: flags | end,
                stream: self.stream,
            }
            .write(output);
            output.put_slice(priority);
            output.put_slice(part);
            if after.is_empty() {
                return;
            }
            rest = after;
            (kind, flags, priority) = (CONTINUATION, 0, &[]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(flags: u8, payload: &[u8]) -> Option<HeaderBlock> {
        let header = FrameHeader {
            payload_len: payload.len(),
            kind: HEADERS,
            flags,
            stream: 7,
        };
        HeaderBlock::open(header, BytesMut::from(payload))
    }

    #[test]
    fn a_header_survives_reading_and_writing() {
        let header = FrameHeader {
            payload_len: 0x01_0203,
            kind: 9,
            flags: 0x2d,
            stream: 0x8000_0005,
        };
        let mut bytes = BytesMut::new();
        header.write(&mut bytes);
        assert_eq!(FrameHeader::read(&bytes), Some(header));
        assert_eq!(FrameHeader::read(&bytes[..8]), None);
    }

    #[test]
    fn padding_is_removed_and_priority_is_kept() {
        let block = headers(
            PADDED | PRIORITY | 1,
            &[2, 0x80, 0, 0, 3, 15, 0xab, 0xcd, 0, 0],
        )
        .unwrap();
        assert_eq!(&block.fragment[..], [0xab, 0xcd]);
        let mut out = BytesMut::new();
        block.write(true, &mut out);
        assert_eq!(
            &out[..],
            [
                0,
                0,
                7,
                1,
                PRIORITY | END_HEADERS | 1,
                0,
                0,
                0,
                7,
                0x80,
                0,
                0,
                3,
                15,
                0xab,
                0xcd
            ]
        );
    }

    #[test]
    fn padding_or_priority_beyond_the_payload_is_refused() {
        assert_eq!(headers(PADDED, &[]), None);
        assert_eq!(headers(PADDED, &[3, 0, 0]), None);
        assert_eq!(headers(PRIORITY, &[0; 4]), None);
        assert_eq!(headers(PADDED | PRIORITY, &[1, 0, 0, 0, 0, 0]), None);
        assert!(headers(PADDED, &[2, 0, 0]).is_some_and(|block| block.fragment.is_empty()));
    }

    #[test]
    fn long_header_block_is_split_into_16_kibibyte_frames() {
        let mut block = headers(PRIORITY, &[9; 5]).unwrap();
        block.fragment = BytesMut::zeroed(2 * FRAME_PAYLOAD_LEN_MAX);
        let mut out = BytesMut::new();
        block.write(true, &mut out);
        let mut seen = Vec::new();
        while let Some(header) = FrameHeader::read(&out) {
            seen.push((header.kind, header.flags, header.payload_len));
            let _frame = out.split_to(header.frame_len());
        }
        assert_eq!(
            seen,
            [(1, PRIORITY, 16_384), (9, 0, 16_384), (9, END_HEADERS, 5)]
        );
    }
}
