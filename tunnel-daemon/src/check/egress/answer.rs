//! What a server speaks. It is asked for nothing: a frontend that speaks gRPC gets a call that ends at once, one that speaks
//! HTTP CONNECT a GET, which it refuses. No agent sees anything.

use std::fmt;
use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::check::line::{degraded, missing, ok};
use crate::status::model::Capability;

/// Time for a server to answer.
const ANSWER: Duration = Duration::from_secs(10);
/// Bytes of an answer that are read.
const ANSWER_BYTES_MAX: u64 = 4096;
/// The beginning of HTTP/2 (RFC 9113, 3.4), with settings that are empty.
pub(super) const HTTP2: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
/// A request that each Konnectivity server refuses, with the text [`REFUSAL`].
pub(super) const GET: &[u8] = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n";
const REFUSAL: &str = "only supports CONNECT";

/// The first bytes of a server, read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Answer {
    /// Settings of HTTP/2.
    Http2,
    /// A status of HTTP/1, and whether it is the refusal of a Konnectivity server.
    Http1 { status: u16, is_refusal: bool },
    /// Other bytes.
    Other,
    /// The end of the connection, and its error if there was one.
    Closed(Option<String>),
    /// Nothing within the time.
    Silent,
}

/// What a server answers to a call of Konnectivity.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Call {
    /// The gRPC status.
    Status(u16),
    /// An HTTP response without a gRPC status.
    NoGrpc,
    /// An error, or no answer.
    Failed(String),
}

/// Sends `question`, and reads as much as shows what the server speaks.
pub(super) async fn ask<S>(stream: &mut S, question: &[u8]) -> Answer
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut read = Vec::new();
    let asked = async {
        // A server that refuses may have closed its side already, behind an answer.
        let _sent = stream.write_all(question).await;
        let _sent = stream.flush().await;
        let mut limited = stream.take(ANSWER_BYTES_MAX);
        while limited.read_buf(&mut read).await? > 0 {
            if is_enough(&read) {
                break;
            }
        }
        Ok::<_, io::Error>(())
    };
    let ended = timeout(ANSWER, asked).await;
    match (parsed(&read), ended) {
        (Some(answer), _) => answer,
        (None, Err(_elapsed)) => Answer::Silent,
        (None, Ok(Err(error))) => Answer::Closed(Some(error.to_string())),
        (None, Ok(Ok(()))) if read.is_empty() => Answer::Closed(None),
        (None, Ok(Ok(()))) => Answer::Other,
    }
}

/// Whether more bytes cannot change how an answer is parsed. The refusal is in the body.
fn is_enough(read: &[u8]) -> bool {
    match parsed(read) {
        Some(Answer::Http1 { status, is_refusal }) => is_refusal || status != 405,
        Some(_) => true,
        None => false,
    }
}

/// `None` if these bytes are the beginning of nothing known, or too few.
fn parsed(read: &[u8]) -> Option<Answer> {
    // The header of a SETTINGS frame of stream 0 (RFC 9113, 4.1).
    if let [_, _, _, 4, 0, 0, 0, 0, 0, ..] = read {
        return Some(Answer::Http2);
    }
    let text = String::from_utf8_lossy(read);
    let rest = text.strip_prefix("HTTP/1.")?;
    let status = rest.split(' ').nth(1)?;
    // A status line that is not complete says less.
    let status = status.get(..3)?.parse().ok()?;
    Some(Answer::Http1 {
        status,
        is_refusal: text.contains(REFUSAL),
    })
}

/// Opens a call of Konnectivity's client service and ends it, so that it asks for no tunnel.
pub(super) async fn call(stream: UnixStream) -> Call {
    let calling = async {
        let (mut client, connection) = h2::client::handshake(stream).await?;
        let request = http::Request::post("http://localhost/ProxyService/Proxy")
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(());
        let Ok(request) = request else {
            return Ok(Call::NoGrpc);
        };
        let answered = async {
            let (response, _ended) = client.send_request(request, true)?;
            status(response.await?).await
        };
        tokio::select! {
            biased;
            answer = answered => answer,
            closed = connection => closed.map(|()| Call::Failed("the server closed the connection".to_owned())),
        }
    };
    match timeout(ANSWER, calling).await {
        Ok(Ok(call)) => call,
        Ok(Err(error)) => Call::Failed(error.to_string()),
        Err(_elapsed) => Call::Failed(format!("no answer within {} s", ANSWER.as_secs())),
    }
}

/// The gRPC status of a response, in its headers or behind its body.
async fn status(response: http::Response<h2::RecvStream>) -> Result<Call, h2::Error> {
    let read = |headers: &http::HeaderMap| {
        let value = headers.get("grpc-status")?.to_str().ok()?;
        value.parse().ok().map(Call::Status)
    };
    if let Some(status) = read(response.headers()) {
        return Ok(status);
    }
    let mut body = response.into_body();
    while let Some(data) = body.data().await {
        // Not released: what exceeds the window waits, until the time is over.
        data?;
    }
    let trailers = body.trailers().await?;
    Ok(trailers.as_ref().and_then(read).unwrap_or(Call::NoGrpc))
}

const SPEAK_GRPC: &str = "write proxyProtocol: HTTPConnect, or let the server speak gRPC there (--frontend grpc=unix:PATH, --mode=grpc)";
const SPEAK_CONNECT: &str = "write proxyProtocol: GRPC with transport.uds, or let the server speak HTTP CONNECT there (--frontend http-connect=..., --mode=http-connect)";
const OTHER_SERVER: &str = "correct the address: another program listens there";

