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
use http::{Request, Response, StatusCode, Version, request};
use http_body_util::{Either, Full};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::time::Sleep;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::Refusal;
use super::idle::Idle;
use super::request::{clean_trailers, for_client, for_parent, for_target, response_framing};
use super::serve::{After, Connection, Connector};

/// What the client gets: an answer of this proxy, or a target's.
pub(super) type ToClient<C> = Either<Full<Bytes>, FromTarget<C>>;

/// How long a target may take to say that it wants the body; then it gets it unasked (RFC 9110, section 10.1.1).
const CONTINUE_WITHIN: Duration = Duration::from_secs(1);
/// How long a connection to a target goes on that no request needs any more: its last bytes are on their way.
const LEFT_OPEN: Duration = Duration::from_secs(5);
/// How long a connection that waited may take to be ready for the next request.
const READY_WITHIN: Duration = Duration::from_millis(100);

/// Sends a request to its target and returns the response.
///
/// # Errors
/// The request may not be sent, the target cannot be reached, or it breaks off.
pub(super) async fn exchange<C: Connector>(
    (mut parts, body): (request::Parts, Incoming),
    target: String,
    client: &Connection<C>,
) -> Result<Response<ToClient<C>>, Refusal> {
    let upgrades = for_target(&mut parts, &target, &client.proxy.via)?;
    if let Some(parent) = client.connector.parent(&target) {
        for_parent(&mut parts, &target, parent)?;
    }
    let progress = Arc::new(Progress::default());
    let expects = parts
        .headers
        .get(EXPECT)
        .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"));
    // Only what can be asked twice goes to a connection that the target may be closing.
    let again = (parts.method.is_safe() && body.is_end_stream()).then(|| parts.clone());
    let waited = match &again {
        Some(_) => ready(&client.idle, &target).await,
        None => None,
    };
    let mut request = Request::from_parts(parts, ToTarget::new(body, &progress, expects));
    if expects {
        let progress = Arc::clone(&progress);
        hyper::ext::on_informational(&mut request, move |response| {
            if response.status() == StatusCode::CONTINUE {
                progress.set(BODY_WANTED);
            }
        });
    }
    let sent = match waited {
        None => Err(request),
        Some(mut sender) => match sender.requests.try_send_request(request).await {
            Ok(response) => Ok((sender, response)),
            Err(mut failed) => {
                let same = || {
                    let parts = again.clone()?;
                    Some(Request::from_parts(parts, ToTarget::empty(&progress)))
                };
                match failed.take_message().or_else(same) {
                    Some(unsent) => Err(unsent),
                    None => return Err(Refusal::no_response(failed.error())),
                }
            }
        },
    };
    let (sender, response) = match sent {
        Ok(both) => both,
        Err(request) => {
            let mut sender = connect(client, &target).await?;
            let sent = sender.requests.try_send_request(request).await;
            (
                sender,
                sent.map_err(|failed| Refusal::no_response(failed.error()))?,
            )
        }
    };
    let (mut parts, body) = response.into_parts();
    // From here on dropping it ends the connection, and what still waits to be sent there.
    let mut body = FromTarget {
        body,
        request: progress,
        connection: Some((sender, target)),
        is_last: false,
        idle: Arc::clone(&client.idle),
        connector: Arc::clone(&client.connector),
    };
    let via = &client.proxy.via;
    if parts.status == StatusCode::SWITCHING_PROTOCOLS {
        if !upgrades {
            return Err(Refusal::unasked_upgrade());
        }
        let mut response = Response::from_parts(parts, ());
        let upgrade = hyper::upgrade::on(&mut response);
        client.switched.set(After::Upgraded(upgrade));
        (parts, ()) = response.into_parts();
        for_client(&mut parts, via, true);
        return Ok(Response::from_parts(parts, Either::Left(Full::default())));
    }
    response_framing(&mut parts)?;
    // Its next request would be of that version, too.
    body.is_last = parts.version != Version::HTTP_11;
    for_client(&mut parts, via, false);
    Ok(Response::from_parts(parts, Either::Right(body)))
}

