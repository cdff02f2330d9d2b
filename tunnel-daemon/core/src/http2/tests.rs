//! Tests of the authority rewriter: its input comes from the encoder here, its output goes through an independent
//! decoder.

mod encoder;

use bytes::BytesMut;
use proptest::prelude::*;

use encoder::{Choice, Encoder, Field, Framing, frame, header_frames, read_back};

use super::{
    AuthorityRewriter, HandOver, HpackError, Limits, RewriteError,
    frame::{CONTINUATION, END_HEADERS, FrameHeader, HEADERS, PADDED, PREFACE},
    is_valid_authority, stand_in,
};

const DATA: u8 = 0x0;
const PATH: &str = "/run/konnectivity/server.sock";
const ENCODED_PATH: &str = "%2Frun%2Fkonnectivity%2Fserver.sock";

/// Runs a whole stream through a fresh rewriter: in pieces of the given lengths, then the rest.
fn run(stream: &[u8], pieces: &[usize]) -> (Result<BytesMut, RewriteError>, Option<HandOver>) {
    let mut rewriter = AuthorityRewriter::default();
    let (mut input, mut output) = (BytesMut::new(), BytesMut::new());
    let mut rest = stream;
    for piece in pieces.iter().copied().chain([usize::MAX]) {
        let (head, tail) = rest.split_at(piece.min(rest.len()));
        input.extend_from_slice(head);
        rest = tail;
        if let Err(error) = rewriter.rewrite(&mut input, &mut output) {
            return (Err(error), None);
        }
    }
    assert!(
        input.is_empty(),
        "something is left behind a complete stream"
    );
    (Ok(output), rewriter.handed_over())
}

fn rewritten(stream: &[u8]) -> BytesMut {
    let (output, handed_over) = run(stream, &[]);
    assert_eq!(handed_over, None);
    output.unwrap()
}

fn field(name: &str, value: &str) -> Field {
    (name.as_bytes().to_vec(), value.as_bytes().to_vec())
}

/// A connection of three requests that uses every feature a gRPC client may use, with DATA frames between them.
fn sample() -> BytesMut {
    let mut encoder = Encoder::new();
    let mut out = BytesMut::from(PREFACE);
    frame(0x4, 0, 0, &[0, 3, 0, 0, 0, 100], &mut out);
    let indexed = Choice {
        name_by_index: true,
        ..Choice::default()
    };
    let huffman = Choice {
        huffman_name: true,
        huffman_value: true,
        ..Choice::default()
    };
    let again = Choice {
        whole_by_index: true,
        name_by_index: true,
        ..Choice::default()
    };
    let requests = [
        (
            PATH,
            indexed,
            Framing {
                padding: Some(3),
                priority: true,
                cuts: vec![],
            },
        ),
        (
            ENCODED_PATH,
            huffman,
            Framing {
                padding: None,
                priority: false,
                cuts: vec![5, 6, 6, 40],
            },
        ),
        (
            PATH,
            again,
            Framing {
                padding: Some(0),
                priority: true,
                cuts: vec![1],
            },
        ),
    ];
    for (stream, (authority, how, framing)) in (1..).step_by(2).zip(requests) {
        let mut block = BytesMut::new();
        if stream == 3 {
            encoder.resize(200, &mut block);
        }
        encoder.field(&field(":path", "/ProxyService/Proxy"), how, &mut block);
        encoder.field(&field(":authority", authority), how, &mut block);
        encoder.field(&field("user-agent", "grpc-go/1.70"), how, &mut block);
        header_frames(&block, stream, &framing, &mut out);
        frame(DATA, 0, stream, b"/run/not/a/header \x01\x04\x00", &mut out);
        frame(DATA, 1, stream, b"", &mut out);
    }
    out
}

#[test]
fn both_forms_of_a_socket_path_are_replaced_and_nothing_else() {
    let (blocks, others) = read_back(&rewritten(&sample()));
    let (before, others_before) = read_back(&sample());
    assert_eq!(others, others_before);
    assert_eq!(blocks.len(), 3);
    for (after, before) in blocks.iter().zip(&before) {
        assert_eq!((&after[0], &after[2]), (&before[0], &before[2]));
        assert_eq!(after[1], (before[1].0.clone(), stand_in(&before[1].1)));
    }
    assert_eq!(
        blocks[0][1],
        field(":authority", "-run-konnectivity-server.sock")
    );
}

#[test]
fn the_output_is_the_same_for_a_split_at_every_byte() {
    let stream = sample();
    let whole = rewritten(&stream);
    for at in 0..=stream.len() {
        assert_eq!(run(&stream, &[at]).0.unwrap(), whole, "split at {at}");
    }
    assert_eq!(
        run(&stream, &vec![1; stream.len()]).0.unwrap(),
        whole,
        "byte by byte"
    );
}

