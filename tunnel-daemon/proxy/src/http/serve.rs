//! A client's connection: reads requests until it ends or becomes a tunnel.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::{Either, Full};
use hyper::body::{Body, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Refusal;
use super::exchange::{ToClient, exchange};
use super::idle::Idle;
use super::request::{Asked, asked};

/// Octets of a request head, at most: no more is held of a client that has not asked for anything yet.
const HEAD_BYTES_MAX: usize = 16 * 1024;

/// How often connections are looked for that have waited too long.
const SWEEP: Duration = Duration::from_secs(5);
/// How long a client may take to read the rest of its last response.
const FLUSH_WITHIN: Duration = Duration::from_secs(30);

/// Opens tunnels for one client.
pub trait Connector: Send + Sync + 'static {
    /// An open tunnel.
    type Tunnel: Send + 'static;
    /// The bytes of a tunnel. At its end reads fail unless the target has ended in order.
    type Stream: AsyncRead + AsyncWrite + Send + Unpin + 'static;

    /// How long the client may take for a request head, and between two requests; then it is closed.
    fn head_timeout(&self) -> Duration;

    /// Who the client is, by the headers of a request.
    ///
    /// # Errors
    /// It has to say who it is, or says something wrong.
    fn authenticate(&self, headers: &HeaderMap) -> Result<(), Refusal>;

    /// Whether connections to targets may wait for a further request, which takes memory.
    fn may_wait(&self) -> bool;

    /// Opens a tunnel to `host:port`. `alone`: the client's connection becomes this tunnel.
    ///
    /// # Errors
    /// Why not, for the client.
    fn open(
        &self,
        target: &str,
        alone: bool,
    ) -> impl Future<Output = Result<Self::Tunnel, Refusal>> + Send;

    /// The proxy to which requests for `host:port` go, if any: [`Self::open`] connects to it in the target's place.
    fn parent(&self, target: &str) -> Option<Parent>;

    /// The bytes of a tunnel that was not opened alone.
    fn stream(&self, tunnel: Self::Tunnel) -> Self::Stream;

    /// Runs a task. It ends with the process, or with what it belongs to.
    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static);
}

/// A proxy behind this one, for requests.
#[derive(Clone, Debug)]
pub struct Parent {
    /// The value of `Proxy-Authorization` that it is sent.
    pub authorization: Option<HeaderValue>,
}

/// What all clients of a listener share.
pub struct Proxy {
    pub(super) via: HeaderValue,
    /// Bytes that a connection to a target may hold, each way.
    pub(super) buffer_bytes: usize,
    leaving: CancellationToken,
}

/// What the requests of one client share.
pub(super) struct Connection<C: Connector> {
    pub(super) proxy: Arc<Proxy>,
    pub(super) connector: Arc<C>,
    pub(super) idle: Arc<Idle>,
    pub(super) switched: Switched<C::Tunnel>,
}

/// What a client's connection has become.
pub enum After<T> {
    /// A tunnel, by CONNECT.
    Tunnel(T),
    /// A connection in the protocol on which client and target agreed.
    Upgraded(OnUpgrade),
}

/// Where a request leaves what its connection becomes.
pub(super) struct Switched<T>(Mutex<Option<After<T>>>);

impl Proxy {
    /// A connection to a target holds at most `buffer_bytes` (at least 8 KiB) each way. After `leaving` no client is read for
    /// further requests.
    #[must_use]
    pub fn new(buffer_bytes: usize, leaving: CancellationToken) -> Self {
        // Another process has another name: a request may pass several.
        let name = format!("adit-{:08x}", rand::random::<u32>());
        let via = HeaderValue::try_from(name);
        Self {
            via: via.unwrap_or_else(|_never| HeaderValue::from_static("adit")),
            buffer_bytes,
            leaving,
        }
    }
}

impl<T> Switched<T> {
    pub(super) fn set(&self, after: After<T>) {
        *self.locked() = Some(after);
    }

    fn is_set(&self) -> bool {
        self.locked().is_some()
    }

