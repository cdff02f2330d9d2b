//! gRPC over the `h2` crate: the few headers and trailers that packet streams need, and how connections
//! are run. No messages are known here.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

use adit_core::text::beginning;
use adit_core::wire::encode::MessageBuf;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use h2::server::{Builder, Connection, SendResponse};
use h2::{Ping, PingPong, RecvStream, client};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use crate::call_pace::CallPace;
use crate::poll_set::together;
use crate::tasks::Admitted;
use crate::write_coalescer::{Flusher, Heard, WriteCoalescer, gather};
use adit_config::limits::{
    CLIENT_STREAMS_MAX, DATA_FRAME_BUDGET_BYTES, EXCERPT_BYTES_MAX, GREETING_TIMEOUT,
};

/// Window of a connection whose streams bound themselves: as large as HTTP/2 allows, so that a stalled
/// stream never holds up the others.
const CONNECTION_WINDOW_BYTES: u32 = (1 << 31) - 1;
/// Frames between our own ends; Go sends 16 KiB whatever we say.
pub const LINK_FRAME_BYTES: u32 = 256 * 1024;
/// The least that HTTP/2 allows, and all that a Go client uses.
pub const SMALL_FRAME_BYTES: u32 = 16 * 1024;
/// Header lists we accept: tokens and identifier lists are long. `h2` also bounds the frames of a list: to what a list of
/// this size needs in frames of the largest size we accept and a quarter more, or else to 6.
const HEADER_LIST_BYTES_MAX: u32 = 256 * 1024;
/// What HTTP/2 may read, beside one read of its own, before all calls that came are taken. It keeps an entry for each, and a call that was cancelled at once
/// takes no more than 22 bytes.
const READ_AHEAD_BYTES: usize = 128 * 1024;
/// An unanswered keepalive ping ends the connection after this, unless anything else comes: the answer may have to wait behind
/// all that is on its way, here and there.
pub const PING_TIMEOUT: Duration = Duration::from_secs(20);
/// A watched peer that has been quiet for so long is sent a PING.
const ASK_AFTER: Duration = Duration::from_secs(3);
/// The answer to that PING may take this long before the peer counts as silent.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);

/// gRPC status codes used here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Code {
    /// 0
    Ok,
    /// 2
    Unknown,
    /// 3
    InvalidArgument,
    /// 4
    DeadlineExceeded,
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
            Self::DeadlineExceeded => "4",
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
            Self::DeadlineExceeded => "DeadlineExceeded",
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

/// Frames and windows of one listener or dialler.
#[derive(Clone, Copy, Debug)]
pub struct Windows {
    /// Largest frame we accept.
    pub frame_bytes: u32,
    /// Bytes a peer may send on one stream before we take them.
    pub stream_bytes: u32,
    /// Bytes of one stream buffered towards the socket.
    pub send_buffer_bytes: usize,
}

/// What is done about a peer that is quiet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Patience {
    /// It is sent a PING after this.
    pub ask_after: Duration,
    /// The connection ends after this.
    pub end_after: Duration,
}

impl Patience {
    /// For a peer that may be asked at any time; `keepalive` is how often it would be asked otherwise.
    #[must_use]
    pub fn asking(keepalive: Duration) -> Self {
        Self {
            ask_after: ASK_AFTER,
            end_after: keepalive.saturating_add(PING_TIMEOUT),
        }
    }

    /// For a peer that takes a PING rarely: one `every` so often.
    #[must_use]
    pub fn rarely_asking(every: Duration) -> Self {
        Self {
            ask_after: every,
            end_after: every.saturating_add(PING_TIMEOUT),
        }
    }
}

/// Settings of our server connections.
#[must_use]
pub fn server_builder(windows: Windows) -> Builder {
    let mut builder = Builder::new();
    builder
        .initial_window_size(windows.stream_bytes)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(windows.frame_bytes)
        .max_header_list_size(HEADER_LIST_BYTES_MAX)
        .data_frame_budget(DATA_FRAME_BUDGET_BYTES)
        .max_concurrent_streams(CLIENT_STREAMS_MAX)
        .max_concurrent_reset_streams(1024)
        // [`READ_AHEAD_BYTES`] bounds them. Beyond a number of its own HTTP/2 would end the connection with all its tunnels.
        .max_pending_accept_reset_streams(usize::MAX)
        .max_send_buffer_size(windows.send_buffer_bytes);
    builder
}

/// Settings of our client connections.
#[must_use]
pub fn client_builder(windows: Windows) -> client::Builder {
    let mut builder = client::Builder::new();
    builder
        .initial_window_size(windows.stream_bytes)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(windows.frame_bytes)
        .max_header_list_size(HEADER_LIST_BYTES_MAX)
        .data_frame_budget(DATA_FRAME_BUDGET_BYTES)
        .max_send_buffer_size(windows.send_buffer_bytes)
        .enable_push(false);
    builder
}

