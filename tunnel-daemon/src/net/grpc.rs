//! gRPC over the `h2` crate: the few headers and trailers that packet streams need, and how a server
//! connection is run. No messages are known here.

use std::pin::pin;
use std::time::Duration;

use adit_core::wire::encode::MessageBuf;
use h2::server::{Builder, Connection, SendResponse};
use h2::{Ping, PingPong, RecvStream};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use tokio::io::{AsyncRead, AsyncWrite};

/// Window of a connection whose streams bound themselves: as large as HTTP/2 allows, so that a stalled
/// stream never holds up the others.
const CONNECTION_WINDOW_BYTES: u32 = (1 << 31) - 1;
/// Frames we accept from peers that follow our settings; Go sends 16 KiB whatever we say.
const FRAME_BYTES_MAX: u32 = 256 * 1024;
/// Header lists we accept: tokens and identifier lists are long.
const HEADER_LIST_BYTES_MAX: u32 = 256 * 1024;
/// An unanswered keepalive ping ends the connection after this.
pub const PING_TIMEOUT: Duration = Duration::from_secs(20);

/// gRPC status codes used here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Code {
    /// 0
    Ok,
    /// 2
    Unknown,
    /// 3
    InvalidArgument,
    /// 7
    PermissionDenied,
    /// 8
    ResourceExhausted,
    /// 12
    Unimplemented,
    /// 13
    Internal,
    /// 14
    Unavailable,
    /// 16
    Unauthenticated,
}

impl Code {
    fn value(self) -> HeaderValue {
        HeaderValue::from_static(match self {
            Self::Ok => "0",
            Self::Unknown => "2",
            Self::InvalidArgument => "3",
            Self::PermissionDenied => "7",
            Self::ResourceExhausted => "8",
            Self::Unimplemented => "12",
            Self::Internal => "13",
            Self::Unavailable => "14",
            Self::Unauthenticated => "16",
        })
    }

    /// Go's spelling, for metric labels.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::Unknown => "Unknown",
            Self::InvalidArgument => "InvalidArgument",
            Self::PermissionDenied => "PermissionDenied",
            Self::ResourceExhausted => "ResourceExhausted",
            Self::Unimplemented => "Unimplemented",
            Self::Internal => "Internal",
            Self::Unavailable => "Unavailable",
            Self::Unauthenticated => "Unauthenticated",
        }
    }
}

/// The gRPC code of a failed stream, as the gRPC specification maps HTTP/2 errors. `gone` is the code of a lost
/// connection: Go calls it `Canceled` at servers and `Unavailable` at clients.
#[must_use]
pub fn code_of(error: &h2::Error, gone: tonic::Code) -> tonic::Code {
    error
        .reason()
        .map_or(gone, |reason| code_of_reason(reason, gone))
}

/// As [`code_of`], for a reset.
#[must_use]
pub fn code_of_reason(reason: h2::Reason, gone: tonic::Code) -> tonic::Code {
    match reason {
        h2::Reason::NO_ERROR => gone,
        h2::Reason::CANCEL => tonic::Code::Cancelled,
        h2::Reason::REFUSED_STREAM => tonic::Code::Unavailable,
        h2::Reason::ENHANCE_YOUR_CALM => tonic::Code::ResourceExhausted,
        h2::Reason::INADEQUATE_SECURITY => tonic::Code::PermissionDenied,
        _ => tonic::Code::Internal,
    }
}

/// Percent-encodes a `grpc-message` as the gRPC specification asks.
#[must_use]
pub fn encode_message(text: &str) -> HeaderValue {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if (b' '..=b'~').contains(&byte) && byte != b'%' {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    HeaderValue::from_str(&out).unwrap_or(HeaderValue::from_static("unprintable"))
}

/// Trailers that end a call.
#[must_use]
pub fn status(code: Code, message: &str) -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(2);
    trailers.insert("grpc-status", code.value());
    if !message.is_empty() {
        trailers.insert("grpc-message", encode_message(message));
    }
    trailers
}

/// Response headers of an accepted call.
#[must_use]
pub fn accepted() -> Response<()> {
    let mut response = Response::new(());
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/grpc"),
    );
    response
}

