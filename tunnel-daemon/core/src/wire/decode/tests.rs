//! Tests of the decoder against prost: the result is the same for every split.

use bytes::{BufMut as _, Bytes};
use proptest::prelude::*;
use prost::Message as _;

use super::*;
use crate::ids::DialId;

fn frame(message: &[u8]) -> Vec<u8> {
    let mut out = vec![0];
    out.put_u32(u32::try_from(message.len()).unwrap());
    out.extend_from_slice(message);
    out
}

/// `stream`, cut at `cuts` modulo its length.
fn pieces<'a>(stream: &'a [u8], cuts: &[usize]) -> Vec<&'a [u8]> {
    let mut ends: Vec<usize> = cuts.iter().map(|cut| cut % (stream.len() + 1)).collect();
    ends.push(stream.len());
    ends.sort_unstable();
    let mut at = 0;
    ends.into_iter()
        .map(|end| &stream[std::mem::replace(&mut at, end)..end])
        .collect()
}

/// Feeds `stream` cut at `cuts`, joining adjacent DATA of one connection.
fn decode(stream: &[u8], cuts: &[usize]) -> Result<Vec<Received>, StreamError> {
    let mut decoder = Decoder::default();
    let mut out: Vec<Received> = Vec::new();
    for piece in pieces(stream, cuts) {
        decoder.push(Bytes::copy_from_slice(piece));
        while let Some(received) = decoder.next()? {
            if let (
                Some(Received::Packet(Packet::Data {
                    conn: last,
                    bytes: have,
                })),
                Received::Packet(Packet::Data { conn, bytes }),
            ) = (out.last_mut(), &received)
                && last == conn
            {
                *have = [&have[..], &bytes[..]].concat().into();
                continue;
            }
            out.push(received);
        }
    }
    decoder.finish()?;
    Ok(out)
}

/// The number of packets counted for `stream`, cut at `cuts`.
fn counted(stream: &[u8], cuts: &[usize]) -> usize {
    let mut decoder = Decoder::default();
    let mut count = 0;
    for piece in pieces(stream, cuts) {
        decoder.push(Bytes::copy_from_slice(piece));
        while let Some(received) = decoder.next().unwrap() {
            assert!(matches!(received, Received::Packet(_)), "{received:?}");
            count += usize::from(!decoder.is_inside_data());
        }
    }
    count
}

fn packet() -> impl Strategy<Value = Packet> {
    let id = prop_oneof![
        Just(1_i64),
        any::<i64>().prop_filter("0 is none", |id| *id != 0)
    ];
    let bytes = proptest::collection::vec(any::<u8>(), 1..3000).prop_map(Bytes::from);
    prop_oneof![
        (any::<i64>(), ".{0,20}", ".{0,40}", any::<u64>()).prop_map(
            |(dial, protocol, address, window)| {
                Packet::DialReq {
                    dial: DialId(dial),
                    protocol,
                    address,
                    window,
                }
            }
        ),
        (any::<i64>(), any::<i64>(), ".{0,40}", any::<u64>()).prop_map(
            |(dial, conn, error, window)| {
                Packet::DialRsp {
                    dial: DialId(dial),
                    conn: ConnId(conn),
                    error,
                    window,
                }
            }
        ),
        any::<i64>().prop_map(|conn| Packet::CloseReq { conn: ConnId(conn) }),
        (any::<i64>(), ".{0,40}").prop_map(|(conn, error)| Packet::CloseRsp {
            conn: ConnId(conn),
            error
        }),
        (id, bytes).prop_map(|(conn, bytes)| Packet::Data {
            conn: ConnId(conn),
            bytes
        }),
        any::<i64>().prop_map(|dial| Packet::DialCls { dial: DialId(dial) }),
        any::<i64>().prop_map(|conn| Packet::Reset { conn: ConnId(conn) }),
        Just(Packet::Drain),
        (any::<i64>(), any::<u64>()).prop_map(|(conn, bytes)| Packet::Window {
            conn: ConnId(conn),
            bytes
        }),
    ]
}

proptest! {
    #[test]
    fn any_split_gives_the_packets_that_were_sent(
        packets in proptest::collection::vec(packet(), 1..8),
        cuts in proptest::collection::vec(any::<usize>(), 0..12),
    ) {
        let mut stream = Vec::new();
        let mut expected: Vec<Received> = Vec::new();
        let sent = packets.len();
        for packet in packets {
            stream.extend(frame(&packet.clone().into_raw().encode_to_vec()));
            match (expected.last_mut(), &packet) {
                (Some(Received::Packet(Packet::Data { conn: last, bytes: have })), Packet::Data { conn, bytes })
                    if last == conn => *have = [&have[..], &bytes[..]].concat().into(),
                _ => expected.push(Received::Packet(packet)),
            }
        }
        prop_assert_eq!(decode(&stream, &cuts), Ok(expected));
        prop_assert_eq!(counted(&stream, &cuts), sent);
    }

    #[test]
    fn garbage_never_panics(stream in proptest::collection::vec(any::<u8>(), 0..600), cuts in proptest::collection::vec(any::<usize>(), 0..6)) {
        let _outcome = decode(&stream, &cuts);
    }
}

