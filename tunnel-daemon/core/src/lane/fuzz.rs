//! Entry point of the fuzz target `lane`.

use bytes::Bytes;

use super::{FrameReader, LaneEnd, LaneEvent, LaneRole, OpenRequest, Piece};

/// Most queued frames other than DATA.
const FRAMES_MAX: usize = 100;
/// Most bytes used of one input.
const INPUT_BYTES_MAX: usize = 1 << 16;

/// The first byte selects role, initial state and chunk size; the rest is the peer's stream. The state machine must not
/// panic, events must not depend on the chunk size, and the queue of frames must stay bounded.
///
/// # Panics
/// When one of these properties is violated.
pub fn fuzz_entry(input: &[u8]) {
    let Some((&choice, stream)) = input.split_first() else {
        return;
    };
    let stream = stream
        .get(..INPUT_BYTES_MAX.min(stream.len()))
        .unwrap_or_default();
    let whole = play(choice, stream, stream.len().max(1));
    let cut = play(choice, stream, usize::from(choice >> 3) + 1);
    assert_eq!(whole, cut, "the cut of the stream changed what it means");
}

/// Events with neighbouring data joined, and whether the peer broke the protocol.
fn play(choice: u8, stream: &[u8], chunk: usize) -> (Vec<LaneEvent>, bool) {
    let role = if choice & 1 == 0 {
        LaneRole::Server
    } else {
        LaneRole::Agent
    };
    let mut end = LaneEnd::new(role);
    if choice & 2 != 0 {
        let request = OpenRequest {
            protocol: "tcp".to_owned(),
            address: "a:1".to_owned(),
            raw: choice & 32 != 0,
            origin: None,
            forward: None,
        };
        assert_eq!(end.open(&request, 0), Ok(()), "a new lane is free");
    }
    let resets = choice & 4 != 0;
    let reads_nothing = choice & 8 != 0;
    let (mut reader, mut events) = (FrameReader::default(), Vec::new());
    for part in stream.chunks(chunk) {
        reader.push(Bytes::copy_from_slice(part));
        loop {
            if end.is_raw() {
                let rest = reader.take_rest();
                assert!(rest.is_some(), "frames end between two of them");
                if let Some(rest) = rest.filter(|rest| !rest.is_empty()) {
                    note(&mut events, LaneEvent::Data(rest));
                }
                break;
            }
            let piece = match reader.next_piece() {
                Ok(Some(piece)) => piece,
                Ok(None) => break,
                Err(_violation) => return (events, true),
            };
            let handled = end.handle(piece);
            while let Some(event) = end.poll_event() {
                if matches!(event, LaneEvent::Open(_)) {
                    end.accept();
                }
                note(&mut events, event);
            }
            if handled.is_err() {
                return (events, true);
            }
            if resets && matches!(events.last(), Some(LaneEvent::PeerFin)) {
                end.reset("");
            }
            if reads_nothing {
                assert!(end.queued_frames() <= FRAMES_MAX, "answers pile up");
                continue;
            }
            while let Some(frame) = end.poll_frame() {
                check(&frame.to_bytes());
            }
        }
    }
    (events, false)
}

fn note(events: &mut Vec<LaneEvent>, event: LaneEvent) {
    if let (Some(LaneEvent::Data(before)), LaneEvent::Data(more)) = (events.last_mut(), &event) {
        *before = [&before[..], &more[..]].concat().into();
    } else {
        events.push(event);
    }
}

/// Checks that a written frame can be parsed.
fn check(frame: &Bytes) {
    let mut reader = FrameReader::default();
    reader.push(frame.clone());
    let piece = reader.next_piece();
    assert!(
        matches!(piece, Ok(Some(Piece::Frame(..) | Piece::Data { .. }))),
        "unreadable: {piece:?}"
    );
    assert!(reader.is_at_boundary(), "more than one frame");
}
