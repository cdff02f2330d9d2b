//! Frames of a lane, out and in.

use std::hint::black_box;

use adit_core::lane::{FrameReader, FrameType, Header, OutFrame, Piece};
use bytes::{Bytes, BytesMut};

use crate::operation::Operation;

/// Payload of an echo, and of bulk.
const SIZES: [usize; 2] = [64, 256 << 10];
/// Frames of one read.
const FRAMES: usize = 8;

fn frame(size: usize) -> OutFrame {
    OutFrame {
        header: Header {
            kind: FrameType::Data,
            flags: 0,
            sequence: 9,
            length: u32::try_from(size).expect("a small size"),
        },
        payload: Bytes::from(vec![7; size]),
    }
}

fn decode(reader: &mut FrameReader, input: Bytes) -> usize {
    reader.push(input);
    let mut payload = 0;
    while let Some(piece) = reader.next_piece().expect("well-formed") {
        if let Piece::Data { bytes, .. } = piece {
            payload += bytes.len();
        }
    }
    payload
}

/// All of this file.
pub(super) fn operations() -> impl Iterator<Item = Operation> {
    let header = Operation::new("frame", "encode/header", || {
        let header = frame(64).header;
        move || {
            black_box(black_box(header).to_bytes());
        }
    });
    let decode = SIZES.into_iter().map(|size| {
        Operation::new("frame", "decode/8-frames", move || decode_frames(size))
            .with(size)
            .moving(size * FRAMES)
    });
    std::iter::once(header).chain(decode)
}

fn decode_frames(size: usize) -> impl FnMut() {
    let mut input = BytesMut::new();
    for _ in 0..FRAMES {
        input.extend_from_slice(&frame(size).to_bytes());
    }
    let input = input.freeze();
    let mut reader = FrameReader::default();
    move || {
        let payload = decode(&mut reader, black_box(input.clone()));
        assert_eq!(payload, size * FRAMES);
    }
}