#[test]
fn payload_of_other_frames_passes_without_a_copy() {
    let mut rewriter = AuthorityRewriter::default();
    assert_eq!(rewriter.pass(PREFACE), PREFACE.len());
    let mut chunk = BytesMut::new();
    frame(DATA, 0, 1, &[7; 70_000], &mut chunk);
    frame(DATA, 0, 1, &[7; 70_000], &mut chunk);
    assert_eq!(rewriter.pass(&chunk[..100_000]), 100_000);
    assert_eq!(rewriter.pass(&chunk[100_000..]), chunk.len() - 100_000);
}

#[test]
fn rewritten_block_beyond_the_frame_size_is_split_again() {
    // A slash takes six bits in Huffman code, and eight bits in the rewritten block.
    let mut block = BytesMut::new();
    let authority = ("/".repeat(20_000)).into_bytes();
    let how = Choice {
        kind: 1,
        huffman_value: true,
        ..Choice::default()
    };
    Encoder::new().field(&(b":authority".to_vec(), authority), how, &mut block);
    assert!(block.len() < 16_384);
    let mut stream = BytesMut::from(PREFACE);
    header_frames(&block, 1, &Framing::default(), &mut stream);
    let (blocks, _) = read_back(&rewritten(&stream));
    assert_eq!(blocks, [[field(":authority", &"-".repeat(20_000))]]);
}

/// Limit (memory): Incomplete header block of a gRPC client | 256 KiB per connection
#[test]
fn a_block_beyond_the_limit_is_an_error_before_it_is_held() {
    let mut stream = BytesMut::from(PREFACE);
    FrameHeader {
        payload_len: 300_000,
        kind: HEADERS,
        flags: END_HEADERS,
        stream: 1,
    }
    .write(&mut stream);
    let error = run(&stream, &[]).0.unwrap_err();
    assert_eq!(
        error,
        RewriteError::HeaderBlockTooLarge {
            len: 300_009,
            limit: 262_144
        }
    );
}

/// Limit (memory): Incomplete header block of a gRPC client
#[test]
fn endless_empty_continuations_are_an_error() {
    let mut stream = BytesMut::from(PREFACE);
    frame(HEADERS, 0, 1, &[], &mut stream);
    for _ in 0..30_000 {
        frame(CONTINUATION, 0, 1, &[], &mut stream);
    }
    assert!(matches!(
        run(&stream, &[]).0,
        Err(RewriteError::HeaderBlockTooLarge { limit: 262_144, .. })
    ));
}

/// Writer of frames that the rewriter cannot follow, and the reason it reports.
type Row<'a> = (&'a dyn Fn(&mut BytesMut), HandOver);

#[test]
fn unparsable_headers_and_all_later_bytes_pass_unchanged() {
    let interrupted = |out: &mut BytesMut| {
        frame(HEADERS, 0, 1, &[0x01], out);
        frame(DATA, 0, 1, b"x", out);
    };
    let headers = |payload: &'static [u8], flags: u8| {
        move |out: &mut BytesMut| frame(HEADERS, END_HEADERS | flags, 1, payload, out)
    };
    let table_too_large = HpackError::TableTooLarge {
        asked: 4097,
        limit: 4096,
    };
    let rows: [Row<'_>; 8] = [
        (&interrupted, HandOver::Interrupted),
        (&headers(&[5, 0], PADDED), HandOver::BadHeadersFrame),
        (&headers(&[0x80], 0), HpackError::NoSuchEntry(0).into()),
        (&headers(&[0xbe], 0), HpackError::NoSuchEntry(62).into()),
        (&headers(&[0x01, 9, b'/'], 0), HpackError::Truncated.into()),
        (
            &headers(&[0x01, 0x81, 0x00], 0),
            HpackError::BadHuffman.into(),
        ),
        (&headers(&[0x3f, 0xe2, 0x1f], 0), table_too_large.into()),
        (
            &headers(&[0xff, 0xff, 0xff, 0xff, 0xff, 1], 0),
            HpackError::IntegerTooLong.into(),
        ),
    ];
    for (write, why) in rows {
        let mut stream = BytesMut::from(PREFACE);
        write(&mut stream);
        frame(HEADERS, END_HEADERS, 3, b"\x01\x02/x", &mut stream);
        assert_eq!(run(&stream, &[]), (Ok(stream.clone()), Some(why)));
    }
}

#[test]
fn a_late_table_update_ends_the_rewriting() {
    let mut stream = BytesMut::from(PREFACE);
    frame(HEADERS, END_HEADERS, 1, &[0x82, 0x20], &mut stream);
    assert_eq!(
        run(&stream, &[]).1,
        Some(HpackError::LateTableUpdate.into())
    );
}