/// The line of a call; its text follows the address.
pub(super) fn of_call(call: &Call) -> Capability {
    /// gRPC status UNIMPLEMENTED.
    const UNIMPLEMENTED: u16 = 12;
    match call {
        Call::Status(UNIMPLEMENTED) | Call::NoGrpc => missing(
            "speaks gRPC or HTTP/2, and is no Konnectivity server",
            OTHER_SERVER,
        ),
        Call::Status(0) => ok("answers as a Konnectivity server that speaks gRPC"),
        Call::Status(status) => degraded(
            format!("speaks gRPC, and refused a call with status {status}"),
            "look at the server's log",
        ),
        Call::Failed(why) => degraded(
            format!("speaks HTTP/2, and did not answer a call: {why}"),
            "look at the server's log",
        ),
    }
}

/// The line of a server that was greeted with HTTP/2 and did not answer with it.
pub(super) fn of_no_grpc(answer: &Answer) -> Capability {
    match answer {
        Answer::Http1 { .. } => missing("speaks HTTP/1.1, and no gRPC", SPEAK_GRPC),
        other => missing(format!("speaks no gRPC: {}", Other(other)), OTHER_SERVER),
    }
}

/// The line of a server that was sent a GET.
pub(super) fn of_http_connect(answer: &Answer) -> Capability {
    match answer {
        Answer::Http1 {
            is_refusal: true, ..
        } => ok("answers as a Konnectivity server that speaks HTTP CONNECT"),
        Answer::Http1 { status, .. } => degraded(
            format!(
                "speaks HTTP/1.1, and answers a GET with {status}, as no Konnectivity server does"
            ),
            "check that a proxy for HTTP CONNECT listens there",
        ),
        Answer::Http2 => missing("speaks HTTP/2 (gRPC), and no HTTP CONNECT", SPEAK_CONNECT),
        other => missing(
            format!("speaks no HTTP CONNECT: {}", Other(other)),
            OTHER_SERVER,
        ),
    }
}

/// An answer without a protocol, in words.
struct Other<'a>(&'a Answer);

impl fmt::Display for Other<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Answer::Closed(Some(error)) => write!(f, "the connection failed: {error}"),
            Answer::Closed(None) => f.write_str("it closed the connection without an answer"),
            Answer::Silent => write!(f, "no answer within {} s", ANSWER.as_secs()),
            Answer::Http2 | Answer::Http1 { .. } | Answer::Other => {
                f.write_str("the answer is of another protocol")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::model::Verdict;

    const SETTINGS: &[u8] = b"\0\0\0\x04\0\0\0\0\0";

    #[test]
    fn first_bytes_show_the_protocol() {
        let http1 = |status, is_refusal| Some(Answer::Http1 { status, is_refusal });
        for (bytes, expected) in [
            (SETTINGS, Some(Answer::Http2)),
            (&SETTINGS[..8], None),
            (b"HTTP/1.1 405 Method Not Allowed\r\n\r\n", http1(405, false)),
            (
                b"HTTP/1.1 405 Method Not Allowed\r\n\r\nthis proxy only supports CONNECT passthrough\n",
                http1(405, true),
            ),
            (b"HTTP/1.0 404 Not Found\r\n", http1(404, false)),
            (b"HTTP/1.1 4", None),
            (b"HTTP/1.1", None),
            (b"SSH-2.0-x\r\n", None),
            (b"", None),
        ] {
            assert_eq!(parsed(bytes), expected, "{}", bytes.escape_ascii());
        }
    }

    #[test]
    fn answers_of_either_protocol_have_their_verdicts() {
        let http1 = |status, is_refusal| Answer::Http1 { status, is_refusal };
        for (answer, connect, grpc) in [
            (http1(405, true), Verdict::Ok, "no gRPC"),
            (http1(404, false), Verdict::Degraded, "no gRPC"),
            (Answer::Closed(None), Verdict::Missing, "without an answer"),
            (
                Answer::Closed(Some("reset".to_owned())),
                Verdict::Missing,
                "reset",
            ),
            (Answer::Silent, Verdict::Missing, "no answer within 10 s"),
            (Answer::Other, Verdict::Missing, "another protocol"),
        ] {
            assert_eq!(of_http_connect(&answer).verdict, connect, "{answer:?}");
            let line = of_no_grpc(&answer);
            assert_eq!(line.verdict, Verdict::Missing, "{answer:?}");
            assert!(line.text.contains(grpc), "{line:?}");
        }
        let line = of_http_connect(&Answer::Http2);
        assert!(
            line.remedy
                .is_some_and(|to_do| to_do.contains("proxyProtocol: GRPC"))
        );
    }

    #[test]
    fn statuses_of_a_call_have_their_verdicts() {
        for (call, verdict) in [
            (Call::Status(0), Verdict::Ok),
            (Call::Status(8), Verdict::Degraded),
            (Call::Status(12), Verdict::Missing),
            (Call::NoGrpc, Verdict::Missing),
            (Call::Failed("no answer".to_owned()), Verdict::Degraded),
        ] {
            assert_eq!(of_call(&call).verdict, verdict, "{call:?}");
        }
    }
}
