//! Tests of the authority rewriter under the real `h2` server, with hand-made client bytes.

use bytes::{BufMut, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use super::*;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const HEADERS: u8 = 0x1;
const RST_STREAM: u8 = 0x3;
const END_STREAM: u8 = 0x1;
const END_HEADERS: u8 = 0x4;
/// Payload of one request; all three together fit a window of 64 KiB.
const BODY_LEN: usize = 20_000;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8], out: &mut BytesMut) {
    out.put_uint(u64::try_from(payload.len()).unwrap(), 3);
    out.put_u8(kind);
    out.put_u8(flags);
    out.put_u32(stream);
    out.put_slice(payload);
}

fn text(first: &[u8], value: &str, out: &mut BytesMut) {
    out.put_slice(first);
    out.put_u8(u8::try_from(value.len()).unwrap());
    out.put_slice(value.as_bytes());
}

fn body(stream: u32) -> Vec<u8> {
    (0..BODY_LEN)
        .map(|nth| (nth * 31 + usize::try_from(stream).unwrap()).to_le_bytes()[0])
        .collect()
}

/// Three requests with authorities by static name index, by dynamic entry, and by dynamic name index.
fn client_bytes(first: &str, second: &str) -> BytesMut {
    let mut literal = BytesMut::from(&[0x83, 0x86][..]);
    text(&[0x44], "/ProxyService/Proxy", &mut literal);
    text(&[0x41], first, &mut literal);
    text(&[0x40, 3, b'x', b'-', b'n'], "1", &mut literal);
    // The dynamic table now holds: 62 x-n, 63 :authority, 64 :path.
    let referring = [0x83, 0x86, 0xc0, 0xbf, 0xbe];
    let mut by_name = BytesMut::from(&[0x83, 0x86, 0xc0][..]);
    text(&[0x7f, 0x00], second, &mut by_name);

    let mut out = BytesMut::from(PREFACE);
    frame(0x4, 0, 0, &[], &mut out);
    for (stream, block) in [(1, &literal[..]), (3, &referring[..]), (5, &by_name[..])] {
        frame(HEADERS, END_HEADERS, stream, block, &mut out);
        for (nth, half) in body(stream).chunks(BODY_LEN / 2).enumerate() {
            let end = if nth == 1 { END_STREAM } else { 0 };
            frame(0x0, end, stream, half, &mut out);
        }
    }
    out
}

/// Serves one connection to its end; returns authority and body of each request.
async fn serve<S: AsyncRead + AsyncWrite + Unpin>(io: S) -> Vec<(String, Vec<u8>)> {
    let mut seen = Vec::new();
    let Ok(mut connection) = h2::server::handshake(io).await else {
        return seen;
    };
    let mut bodies = Vec::new();
    while let Some(Ok((request, mut respond))) = connection.accept().await {
        let authority = request
            .uri()
            .authority()
            .map_or("", |name| name.as_str())
            .to_owned();
        respond
            .send_response(http::Response::new(()), true)
            .unwrap();
        bodies.push((authority, request.into_body()));
    }
    for (authority, mut stream) in bodies {
        let mut bytes = Vec::new();
        while let Some(Ok(chunk)) = stream.data().await {
            bytes.extend_from_slice(&chunk);
        }
        seen.push((authority, bytes));
    }
    seen
}

/// Sends `bytes` and sends EOF once all three requests are answered or refused. An earlier EOF would fail: h2 drops
/// requests that it has read together with EOF.
async fn send(mut client: DuplexStream, bytes: &[u8]) {
    let (mut reader, mut writer) = tokio::io::split(&mut client);
    let answers = async {
        let (mut answered, mut header) = (0, [0; 9]);
        while answered < 3 && reader.read_exact(&mut header).await.is_ok() {
            let [l0, l1, l2, kind, ..] = header;
            let mut payload =
                vec![0; usize::try_from(u32::from_be_bytes([0, l0, l1, l2])).unwrap()];
            reader.read_exact(&mut payload).await.unwrap();
            if kind == HEADERS || kind == RST_STREAM {
                answered += 1;
            }
        }
        answered
    };
    let (written, answered) = tokio::join!(writer.write_all(bytes), answers);
    written.unwrap();
    assert_eq!(answered, 3);
    writer.shutdown().await.unwrap();
}