/// Answers a call with a status and nothing else.
pub fn refuse(respond: &mut SendResponse<MessageBuf>, code: Code, message: &str) {
    let mut response = accepted();
    response.headers_mut().extend(status(code, message));
    // A caller that has gone needs no answer.
    let _sent = respond.send_response(response, true);
}

/// Windows of one listener or dialler.
#[derive(Clone, Copy, Debug)]
pub struct Windows {
    /// Bytes a peer may send on one stream before we take them.
    pub stream_bytes: u32,
    /// Bytes of one stream buffered towards the socket.
    pub send_buffer_bytes: usize,
}

/// Settings of our server connections.
#[must_use]
pub fn server_builder(windows: Windows) -> Builder {
    let mut builder = Builder::new();
    builder
        .initial_window_size(windows.stream_bytes)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES_MAX)
        .max_header_list_size(HEADER_LIST_BYTES_MAX)
        .max_concurrent_streams(u32::MAX)
        .max_concurrent_reset_streams(1024)
        .max_pending_accept_reset_streams(1024)
        .max_send_buffer_size(windows.send_buffer_bytes);
    builder
}

/// Settings of our client connections.
#[must_use]
pub fn client_builder(windows: Windows) -> h2::client::Builder {
    let mut builder = h2::client::Builder::new();
    builder
        .initial_window_size(windows.stream_bytes)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES_MAX)
        .max_header_list_size(HEADER_LIST_BYTES_MAX)
        .max_send_buffer_size(windows.send_buffer_bytes)
        .enable_push(false);
    builder
}

/// Runs a server connection until it ends; `on_call` gets every request and must not block.
///
/// # Errors
/// Whatever ended the connection, a missed keepalive included.
pub async fn serve<S, F>(
    mut connection: Connection<S, MessageBuf>,
    keepalive_every: Duration,
    mut on_call: F,
) -> Result<(), h2::Error>
where
    S: AsyncRead + AsyncWrite + Unpin,
    F: FnMut(Request<RecvStream>, SendResponse<MessageBuf>),
{
    let ping = connection.ping_pong();
    let mut keepalive = pin!(keepalive(ping, keepalive_every));
    loop {
        tokio::select! {
            biased;
            accepted = connection.accept() => match accepted {
                Some(Ok((request, respond))) => on_call(request, respond),
                Some(Err(error)) => return Err(error),
                None => return Ok(()),
            },
            () = &mut keepalive => return Err(h2::Reason::NO_ERROR.into()),
        }
    }
}

/// Pings every `every`; completes when an answer is missing for [`PING_TIMEOUT`].
pub async fn keepalive(ping: Option<PingPong>, every: Duration) {
    let Some(mut ping) = ping else {
        return std::future::pending().await;
    };
    loop {
        tokio::time::sleep(every).await;
        match tokio::time::timeout(PING_TIMEOUT, ping.ping(Ping::opaque())).await {
            Ok(Ok(_pong)) => (),
            Ok(Err(_)) | Err(_) => return,
        }
    }
}

/// Whether a request is a gRPC call of `path`; anything else is answered here.
pub fn is_call(
    request: &Request<RecvStream>,
    path: &str,
    respond: &mut SendResponse<MessageBuf>,
) -> bool {
    let grpc = request
        .headers()
        .get(header::CONTENT_TYPE)
        .is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"));
    if !grpc {
        let mut response = Response::new(());
        *response.status_mut() = StatusCode::UNSUPPORTED_MEDIA_TYPE;
        let _sent = respond.send_response(response, true);
        return false;
    }
    if request.uri().path() != path {
        let text = format!("unknown method {}", request.uri().path());
        refuse(respond, Code::Unimplemented, &text);
        return false;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_percent_encoded_and_read_back() {
        assert_eq!(encode_message("100% ü"), "100%25 %C3%BC");
        let trailers = status(Code::Unavailable, "no agent");
        assert_eq!(trailers.get("grpc-status").unwrap(), "14");
        assert_eq!(trailers.get("grpc-message").unwrap(), "no agent");
    }
}
