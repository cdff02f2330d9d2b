//! HTTP/2 frame headers (RFC 9113, section 4.1).

use bytes::{BufMut, BytesMut};

/// The client's connection preface (RFC 9113, section 3.4).
pub(super) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Octets of a frame header.
pub(super) const HEADER_LEN: usize = 9;
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