#[test]
fn the_last_piece_of_a_data_message_is_recognized() {
    let data = Packet::Data {
        conn: ConnId(5),
        bytes: vec![7; 3000].into(),
    };
    let message = frame(&data.into_raw().encode_to_vec());
    let mut decoder = Decoder::default();
    let more = message.chunks(1500).map(|piece| {
        decoder.push(Bytes::copy_from_slice(piece));
        let received = decoder.next().unwrap();
        assert!(matches!(received, Some(Received::Packet(_))));
        let more = decoder.is_inside_data();
        assert_eq!(decoder.next(), Ok(None));
        more
    });
    assert_eq!(more.collect::<Vec<_>>(), [true, true, false]);
}

#[test]
fn an_empty_message_is_a_dial_request_without_payload() {
    assert_eq!(
        decode(&frame(&[]), &[]),
        Ok(vec![Received::Violation(Violation::PayloadMismatch(0))])
    );
}

#[test]
fn unknown_types_and_wrong_payloads_are_named() {
    assert_eq!(
        decode(&frame(&[0x08, 0x63]), &[]),
        Ok(vec![Received::Unknown(99)])
    );
    let mut raw = Packet::DialCls { dial: DialId(7) }.into_raw();
    raw.r#type = 4;
    let got = decode(&frame(&raw.encode_to_vec()), &[]);
    assert_eq!(
        got,
        Ok(vec![Received::Violation(Violation::PayloadMismatch(4))])
    );
}

#[test]
fn empty_data_yields_no_bytes_and_connection_id_zero_is_a_violation() {
    let empty = Packet::Data {
        conn: ConnId(3),
        bytes: Bytes::new(),
    }
    .into_raw()
    .encode_to_vec();
    let got = decode(&frame(&empty), &[]).unwrap();
    let silent = got
        .iter()
        .all(|r| matches!(r, Received::Packet(Packet::Data { bytes, .. }) if bytes.is_empty()));
    assert!(silent, "{got:?}");
    let zero = Packet::Data {
        conn: ConnId(0),
        bytes: Bytes::from_static(b"x"),
    }
    .into_raw()
    .encode_to_vec();
    assert_eq!(
        decode(&frame(&zero), &[]),
        Ok(vec![Received::Violation(Violation::DataWithoutConn)])
    );
}

/// Limit (sizes): gRPC message | 4 MiB of `DATA`; 16 KiB of any other packet
#[test]
fn a_message_over_the_limit_is_skipped_and_named_and_the_next_one_is_read() {
    let big = Packet::Data {
        conn: ConnId(5),
        bytes: vec![0; MESSAGE_BYTES_MAX + 1].into(),
    };
    let mut stream = frame(&big.into_raw().encode_to_vec());
    stream.extend(frame(&Packet::Drain.into_raw().encode_to_vec()));
    let expected = vec![
        Received::Violation(Violation::Oversize(Some(ConnId(5)))),
        Received::Packet(Packet::Drain),
    ];
    assert_eq!(decode(&stream, &[70_000, 2_000_000]), Ok(expected));
}

/// Limit (sizes): gRPC message
#[test]
fn a_full_size_message_passes() {
    let payload = MESSAGE_BYTES_MAX - 20;
    let full = Packet::Data {
        conn: ConnId(5),
        bytes: vec![7; payload].into(),
    };
    let got = decode(&frame(&full.clone().into_raw().encode_to_vec()), &[100_000]);
    assert_eq!(got, Ok(vec![Received::Packet(full)]));
}

/// A peer that starts long messages and never ends them would otherwise occupy that much memory for each stream.
///
/// Limit (sizes): gRPC message
/// Limit (memory): Incomplete gRPC messages | 16 KiB per call or link
#[test]
fn collected_message_bytes_are_bounded_and_excess_is_skipped() {
    let text = "x".repeat(COLLECTED_BYTES_MAX);
    let odd = raw::Packet {
        payload: Some(raw::packet::Payload::Data(raw::Data {
            connect_id: 5,
            error: "not what peers send".to_owned(),
            data: vec![0; COLLECTED_BYTES_MAX].into(),
        })),
        r#type: raw::PacketType::Data.into(),
    };
    let dial = Packet::DialReq {
        dial: DialId(1),
        protocol: "tcp".to_owned(),
        address: text.clone(),
        window: 0,
    };
    let close = Packet::CloseRsp {
        conn: ConnId(5),
        error: text,
    };
    for message in [odd, dial.into_raw(), close.into_raw()] {
        let mut stream = frame(&message.encode_to_vec());
        let mut decoder = Decoder::default();
        decoder.push(Bytes::copy_from_slice(&stream[..COLLECTED_BYTES_MAX]));
        let oversize = Received::Violation(Violation::Oversize(None));
        assert_eq!(decoder.next(), Ok(Some(oversize.clone())));
        assert_eq!(decoder.next(), Ok(None));
        assert_eq!((decoder.available(), decoder.joined.capacity()), (0, 0));
        stream.extend(frame(&Packet::Drain.into_raw().encode_to_vec()));
        let expected = vec![oversize, Received::Packet(Packet::Drain)];
        assert_eq!(decode(&stream, &[1000]), Ok(expected));
    }
}

