//! Sample targets: a web page, as many patterned bytes as a request asks for, and an upload that is verified.

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::LazyLock;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;

use adit_net::tasks::Tasks;

/// Bytes of one chunk of a bulk body.
const BLOCK_BYTES: usize = 64 * 1024;
/// Most bytes one request may ask for.
const BULK_BYTES_MAX: u64 = 16 << 30;
/// The pattern repeats after this many bytes. It is prime: no block size hides a shift.
const PERIOD: usize = 251;
/// Body of `/`.
pub const GREETING: &str = "Hello from the far end of the tunnel.\n";

/// A block at every phase of the pattern: chunks are slices of it, and checks compare slices.
static PATTERN: LazyLock<Bytes> = LazyLock::new(|| {
    (0_u64..)
        .take(BLOCK_BYTES + PERIOD)
        .map(pattern_byte)
        .collect()
});

/// The byte at `offset` of every bulk body; lets a reader check any chunk.
#[must_use]
pub fn pattern_byte(offset: u64) -> u8 {
    u8::try_from(offset % PERIOD as u64).unwrap_or(0)
}

/// Pattern bytes from `offset`: at most one block and at most `length`.
fn pattern(offset: u64, length: u64) -> Bytes {
    let start = usize::from(pattern_byte(offset));
    let length = usize::try_from(length).map_or(BLOCK_BYTES, |length| length.min(BLOCK_BYTES));
    PATTERN.slice(start..start + length)
}

/// Offset of the first wrong byte in `piece`, which was read at `offset` of a bulk body.
#[must_use]
pub fn first_wrong(offset: u64, piece: &[u8]) -> Option<u64> {
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
pub async fn serve(tasks: &Tasks, ip: IpAddr) -> std::io::Result<SocketAddr> {
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

type Answer = Response<BoxBody<Bytes, Infallible>>;

async fn answer(request: Request<Incoming>) -> Result<Answer, Infallible> {
    let path = request.uri().path();
    let bulk = path
        .strip_prefix("/bulk/")
        .and_then(|length| length.parse::<u64>().ok());
    let mut response = match (request.method(), path, bulk) {
        (&Method::POST, "/upload", _) => upload(request.into_body()).await,
        (&Method::GET, "/", _) => text(StatusCode::OK, GREETING),
        (&Method::GET, _, Some(length)) => {
            Response::new(Bulk::new(length.min(BULK_BYTES_MAX)).boxed())
        }
        _ => text(
            StatusCode::NOT_FOUND,
            "try GET / or GET /bulk/1000000 or POST /upload\n",
        ),
    };
    let plain = header::HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, plain);
    Ok(response)
}

fn text(status: StatusCode, body: impl Into<Bytes>) -> Answer {
    let mut response = Response::new(Full::from(body.into()).boxed());
    *response.status_mut() = status;
    response
}

/// Response to an upload whose `length` bytes were all right.
#[must_use]
pub fn receipt(length: u64) -> String {
    format!("{length} bytes, all right\n")
}

async fn upload(mut body: Incoming) -> Answer {
    let mut at = 0_u64;
    while let Some(frame) = body.frame().await {
        let data = match frame.map(Frame::into_data) {
            Ok(Ok(data)) => data,
            Ok(Err(_trailers)) => continue,
            Err(error) => return text(StatusCode::BAD_REQUEST, format!("at byte {at}: {error}\n")),
        };
        if let Some(wrong) = first_wrong(at, &data) {
            return text(
                StatusCode::BAD_REQUEST,
                format!("byte {wrong} is not the pattern's\n"),
            );
        }
        at += data.len() as u64;
    }
    text(StatusCode::OK, receipt(at))
}

/// A body of patterned bytes.
#[derive(Debug)]
pub struct Bulk {
    at: u64,
    left: u64,
}

impl Bulk {
    /// The first `length` bytes of the pattern.
    #[must_use]
    pub fn new(length: u64) -> Self {
        Self {
            at: 0,
            left: length,
        }
    }
}

impl Body for Bulk {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        let block = pattern(self.at, self.left);
        self.at += block.len() as u64;
        self.left -= block.len() as u64;
        Poll::Ready(Some(Ok(Frame::data(block))))
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
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