/// Why a connection is over before its peer ended it.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    /// HTTP/2 gave up.
    #[error(transparent)]
    Http2(#[from] h2::Error),
    /// The stream took no more.
    #[error("write failed: {0}")]
    Write(#[from] io::Error),
    /// No answer to a keepalive ping.
    #[error("no answer to a keepalive ping")]
    Silent,
    /// Nothing, or not enough, came of a new client.
    #[error("no HTTP/2 preface within {} s", GREETING_TIMEOUT.as_secs())]
    NoGreeting,
}

/// What a client asks for, and where the answer goes.
type Call = (Request<RecvStream>, SendResponse<MessageBuf>);

/// One client's connection, after its preface.
pub struct ServerConnection<S> {
    http2: Connection<WriteCoalescer<S>, MessageBuf>,
    flusher: Flusher<S>,
    pace: CallPace,
}

/// Greets a client. Boxed, the greeting and what comes of it: a task that greets and then serves for days would keep room
/// for both, and for each hand a connection passes through.
///
/// # Errors
/// What came is not HTTP/2, or nothing came for 10 s.
pub async fn accept<S>(
    builder: &Builder,
    io: S,
) -> Result<Box<ServerConnection<S>>, ConnectionError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (io, flusher) = gather(io);
    let http2 = Box::pin(timeout(
        GREETING_TIMEOUT,
        builder.handshake::<_, MessageBuf>(io),
    ))
    .await
    .map_err(|_elapsed| ConnectionError::NoGreeting)??;
    flusher.allow(READ_AHEAD_BYTES);
    Ok(Box::new(ServerConnection {
        http2,
        flusher,
        pace: CallPace::new(),
    }))
}

