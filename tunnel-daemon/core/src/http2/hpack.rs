//! The part of HPACK (RFC 7541) needed to find `:authority`: representations and strings. Of the dynamic table only
//! lengths are kept, and which names are `:authority`.

use std::{collections::VecDeque, ops::Range};

use bytes::{BufMut, BytesMut};

use super::{
    authority::{is_valid_authority, stand_in},
    huffman,
};

/// The field to find.
const AUTHORITY: &[u8] = b":authority";
/// Octets that an entry of the dynamic table counts in addition to its name and value (RFC 7541, section 4.1).
const ENTRY_OVERHEAD: usize = 32;
/// Most octets of an integer, the limit of `h2`: longer integers exceed 2^28.
const INTEGER_LEN_MAX: usize = 5;
/// Flag of a Huffman coded string.
const HUFFMAN: u8 = 0x80;

/// Names of the static table (RFC 7541, appendix A); the first has index 1.
#[rustfmt::skip]
const STATIC_NAMES: [&str; 61] = [
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
pub enum HpackError {
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

/// A field value to replace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Edit {
    /// The old value with its length prefix, as offsets into the block.
    range: Range<usize>,
    /// The new value; its length is the decoded length of the old value.
    value: Vec<u8>,
}

/// Copies `block` with the values of `edits` in place; the new values are not Huffman coded.
pub(super) fn apply(block: &[u8], edits: &[Edit]) -> BytesMut {
    let added: usize = edits
        .iter()
        .map(|edit| edit.value.len() + INTEGER_LEN_MAX)
        .sum();
    let mut output = BytesMut::with_capacity(block.len() + added);
    let mut copied = 0;
    for edit in edits {
        output.put_slice(block.get(copied..edit.range.start).unwrap_or_default());
        write_integer(edit.value.len(), 7, 0, &mut output);
        output.put_slice(&edit.value);
        copied = edit.range.end;
    }
    output.put_slice(block.get(copied..).unwrap_or_default());
    output
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

/// An entry of the dynamic table, without its texts.
#[derive(Clone, Copy, Debug)]
struct Entry {
    name: Name,
    value_len: usize,
}

impl Entry {
    fn size(self) -> usize {
        self.name.len + self.value_len + ENTRY_OVERHEAD
    }
}

/// A field name, without its text.
#[derive(Clone, Copy, Debug)]
struct Name {
    len: usize,
    is_authority: bool,
}

/// Follows the sizes of the client's dynamic table through its header blocks.
#[derive(Debug)]
pub(super) struct Tracker {
    /// Newest first, in index order.
    entries: VecDeque<Entry>,
    /// Octets the entries count for.
    size: usize,
    /// Size that the client set last; at most `limit`.
    capacity: usize,
    limit: usize,
}

impl Tracker {
    /// A table of at most `limit` octets: this end's `SETTINGS_HEADER_TABLE_SIZE`.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            entries: VecDeque::new(),
            size: 0,
            capacity: limit,
            limit,
        }
    }

    /// Reads one whole block, applies its changes to the table and returns an edit for each refused authority, in
    /// order. After an error the table must not be used any more.
    pub(super) fn follow(&mut self, block: &[u8]) -> Result<Vec<Edit>, HpackError> {
        let mut reader = Reader { block, at: 0 };
        let mut edits = Vec::new();
        let mut in_front = true;
        while let Some(first) = reader.peek() {
            if first & 0xe0 == 0x20 {
                if !in_front {
                    return Err(HpackError::LateTableUpdate);
                }
                self.resize(reader.integer(5)?)?;
                continue;
            }
            in_front = false;
            if first & 0x80 != 0 {
                let _indexed: Name = self.name(reader.integer(7)?)?;
            } else {
                let indexing = first & 0x40 != 0;
                let index = reader.integer(if indexing { 6 } else { 4 })?;
                let name = if index == 0 {
                    reader.literal_name()?
                } else {
                    self.name(index)?
                };
                let value_len = reader.value(name, &mut edits)?;
                if indexing {
                    self.insert(Entry { name, value_len });
                }
            }
        }
        Ok(edits)
    }

    /// The name of entry `index` in the common index space of the static and dynamic table.
    fn name(&self, index: usize) -> Result<Name, HpackError> {
        let nth = index.checked_sub(1).ok_or(HpackError::NoSuchEntry(index))?;
        if let Some(name) = STATIC_NAMES.get(nth) {
            return Ok(Name {
                len: name.len(),
                is_authority: name.as_bytes() == AUTHORITY,
            });
        }
        let entry = self
            .entries
            .get(nth - STATIC_NAMES.len())
            .ok_or(HpackError::NoSuchEntry(index))?;
        Ok(entry.name)
    }

    fn resize(&mut self, asked: usize) -> Result<(), HpackError> {
        if asked > self.limit {
            return Err(HpackError::TableTooLarge {
                asked,
                limit: self.limit,
            });
        }
        self.capacity = asked;
        self.evict_to(asked);
        Ok(())
    }

    /// An entry that does not fit at all empties the table and is not kept (RFC 7541, section 4.4).
    fn insert(&mut self, entry: Entry) {
        self.evict_to(self.capacity.saturating_sub(entry.size()));
        if self.size + entry.size() <= self.capacity {
            self.size += entry.size();
            self.entries.push_front(entry);
        }
    }

    fn evict_to(&mut self, size: usize) {
        while self.size > size {
            let Some(oldest) = self.entries.pop_back() else {
                return;
            };
            self.size -= oldest.size();
        }
    }
}

/// A place in a header block.
struct Reader<'a> {
    block: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn peek(&self) -> Option<u8> {
        self.block.get(self.at).copied()
    }

    fn octet(&mut self) -> Result<u8, HpackError> {
        let octet = self.peek().ok_or(HpackError::Truncated)?;
        self.at += 1;
        Ok(octet)
    }

    /// RFC 7541, section 5.1.
    fn integer(&mut self, prefix_bits: u32) -> Result<usize, HpackError> {
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

    fn literal_name(&mut self) -> Result<Name, HpackError> {
        let (coded, is_huffman) = self.string()?;
        if !is_huffman {
            return Ok(Name {
                len: coded.len(),
                is_authority: coded == AUTHORITY,
            });
        }
        let (mut len, mut is_authority) = (0, true);
        decode(coded, |octet| {
            is_authority &= AUTHORITY.get(len) == Some(&octet);
            len += 1;
        })?;
        Ok(Name {
            len,
            is_authority: is_authority && len == AUTHORITY.len(),
        })
    }

    /// Reads the value of a field and returns its decoded length; a refused authority adds an edit.
    fn value(&mut self, name: Name, edits: &mut Vec<Edit>) -> Result<usize, HpackError> {
        let start = self.at;
        let (coded, is_huffman) = self.string()?;
        if !name.is_authority {
            let mut len = coded.len();
            if is_huffman {
                len = 0;
                decode(coded, |_octet| len += 1)?;
            }
            return Ok(len);
        }
        let mut decoded = Vec::new();
        if is_huffman {
            decode(coded, |octet| decoded.push(octet))?;
        } else {
            decoded.extend_from_slice(coded);
        }
        // No valid replacement has length zero, so an empty authority stays and `h2` refuses this request only.
        if !decoded.is_empty() && !is_valid_authority(&decoded) {
            edits.push(Edit {
                range: start..self.at,
                value: stand_in(&decoded),
            });
        }
        Ok(decoded.len())
    }
}

fn decode(coded: &[u8], take: impl FnMut(u8)) -> Result<(), HpackError> {
    huffman::decode(coded, take).map_err(|huffman::BadCode| HpackError::BadHuffman)
}
