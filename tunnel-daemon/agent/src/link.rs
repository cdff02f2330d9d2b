//! One connection to one server: opens it, identifies the server, runs the link.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use adit_core::ids::{ServerId, TunnelKey};
use adit_core::session::{Event, Link, LinkConfig, Role};
use adit_core::wire::metadata::{AgentHello, HelloError, PeerVersion, ServerHello};
use adit_core::wire::packet::{Keys, PacketType};
use adit_relay::tcp_state;
use h2::client::SendRequest;
use http::{HeaderMap, HeaderValue, Method, Request, Uri, header};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;
use zeroize::Zeroizing;

mod run;

use self::run::run;
use crate::context::{LinkContext, UnderWay};
use crate::lanes::LaneKeeper;
use crate::targets::dial_target;
use adit_core::wire::encode::MessageBuf;
use adit_net::grpc::{self, ConnectionError, Patience, Windows};
use adit_net::socket::probe_after;
use adit_telemetry::labels::{DialReason, DialStage, Offence, Path, Segment};
use adit_telemetry::{Masked, PacketCounter};
use adit_tunnel::{Command, Dialed, DirtyList, LinkDriver, LinkExit, LinkHooks, LinkStreams};

/// Commands queued for one link, mostly dial outcomes.
const COMMANDS_MAX: usize = 1024;
/// Time for a server to answer the call with headers; upstream waits for ever.
const HEADERS_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes in flight from one server: enough for 1 Gbit/s over 100 ms.
const STREAM_WINDOW_BYTES: u32 = 16 << 20;
/// Bytes in the HTTP/2 layer, above which control packets would have to wait.
const SEND_BUFFER_BYTES: usize = 128 * 1024;
/// Limit on pending dials for one server.
const DIALS_MAX: usize = 4096;
/// Least interval between pings: Go servers refuse more frequent ones.
const PING_EVERY_MIN: Duration = Duration::from_secs(30);
/// For a Go server, TCP keepalive replaces pings: probes start after this time, one per second.
const PROBE_AFTER: Duration = Duration::from_secs(3);
/// A server is silent when its kernel has acknowledged nothing for this long, probes included.
const PROBES_SILENT: Duration = Duration::from_secs(4);

