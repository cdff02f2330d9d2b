//! Every response of the HTTP-CONNECT dialect, byte for byte as upstream writes it.

use bytes::Bytes;

use crate::failure::DialFailure;
use crate::grant::TargetDenied;
use crate::text::Excerpt;

/// Written once the target is connected. Tunnel bytes follow in a separate write: kube-apiserver fails when they arrive
/// together with this line.
pub const ESTABLISHED: &[u8] = b"HTTP/1.1 200 Connection Established\r\n\r\n";

/// Why a request head is not a request for a tunnel. The connection is closed after the response.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Rejection {
    /// The method is not CONNECT.
    #[error("method is not CONNECT")]
    NotConnect,
    /// Invalid syntax, or a target that is not an authority.
    #[error("malformed HTTP request head")]
    Malformed,
    /// The head did not end within the limit.
    #[error("HTTP request head exceeds the limit")]
    TooLarge,
    /// A major version of HTTP other than 1.
    #[error("unsupported HTTP version")]
    VersionUnsupported,
}

impl Rejection {
    /// All bytes to write. The texts are those of Go's `net/http` server, which upstream uses.
    #[must_use]
    pub fn response(self) -> Bytes {
        Bytes::from_static(match self {
            Self::NotConnect => {
                b"HTTP/1.1 405 Method Not Allowed\r\n\
                Content-Type: text/plain; charset=utf-8\r\n\
                X-Content-Type-Options: nosniff\r\n\
                Content-Length: 45\r\n\
                Connection: close\r\n\r\n\
                this proxy only supports CONNECT passthrough\n"
            }
            Self::Malformed => {
                b"HTTP/1.1 400 Bad Request\r\n\
                Content-Type: text/plain; charset=utf-8\r\n\
                Connection: close\r\n\r\n\
                400 Bad Request"
            }
            Self::TooLarge => {
                b"HTTP/1.1 431 Request Header Fields Too Large\r\n\
                Content-Type: text/plain; charset=utf-8\r\n\
                Connection: close\r\n\r\n\
                431 Request Header Fields Too Large"
            }
            Self::VersionUnsupported => {
                b"HTTP/1.1 505 HTTP Version Not Supported: unsupported protocol version\r\n\
                Content-Type: text/plain; charset=utf-8\r\n\
                Connection: close\r\n\r\n\
                505 HTTP Version Not Supported: unsupported protocol version"
            }
        })
    }
}

/// The HTTP status of an agent's dial error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TargetStatus {
    /// 502: refused, reset, unreachable, unknown host and every other error.
    BadGateway,
    /// 503: the agent is out of descriptors or, if it is Adit, of memory for tunnels.
    ServiceUnavailable,
    /// 504: the target did not answer in time.
    GatewayTimeout,
}

impl TargetStatus {
    /// Classifies the agent's text as upstream does: by lower-cased substring, first match wins. The protocol carries
    /// no error code.
    #[must_use]
    pub fn of(text: &str) -> Self {
        let text = text.to_lowercase();
        if text.contains("timeout") || text.contains("deadline exceeded") {
            Self::GatewayTimeout
        } else if text.contains("too many open files") || text.contains("short of memory") {
            Self::ServiceUnavailable
        } else {
            Self::BadGateway
        }
    }

    /// The numeric status.
    #[must_use]
    pub fn code(self) -> u16 {
        match self {
            Self::BadGateway => 502,
            Self::ServiceUnavailable => 503,
            Self::GatewayTimeout => 504,
        }
    }

    /// Code and reason phrase.
    fn line(self) -> &'static str {
        match self {
            Self::BadGateway => "502 Bad Gateway",
            Self::ServiceUnavailable => "503 Service Unavailable",
            Self::GatewayTimeout => "504 Gateway Timeout",
        }
    }
}

