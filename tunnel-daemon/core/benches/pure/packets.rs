//! gRPC messages of the upstream protocol, out and in.

use std::hint::black_box;

use adit_core::ids::{ConnId, DialId};
use adit_core::wire::decode::Decoder;
use adit_core::wire::encode::MessageBuf;
use adit_core::wire::packet::{Packet, Received};
use bytes::{Buf as _, Bytes};

use crate::operation::Operation;

/// Payload of an echo, of a packet to a Go peer, and of a large one to a gRPC client.
const SIZES: [usize; 3] = [64, 32 << 10, 1 << 20];
/// What HTTP/2 hands over at a time.
const FRAME_BYTES: usize = 16 << 10;

fn data(size: usize) -> Packet {
    Packet::Data {
        conn: ConnId(7_000_000_001),
        bytes: Bytes::from(vec![7; size]),
    }
}

fn dial() -> Packet {
    Packet::DialReq {
        dial: DialId(1 << 60),
        protocol: "tcp".to_owned(),
        address: "node-17.example.internal:10250".to_owned(),
        window: 0,
    }
}

/// The message in the pieces in which it arrives.
fn pieces(packet: Packet) -> Vec<Bytes> {
    let mut message = MessageBuf::packet(packet);
    let mut bytes = message.copy_to_bytes(message.remaining());
    let mut pieces = Vec::new();
    while !bytes.is_empty() {
        pieces.push(bytes.split_to(bytes.len().min(FRAME_BYTES)));
    }
    pieces
}

fn decode(pieces: Vec<Bytes>) -> usize {
    let mut decoder = Decoder::default();
    let mut payload = 0;
    for piece in pieces {
        decoder.push(piece);
        while let Some(received) = decoder.next().expect("well-formed") {
            if let Received::Packet(Packet::Data { bytes, .. }) = received {
                payload += bytes.len();
            }
        }
    }
    payload
}

/// All of this file.
pub(super) fn operations() -> impl Iterator<Item = Operation> {
    let dials = [
        // With the copy of its texts: a dial that was encoded is gone.
        Operation::new("packet", "encode/dial", || encode(dial())),
        Operation::new("packet", "decode/dial", || {
            let message = pieces(dial());
            move || {
                black_box(decode(black_box(message.clone())));
            }
        }),
    ];
    let data = SIZES.into_iter().flat_map(|size| {
        let encode = Operation::new("packet", "encode/data", move || encode(data(size)));
        let decode = Operation::new("packet", "decode/data", move || {
            let message = pieces(data(size));
            move || {
                let payload = decode(black_box(message.clone()));
                assert_eq!(payload, size);
            }
        });
        [encode, decode].map(|operation| operation.with(size).moving(size))
    });
    dials.into_iter().chain(data)
}

fn encode(packet: Packet) -> impl FnMut() {
    move || {
        black_box(MessageBuf::packet(black_box(packet.clone())));
    }
}