/// Why no link could be opened.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The HTTP/2 connection or the call failed.
    #[error("call to the server failed: {}", grpc::words(.0))]
    Http2(#[from] h2::Error),
    /// The connection ended before the call was answered.
    #[error("call to the server failed: {0}")]
    Connection(#[source] ConnectionError),
    /// The server refused the call, with this text.
    #[error("the server refused this agent: {message} (gRPC status {status})")]
    Refused {
        /// gRPC status number as sent.
        status: String,
        /// The server's text.
        message: String,
    },
    /// The response headers are not those of a Konnectivity server.
    #[error(transparent)]
    Headers(#[from] HelloError),
    /// The server sent no headers in time.
    #[error("the server did not answer the call within {} s", HEADERS_TIMEOUT.as_secs())]
    Silent,
    /// A local value for a header is not ASCII.
    #[error("{0} cannot be sent as a header")]
    BadHeader(&'static str),
}

/// What the agent sends about itself to every server.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Id and identifiers.
    pub hello: AgentHello,
    /// Bearer token for this attempt, if tokens are in use.
    pub token: Option<Masked<String>>,
}

/// An accepted call whose link is not running yet.
pub struct Opened {
    /// The server's answer.
    pub server: ServerHello,
    /// The server is in the zone of this agent.
    is_near: bool,
    streams: LinkStreams,
    /// `None` once the connection has ended: the streams then carry the error.
    connection: Option<Running>,
    /// Keeps the connection alive.
    requests: SendRequest<MessageBuf>,
    silence: Silence,
}

/// How long a server has been silent, as reported by its connection; zero: it responds.
pub struct Silence {
    told: watch::Receiver<Duration>,
    /// The socket of a Go server.
    socket: Option<OwnedFd>,
}

/// A connection; boxed, because it moves from the call to the link and may outlive the link.
type Running = Pin<Box<dyn Future<Output = Result<(), ConnectionError>> + Send>>;

/// Opens the `Connect` call over a fresh connection. `socket`: a descriptor of its TCP socket, if it has one.
///
/// # Errors
/// See [`ConnectError`]. A cancelled call has no effect once `io` is dropped.
pub async fn open<S>(
    io: S,
    authority: &str,
    identity: &Identity,
    keepalive: Duration,
    socket: Option<OwnedFd>,
) -> Result<Opened, ConnectError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let windows = Windows {
        frame_bytes: grpc::LINK_FRAME_BYTES,
        stream_bytes: STREAM_WINDOW_BYTES,
        send_buffer_bytes: SEND_BUFFER_BYTES,
    };
    let (requests, connection) = grpc::connect(&grpc::client_builder(windows), io).await?;
    let (tell, told) = watch::channel(Duration::ZERO);
    let is_adit = Arc::new(AtomicBool::new(false));
    let asks = Arc::clone(&is_adit);
    let patience = move || {
        if asks.load(Relaxed) {
            Patience::asking(keepalive.max(PING_EVERY_MIN))
        } else {
            Patience::rarely_asking(PING_EVERY_MIN)
        }
    };
    let mut connection: Running = Box::pin(async move {
        let silence = |quiet| {
            tell.send_replace(quiet);
        };
        let ended = connection.run(patience, silence).await;
        match &ended {
            Err(error @ ConnectionError::Silent) => {
                tracing::info!(%error, "connection to a server dropped");
            }
            Err(error) => tracing::debug!(%error, "connection to a server ended"),
            Ok(()) => (),
        }
        ended
    });
    let call = async move {
        let mut requests = requests.ready().await?;
        let (response, send) = requests.send_request(request(authority, identity)?, false)?;
        let response = tokio::time::timeout(HEADERS_TIMEOUT, response)
            .await
            .map_err(|_elapsed| ConnectError::Silent)??;
        Ok::<_, ConnectError>((requests, response, send))
    };
    let mut call = pin!(call);
    let ((requests, response, send), has_ended) = tokio::select! {
        biased;
        called = &mut call => (called?, false),
        // The error that ended the connection ends the call, too; or the answer came just before.
        ended = &mut connection => {
            (call.await.map_err(|error| error_of_both(error, ended))?, true)
        }
    };
    refused(response.headers())?;
    let headers = response.headers().iter();
    let headers = headers.map(|(name, value)| (name.as_str(), value.as_bytes()));
    let server = ServerHello::from_headers(headers)?;
    let streams = LinkStreams {
        send,
        recv: response.into_body(),
        withhold_bytes: 0,
    };
    is_adit.store(server.extensions.link, Relaxed);
    let socket = socket.filter(|_| !server.extensions.link);
    if let Some(socket) = &socket
        && let Err(error) = probe_after(socket, PROBE_AFTER)
    {
        tracing::debug!(%error, "the kernel does not probe a server");
    }
    let silence = Silence { told, socket };
    let own = identity.hello.identifiers.zone.as_deref();
    let is_near = own.is_some() && own == server.zone.as_deref();
    Ok(Opened {
        server,
        is_near,
        streams,
        silence,
        connection: (!has_ended).then_some(connection),
        requests,
    })
}

/// A failed write ends the connection, and its calls with an error that does not say why.
fn error_of_both(call: ConnectError, connection: Result<(), ConnectionError>) -> ConnectError {
    match (call, connection) {
        (ConnectError::Http2(_), Err(error)) => ConnectError::Connection(error),
        (call, _) => call,
    }
}

fn request(authority: &str, identity: &Identity) -> Result<Request<()>, ConnectError> {
    let uri = Uri::builder()
        .scheme("https")
        .authority(authority)
        .path_and_query("/AgentService/Connect")
        .build()
        .map_err(|_invalid| ConnectError::BadHeader("the server's name"))?;
    let mut request = Request::new(());
    *request.method_mut() = Method::POST;
    *request.uri_mut() = uri;
    let headers = request.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/grpc"),
    );
    headers.insert(header::TE, HeaderValue::from_static("trailers"));
    headers.insert(
        header::USER_AGENT,
        HeaderValue::from_static(concat!("adit/", env!("CARGO_PKG_VERSION"))),
    );
    for (name, value) in identity.hello.to_headers() {
        let value =
            HeaderValue::from_str(&value).map_err(|_invalid| ConnectError::BadHeader(name))?;
        headers.insert(name, value);
    }
    if let Some(token) = &identity.token {
        let shown = Zeroizing::new(format!("Bearer {}", token.reveal().trim()));
        let mut value = HeaderValue::from_str(&shown)
            .map_err(|_invalid| ConnectError::BadHeader("the token"))?;
        value.set_sensitive(true);
        headers.insert(header::AUTHORIZATION, value);
    }
    Ok(request)
}