    fn take(&self) -> Option<After<T>> {
        self.locked().take()
    }

    fn locked(&self) -> MutexGuard<'_, Option<After<T>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How a client's connection has ended. Its owner closes it.
pub enum Served<S, T> {
    /// In order.
    Ended(S),
    /// In the middle of a request or response, which must not look complete.
    Broken(S),
    /// It has become something else. The bytes are what the client has sent beyond its last request.
    Became(S, Bytes, After<T>),
    /// It should have, but the client could not be told.
    Lost(After<T>),
}

/// Serves one client until its connection ends or becomes something else. A client that closes its sending side, too, has left.
pub async fn serve<S, C>(io: S, proxy: Arc<Proxy>, connector: C) -> Served<S, C::Tunnel>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    C: Connector,
{
    let client = Arc::new(Connection {
        proxy: Arc::clone(&proxy),
        connector: Arc::new(connector),
        idle: Arc::default(),
        switched: Switched(Mutex::new(None)),
    });
    let requests = Arc::clone(&client);
    let service = service_fn(move |request: Request<Incoming>| {
        let client = Arc::clone(&requests);
        Box::pin(async move {
            let has_body = !Body::is_end_stream(request.body());
            let answered = answer(request, &client).await;
            let answered =
                answered.unwrap_or_else(|refusal| refusal.response(has_body).map(Either::Left));
            Ok::<_, std::convert::Infallible>(answered)
        })
    });
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(client.connector.head_timeout())
        .preserve_header_case(true)
        .max_buf_size(HEAD_BYTES_MAX);
    let mut connection = builder.serve_connection(TokioIo::new(io), service);
    let mut leaving = pin!(proxy.leaving.cancelled());
    let mut is_leaving = false;
    let mut sweeps = tokio::time::interval_at(Instant::now() + SWEEP, SWEEP);
    let mut ended = poll_fn(|cx| {
        if sweeps.poll_tick(cx).is_ready() {
            client.idle.sweep(client.connector.may_wait());
            cx.waker().wake_by_ref();
        }
        if !is_leaving && leaving.as_mut().poll(cx).is_ready() {
            is_leaving = true;
            if !client.switched.is_set() {
                Pin::new(&mut connection).graceful_shutdown();
            }
        }
        connection.poll_without_shutdown(cx)
    })
    .await;
    // Behind garbage in place of a request it ends, too.
    let ends = ended
        .as_ref()
        .map_or_else(hyper::Error::is_parse, |()| true);
    if ends && !client.switched.is_set() {
        // What it still holds for the client is written only by its shutdown.
        let flushed = tokio::time::timeout(FLUSH_WITHIN, &mut connection).await;
        let Ok(flushed) = flushed else {
            return Served::Broken(connection.into_parts().io.into_inner());
        };
        ended = flushed;
    }
    let parts = connection.into_parts();
    let io = parts.io.into_inner();
    match (ended, client.switched.take()) {
        (Ok(()), Some(after)) => Served::Became(io, parts.read_buf, after),
        (Err(_broken), Some(after)) => Served::Lost(after),
        (Ok(()), None) => Served::Ended(io),
        (Err(error), None) => {
            tracing::debug!(%error, "a client's connection failed");
            // Nothing was asked.
            if error.is_timeout() {
                Served::Ended(io)
            } else {
                Served::Broken(io)
            }
        }
    }
}

async fn answer<C: Connector>(
    request: Request<Incoming>,
    client: &Connection<C>,
) -> Result<Response<ToClient<C>>, Refusal> {
    let (parts, body) = request.into_parts();
    client.connector.authenticate(&parts.headers)?;
    match asked(&parts)? {
        Asked::Tunnel(target) => {
            let tunnel = client.connector.open(&target, true).await?;
            client.switched.set(After::Tunnel(tunnel));
            Ok(Response::new(Either::Left(Full::default())))
        }
        Asked::Request(target) => exchange((parts, body), target, client).await,
    }
}
