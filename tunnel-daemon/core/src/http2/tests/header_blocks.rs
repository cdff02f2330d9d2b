//! Header blocks and what they may say.

use super::*;
use crate::http2::hpack::HpackError;

/// Sections 8.2, 8.3 and 8.1.1: such a request is reset, and no call begins.
#[test]
fn malformed_requests_are_reset() {
    let with = |more: (&'static str, &'static str)| [&CALL[..], &[more]].concat();
    let without = |name: &str| {
        let others = CALL.iter().filter(|(other, _)| *other != name);
        others.copied().collect::<Vec<_>>()
    };
    let changed = |name: &str, value: &'static str| {
        let all = CALL.iter().map(|field| {
            if field.0 == name {
                (field.0, value)
            } else {
                *field
            }
        });
        all.collect::<Vec<_>>()
    };
    for fields in [
        without(":method"),
        without(":scheme"),
        without(":path"),
        changed(":path", ""),
        changed(":method", "CONNECT"),
        changed("te", "gzip"),
        with((":path", "/twice")),
        with((":status", "200")),
        with(("Upper", "case")),
        with(("sp ace", "x")),
        with(("", "no name")),
        with(("connection", "close")),
        with(("transfer-encoding", "chunked")),
        with(("upgrade", "h3")),
        with(("x", "line\r\nbreak")),
        with(("x", " blank")),
        with(("content-length", "-1")),
        with(("content-length", "")),
        [&[("x", "regular before pseudo")][..], &CALL].concat(),
        [
            &CALL[..],
            &[("content-length", "1"), ("content-length", "2")],
        ]
        .concat(),
    ] {
        let mut peer = Peer::greeted();
        peer.feed(&frame(HEADERS, END_HEADERS, 1, &block(&fields)));
        assert_eq!(peer.reset(1), code::PROTOCOL_ERROR, "{fields:?}");
        assert_eq!(peer.0.next_call(), None, "{fields:?}");
        assert_eq!(peer.0.streams(), 0);
        peer.call(3);
    }
}

/// Sections 8.1.1 and 6.1: padding is no content.
#[test]
fn the_content_length_is_that_of_the_body() {
    let call = [&CALL[..], &[("content-length", "3")]].concat();
    for (body, is_good) in [
        (vec![frame(DATA, END_STREAM, 1, b"abc")], true),
        (
            vec![frame(DATA, END_STREAM | PADDED, 1, b"\x02abc\0\0")],
            true,
        ),
        (
            vec![
                frame(DATA, 0, 1, b"ab"),
                frame(HEADERS, END_HEADERS | END_STREAM, 1, &[]),
            ],
            false,
        ),
        (vec![frame(DATA, END_STREAM, 1, b"abcd")], false),
        (vec![frame(DATA, END_STREAM, 1, b"")], false),
    ] {
        let mut peer = Peer::greeted();
        peer.feed(&frame(HEADERS, END_HEADERS, 1, &block(&call)));
        peer.feed(&body.concat());
        if is_good {
            let id = peer.0.next_call().expect("a call").stream;
            assert_eq!(peer.data(id), Poll::Ready(Some(Ok("abc".into()))));
            assert_eq!(peer.data(id), Poll::Ready(None));
        } else {
            assert_eq!(peer.reset(1), code::PROTOCOL_ERROR);
            assert_eq!((peer.0.streams(), peer.0.next_call()), (0, None));
        }
    }
}

/// RFC 7541, appendix C.3 and C.4: the same three requests, plain and by Huffman's code.
#[test]
fn header_blocks_are_decoded_with_the_dynamic_table() {
    let plain: [&[u8]; 3] = [
        b"\x82\x86\x84\x41\x0fwww.example.com",
        b"\x82\x86\x84\xbe\x58\x08no-cache",
        b"\x82\x87\x85\xbf\x40\x0acustom-key\x0ccustom-value",
    ];
    let coded: [&[u8]; 3] = [
        b"\x82\x86\x84\x41\x8c\xf1\xe3\xc2\xe5\xf2\x3a\x6b\xa0\xab\x90\xf4\xff",
        b"\x82\x86\x84\xbe\x58\x86\xa8\xeb\x10\x64\x9c\xbf",
        b"\x82\x87\x85\xbf\x40\x88\x25\xa8\x49\xe9\x5b\xa9\x7d\x7f\x89\x25\xa8\x49\xe9\x5b\xb8\xe8\xb4\xbf",
    ];
    let common = ":method=GET :scheme=http :path=/ :authority=www.example.com";
    let wanted = [
        common.to_owned(),
        format!("{common} cache-control=no-cache"),
        ":method=GET :scheme=https :path=/index.html :authority=www.example.com custom-key=custom-value".to_owned(),
    ];
    for blocks in [plain, coded] {
        let mut fields = FieldDecoder::default();
        for (block, wanted) in blocks.iter().zip(&wanted) {
            let mut list = Vec::new();
            let decoded = fields.decode(block, |name, value| {
                let text = [name, b"=", value].concat();
                list.push(String::from_utf8(text).unwrap());
            });
            assert_eq!(decoded, Ok(()));
            assert_eq!(list.join(" "), *wanted);
        }
    }
}

/// RFC 7541, sections 4.2, 4.3 and 6.3.
#[test]
fn the_dynamic_table_has_a_size() {
    let mut fields = FieldDecoder::default();
    let nothing = |_: &[u8], _: &[u8]| ();
    assert_eq!(fields.decode(b"\x40\x01a\x01b\xbe", nothing), Ok(()));
    // Down to nothing and up again: the entry is gone.
    let gone = fields.decode(b"\x20\x3f\xe1\x1f\xbe", nothing);
    assert_eq!(gone, Err(HpackError::NoSuchEntry(62)));
    let mut fields = FieldDecoder::default();
    let large = fields.decode(b"\x3f\xe2\x1f", nothing);
    assert!(matches!(
        large,
        Err(HpackError::TableTooLarge { asked: 4097, .. })
    ));
    let late = FieldDecoder::default().decode(b"\x82\x20", nothing);
    assert_eq!(late, Err(HpackError::LateTableUpdate));
    // A field as large as the table empties it, and does not grow it.
    let mut fields = FieldDecoder::default();
    let value = vec![b'v'; 4096];
    let mut long = b"\x40\x01a\x7f\x81\x1f".to_vec();
    long.extend_from_slice(&value);
    assert_eq!(fields.decode(b"\x40\x01a\x01b", nothing), Ok(()));
    assert_eq!(fields.decode(&long, nothing), Ok(()));
    assert!(fields.decode(b"\xbe", nothing).is_err());
}

proptest::proptest! {
    /// Another implementation's encoder, with its table and its Huffman code.
    #[test]
    fn blocks_of_another_encoder_are_decoded(
        lists in proptest::collection::vec(
            proptest::collection::vec(("[a-z]{1,12}", "[ -~]{0,60}"), 0..8),
            1..8,
        ),
    ) {
        let mut encoder = loona_hpack::Encoder::new();
        let mut fields = FieldDecoder::default();
        for list in lists {
            let pairs = list.iter().map(|(name, value)| (name.as_bytes(), value.as_bytes()));
            let block = encoder.encode(pairs);
            let mut decoded = Vec::new();
            let result = fields.decode(&block, |name, value| {
                let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
                decoded.push((text(name), text(value)));
            });
            proptest::prop_assert_eq!(result, Ok(()));
            proptest::prop_assert_eq!(decoded, list);
        }
    }
}