/// A trailers-only response carries the gRPC status among the headers.
fn refused(headers: &HeaderMap) -> Result<(), ConnectError> {
    let text = |name| {
        headers
            .get(name)
            .and_then(|v: &HeaderValue| v.to_str().ok())
            .unwrap_or_default()
            .to_owned()
    };
    let status = text("grpc-status");
    if status.is_empty() || status == "0" {
        return Ok(());
    }
    Err(ConnectError::Refused {
        status,
        message: text("grpc-message"),
    })
}

/// Handle to a running link.
#[derive(Clone)]
pub struct AgentLink {
    /// The server at the other end.
    pub server: ServerId,
    /// Sends commands to the link task.
    pub commands: mpsc::Sender<Command>,
    /// Its lanes, if the server grants lanes.
    pub lanes: Option<LaneKeeper>,
    /// Where endpoints of this link notify it.
    pub dirty_list: Arc<DirtyList>,
    /// Whether both ends are Adit.
    pub credit: bool,
    /// The release that the server reports.
    pub version: PeerVersion,
    /// The address that was dialled.
    pub address: Arc<str>,
    /// When the link was opened.
    pub since: Instant,
    /// The server is silent.
    pub is_silent: bool,
}

impl Opened {
    /// Splits the call into a handle and the future that runs the link. It opens at most `lanes_max` lanes, if the server
    /// grants any.
    pub fn start(
        self,
        context: &LinkContext,
        lanes_max: usize,
    ) -> (
        AgentLink,
        Silence,
        impl Future<Output = LinkExit> + Send + 'static,
    ) {
        let credit = self.server.extensions.link;
        let config = LinkConfig::new(Role::Agent, credit, context.isolation, DIALS_MAX);
        // All servers belong to one control plane.
        let link = Link::new(config, Arc::clone(&context.budget), Arc::default());
        let (sender, commands) = mpsc::channel(COMMANDS_MAX);
        let grant = self.server.lane_grant.as_ref();
        let lanes = grant.filter(|_| credit && lanes_max > 0).map(|grant| {
            let server = self.server.server.clone();
            LaneKeeper::new(server, grant, lanes_max, self.is_near, context)
        });
        let handle = AgentLink {
            server: self.server.server.clone(),
            commands: sender.clone(),
            lanes: lanes.clone(),
            dirty_list: Arc::default(),
            credit,
            version: self.server.version,
            address: Arc::from(""),
            since: Instant::now(),
            is_silent: false,
        };
        let hooks = Hooks {
            context: context.clone(),
            commands: sender.downgrade(),
            dials: HashMap::new(),
            lanes,
            server: handle.server.clone(),
            received: context.metrics.packets(Segment::ToAgent),
            sent: context.metrics.packets(Segment::FromAgent),
        };
        let driver = LinkDriver::new(
            link,
            self.streams,
            commands,
            Arc::clone(&handle.dirty_list),
            hooks,
        );
        let (tasks, requests) = (context.tasks.clone(), self.requests);
        let running = run(driver, self.connection, requests, tasks);
        (handle, self.silence, running)
    }
}

impl Silence {
    /// For a server that is never silent.
    #[cfg(test)]
    pub(super) fn none() -> Self {
        let (_never, told) = watch::channel(Duration::ZERO);
        let socket = None;
        Self { told, socket }
    }

    /// Calls `tell` when the server falls silent and when it responds again. Runs until its connection ends.
    pub async fn watch(mut self, tell: impl Fn(bool)) {
        let mut was_silent = false;
        let mut every = tokio::time::interval(PROBES_SILENT / 4);
        loop {
            tokio::select! {
                told = self.told.changed() => if told.is_err() {
                    return;
                },
                _now = every.tick(), if self.socket.is_some() => (),
            }
            let is_silent = !self.told.borrow().is_zero() || self.probes_are_unanswered();
            if is_silent != was_silent {
                was_silent = is_silent;
                tell(is_silent);
            }
        }
    }

