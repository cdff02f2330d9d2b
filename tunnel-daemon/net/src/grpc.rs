//! gRPC over the `h2` crate: the few headers and trailers that packet streams need, and how connections are run. Nothing
//! here knows messages.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

use adit_core::http2::StreamEnd;
use adit_core::text::beginning;
use adit_core::wire::encode::MessageBuf;
use h2::server::{Builder, Connection, SendResponse};
use h2::{Ping, PingPong, RecvStream, client};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use crate::call_pace::CallPace;
use crate::poll_set::{PollSet, together};
use crate::tasks::Admitted;
use crate::write_coalescer::{Flusher, Heard, WriteCoalescer, gather};
use adit_config::limits::{
    CLIENT_STREAMS_MAX, DATA_FRAME_BUDGET_BYTES, EXCERPT_BYTES_MAX, GREETING_TIMEOUT,
};

/// Window of a connection, whose streams have windows of their own. As large as HTTP/2 allows, so that a stalled stream
/// never holds up the others.
const CONNECTION_WINDOW_BYTES: u32 = (1 << 31) - 1;
/// Largest frame between our own ends; Go sends 16 KiB in any case.
pub const LINK_FRAME_BYTES: u32 = 256 * 1024;
/// The smallest limit of frames that HTTP/2 allows, and the largest frame that a Go client sends.
pub const SMALL_FRAME_BYTES: u32 = 16 * 1024;
/// Largest header list accepted: tokens and identifier lists are long. `h2` also bounds the frames of a list: to what a
/// list of this size needs in frames of the largest accepted size, plus a quarter, and never below 6.
const HEADER_LIST_BYTES_MAX: u32 = 256 * 1024;
/// Bytes that HTTP/2 may read, beside one read of its own, before all received calls are taken. `h2` keeps an entry for
/// each call, and a call that is cancelled at once may take only 22 bytes.
const READ_AHEAD_BYTES: usize = 128 * 1024;
/// An unanswered keepalive ping ends the connection after this time, unless other bytes arrive: the answer may wait behind
/// all data in flight in both directions.
pub const PING_TIMEOUT: Duration = Duration::from_secs(20);
/// A watched peer that has been silent for this long is sent a PING.
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
        HeaderValue::from_static(self.number())
    }

    /// Its number, in digits.
    #[must_use]
    pub fn number(self) -> &'static str {
        match self {
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
        }
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

/// As [`code_of`], for the reason of a reset.
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

/// As [`code_of_reason`], for the end of a client's call.
#[must_use]
pub fn code_of_end(end: StreamEnd) -> tonic::Code {
    let gone = tonic::Code::Cancelled;
    match end {
        StreamEnd::Gone => gone,
        StreamEnd::Reset(reason) => code_of_reason(reason.into(), gone),
    }
}

/// An error of HTTP/2 in words for operators: the error of the stream below, or the peer's code by its name in RFC 9113.
#[must_use]
pub fn words(error: &h2::Error) -> String {
    if let Some(io) = error.get_io() {
        // The library's own texts for streams of a connection that is gone.
        let is_told =
            io.get_ref().is_some() && !io.to_string().ends_with(" because of a broken pipe");
        return if is_told {
            io.to_string()
        } else {
            match io.kind() {
                io::ErrorKind::BrokenPipe => "the peer closed the connection".to_owned(),
                kind => kind.to_string(),
            }
        };
    }
    let Some(reason) = error.reason() else {
        return "the HTTP/2 stream is over".to_owned();
    };
    let code = u32::from(reason);
    let name = usize::try_from(code).ok().and_then(|at| CODES.get(at));
    let name = name.copied().unwrap_or("unknown");
    match (error.is_go_away(), error.is_remote()) {
        (true, true) => format!("the peer ended the connection (HTTP/2 {code}, {name})"),
        (false, true) => format!("the peer reset the stream (HTTP/2 {code}, {name})"),
        (_, false) => format!("the peer broke HTTP/2 ({code}, {name})"),
    }
}

/// Names of error codes, RFC 9113, section 7, by number.
const CODES: [&str; 14] = [
    "NO_ERROR",
    "PROTOCOL_ERROR",
    "INTERNAL_ERROR",
    "FLOW_CONTROL_ERROR",
    "SETTINGS_TIMEOUT",
    "STREAM_CLOSED",
    "FRAME_SIZE_ERROR",
    "REFUSED_STREAM",
    "CANCEL",
    "COMPRESSION_ERROR",
    "CONNECT_ERROR",
    "ENHANCE_YOUR_CALM",
    "INADEQUATE_SECURITY",
    "HTTP_1_1_REQUIRED",
];

/// Percent-encodes a `grpc-message` as the gRPC specification asks.
#[must_use]
pub fn encode_message(text: &str) -> HeaderValue {
    let encoded = percent_encoded(text);
    HeaderValue::from_str(&encoded).unwrap_or(HeaderValue::from_static("unprintable"))
}

