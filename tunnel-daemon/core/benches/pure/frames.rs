//! Frames of a lane, out and in.

use std::hint::black_box;

use adit_core::lane::{FrameReader, FrameType, Header, OutFrame, Piece};
use bytes::{Bytes, BytesMut};
use criterion::{BenchmarkId, Criterion, Throughput};

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

pub(super) fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("frame");
    group.bench_function("encode/header", |bencher| {
        let header = frame(64).header;
        bencher.iter(|| black_box(header).to_bytes());
    });
    for size in SIZES {
        let mut input = BytesMut::new();
        for _ in 0..FRAMES {
            input.extend_from_slice(&frame(size).to_bytes());
        }
        let input = input.freeze();
        group.throughput(Throughput::Bytes((size * FRAMES) as u64));
        group.bench_function(BenchmarkId::new("decode/8-frames", size), |bencher| {
            let mut reader = FrameReader::default();
            bencher.iter(|| {
                let payload = decode(&mut reader, black_box(input.clone()));
                assert_eq!(payload, size * FRAMES);
            });
        });
    }
    group.finish();
}
