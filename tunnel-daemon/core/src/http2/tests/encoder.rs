//! An HPACK encoder and framer whose caller makes every choice, and the reader of the rewritten stream.

use std::collections::VecDeque;

use bytes::{BufMut, BytesMut};

use crate::http2::{
    frame::{CONTINUATION, END_HEADERS, FrameHeader, HEADERS, PADDED, PREFACE, PRIORITY},
    hpack::write_integer,
    huffman::code_of,
};

/// Name and value.
pub(super) type Field = (Vec<u8>, Vec<u8>);

/// How the encoder writes one field where HPACK permits several forms.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Choice {
    /// 0: incremental indexing; 1: without indexing; 2: never indexed.
    pub(super) kind: u8,
    pub(super) whole_by_index: bool,
    pub(super) name_by_index: bool,
    pub(super) huffman_name: bool,
    pub(super) huffman_value: bool,
}

/// The static table entries used here: index and name.
const STATIC: [(usize, &str); 4] = [
    (1, ":authority"),
    (4, ":path"),
    (38, "host"),
    (58, "user-agent"),
];

/// An HPACK encoder whose caller chooses the form of each field.
pub(super) struct Encoder {
    table: VecDeque<Field>,
    capacity: usize,
}

impl Encoder {
    pub(super) fn new() -> Self {
        Self {
            table: VecDeque::new(),
            capacity: 4096,
        }
    }

    fn evict(&mut self) {
        let size = |table: &VecDeque<Field>| {
            table
                .iter()
                .map(|(n, v)| n.len() + v.len() + 32)
                .sum::<usize>()
        };
        while size(&self.table) > self.capacity {
            self.table.pop_back();
        }
    }

    pub(super) fn resize(&mut self, capacity: usize, out: &mut BytesMut) {
        self.capacity = capacity;
        self.evict();
        write_integer(capacity, 5, 0x20, out);
    }

    pub(super) fn field(&mut self, (name, value): &Field, how: Choice, out: &mut BytesMut) {
        let whole = self
            .table
            .iter()
            .position(|entry| entry.0 == *name && entry.1 == *value);
        if let (Some(nth), true) = (whole, how.whole_by_index) {
            return write_integer(62 + nth, 7, 0x80, out);
        }
        let in_static = STATIC
            .iter()
            .find(|entry| entry.1.as_bytes() == name)
            .map(|entry| entry.0);
        let in_dynamic = self
            .table
            .iter()
            .position(|entry| entry.0 == *name)
            .map(|nth| 62 + nth);
        let index = in_dynamic
            .or(in_static)
            .filter(|_| how.name_by_index)
            .unwrap_or(0);
        match how.kind {
            0 => write_integer(index, 6, 0x40, out),
            1 => write_integer(index, 4, 0x00, out),
            _ => write_integer(index, 4, 0x10, out),
        }
        if index == 0 {
            string(name, how.huffman_name, out);
        }
        string(value, how.huffman_value, out);
        if how.kind == 0 {
            self.table.push_front((name.clone(), value.clone()));
            self.evict();
        }
    }
}

fn string(text: &[u8], huffman: bool, out: &mut BytesMut) {
    if !huffman {
        write_integer(text.len(), 7, 0, out);
        return out.put_slice(text);
    }
    let mut bits = String::new();
    for &octet in text {
        let (code, len) = code_of(octet);
        bits.push_str(&format!("{code:0len$b}"));
    }
    while !bits.len().is_multiple_of(8) {
        bits.push('1');
    }
    write_integer(bits.len() / 8, 7, 0x80, out);
    for octet in bits.as_bytes().chunks(8) {
        out.put_u8(u8::from_str_radix(std::str::from_utf8(octet).unwrap(), 2).unwrap());
    }
}

pub(super) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8], out: &mut BytesMut) {
    FrameHeader {
        payload_len: payload.len(),
        kind,
        flags,
        stream,
    }
    .write(out);
    out.put_slice(payload);
}

/// How a header block is split into frames.
#[derive(Clone, Debug, Default)]
pub(super) struct Framing {
    pub(super) padding: Option<u8>,
    pub(super) priority: bool,
    /// Offsets at which the block is cut, modulo its length.
    pub(super) cuts: Vec<usize>,
}

pub(super) fn header_frames(block: &[u8], stream: u32, how: &Framing, out: &mut BytesMut) {
    let mut cuts: Vec<usize> = how.cuts.iter().map(|cut| cut % (block.len() + 1)).collect();
    cuts.sort_unstable();
    let mut parts = Vec::new();
    let mut at = 0;
    for cut in cuts.into_iter().chain([block.len()]) {
        parts.push(&block[at..cut]);
        at = cut;
    }
    for (nth, part) in parts.iter().enumerate() {
        let end = if nth + 1 == parts.len() {
            END_HEADERS
        } else {
            0
        };
        if nth > 0 {
            frame(CONTINUATION, end, stream, part, out);
            continue;
        }
        let mut payload = BytesMut::new();
        let mut flags = end;
        if let Some(padding) = how.padding {
            flags |= PADDED;
            payload.put_u8(padding);
        }
        if how.priority {
            flags |= PRIORITY;
            payload.put_slice(&[0x80, 0, 0, 1, 7]);
        }
        payload.put_slice(part);
        payload.put_bytes(0, usize::from(how.padding.unwrap_or(0)));
        frame(HEADERS, flags, stream, &payload, out);
    }
}

/// Decoded header blocks, and the other frames unchanged.
pub(super) type ReadBack = (Vec<Vec<Field>>, Vec<(FrameHeader, Vec<u8>)>);

/// Reads a whole stream with an independent HPACK decoder.
pub(super) fn read_back(mut stream: &[u8]) -> ReadBack {
    stream = stream.strip_prefix(PREFACE).unwrap();
    let mut decoder = loona_hpack::Decoder::new();
    let (mut blocks, mut others, mut fragment) = (Vec::new(), Vec::new(), Vec::new());
    while let Some(header) = FrameHeader::read(stream) {
        let mut payload = &stream[9..header.frame_len()];
        stream = &stream[header.frame_len()..];
        if header.kind != HEADERS && header.kind != CONTINUATION {
            others.push((header, payload.to_vec()));
            continue;
        }
        assert!(header.payload_len <= 16_384);
        if header.has(PADDED) {
            payload = &payload[1..payload.len() - usize::from(payload[0])];
        }
        if header.has(PRIORITY) {
            assert_eq!(payload[..5], [0x80, 0, 0, 1, 7]);
            payload = &payload[5..];
        }
        fragment.extend_from_slice(payload);
        if header.has(END_HEADERS) {
            blocks.push(decoder.decode(&std::mem::take(&mut fragment)).unwrap());
        }
    }
    assert!(stream.is_empty() && fragment.is_empty());
    (blocks, others)
}
