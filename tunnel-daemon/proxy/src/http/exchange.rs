//! One request to a target, and its response.

use std::error::Error;
use std::future::Future as _;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::AcqRel, Ordering::Acquire};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_util::task::AtomicWaker;
use http::header::EXPECT;
use http::{Request, Response, StatusCode, request};
use http_body_util::{Either, Full};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::time::Sleep;

use super::Refusal;
use super::request::{for_client, for_target};
use super::serve::{After, Connector, HEAD_BYTES_MAX, Proxy, Switched};

/// What the client gets: an answer of this proxy, or a target's.
pub(super) type ToClient<C> = Either<Full<Bytes>, FromTarget<C>>;

/// How long a target may take to say that it wants the body; then it gets it unasked (RFC 9110, section 10.1.1).
const CONTINUE_WITHIN: Duration = Duration::from_secs(1);
/// How long a connection that waited may take to be ready for the next request.
const READY_WITHIN: Duration = Duration::from_millis(100);

/// Sends a request to its target and returns the response.
///
/// # Errors
/// The request may not be sent, the target cannot be reached, or it breaks off.
pub(super) async fn exchange<C: Connector>(
    (mut parts, body): (request::Parts, Incoming),
    target: String,
    proxy: &Arc<Proxy>,
    connector: &Arc<C>,
    switched: &Switched<C>,
) -> Result<Response<ToClient<C>>, Refusal> {
    let upgrades = for_target(&mut parts, &proxy.via)?;
    let progress = Arc::new(Progress::default());
    let expects = parts
        .headers
        .get(EXPECT)
        .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"));
    // The same request can be sent again if the connection turns out to have ended.
    let again = (parts.method.is_safe() && body.is_end_stream()).then(|| parts.clone());
    let mut request = Request::from_parts(parts, ToTarget::new(body, &progress, expects));
    if expects {
        let progress = Arc::clone(&progress);
        hyper::ext::on_informational(&mut request, move |response| {
            if response.status() == StatusCode::CONTINUE {
                progress.set(BODY_WANTED);
            }
        });
    }
    // A client that may not ask for the target is told so when it opens a connection of its own.
    let mut waited = match connector.permits(&target) {
        true => ready(proxy, &target).await,
        false => None,
    };
    let (sender, response) = loop {
        let was_waiting = waited.is_some();
        let mut sender = match waited.take() {
            Some(sender) => sender,
            None => connect(connector, &target).await?,
        };
        match sender.try_send_request(request).await {
            Ok(response) => break (sender, response),
            Err(mut failed) => {
                let unsent = failed.take_message();
                let same = again
                    .clone()
                    .map(|parts| Request::from_parts(parts, ToTarget::empty(&progress)));
                match unsent.or(same).filter(|_| was_waiting) {
                    Some(unsent) => request = unsent,
                    None => return Err(Refusal::no_response(failed.error())),
                }
            }
        }
    };
    let (mut parts, body) = response.into_parts();
    if parts.status == StatusCode::SWITCHING_PROTOCOLS {
        if !upgrades {
            return Err(Refusal::unasked_upgrade());
        }
        let mut response = Response::from_parts(parts, body);
        switched.set(After::Upgraded(hyper::upgrade::on(&mut response)));
        (parts, _) = response.into_parts();
        for_client(&mut parts, &proxy.via, true);
        return Ok(Response::from_parts(parts, Either::Left(Full::default())));
    }
    for_client(&mut parts, &proxy.via, false);
    let body = FromTarget {
        body,
        request: progress,
        connection: Some((sender, target)),
        proxy: Arc::clone(proxy),
        connector: Arc::clone(connector),
    };
    Ok(Response::from_parts(parts, Either::Right(body)))
}

/// A connection to the target that has waited, ready for a request.
async fn ready(proxy: &Proxy, target: &str) -> Option<SendRequest<ToTarget>> {
    while let Some(mut sender) = proxy.idle.take(target) {
        if let Ok(Ok(())) = tokio::time::timeout(READY_WITHIN, sender.ready()).await {
            return Some(sender);
        }
    }
    None
}

