//! Tests of lane frames: accepted order and size, greetings, and violations.

use super::*;
use crate::ids::{LinkId, ServerId};

#[test]
fn unexpected_frames_end_the_lane() {
    let frame = |kind, sequence, payload| frame(kind, 0, sequence, payload);
    let data = |sequence| Piece::Data {
        sequence,
        bytes: Bytes::from_static(b"x"),
    };
    for piece in [
        data(0),
        data(1),
        frame(FrameType::Opened, 0, b""),
        frame(FrameType::Fin, 0, b""),
        frame(FrameType::Reset, 1, b""),
        frame(FrameType::ResetAck, 0, b""),
        frame(FrameType::Open, 2, b"\0\x03tcpa:1"),
        frame(FrameType::Open, 0, b"\0\x03tcpa:1"),
        frame(FrameType::Open, 1, b"\0"),
        frame(FrameType::Open, 1, b"\0\x09tcp"),
        frame(FrameType::Open, 1, b"\0\x03t\xffp"),
        frame(FrameType::Ping, 0, b"short"),
        frame(FrameType::Want, 0, b"\0\0\0\x01"),
        frame(FrameType::Hello, 0, b""),
    ] {
        let mut end = LaneEnd::new(LaneRole::Server);
        let handled = end.handle(piece.clone());
        assert!(handled.is_err(), "{piece:?}");
    }
    // Late frames of earlier tunnels are ignored.
    let mut pair = Pair::opened();
    for piece in [data(0), frame(FrameType::Reset, 0xffff, b"")] {
        pair.ends[SERVER].handle(piece).unwrap();
    }
    assert_eq!(pair.take(SERVER), []);
    assert_eq!(
        pair.ends[SERVER].handle(frame(FrameType::Opened, 1, b"")),
        Err(LaneViolation::OutOfTurn(FrameType::Opened))
    );
}

/// A peer that causes answers and reads none loses its lane before the answer queue grows beyond its limit.
///
/// Limit (peers): PING answers and control frames queued on a lane | 16 and 64, then the lane ends
#[test]
fn unread_answers_are_bounded() {
    let frame = |kind, sequence, payload| {
        let closes = kind == FrameType::Fin;
        let flags = if closes { Header::CLOSE } else { 0 };
        frame(kind, flags, sequence, payload)
    };
    let open = b"\0\x03tcpa:1";
    type Flood = fn(u16) -> (FrameType, u16);
    let floods: [(&str, Flood); 3] = [
        ("old resets", |n| (FrameType::Reset, 0xfff0 + n % 2)),
        ("opens and resets", |n| {
            let kinds = [FrameType::Open, FrameType::Reset];
            (kinds[usize::from(n % 2)], 1 + n / 2)
        }),
        ("opens and closes", |n| {
            let kinds = [FrameType::Open, FrameType::Fin];
            (kinds[usize::from(n % 2)], 1 + n / 2)
        }),
    ];
    for (what, flood) in floods {
        let mut end = LaneEnd::new(LaneRole::Server);
        let handled = (0..10_000).try_for_each(|n| {
            let (kind, sequence) = flood(n);
            let payload = if kind == FrameType::Open {
                open
            } else {
                &b""[..]
            };
            end.handle(frame(kind, sequence, payload))?;
            end.accept();
            assert!(end.queued_frames() < 100, "{what}");
            Ok(())
        });
        assert!(matches!(handled, Err(LaneViolation::Unread(_))), "{what}");
    }
}

/// Limit (sizes): Payload of a lane frame | 1 MiB of DATA, 16 KiB of any other frame
#[test]
fn frames_of_unknown_types_are_skipped_and_long_ones_end_the_lane() {
    let mut reader = FrameReader::default();
    reader.push(Bytes::from_static(
        b"\x63\0\0\0\0\0\0\x03abc\x0b\0\0\0\0\0\0\0",
    ));
    assert_eq!(reader.next_piece(), Ok(Some(Piece::Unknown(0x63))));
    let drain = reader.next_piece().unwrap().unwrap();
    assert!(matches!(drain, Piece::Frame(header, _) if header.kind == FrameType::Drain));
    assert!(reader.is_at_boundary());
    for (head, too_long) in [
        (&b"\x04\0\0\0\0\x10\0\0"[..], None),
        (b"\x04\0\0\0\0\x10\0\x01", Some((4, 0x10_0001))),
        (b"\x05\0\0\0\0\0\x40\x01", Some((5, 0x4001))),
        (b"\xf0\0\0\0\0\0\x40\x01", Some((0xf0, 0x4001))),
    ] {
        let mut reader = FrameReader::default();
        reader.push(Bytes::from_static(head));
        let expected = match too_long {
            None => Ok(None),
            Some((kind, length)) => Err(LaneViolation::TooLong { kind, length }),
        };
        assert_eq!(reader.next_piece(), expected);
    }
}

