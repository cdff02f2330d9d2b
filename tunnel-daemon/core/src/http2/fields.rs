//! Decoding of header blocks (RFC 7541) with their values.

use std::collections::VecDeque;

use bytes::Bytes;

use super::hpack::{ENTRY_OVERHEAD, HpackError, Reader, STATIC_NAMES};

/// Octets of the dynamic table: the default of `SETTINGS_HEADER_TABLE_SIZE` (RFC 9113, section 6.5.2).
const TABLE_BYTES: usize = 4_096;

/// Values of the static table from index 1 on; those after them are empty (RFC 7541, appendix A).
const STATIC_VALUES: [&str; 16] = [
    "",
    "GET",
    "POST",
    "/",
    "/index.html",
    "http",
    "https",
    "200",
    "204",
    "206",
    "304",
    "400",
    "404",
    "500",
    "",
    "gzip, deflate",
];

/// The client's dynamic table.
#[derive(Debug)]
pub(super) struct FieldDecoder {
    /// Name and value, newest first, in index order.
    entries: VecDeque<(Bytes, Bytes)>,
    /// Octets that the entries count for.
    size: usize,
    /// Size that the client set last.
    capacity: usize,
}

impl Default for FieldDecoder {
    fn default() -> Self {
        Self {
            entries: VecDeque::new(),
            size: 0,
            capacity: TABLE_BYTES,
        }
    }
}

impl FieldDecoder {
    /// Reads one whole block and calls `take` with name and value of each field. After an error the table must not be used
    /// any more.
    pub(super) fn decode(
        &mut self,
        block: &[u8],
        mut take: impl FnMut(&[u8], &[u8]),
    ) -> Result<(), HpackError> {
        let mut reader = Reader::new(block);
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
                let index = reader.integer(7)?;
                let (name, value) = self.field(index)?;
                take(&name, &value);
                continue;
            }
            let is_indexed = first & 0x40 != 0;
            let index = reader.integer(if is_indexed { 6 } else { 4 })?;
            if index == 0 {
                let name = reader.text()?;
                let value = reader.text()?;
                take(&name, &value);
                if is_indexed {
                    self.insert(name.into_owned().into(), value.into_owned().into());
                }
            } else {
                let value = reader.text()?;
                let (name, _) = self.field(index)?;
                take(&name, &value);
                if is_indexed {
                    self.insert(name, value.into_owned().into());
                }
            }
        }
        Ok(())
    }

    /// Shares name and value: a few octets may refer to long ones.
    fn field(&self, index: usize) -> Result<(Bytes, Bytes), HpackError> {
        let missing = HpackError::NoSuchEntry(index);
        let nth = index.checked_sub(1).ok_or(missing)?;
        if let Some(name) = STATIC_NAMES.get(nth) {
            let value = STATIC_VALUES.get(nth).copied().unwrap_or_default();
            let text = |text: &'static str| Bytes::from_static(text.as_bytes());
            return Ok((text(name), text(value)));
        }
        let entry = self.entries.get(nth - STATIC_NAMES.len());
        entry.cloned().ok_or(missing)
    }

    fn resize(&mut self, asked: usize) -> Result<(), HpackError> {
        if asked > TABLE_BYTES {
            return Err(HpackError::TableTooLarge {
                asked,
                limit: TABLE_BYTES,
            });
        }
        self.capacity = asked;
        self.evict_to(asked);
        Ok(())
    }

    /// An entry that does not fit at all empties the table and is not kept (RFC 7541, section 4.4).
    fn insert(&mut self, name: Bytes, value: Bytes) {
        let size = name.len() + value.len() + ENTRY_OVERHEAD;
        self.evict_to(self.capacity.saturating_sub(size));
        if self.size + size <= self.capacity {
            self.size += size;
            self.entries.push_front((name, value));
        }
    }

    fn evict_to(&mut self, size: usize) {
        while self.size > size {
            let Some((name, value)) = self.entries.pop_back() else {
                return;
            };
            self.size -= name.len() + value.len() + ENTRY_OVERHEAD;
        }
    }
}