#[test]
fn compression_and_truncation_end_the_stream() {
    assert_eq!(
        decode(&[1, 0, 0, 0, 0], &[]),
        Err(StreamError::Compressed(1))
    );
    assert_eq!(
        decode(&[0, 0, 0, 0, 9, 8], &[]),
        Err(StreamError::Truncated)
    );
}

#[test]
fn a_message_beyond_64_mebibytes_ends_the_stream() {
    let mut decoder = Decoder::default();
    let skipped = u32::try_from(16 * MESSAGE_BYTES_MAX).unwrap();
    let mut prefix = vec![0];
    prefix.extend((skipped + 1).to_be_bytes());
    decoder.push(prefix.into());
    assert_eq!(
        decoder.next(),
        Err(StreamError::TooLong(16 * MESSAGE_BYTES_MAX + 1))
    );
    let mut decoder = Decoder::default();
    let mut prefix = vec![0];
    prefix.extend(skipped.to_be_bytes());
    decoder.push(prefix.into());
    assert_eq!(decoder.next(), Ok(None));
}

/// A budget counts the bytes that an endpoint holds. These bytes must not keep the buffer around them alive, since the
/// peer chooses its size.
#[test]
fn a_piece_keeps_little_beside_its_own_bytes() {
    let data = |conn, length| {
        let bytes = vec![7; length].into();
        let conn = ConnId(conn);
        frame(&Packet::Data { conn, bytes }.into_raw().encode_to_vec())
    };
    for held in [1, COPY_BELOW_BYTES, 50_000] {
        let stream = Bytes::from([data(1, held), data(2, 200_000)].concat());
        let mut decoder = Decoder::default();
        decoder.push(stream.clone());
        let Ok(Some(Received::Packet(Packet::Data { bytes, .. }))) = decoder.next() else {
            panic!("no data of {held} bytes");
        };
        while decoder.next().unwrap().is_some() {}
        assert_eq!(bytes, vec![7; held]);
        assert!(stream.is_unique(), "{held} bytes keep all of it");
    }
    let whole = Bytes::from(data(1, 200_000));
    let mut decoder = Decoder::default();
    decoder.push(whole.clone());
    let kept = decoder.next();
    assert!(matches!(kept, Ok(Some(Received::Packet(_)))));
    assert!(!whole.is_unique(), "most of a frame is not copied");
}

/// The same holds for DATA in a message of unusual shape: a budget counts its data only.
#[test]
fn a_piece_keeps_nothing_of_the_other_fields_of_its_message() {
    for held in [1, COPY_BELOW_BYTES, 2000] {
        let data = raw::Data {
            connect_id: 1,
            error: "x".repeat(COLLECTED_BYTES_MAX - 3000),
            data: vec![7; held].into(),
        };
        let message = raw::Packet {
            r#type: raw::PacketType::Data.into(),
            payload: Some(raw::packet::Payload::Data(data)),
        };
        let stream = Bytes::from(frame(&message.encode_to_vec()));
        let mut decoder = Decoder::default();
        decoder.push(stream.clone());
        let Ok(Some(Received::Packet(Packet::Data { bytes, .. }))) = decoder.next() else {
            panic!("no data of {held} bytes");
        };
        assert_eq!(decoder.next(), Ok(None));
        assert_eq!(bytes, vec![7; held]);
        assert!(stream.is_unique(), "{held} bytes keep all of it");
    }
}

/// The same holds for joined buffers: of a long message without data, and of a message head that is split repeatedly.
#[test]
fn joined_buffers_are_not_kept_by_pieces_or_the_stream() {
    let long = Packet::CloseRsp {
        conn: ConnId(1),
        error: "x".repeat(COLLECTED_BYTES_MAX - 100),
    };
    let crumb = Packet::Data {
        conn: ConnId(2),
        bytes: Bytes::from_static(b"y"),
    };
    let [long, crumb] = [long, crumb].map(|packet| frame(&packet.into_raw().encode_to_vec()));
    let mut decoder = Decoder::default();
    let mut small_chunks = Vec::new();
    let stream = [long, crumb].concat();
    let (first, rest) = stream.split_at(100);
    let (second, third) = rest.split_at(rest.len() - 2);
    for piece in [first, second, third] {
        decoder.push(Bytes::copy_from_slice(piece));
        while let Some(received) = decoder.next().unwrap() {
            if let Received::Packet(Packet::Data { bytes, .. }) = received {
                small_chunks.push(bytes);
            }
        }
    }
    assert_eq!(small_chunks, ["y"]);
    assert!(small_chunks.iter().all(Bytes::is_unique));
    assert_eq!(decoder.joined.capacity(), 0);
}
