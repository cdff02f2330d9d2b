//! Sample targets: a web page, as many patterned bytes as a request asks for, and an upload that is verified.

use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::LazyLock;

use anyhow::{Context as _, bail};
use bytes::Bytes;
use futures_util::stream;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;

use adit_net::tasks::Tasks;

/// Bytes of one chunk of a bulk body.
const BLOCK_BYTES: usize = 64 * 1024;
/// The pattern repeats after this many bytes. It is prime: no block size hides a shift.
const PERIOD: usize = 251;
/// Body of `/`.
pub(super) const GREETING: &str = "Hello from the far end of the tunnel.\n";

/// A block at every phase of the pattern: chunks are slices of it, and checks compare slices.
static PATTERN: LazyLock<Bytes> = LazyLock::new(|| {
    (0_u64..)
        .take(BLOCK_BYTES + PERIOD)
        .map(pattern_byte)
        .collect()
});

/// The byte at `offset` of every bulk body; lets a reader check any chunk.
fn pattern_byte(offset: u64) -> u8 {
    u8::try_from(offset % PERIOD as u64).unwrap_or(0)
}

/// Pattern bytes from `offset`: at most one block and at most `length`.
fn pattern(offset: u64, length: u64) -> Bytes {
    let start = usize::from(pattern_byte(offset));
    let length = usize::try_from(length).map_or(BLOCK_BYTES, |length| length.min(BLOCK_BYTES));
    PATTERN.slice(start..start + length)
}

/// Offset of the first wrong byte in `piece`, which was read at `offset` of a bulk body.
fn first_wrong(offset: u64, piece: &[u8]) -> Option<u64> {
    let mut at = offset;
    for block in piece.chunks(BLOCK_BYTES) {
        let expected = pattern(at, block.len() as u64);
        // Comparing slices is fast; single bytes are compared only to locate a wrong one.
        if *block != expected[..] {
            let wrong = block.iter().zip(&expected).position(|(a, b)| a != b)?;
            return Some(at + wrong as u64);
        }
        at += block.len() as u64;
    }
    None
}

/// Serves `/`, `/bulk/N` and `/upload` on a free port of `ip` until `tasks` is cancelled.
///
/// # Errors
/// When no port can be bound.
pub(super) async fn serve(tasks: &Tasks, ip: Ipv4Addr) -> std::io::Result<SocketAddr> {
    let listener = TcpListener::bind((ip, 0)).await?;
    let address = listener.local_addr()?;
    let connections = tasks.clone();
    tasks.spawn_always("demo-target", async move {
        while let Ok((socket, _peer)) = listener.accept().await {
            let served = async move {
                let http = hyper::server::conn::http1::Builder::new();
                // A client may leave in the middle.
                let _over = http
                    .serve_connection(TokioIo::new(socket), service_fn(answer))
                    .await;
            };
            if connections.spawn("demo-target-connection", served).is_err() {
                tracing::debug!("demo target is at its limit of connections");
            }
        }
    });
    Ok(address)
}

/// The body of a request or an answer.
pub(super) type Body = BoxBody<Bytes, Infallible>;
type Answer = Response<Body>;

async fn answer(request: Request<Incoming>) -> Result<Answer, Infallible> {
    let path = request.uri().path();
    let length = path
        .strip_prefix("/bulk/")
        .and_then(|length| length.parse::<u64>().ok());
    Ok(match (request.method(), path, length) {
        (&Method::POST, "/upload", _) => upload(request.into_body()).await,
        (&Method::GET, "/", _) => text(StatusCode::OK, GREETING),
        (&Method::GET, _, Some(length)) => {
            let mut response = Response::new(bulk(length));
            let headers = response.headers_mut();
            headers.insert(header::CONTENT_LENGTH, length.into());
            response
        }
        _ => text(
            StatusCode::NOT_FOUND,
            "try GET / or GET /bulk/1000000 or POST /upload\n",
        ),
    })
}

fn text(status: StatusCode, body: impl Into<Bytes>) -> Answer {
    let mut response = Response::new(Full::from(body.into()).boxed());
    *response.status_mut() = status;
    response
}

/// Response to an upload whose `length` bytes were all right.
pub(super) fn receipt(length: u64) -> String {
    format!("{length} bytes, all right\n")
}

async fn upload(body: Incoming) -> Answer {
    match compared(body).await {
        Ok(length) => text(StatusCode::OK, receipt(length)),
        Err(error) => text(StatusCode::BAD_REQUEST, format!("{error:#}\n")),
    }
}

/// Reads a body and compares every byte with the pattern; returns the length.
///
/// # Errors
/// The first wrong byte, or a broken connection.
pub(super) async fn compared(mut body: Incoming) -> anyhow::Result<u64> {
    let mut at = 0_u64;
    while let Some(frame) = body.frame().await {
        let frame = frame.with_context(|| format!("broken off at byte {at}"))?;
        let Ok(data) = frame.into_data() else {
            continue;
        };
        if let Some(wrong) = first_wrong(at, &data) {
            bail!("byte {wrong} is not the pattern's");
        }
        at += data.len() as u64;
    }
    Ok(at)
}

/// The first `length` bytes of the pattern.
pub(super) fn bulk(length: u64) -> Body {
    let blocks = (0..length).step_by(BLOCK_BYTES);
    let frames = blocks.map(move |at| Ok(Frame::data(pattern(at, length - at))));
    StreamBody::new(stream::iter(frames)).boxed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_of_any_size_and_offset_match_the_pattern() {
        for offset in [0, 1, 250, 251, 65_536, 1 << 40] {
            for length in [0, 1, 251, BLOCK_BYTES as u64, BLOCK_BYTES as u64 + 7] {
                let piece: Vec<u8> = (offset..offset + length).map(pattern_byte).collect();
                assert_eq!(first_wrong(offset, &piece), None, "{offset} {length}");
            }
        }
    }

    #[test]
    fn the_first_wrong_byte_is_named_beyond_the_first_block_too() {
        let mut piece: Vec<u8> = (7..7 + 3 * BLOCK_BYTES as u64).map(pattern_byte).collect();
        piece[2 * BLOCK_BYTES + 5] ^= 1;
        assert_eq!(first_wrong(7, &piece), Some(7 + 2 * BLOCK_BYTES as u64 + 5));
    }

    #[test]
    fn a_shift_by_one_byte_is_detected() {
        let piece: Vec<u8> = (1..100).map(pattern_byte).collect();
        assert_eq!(first_wrong(0, &piece), Some(0));
    }
}