async fn connect<C: Connector>(
    connector: &Arc<C>,
    target: &str,
) -> Result<SendRequest<ToTarget>, Refusal> {
    let tunnel = connector.open(target, false).await?;
    let stream = connector.stream(tunnel);
    let mut builder = http1::Builder::new();
    builder
        .preserve_header_case(true)
        .max_buf_size(HEAD_BYTES_MAX);
    let connecting = builder.handshake(TokioIo::new(stream)).await;
    let (sender, connection) = connecting.map_err(|error| Refusal::no_response(&error))?;
    connector.spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(%error, "a target's connection failed");
        }
    });
    Ok(sender)
}

/// How far a request's body has come.
#[derive(Default)]
pub(super) struct Progress {
    state: AtomicU8,
    waker: AtomicWaker,
}

/// The body waits for the target's consent.
const BODY_WAITS: u8 = 0;
const BODY_WANTED: u8 = 1;
/// The target has the whole body.
const BODY_SENT: u8 = 2;
/// The response is over, and with it the connection if the body is not.
const ABANDONED: u8 = 3;

impl Progress {
    fn set(&self, state: u8) {
        self.state.fetch_max(state, AcqRel);
        self.waker.wake();
    }

    fn state(&self) -> u8 {
        self.state.load(Acquire)
    }
}

/// The body of a request, on its way to the target.
pub(super) struct ToTarget {
    /// `None`: empty.
    body: Option<Incoming>,
    progress: Arc<Progress>,
    consent: Option<Pin<Box<Sleep>>>,
}

impl ToTarget {
    fn new(body: Incoming, progress: &Arc<Progress>, expects: bool) -> Self {
        if body.is_end_stream() {
            return Self::empty(progress);
        }
        Self {
            body: Some(body),
            progress: Arc::clone(progress),
            consent: expects.then(|| Box::pin(tokio::time::sleep(CONTINUE_WITHIN))),
        }
    }

    fn empty(progress: &Arc<Progress>) -> Self {
        progress.set(BODY_SENT);
        Self {
            body: None,
            progress: Arc::clone(progress),
            consent: None,
        }
    }
}

impl Body for ToTarget {
    type Data = Bytes;
    type Error = Box<dyn Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = &mut *self;
        this.progress.waker.register(cx.waker());
        if this.progress.state() == ABANDONED {
            return Poll::Ready(Some(Err(
                "the response is complete without the request".into()
            )));
        }
        if let Some(consent) = &mut this.consent {
            if this.progress.state() == BODY_WAITS {
                ready!(consent.as_mut().poll(cx));
            }
            this.consent = None;
        }
        let Some(body) = &mut this.body else {
            return Poll::Ready(None);
        };
        let frame = ready!(Pin::new(&mut *body).poll_frame(cx));
        if frame.is_none() || body.is_end_stream() {
            this.progress.set(BODY_SENT);
        }
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Incoming::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body
            .as_ref()
            .map_or(SizeHint::with_exact(0), Incoming::size_hint)
    }
}

/// The body of a response, on its way to the client. At its end the connection waits for another request.
pub(super) struct FromTarget<C: Connector> {
    body: Incoming,
    request: Arc<Progress>,
    /// The connection, and its target.
    connection: Option<(SendRequest<ToTarget>, String)>,
    proxy: Arc<Proxy>,
    connector: Arc<C>,
}

impl<C: Connector> FromTarget<C> {
    fn complete(&mut self) {
        let Some((sender, target)) = self.connection.take() else {
            return;
        };
        if self.request.state() != BODY_SENT {
            return;
        }
        if let Some(sweep) = self.proxy.idle.put(target, sender) {
            self.connector.spawn(sweep);
        }
    }
}

impl<C: Connector> Body for FromTarget<C> {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(pin!(&mut self.body).poll_frame(cx));
        match &frame {
            Some(Err(_broken)) => self.connection = None,
            None => self.complete(),
            Some(Ok(_)) => (),
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl<C: Connector> Drop for FromTarget<C> {
    fn drop(&mut self) {
        // Bodies that are empty, or whose length is known, are not asked for their end.
        if self.body.is_end_stream() {
            self.complete();
        }
        self.request.set(ABANDONED);
    }
}