#[test]
fn another_protocol_passes_from_its_first_byte() {
    let stream = b"PRI GET / HTTP/1.1\r\n\r\n";
    for pieces in [vec![], vec![1; stream.len()]] {
        let (output, handed_over) = run(stream, &pieces);
        assert_eq!(
            (&output.unwrap()[..], handed_over),
            (&stream[..], Some(HandOver::NoPreface))
        );
    }
}

#[test]
fn limits_follow_what_the_server_announces() {
    let limits = Limits {
        header_table_len: 65_536,
        ..Limits::default()
    };
    let mut rewriter = AuthorityRewriter::new(limits);
    let mut stream = BytesMut::from(PREFACE);
    frame(HEADERS, END_HEADERS, 1, &[0x3f, 0xe2, 0x1f], &mut stream);
    rewriter.rewrite(&mut stream, &mut BytesMut::new()).unwrap();
    assert_eq!(rewriter.handed_over(), None);
}

/// One request of a random connection.
#[derive(Clone, Debug)]
struct Request {
    resizes: Vec<usize>,
    fields: Vec<(Field, Choice)>,
    framing: Framing,
    data: Vec<u8>,
}

fn any_field() -> impl Strategy<Value = Field> {
    let name = prop_oneof![
        3 => Just(":authority".to_owned()),
        2 => prop::sample::select(vec![":path", "host", "user-agent", ":authorit", ":authority2"]).prop_map(str::to_owned),
        1 => "[a-z-]{1,40}",
    ];
    let value = prop_oneof![
        4 => prop::sample::select(vec![PATH, ENCODED_PATH, "localhost:1", "[::1]:1", "", "a:b:c"])
            .prop_map(|value| value.as_bytes().to_vec()),
        2 => prop::collection::vec(any::<u8>(), 0..300),
    ];
    (name, value).prop_map(|(name, value)| (name.into_bytes(), value))
}

fn any_choice() -> impl Strategy<Value = Choice> {
    (0..3_u8, any::<[bool; 4]>()).prop_map(|(kind, [whole, name, huffman_name, huffman_value])| {
        Choice {
            kind,
            whole_by_index: whole,
            name_by_index: name,
            huffman_name,
            huffman_value,
        }
    })
}

fn any_request() -> impl Strategy<Value = Request> {
    let framing = (
        prop::option::of(any::<u8>()),
        any::<bool>(),
        prop::collection::vec(any::<usize>(), 0..4),
    )
        .prop_map(|(padding, priority, cuts)| Framing {
            padding,
            priority,
            cuts,
        });
    let resizes = prop_oneof![2 => Just(vec![]), 1 => prop::collection::vec(0..=4096_usize, 1..3)];
    // At least one field: the independent decoder refuses a block that holds only a table size update.
    let fields = prop::collection::vec((any_field(), any_choice()), 1..10);
    let data = prop::collection::vec(any::<u8>(), 0..60);
    (resizes, fields, framing, data).prop_map(|(resizes, fields, framing, data)| Request {
        resizes,
        fields,
        framing,
        data,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn an_independent_decoder_sees_all_fields_unchanged_but_refused_authorities(
        requests in prop::collection::vec(any_request(), 1..6),
        pieces in prop::collection::vec(0..50_usize, 0..40),
    ) {
        let mut encoder = Encoder::new();
        let mut stream = BytesMut::from(PREFACE);
        let mut expected = Vec::new();
        let mut data = Vec::new();
        for (nth, request) in (1_u32..).step_by(2).zip(&requests) {
            let mut block = BytesMut::new();
            request.resizes.iter().for_each(|&size| encoder.resize(size, &mut block));
            request.fields.iter().for_each(|(field, how)| encoder.field(field, *how, &mut block));
            header_frames(&block, nth, &request.framing, &mut stream);
            frame(DATA, 0, nth, &request.data, &mut stream);
            data.push(request.data.clone());
            expected.push(request.fields.iter().map(|((name, value), _)| {
                let replace = name == b":authority" && !value.is_empty() && !is_valid_authority(value);
                (name.clone(), if replace { stand_in(value) } else { value.clone() })
            }).collect::<Vec<_>>());
        }
        let (output, handed_over) = run(&stream, &pieces);
        prop_assert_eq!(handed_over, None);
        let (blocks, others) = read_back(&output.unwrap());
        prop_assert_eq!(blocks, expected);
        prop_assert_eq!(others.into_iter().map(|(_, payload)| payload).collect::<Vec<_>>(), data);
    }

    #[test]
    fn random_bytes_never_panic_and_no_split_changes_the_result(data in prop::collection::vec(any::<u8>(), 0..400)) {
        super::fuzz_entry(&data);
    }
}