#[test]
fn long_texts_and_addresses_are_cut_not_refused() {
    let mut pair = Pair::new();
    let long = OpenRequest {
        address: "é".repeat(20_000),
        ..request()
    };
    pair.ends[SERVER].open(&long, 0).unwrap();
    pair.settle();
    let seen = pair.take(AGENT);
    let [LaneEvent::Open(open)] = &seen[..] else {
        panic!("{} events", seen.len())
    };
    assert!(long.address.starts_with(&open.address) && open.address.len() > 16_000);
    pair.ends[AGENT].refuse(RefusalCode::Failed, &"ü".repeat(10_000));
    pair.settle();
    assert_eq!(pair.take(SERVER).len(), 2);
}

/// As on links: the text waits in memory until the endpoint takes it, and no budget counts it.
///
/// Limit (sizes): Text of a failed dial or close | the first 4 KiB are kept
#[test]
fn peer_text_is_truncated_to_four_kibibytes() {
    // Each byte is invalid UTF-8 and becomes a replacement character of three bytes.
    static LONG: [u8; CONTROL_BYTES_MAX] = [0xff; CONTROL_BYTES_MAX];
    for (kind, flags) in [
        (FrameType::Failed, 0),
        (FrameType::Fin, Header::CLOSE),
        (FrameType::Reset, 0),
    ] {
        let mut end = LaneEnd::new(LaneRole::Server);
        end.open(&request(), 0).unwrap();
        if kind != FrameType::Failed {
            end.handle(frame(FrameType::Opened, 0, 1, b"")).unwrap();
            assert_eq!(end.poll_event(), Some(LaneEvent::Opened));
        }
        end.handle(frame(kind, flags, 1, &LONG)).unwrap();
        let text = match end.poll_event().unwrap() {
            LaneEvent::Failed { text, .. }
            | LaneEvent::PeerClosed { text }
            | LaneEvent::PeerReset { text } => text,
            other => panic!("{kind:?}: {other:?}"),
        };
        let kept = (text.len(), text.capacity());
        assert!(kept.0 > 4000 && kept.1 <= 4096, "{kind:?}: {kept:?}");
    }
}

#[test]
fn greetings_round_trip_and_broken_ones_are_refused() {
    let hello = Hello {
        server: ServerId::new("server-1"),
        nonce: [7; NONCE_BYTES],
    };
    let bind = |clear, kernel_tls| Bind {
        link: LinkId(42),
        proof: [9; PROOF_BYTES],
        clear,
        kernel_tls,
    };
    let ready = |clear, kernel_tls| {
        let frame = Greeting::ready_frame(clear, kernel_tls);
        (frame, Greeting::Ready { clear, kernel_tls })
    };
    let bound = |clear, kernel_tls| {
        let bind = bind(clear, kernel_tls);
        (bind.to_frame(), Greeting::Bind(bind))
    };
    for (frame, greeting) in [
        (hello.to_frame(), Greeting::Hello(hello.clone())),
        bound(false, false),
        bound(true, false),
        bound(false, true),
        ready(false, false),
        ready(true, false),
        ready(false, true),
    ] {
        let mut reader = FrameReader::default();
        reader.push(frame.to_bytes());
        let piece = reader.next_piece().unwrap();
        let Some(Piece::Frame(header, payload)) = piece else {
            panic!("{piece:?}")
        };
        assert_eq!(Greeting::read(header, payload.clone()), Ok(greeting));
        if header.kind != FrameType::Ready {
            let short = payload.slice(..20);
            assert!(Greeting::read(header, short).is_err());
        }
    }
    let header = |kind| Header {
        kind,
        flags: 0,
        sequence: 0,
        length: 0,
    };
    assert!(Greeting::read(header(FrameType::Data), Bytes::new()).is_err());
    let long = Bytes::copy_from_slice(&[b'x'; NONCE_BYTES + 1025]);
    assert!(Greeting::read(header(FrameType::Hello), long).is_err());
    // Every part of the proof's input changes the result.
    let input = proof_input(&hello, LinkId(1), &[1; 32]);
    let mut other = hello.clone();
    other.nonce[31] = 0;
    for changed in [
        proof_input(&other, LinkId(1), &[1; 32]),
        proof_input(&hello, LinkId(2), &[1; 32]),
        proof_input(&hello, LinkId(1), &[2; 32]),
    ] {
        assert_ne!(changed, input);
    }
}