/// Reads what a server answers to a failed dial: the inverse of [`failure_response`], whose texts are upstream's. An answer
/// of another proxy is quoted.
#[must_use]
pub fn failure_of(status: u16, body: &str) -> DialFailure {
    let text = body.trim_end();
    let known = [
        DialFailure::NoAgent,
        DialFailure::LinkBusy,
        DialFailure::SendTimedOut,
        DialFailure::TimedOut,
        DialFailure::TooLong,
        DialFailure::LinkLost,
        DialFailure::TooManyPending { per_agent: false },
        DialFailure::TooManyPending { per_agent: true },
        DialFailure::ShuttingDown,
        DialFailure::NoMemory,
        DialFailure::NoDescriptors,
    ];
    let says = |failure: &DialFailure| {
        failure_response(failure).is_some_and(|response| {
            let body = response.windows(4).position(|four| four == b"\r\n\r\n");
            let body = body.and_then(|at| response.get(at + 4..));
            body.is_some_and(|body| body.trim_ascii_end() == text.as_bytes())
        })
    };
    if let Some(failure) = known.into_iter().find(says) {
        return failure;
    }
    match status {
        403 => DialFailure::Denied(Box::new(TargetDenied::quoted(text))),
        // Upstream's server answers so when it cannot hand the dial to an agent.
        _ if text.starts_with("Failed to tunnel dial request: ") => DialFailure::LinkBusy,
        _ if text.starts_with("Backend dial timeout") => DialFailure::TimedOut,
        _ if text.starts_with("Backend context error") => DialFailure::LinkLost,
        _ if text.starts_with("currently no tunnels available") => DialFailure::NoAgent,
        _ if text.is_empty() => DialFailure::Target(format!("the server answered status {status}")),
        _ => DialFailure::Target(Excerpt(text).to_string()),
    }
}

/// All bytes to write for a failed dial before the connection is closed; `None` if upstream writes nothing.
#[must_use]
pub fn failure_response(failure: &DialFailure) -> Option<Bytes> {
    let text = |line: &str, body: &str| {
        format!("HTTP/1.1 {line}\r\nContent-Type: text/plain; charset=utf-8\r\n\r\n{body}")
    };
    let plain = |status: TargetStatus, body: &str| text(status.line(), body);
    let response = match failure {
        DialFailure::NoAgent => format!(
            "HTTP/1.1 500 Internal Server Error\r\n\
            Content-Type: text/plain\r\n\r\n\
            currently no tunnels available: {failure}"
        ),
        DialFailure::Target(text) => {
            let line = TargetStatus::of(text).line();
            format!(
                "HTTP/1.1 {line}\r\n\
                Connection: close\r\n\
                Content-Type: text/plain; charset=utf-8\r\n\r\n\
                {text}"
            )
        }
        DialFailure::Denied(denied) => text("403 Forbidden", &format!("{denied}\r\n")),
        DialFailure::LinkBusy => plain(
            TargetStatus::BadGateway,
            &format!("Failed to tunnel dial request: {failure}\r\n"),
        ),
        DialFailure::TooLong => plain(TargetStatus::BadGateway, &format!("{failure}\r\n")),
        DialFailure::LinkLost => {
            // Go's text for an ended stream; clients and dashboards expect it.
            plain(
                TargetStatus::BadGateway,
                "Backend context error: context canceled\r\n",
            )
        }
        DialFailure::TimedOut => plain(
            TargetStatus::GatewayTimeout,
            &format!("Backend dial timeout: {failure}\r\n"),
        ),
        DialFailure::SendTimedOut => plain(
            TargetStatus::GatewayTimeout,
            &format!("Failed to tunnel dial request: {failure}\r\n"),
        ),
        DialFailure::TooManyPending { .. }
        | DialFailure::ShuttingDown
        | DialFailure::NoMemory
        | DialFailure::NoDescriptors
        | DialFailure::NoServer(_) => {
            plain(TargetStatus::ServiceUnavailable, &format!("{failure}\r\n"))
        }
        DialFailure::Closed => return None,
    };
    Some(Bytes::from(response))
}