/// Upstream (tunnels): A socket path is accepted as `:authority`, raw and percent-encoded.
#[tokio::test]
async fn h2_serves_both_forms_of_a_socket_path_and_data_is_intact() {
    let bytes = client_bytes("/run/konnectivity/x.sock", "%2Frun%2Fkonnectivity%2Fx.sock");
    for pipe_len in [1, 7, 10, 1000, 1 << 20] {
        let (client, server) = tokio::io::duplex(pipe_len);
        let io = AuthorityIo::new(server, Limits::default());
        let ((), seen) = tokio::join!(send(client, &bytes), serve(io));
        let authorities: Vec<&str> = seen
            .iter()
            .map(|(authority, _)| authority.as_str())
            .collect();
        let path = "-run-konnectivity-x.sock";
        assert_eq!(
            authorities,
            [path, path, "-2Frun-2Fkonnectivity-2Fx.sock"],
            "pipe of {pipe_len}"
        );
        for ((_, bytes), stream) in seen.iter().zip([1, 3, 5]) {
            assert!(
                *bytes == body(stream),
                "body of stream {stream}, pipe of {pipe_len}"
            );
        }
    }
}

#[tokio::test]
async fn without_the_filter_h2_serves_neither_form() {
    let bytes = client_bytes("/run/x.sock", "%2Frun%2Fx.sock");
    let (client, server) = tokio::io::duplex(1 << 20);
    let ((), seen) = tokio::join!(send(client, &bytes), serve(server));
    assert_eq!(
        seen,
        [],
        "h2 learned to take any authority: this module can go"
    );
}

#[tokio::test]
async fn ordinary_authorities_pass_unchanged() {
    let bytes = client_bytes("localhost:8090", "[fd00::1]:8090");
    let mut output = Vec::new();
    AuthorityIo::new(&bytes[..], Limits::default())
        .read_to_end(&mut output)
        .await
        .unwrap();
    assert!(output == bytes[..]);
}

#[tokio::test]
async fn a_stream_cut_anywhere_keeps_every_byte() {
    let bytes = client_bytes("localhost:8090", "[fd00::1]:8090");
    let header_bytes = PREFACE.len()..PREFACE.len() + 90;
    for len in header_bytes {
        let mut output = Vec::new();
        AuthorityIo::new(&bytes[..len], Limits::default())
            .read_to_end(&mut output)
            .await
            .unwrap();
        assert!(output == bytes[..len], "cut at {len}");
    }
}

#[tokio::test]
async fn a_caller_with_a_tiny_buffer_gets_every_byte() {
    let bytes = client_bytes("localhost:8090", "[fd00::1]:8090");
    for room in 1..12 {
        let mut io = AuthorityIo::new(&bytes[..], Limits::default());
        let (mut output, mut space) = (Vec::new(), vec![0; room]);
        loop {
            match io.read(&mut space).await.unwrap() {
                0 => break,
                len => output.extend_from_slice(&space[..len]),
            }
        }
        assert!(output == bytes[..], "reads of {room}");
    }
}

#[tokio::test]
async fn nothing_is_held_between_frames() {
    let bytes = client_bytes("/run/x.sock", "%2Frun%2Fx.sock");
    let mut io = AuthorityIo::new(&bytes[..], Limits::default());
    let mut output = vec![0; bytes.len()];
    io.read_exact(&mut output).await.unwrap();
    assert_eq!((io.held.capacity(), io.decided.capacity()), (0, 0));
}

/// Limit (memory): Incomplete header block of a gRPC client
#[tokio::test]
async fn a_header_block_beyond_the_limit_fails_this_and_every_later_read() {
    let bytes = client_bytes("/run/x.sock", "%2Frun%2Fx.sock");
    let limits = Limits {
        header_block_len: 32,
        ..Limits::default()
    };
    let mut io = AuthorityIo::new(&bytes[..], limits);
    let error = io.read_to_end(&mut Vec::new()).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    assert!(error.to_string().contains("limit of 32"), "{error}");
    assert!(io.read_to_end(&mut Vec::new()).await.is_err());
}