    /// Whether the peer's kernel is silent. A kernel that answers does not prove that its process does.
    fn probes_are_unanswered(&self) -> bool {
        let socket = self.socket.as_ref();
        let state = socket.and_then(|socket| tcp_state(socket).ok());
        state.is_some_and(|state| state.silent_for >= PROBES_SILENT && state.is_unanswered)
    }
}

struct Hooks {
    context: LinkContext,
    commands: mpsc::WeakSender<Command>,
    dials: HashMap<TunnelKey, CancellationToken>,
    lanes: Option<LaneKeeper>,
    server: ServerId,
    received: PacketCounter,
    sent: PacketCounter,
}

impl LinkHooks for Hooks {
    fn start_dial(
        &mut self,
        key: TunnelKey,
        protocol: String,
        address: String,
    ) -> Result<(), String> {
        if let Some(asker) = &self.context.asker {
            asker.asked("DIAL_REQ");
            return Err("a server dials nothing for another one".to_owned());
        }
        let Some(commands) = self.commands.upgrade() else {
            return Ok(());
        };
        if let Some(lanes) = &self.lanes {
            lanes.missed();
        }
        let cancel = CancellationToken::new();
        self.dials.insert(key, cancel.clone());
        let (context, under_way) = (self.context.clone(), self.context.dials.begin());
        let server = self.server.clone();
        let destination = address.clone();
        let work = async move {
            cancel
                .run_until_cancelled(dial_and_serve(
                    context, under_way, commands, key, server, protocol, address,
                ))
                .await;
        };
        if self.context.tasks.spawn("target", work).is_err() {
            self.dials.remove(&key);
            let (reason, why) = if self.context.tasks.stopping().is_cancelled() {
                (DialReason::Shutdown, "this agent is stopping")
            } else {
                (
                    DialReason::Overload,
                    "this agent is at its limit of open targets",
                )
            };
            let error = format!("dial refused: {why}");
            let reason = (reason, DialStage::Request);
            self.context
                .dial_failed(&destination, reason, &error, Path::Link);
            return Err(error);
        }
        Ok(())
    }

    fn cancel_dial(&mut self, key: TunnelKey) {
        if let Some(cancel) = self.dials.remove(&key) {
            cancel.cancel();
        }
    }

    fn dial_finished(&mut self, key: TunnelKey) {
        self.dials.remove(&key);
    }

    fn keys(&mut self, keys: Keys) -> bool {
        let asker = self.context.asker.as_ref();
        asker.map(|asker| asker.keys(keys)).is_some()
    }

    fn packet_in(&mut self, kind: Result<PacketType, i32>) {
        match kind {
            Ok(kind) => self.received.count(kind),
            Err(number) => self.received.count(number),
        }
    }

    fn packet_out(&mut self, kind: PacketType) {
        self.sent.count(kind);
    }

    fn count(&mut self, event: Event) {
        let adit = self.context.metrics.adit();
        match event {
            Event::Offence(violation) => adit.offences.count(violation),
            Event::Foreign => adit.offences.count(Offence::Foreign),
            Event::UnknownType(_)
            | Event::UnrecognizedResponse
            | Event::LateAnswer
            | Event::DialAbandoned
            | Event::LateCredit => (),
        }
    }
}

async fn dial_and_serve(
    context: LinkContext,
    under_way: UnderWay,
    commands: mpsc::Sender<Command>,
    key: TunnelKey,
    server: ServerId,
    protocol: String,
    address: String,
) {
    // Boxed: a dial's state is large, and the tunnel that follows may live for days.
    let dialed = Box::pin(dial_target(&context, &protocol, &address, Path::Link)).await;
    let (sender, endpoint) = oneshot::channel();
    let (outcome, target) = match dialed {
        Ok(target) => (Ok(()), Some(target)),
        Err(text) => (Err(text), None),
    };
    // A link that is over needs no target.
    if commands
        .send(Command::Dialed(Dialed {
            key,
            outcome,
            endpoint: sender,
        }))
        .await
        .is_err()
    {
        return;
    }
    drop(commands);
    if let (Some(target), Ok(endpoint)) = (target, endpoint.await) {
        let serving = context.serve(&server, target, endpoint, address, Path::Link);
        drop(under_way);
        serving.await;
    }
}

#[cfg(test)]
pub(super) mod tests;
