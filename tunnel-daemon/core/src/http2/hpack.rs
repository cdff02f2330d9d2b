//! Integers, strings and the static table of HPACK (RFC 7541).

use std::borrow::Cow;

use bytes::{BufMut, BytesMut};

use super::huffman;

/// Octets that an entry of the dynamic table counts in addition to its name and value (RFC 7541, section 4.1).
pub(super) const ENTRY_OVERHEAD: usize = 32;
/// Most octets of an integer, the limit of `h2`: longer integers exceed 2^28.
const INTEGER_LEN_MAX: usize = 5;
/// Flag of a Huffman coded string.
const HUFFMAN: u8 = 0x80;

/// Names of the static table (RFC 7541, appendix A); the first has index 1.
#[rustfmt::skip]
pub(super) const STATIC_NAMES: [&str; 61] = [
    ":authority", ":method", ":method", ":path", ":path", ":scheme", ":scheme", ":status", ":status", ":status",
    ":status", ":status", ":status", ":status", "accept-charset", "accept-encoding", "accept-language",
    "accept-ranges", "accept", "access-control-allow-origin", "age", "allow", "authorization", "cache-control",
    "content-disposition", "content-encoding", "content-language", "content-length", "content-location",
    "content-range", "content-type", "cookie", "date", "etag", "expect", "expires", "from", "host", "if-match",
    "if-modified-since", "if-none-match", "if-range", "if-unmodified-since", "last-modified", "link", "location",
    "max-forwards", "proxy-authenticate", "proxy-authorization", "range", "referer", "refresh", "retry-after",
    "server", "set-cookie", "strict-transport-security", "transfer-encoding", "user-agent", "vary", "via",
    "www-authenticate",
];

/// Why a header block cannot be decoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum HpackError {
    /// The block ends inside a field.
    #[error("header block ends inside a field")]
    Truncated,
    /// An integer has more octets than an endpoint sends.
    #[error("header block has an integer of more than {INTEGER_LEN_MAX} octets")]
    IntegerTooLong,
    /// A reference to an entry that is in neither table.
    #[error("header block refers to table entry {0}, which does not exist")]
    NoSuchEntry(usize),
    /// A Huffman coded string that cannot be decoded.
    #[error("header block has an invalid Huffman code")]
    BadHuffman,
    /// The client set a larger dynamic table than this end allows.
    #[error("header block sets the dynamic table to {asked} octets, the limit is {limit}")]
    TableTooLarge {
        /// Octets the client announced.
        asked: usize,
        /// Octets of this end's `SETTINGS_HEADER_TABLE_SIZE`.
        limit: usize,
    },
    /// A table size update after the first field of a block (RFC 7541, section 4.2).
    #[error("header block resizes the dynamic table after its first field")]
    LateTableUpdate,
}

/// Writes an integer with a prefix of `prefix_bits` below `flags` (RFC 7541, section 5.1).
pub(super) fn write_integer(value: usize, prefix_bits: u32, flags: u8, output: &mut BytesMut) {
    let prefix_max = (1_usize << prefix_bits) - 1;
    let low_bits = |value: usize| u8::try_from(value & 0xff).unwrap_or(0);
    if value < prefix_max {
        output.put_u8(flags | low_bits(value));
        return;
    }
    output.put_u8(flags | low_bits(prefix_max));
    let mut rest = value - prefix_max;
    while rest >= 0x80 {
        output.put_u8(low_bits(rest & 0x7f) | 0x80);
        rest >>= 7;
    }
    output.put_u8(low_bits(rest));
}

/// A place in a header block.
pub(super) struct Reader<'a> {
    block: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(block: &'a [u8]) -> Self {
        Self { block, at: 0 }
    }

    pub(super) fn peek(&self) -> Option<u8> {
        self.block.get(self.at).copied()
    }

    fn octet(&mut self) -> Result<u8, HpackError> {
        let octet = self.peek().ok_or(HpackError::Truncated)?;
        self.at += 1;
        Ok(octet)
    }

    /// RFC 7541, section 5.1.
    pub(super) fn integer(&mut self, prefix_bits: u32) -> Result<usize, HpackError> {
        let prefix_max = (1_usize << prefix_bits) - 1;
        let mut value = usize::from(self.octet()?) & prefix_max;
        if value < prefix_max {
            return Ok(value);
        }
        for nth in 1..INTEGER_LEN_MAX {
            let octet = self.octet()?;
            value += usize::from(octet & 0x7f) << (7 * (nth - 1));
            if octet & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(HpackError::IntegerTooLong)
    }

    /// A string as encoded, and whether it is Huffman coded.
    fn string(&mut self) -> Result<(&'a [u8], bool), HpackError> {
        let is_huffman = self.peek().is_some_and(|first| first & HUFFMAN != 0);
        let len = self.integer(7)?;
        let coded = self
            .block
            .get(self.at..)
            .and_then(|rest| rest.get(..len))
            .ok_or(HpackError::Truncated)?;
        self.at += len;
        Ok((coded, is_huffman))
    }

    /// A string, decoded.
    pub(super) fn text(&mut self) -> Result<Cow<'a, [u8]>, HpackError> {
        let (coded, is_huffman) = self.string()?;
        if !is_huffman {
            return Ok(Cow::Borrowed(coded));
        }
        let mut decoded = Vec::with_capacity(coded.len() * 2);
        decode(coded, |octet| decoded.push(octet))?;
        Ok(Cow::Owned(decoded))
    }
}

fn decode(coded: &[u8], take: impl FnMut(u8)) -> Result<(), HpackError> {
    huffman::decode(coded, take).map_err(|huffman::BadCode| HpackError::BadHuffman)
}