/// As [`encode_message`], as text.
pub(crate) fn percent_encoded(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if (b' '..=b'~').contains(&byte) && byte != b'%' {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
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

/// The text of trailers that deny a call with [`Code::PermissionDenied`], shortened: it is a peer's.
#[must_use]
pub fn denial_of(trailers: &HeaderMap) -> Option<String> {
    let text = |name| trailers.get(name).and_then(|value| value.to_str().ok());
    let is_denied = trailers.get("grpc-status") == Some(&Code::PermissionDenied.value());
    is_denied.then(|| {
        let message = text("grpc-message").unwrap_or_default();
        beginning(message, EXCERPT_BYTES_MAX).to_owned()
    })
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
    // The caller may be gone.
    let _sent = respond.send_response(response, true);
}

/// Frame size and windows of a listener or dialler.
#[derive(Clone, Copy, Debug)]
pub struct Windows {
    /// Largest frame accepted.
    pub frame_bytes: u32,
    /// Bytes a peer may send on one stream before we read them.
    pub stream_bytes: u32,
    /// Bytes of one stream buffered towards the socket.
    pub send_buffer_bytes: usize,
}

/// Timeouts for a silent peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Patience {
    /// The peer is sent a PING after this time of silence.
    pub ask_after: Duration,
    /// The connection ends after this time of silence.
    pub end_after: Duration,
}

impl Patience {
    /// For a peer that may be pinged at any time; `keepalive` is the time between pings otherwise.
    #[must_use]
    pub fn asking(keepalive: Duration) -> Self {
        Self {
            ask_after: ASK_AFTER,
            end_after: keepalive.saturating_add(PING_TIMEOUT),
        }
    }

    /// For a peer that accepts a PING only once per `every`.
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
        // [`READ_AHEAD_BYTES`] bounds them. A limit here would end the connection with all its tunnels.
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

/// Why a connection ended before its peer closed it.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    /// HTTP/2 failed.
    #[error("{}", words(.0))]
    Http2(#[from] h2::Error),
    /// Writing to the stream failed.
    #[error(transparent)]
    Write(#[from] io::Error),
    /// No answer to a keepalive ping.
    #[error("no answer to a keepalive ping")]
    Silent,
    /// A new client did not send the whole HTTP/2 preface in time.
    #[error("no HTTP/2 preface within {} s", GREETING_TIMEOUT.as_secs())]
    NoGreeting,
}

/// A client's request, and where the response goes.
type Call = (Request<RecvStream>, SendResponse<MessageBuf>);

/// One client's connection, after its preface.
pub struct ServerConnection<S> {
    http2: Connection<WriteCoalescer<S>, MessageBuf>,
    flusher: Flusher<S>,
    pace: CallPace,
}

/// Greets a client. Greeting and connection are boxed: a task that greets and then serves for days would keep room for
/// both, once for each function they pass through.
///
/// # Errors
/// The peer does not speak HTTP/2, or sent nothing for 10 s.
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
    /// The next request; `Ok(None)` at the end. Polling this drives the whole connection. More is read only when all
    /// received calls are taken, and not while calls come too fast.
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

    /// Runs until the connection and its calls have ended. `on_call` gets every request and must not block; the future it
    /// returns is polled beside the connection, in the same task. Once this process is `leaving`, the peer gets GOAWAY as soon as
    /// it has no calls, and the connection ends. While the peer is silent despite a PING, `silence` gets the time of silence each
    /// second, from 4 s on. It gets zero when the peer is heard again.
    ///
    /// # Errors
    /// The error that ended the connection, a missed keepalive included.
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
        mut watch: Pin<Box<impl Future<Output = ()>>>,
        leaving: CancellationToken,
        mut on_call: F,
    ) -> Result<(), ConnectionError>
    where
        F: FnMut(Request<RecvStream>, SendResponse<MessageBuf>) -> Option<Admitted>,
    {
        let mut leaving = Some(Box::pin(leaving.cancelled_owned()));
        let mut calls = PollSet::default();
        let mut connection = Some(self);
        let mut result = Ok(());
        together(|cx| {
            let over = loop {
                calls.poll(cx);
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
                        if let Some(call) = on_call(request, respond) {
                            calls.push(call);
                        }
                    }
                    Poll::Ready(Ok(None)) => break true,
                    Poll::Ready(Err(error)) => {
                        result = Err(error);
                        break true;
                    }
                    Poll::Pending if watch.as_mut().poll(cx).is_ready() => {
                        result = Err(ConnectionError::Silent);
                        break true;
                    }
                    Poll::Pending => break false,
                }
            };
            if over {
                // This tells the calls that the connection is over.
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
    /// Runs until the connection ends. `silence` is called as by [`ServerConnection::serve_watched`].
    ///
    /// # Errors
    /// The error that ended the connection, a missed keepalive included.
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

/// Pings a silent peer. From [`ANSWER_WITHIN`] after the PING on, reports the silence each second, and reports when the
/// peer is heard again. Completes when the patience is over.
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
        // The patience may change: what kind of peer answers is known only after its first bytes.
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
                // A process that was stopped itself has read nothing meanwhile.
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

/// Whether a request is a gRPC call of `path`; any other request is answered here.
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
            &unknown_method(request.uri().path().as_bytes()),
        );
        return false;
    }
    true
}

/// Error text for a call of `path`, which is cut: a path may be as long as a header list, and three times as long
/// percent-encoded.
#[must_use]
pub fn unknown_method(path: &[u8]) -> String {
    let path = String::from_utf8_lossy(path);
    format!("unknown method {}", beginning(&path, EXCERPT_BYTES_MAX))
}

#[cfg(test)]
mod tests;