/// A connection to the target that has waited, ready for a request.
async fn ready(idle: &Idle, target: &str) -> Option<Sender> {
    while let Some(mut sender) = idle.take(target) {
        if let Ok(Ok(())) = tokio::time::timeout(READY_WITHIN, sender.requests.ready()).await {
            return Some(sender);
        }
    }
    None
}

async fn connect<C: Connector>(client: &Connection<C>, target: &str) -> Result<Sender, Refusal> {
    let tunnel = client.connector.open(target, false).await?;
    let stream = client.connector.stream(tunnel);
    let mut builder = http1::Builder::new();
    builder
        .preserve_header_case(true)
        .max_buf_size(client.proxy.buffer_bytes);
    let connecting = builder.handshake(TokioIo::new(stream)).await;
    let (requests, connection) = connecting.map_err(|error| Refusal::no_response(&error))?;
    let needed = CancellationToken::new();
    let left = needed.clone();
    client.connector.spawn(async move {
        let left = async {
            left.cancelled().await;
            tokio::time::sleep(LEFT_OPEN).await;
        };
        tokio::select! {
            ended = connection.with_upgrades() => if let Err(error) = ended {
                tracing::debug!(%error, "a target's connection failed");
            },
            // The target takes no more bytes, and nobody waits for it.
            () = left => (),
        }
    });
    Ok(Sender {
        requests,
        _needed: needed.drop_guard(),
    })
}

/// A connection to a target. Dropped, it ends.
pub(super) struct Sender {
    pub(super) requests: SendRequest<ToTarget>,
    _needed: DropGuard,
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
    /// The target is to be waited for.
    expects: bool,
    /// From when on it is not.
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
            expects,
            consent: None,
        }
    }

    fn empty(progress: &Arc<Progress>) -> Self {
        progress.set(BODY_SENT);
        Self {
            body: None,
            progress: Arc::clone(progress),
            expects: false,
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
        if this.expects {
            if this.progress.state() == BODY_WAITS {
                let consent = this
                    .consent
                    .get_or_insert_with(|| Box::pin(tokio::time::sleep(CONTINUE_WITHIN)));
                ready!(consent.as_mut().poll(cx));
            }
            (this.expects, this.consent) = (false, None);
        }
        let Some(body) = &mut this.body else {
            return Poll::Ready(None);
        };
        let frame = ready!(Pin::new(&mut *body).poll_frame(cx));
        if frame.is_none() || body.is_end_stream() {
            this.progress.set(BODY_SENT);
        }
        Poll::Ready(frame.map(|frame| frame.map(cleaned).map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Incoming::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body
            .as_ref()
            .map_or_else(|| SizeHint::with_exact(0), Incoming::size_hint)
    }
}

fn cleaned(mut frame: Frame<Bytes>) -> Frame<Bytes> {
    if let Some(trailers) = frame.trailers_mut() {
        clean_trailers(trailers);
    }
    frame
}

/// The body of a response, on its way to the client. At its end the connection waits for another request.
pub(super) struct FromTarget<C: Connector> {
    body: Incoming,
    request: Arc<Progress>,
    /// The connection, and its target.
    connection: Option<(Sender, String)>,
    /// The connection takes no further request.
    is_last: bool,
    idle: Arc<Idle>,
    connector: Arc<C>,
}

impl<C: Connector> FromTarget<C> {
    fn complete(&mut self) {
        let Some((sender, target)) = self.connection.take() else {
            return;
        };
        let is_done = self.request.state() == BODY_SENT && !sender.requests.is_closed();
        if is_done && !self.is_last && self.connector.may_wait() {
            self.idle.put(target, sender);
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
        Poll::Ready(frame.map(|frame| frame.map(cleaned)))
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