impl<S: AsyncRead + AsyncWrite + Unpin> ServerConnection<S> {
    /// The next request; `Ok(None)` at the end. Everything else of the connection moves on in here. More is read only when all
    /// calls that came are taken, and not while they come too fast.
    fn poll_call(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Call>, ConnectionError>> {
        loop {
            match self.http2.poll_accept(cx) {
                Poll::Ready(next) => {
                    if let Poll::Ready(Err(error)) = self.flusher.poll_flush(cx) {
                        return Poll::Ready(Err(error.into()));
                    }
                    let mut next = next.transpose()?;
                    if let Some((_request, respond)) = &mut next {
                        self.pace.count(respond.poll_reset(cx).is_ready());
                    }
                    return Poll::Ready(Ok(next));
                }
                Poll::Pending => {
                    let paused = self.pace.is_paused(cx);
                    let bytes = if paused { 0 } else { READ_AHEAD_BYTES };
                    if !self.flusher.flush_and_allow(cx, bytes)? {
                        return Poll::Pending;
                    }
                }
            }
        }
    }

    /// Runs until the connection has ended and its calls have, too. `on_call` gets every request and must not block;
    /// what it returns is polled beside the connection, in the same task. Once this process is `leaving`, the connection ends
    /// as soon as it has no calls: its client is told to make none here (GOAWAY).
    ///
    /// # Errors
    /// Whatever ended the connection, a missed keepalive included.
    pub fn serve<F>(
        mut self: Box<Self>,
        keepalive_every: Duration,
        leaving: CancellationToken,
        on_call: F,
    ) -> impl Future<Output = Result<(), ConnectionError>>
    where
        F: FnMut(Request<RecvStream>, SendResponse<MessageBuf>) -> Option<Admitted>,
    {
        let (ping, heard) = (self.http2.ping_pong(), self.flusher.heard());
        let keepalive = Box::pin(keepalive(ping, keepalive_every, heard));
        self.run(keepalive, leaving, on_call)
    }

    /// As [`Self::serve`]; `silence` is told each second for how long the peer has been silent, once that is 4 s or more though it
    /// was asked, and zero when it is heard again.
    ///
    /// # Errors
    /// As there.
    pub fn serve_watched<F>(
        mut self: Box<Self>,
        keepalive_every: Duration,
        leaving: CancellationToken,
        silence: impl Fn(Duration),
        on_call: F,
    ) -> impl Future<Output = Result<(), ConnectionError>>
    where
        F: FnMut(Request<RecvStream>, SendResponse<MessageBuf>) -> Option<Admitted>,
    {
        let (ping, heard) = (self.http2.ping_pong(), self.flusher.heard());
        let patience = move || Patience::asking(keepalive_every);
        let watch = Box::pin(watch(ping, patience, heard, silence));
        self.run(watch, leaving, on_call)
    }

    async fn run<F>(
        self: Box<Self>,
        mut keepalive: Pin<Box<impl Future<Output = ()>>>,
        leaving: CancellationToken,
        mut on_call: F,
    ) -> Result<(), ConnectionError>
    where
        F: FnMut(Request<RecvStream>, SendResponse<MessageBuf>) -> Option<Admitted>,
    {
        let mut leaving = Some(Box::pin(leaving.cancelled_owned()));
        let mut calls = FuturesUnordered::new();
        let mut connection = Some(self);
        let mut result = Ok(());
        together(|cx| {
            let over = loop {
                while let Poll::Ready(Some(())) = calls.poll_next_unpin(cx) {}
                let Some(open) = &mut connection else {
                    break false;
                };
                if calls.is_empty()
                    && let Some(told) = &mut leaving
                    && told.as_mut().poll(cx).is_ready()
                {
                    leaving = None;
                    open.http2.graceful_shutdown();
                }
                match open.poll_call(cx) {
                    Poll::Ready(Ok(Some((request, respond)))) => {
                        calls.extend(on_call(request, respond));
                    }
                    Poll::Ready(Ok(None)) => break true,
                    Poll::Ready(Err(error)) => {
                        result = Err(error);
                        break true;
                    }
                    Poll::Pending if keepalive.as_mut().poll(cx).is_ready() => {
                        result = Err(ConnectionError::Silent);
                        break true;
                    }
                    Poll::Pending => break false,
                }
            };
            if over {
                // Its calls learn of it by this.
                connection = None;
                cx.waker().wake_by_ref();
            }
            if connection.is_none() && calls.is_empty() {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
        result
    }
}

/// Our end of a connection to a server. Nothing moves unless [`Self::run`] is polled.
pub struct ClientConnection<S> {
    http2: client::Connection<WriteCoalescer<S>, MessageBuf>,
    flusher: Flusher<S>,
}

/// Greets a server.
///
/// # Errors
/// The stream failed.
pub async fn connect<S>(
    builder: &client::Builder,
    io: S,
) -> Result<(client::SendRequest<MessageBuf>, ClientConnection<S>), h2::Error>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (io, flusher) = gather(io);
    let (requests, http2) = builder.handshake::<_, MessageBuf>(io).await?;
    Ok((requests, ClientConnection { http2, flusher }))
}

impl<S: AsyncRead + AsyncWrite + Unpin> ClientConnection<S> {
    /// Runs until the connection ends. `silence` is told as by [`ServerConnection::serve_watched`].
    ///
    /// # Errors
    /// Whatever ended the connection, a missed keepalive included.
    pub async fn run(
        mut self,
        patience: impl Fn() -> Patience,
        silence: impl Fn(Duration),
    ) -> Result<(), ConnectionError> {
        let (ping, heard) = (self.http2.ping_pong(), self.flusher.heard());
        let over = poll_fn(|cx| {
            let polled = Pin::new(&mut self.http2).poll(cx);
            if let Poll::Ready(Err(error)) = self.flusher.poll_flush(cx) {
                return Poll::Ready(Err(error.into()));
            }
            polled.map_err(Into::into)
        });
        tokio::select! {
            biased;
            over = over => over,
            () = watch(ping, patience, heard, silence) => Err(ConnectionError::Silent),
        }
    }
}

/// Pings every `every`; completes when an answer is missing and nothing else has come for [`PING_TIMEOUT`].
async fn keepalive(ping: Option<PingPong>, every: Duration, heard: Heard) {
    let Some(mut ping) = ping else {
        return std::future::pending().await;
    };
    loop {
        tokio::time::sleep(every).await;
        let mut known = heard.last();
        let mut answer = pin!(ping.ping(Ping::opaque()));
        loop {
            match timeout(PING_TIMEOUT, answer.as_mut()).await {
                Ok(Ok(_pong)) => break,
                Err(_elapsed) if heard.last() > known => known = heard.last(),
                Ok(Err(_)) | Err(_) => return,
            }
        }
    }
}

/// Pings a peer that is quiet, and tells its silence each second from [`ANSWER_WITHIN`] after the PING on, and when it is heard
/// again. Completes at the end of the patience.
async fn watch(
    ping: Option<PingPong>,
    patience: impl Fn() -> Patience,
    heard: Heard,
    silence: impl Fn(Duration),
) {
    let Some(mut ping) = ping else {
        return std::future::pending().await;
    };
    loop {
        // It may change meanwhile: what answers is known later than that something does.
        let ask_at = heard.last() + patience().ask_after;
        let now = Instant::now();
        if now < ask_at {
            tokio::time::sleep_until(ask_at.min(now + ASK_AFTER)).await;
            continue;
        }
        let mut answer = pin!(ping.ping(Ping::opaque()));
        let mut is_silent = false;
        loop {
            let looked = Instant::now();
            match timeout(ANSWER_WITHIN, answer.as_mut()).await {
                Ok(Ok(_pong)) => break,
                Ok(Err(_broken)) => return,
                // Whoever was stopped itself for a while has heard nobody meanwhile.
                Err(_elapsed) if looked.elapsed() > 2 * ANSWER_WITHIN => continue,
                Err(_elapsed) => (),
            }
            let (quiet, patience) = (heard.last().elapsed(), patience());
            if quiet >= patience.end_after {
                return;
            }
            if quiet >= patience.ask_after + ANSWER_WITHIN {
                is_silent = true;
                silence(quiet);
            } else if std::mem::take(&mut is_silent) {
                silence(Duration::ZERO);
            }
        }
        if is_silent {
            silence(Duration::ZERO);
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
        refuse(
            respond,
            Code::Unimplemented,
            &unknown_method(request.uri().path()),
        );
        return false;
    }
    true
}

/// The answer to a call of `path`. A path may be as long as a header list, and its percent-encoded form three times as long.
fn unknown_method(path: &str) -> String {
    format!("unknown method {}", beginning(path, EXCERPT_BYTES_MAX))
}

#[cfg(test)]
mod tests;
