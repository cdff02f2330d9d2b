//! Entry point of the fuzz target `http2`: what a client's bytes mean does not depend on how they are cut.

use std::task::{Context, Poll, Waker};

use bytes::BytesMut;

use super::frame::PREFACE;
use super::{Http2Error, Http2Server, ServerLimits};

/// The result, the body of each call, and the answer.
type Outcome = (Result<(), Http2Error>, Vec<(String, Vec<u8>)>, Vec<u8>);

/// For the fuzz target and the test that replays its corpus. The first byte says how the rest is cut, which are the client's bytes
/// behind its preface.
///
/// # Panics
///
/// When the outcome depends on the cut.
pub fn fuzz_entry(data: &[u8]) {
    let [cut, frames @ ..] = data else { return };
    let mut bytes = PREFACE.to_vec();
    bytes.extend_from_slice(frames);
    let whole = outcome(&bytes, bytes.len());
    let pieces = outcome(&bytes, usize::from(*cut) + 1);
    assert_eq!(whole, pieces, "the outcome depends on how the input is cut");
}

fn outcome(bytes: &[u8], piece: usize) -> Outcome {
    let mut server = Http2Server::new(ServerLimits {
        calls_max: 4,
        window_bytes: 4096,
        output_bytes: 4096,
    });
    let mut input = BytesMut::new();
    let mut result = Ok(());
    for piece in bytes.chunks(piece) {
        input.extend_from_slice(piece);
        result = server.receive(&mut input, 4096);
        if result.is_err() {
            break;
        }
    }
    let mut calls = Vec::new();
    while let Some(call) = server.next_call() {
        let mut body = Vec::new();
        let cx = Context::from_waker(Waker::noop());
        while let Poll::Ready(Some(Ok(piece))) = server.poll_data(call.stream, &cx) {
            body.extend_from_slice(&piece);
        }
        calls.push((format!("{call:?}"), body));
    }
    let mut said = Vec::new();
    server.release_answers();
    said.extend_from_slice(server.output());
    (result, calls, said)
}
