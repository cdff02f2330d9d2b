//! A client's connection: reads requests until it ends or becomes a tunnel.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::{Either, Full};
use hyper::body::{Body, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio_util::sync::CancellationToken;

use super::Refusal;
use super::exchange::{ToClient, exchange};
use super::idle::Idle;
use super::request::{Asked, asked};

/// Octets of a request head or response head, at most.
pub(super) const HEAD_BYTES_MAX: usize = 64 * 1024;

/// Opens tunnels for one client.
pub trait Connector: Send + Sync + 'static {
    /// An open tunnel.
    type Tunnel: Send + 'static;
    /// The bytes of a tunnel. At its end reads fail unless the target has ended in order.
    type Stream: AsyncRead + AsyncWrite + Send + Unpin + 'static;

    /// Who the client is, by the headers of a request.
    ///
    /// # Errors
    /// It has to say who it is, or says something wrong.
    fn authenticate(&self, headers: &HeaderMap) -> Result<(), Refusal>;

    /// Whether the client may use a connection to this `host:port` that is open already.
    fn permits(&self, target: &str) -> bool;

    /// Opens a tunnel to `host:port`. `alone`: the client's connection becomes this tunnel.
    ///
    /// # Errors
    /// Why not, for the client.
    fn open(
        &self,
        target: &str,
        alone: bool,
    ) -> impl Future<Output = Result<Self::Tunnel, Refusal>> + Send;

    /// The bytes of a tunnel that was not opened alone.
    fn stream(&self, tunnel: Self::Tunnel) -> Self::Stream;

    /// Runs a task. It ends with the process, or with what it belongs to.
    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static);
}

/// What all clients of a listener share.
pub struct Proxy {
    pub(super) via: HeaderValue,
    pub(super) idle: Arc<Idle>,
    head_timeout: Duration,
    leaving: CancellationToken,
}

/// What a client's connection has become.
pub enum After<T> {
    /// A tunnel, by CONNECT.
    Tunnel(T),
    /// A connection in the protocol on which client and target agreed.
    Upgraded(OnUpgrade),
}

/// Where a request leaves what its connection becomes.
pub(super) struct Switched<C: Connector>(Mutex<Option<After<C::Tunnel>>>);

impl Proxy {
    /// A client that needs longer than `head_timeout` for a request head, or between two requests, is closed. After `leaving`
    /// no client is read for further requests.
    #[must_use]
    pub fn new(head_timeout: Duration, leaving: CancellationToken) -> Self {
        // Another process has another name: a request may pass several.
        let name = format!("adit-{:08x}", rand::random::<u32>());
        Self {
            via: HeaderValue::try_from(name)
                .unwrap_or_else(|_never| HeaderValue::from_static("adit")),
            idle: Arc::new(Idle::new(leaving.clone())),
            head_timeout,
            leaving,
        }
    }
}

impl<C: Connector> Switched<C> {
    pub(super) fn set(&self, after: After<C::Tunnel>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(after);
    }

    fn take(&self) -> Option<After<C::Tunnel>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// How a client's connection has ended.
pub enum Served<S, T> {
    /// In order, or it was the client that broke it off.
    Closed,
    /// In the middle of a response: the client must see that.
    Broken(S),
    /// It has become something else. The bytes are what the client has sent beyond its last request.
    Became(S, Bytes, After<T>),
    /// It should have, but the client could not be told.
    Lost(After<T>),
}

/// Serves one client until its connection ends or becomes something else.
pub async fn serve<S, C>(io: S, proxy: Arc<Proxy>, connector: C) -> Served<S, C::Tunnel>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    C: Connector,
{
    let connector = Arc::new(connector);
    let switched = Arc::new(Switched::<C>(Mutex::new(None)));
    let leaving = proxy.leaving.clone();
    let head_timeout = proxy.head_timeout;
    let service = {
        let switched = Arc::clone(&switched);
        service_fn(move |request| {
            let (proxy, connector) = (Arc::clone(&proxy), Arc::clone(&connector));
            let switched = Arc::clone(&switched);
            Box::pin(async move {
                let has_body = !Body::is_end_stream(request.body());
                let answered = answer(request, &proxy, &connector, &switched).await;
                let answered =
                    answered.unwrap_or_else(|refusal| refusal.response(has_body).map(Either::Left));
                Ok::<_, std::convert::Infallible>(answered)
            })
        })
    };
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(head_timeout)
        .half_close(true)
        .preserve_header_case(true)
        .max_buf_size(HEAD_BYTES_MAX);
    let mut connection = builder.serve_connection(TokioIo::new(io), service);
    let mut leaving = pin!(leaving.cancelled_owned());
    let mut is_leaving = false;
    let ended = poll_fn(|cx| {
        if !is_leaving && leaving.as_mut().poll(cx).is_ready() {
            is_leaving = true;
            Pin::new(&mut connection).graceful_shutdown();
        }
        connection.poll_without_shutdown(cx)
    })
    .await;
    let parts = connection.into_parts();
    let mut io = parts.io.into_inner();
    match (ended, switched.take()) {
        (Ok(()), Some(after)) => Served::Became(io, parts.read_buf, after),
        (Err(_broken), Some(after)) => Served::Lost(after),
        (Err(error), None) if error.is_user() => Served::Broken(io),
        (ended, None) => {
            if let Err(error) = ended {
                tracing::debug!(%error, "a client's connection failed");
            }
            let _closed = io.shutdown().await;
            Served::Closed
        }
    }
}

async fn answer<C: Connector>(
    request: Request<Incoming>,
    proxy: &Arc<Proxy>,
    connector: &Arc<C>,
    switched: &Switched<C>,
) -> Result<Response<ToClient<C>>, Refusal> {
    let (parts, body) = request.into_parts();
    connector.authenticate(&parts.headers)?;
    match asked(&parts)? {
        Asked::Tunnel(target) => {
            let tunnel = connector.open(&target, true).await?;
            switched.set(After::Tunnel(tunnel));
            Ok(Response::new(Either::Left(Full::default())))
        }
        Asked::Request(target) => exchange((parts, body), target, proxy, connector, switched).await,
    }
}
