//! The listeners of a server: binds them and runs their accept loops.

pub(super) mod address;
pub(super) mod spelling;

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use adit_core::lane;
use anyhow::Context as _;
use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, OptionFuture};
use ipnet::IpNet;
use rustls_pki_types::UnixTime;
use tokio_util::sync::CancellationToken;

use self::address::listen_addr;
use crate::certificates::AGENT_LISTENER;
use crate::peers::peer_alpn;
use crate::process::Process;
use adit_config::address::BindAddress;
use adit_config::limits;
use adit_config::plan::{
    AgentListenerPlan, AgentPort, AgentProof, ClientsPlan, Dialect, FrontendListen, FrontendPlan,
    PeersPlan, TlsFiles,
};
use adit_config::tls_policy::TlsPolicy;
use adit_host::descriptors::{Descriptors, Use};
use adit_net::accept::{AcceptEvents, AcceptTls, Balancers, accept_loop};
use adit_net::handshakes::{HandshakeLimits, SlotError};
use adit_net::listen::{ListenAddr, ListenError, Listener};
use adit_net::socket;
use adit_net::tasks::{Overloaded, Tasks};
use adit_net::unix::StaleFile;
use adit_proxy::http::Proxy;
use adit_server::backend::Backend;
use adit_server::frontend::events::FrontendContext;
use adit_server::frontend::{grpc, http_connect, http_proxy, socks5};
use adit_telemetry::AditMetrics;
use adit_telemetry::labels::{HandshakeFailure, Label as _, Listener as ListenerLabel};
use adit_telemetry::rate::TokenBucket;
use adit_tls::agent_identity::Certificate;
use adit_tls::cause::TlsCause;
use adit_tls::handshake::HandshakeError;
use adit_tls::reload::{Reload, Reloadable, ReloadableServerTls};
use adit_tls::stream::{ByteStream, PeerAddr};
use adit_tls::tls::{Alpn, ServerTls};

/// Failed handshakes that a listener logs per second, and its burst.
const HANDSHAKES_LOGGED_PER_SECOND: u32 = 1;
const HANDSHAKES_LOGGED_BURST: u32 = 10;

/// Serves a listener until the token is cancelled.
pub(crate) type Serve =
    Arc<dyn Fn(Listener, CancellationToken) -> BoxFuture<'static, ()> + Send + Sync>;

/// Counts the errors of one listener.
pub(super) struct Counted {
    metrics: AditMetrics,
    listener: ListenerLabel,
    descriptors: Arc<Descriptors>,
    handshakes: HandshakeLog,
}

impl Counted {
    pub(super) fn new(process: &Process, listener: ListenerLabel) -> Arc<Self> {
        Arc::new(Self {
            metrics: process.metrics.clone(),
            listener,
            descriptors: Arc::clone(&process.descriptors),
            handshakes: HandshakeLog::default(),
        })
    }
}

/// Logs a few failed handshakes: any peer that reaches a port can cause them. All are counted.
struct HandshakeLog {
    bucket: Mutex<TokenBucket>,
    suppressed: AtomicU64,
}

impl Default for HandshakeLog {
    fn default() -> Self {
        let bucket = TokenBucket::new(
            HANDSHAKES_LOGGED_PER_SECOND,
            HANDSHAKES_LOGGED_BURST,
            Instant::now(),
        );
        Self {
            bucket: Mutex::new(bucket),
            suppressed: AtomicU64::new(0),
        }
    }
}

impl HandshakeLog {
    /// Logs this failure, or adds it to the count in the next line.
    fn failed(&self, listener: ListenerLabel, peer: PeerAddr, error: &HandshakeError) {
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        if !bucket.try_take(Instant::now()) {
            self.suppressed.fetch_add(1, Relaxed);
            return;
        }
        drop(bucket);
        let (listener, cause) = (listener.as_str(), error.cause.to_string());
        match self.suppressed.swap(0, Relaxed) {
            0 => tracing::warn!(listener, %peer, cause, "TLS handshake failed"),
            suppressed => {
                tracing::warn!(listener, %peer, cause, suppressed, "TLS handshake failed; earlier failures were not logged, `suppressed` counts them");
            }
        }
    }
}

impl AcceptEvents for Counted {
    fn accept_failed(&self, _error: &io::Error) {
        self.metrics.accept_errors.count(self.listener);
    }

    fn handshake_failed(&self, peer: PeerAddr, error: &HandshakeError) {
        self.handshakes.failed(self.listener, peer, error);
        self.metrics.accept_errors.count(self.listener);
        self.metrics.handshakes_failed.count(match error.cause {
            TlsCause::TimedOut { .. } => HandshakeFailure::TimedOut,
            _ => HandshakeFailure::Failed,
        });
    }

    fn no_slot(&self, _peer: PeerAddr, why: SlotError) {
        self.metrics.accept_errors.count(self.listener);
        self.metrics.handshakes_failed.count(match why {
            SlotError::Silent => HandshakeFailure::Silent,
            SlotError::CrowdedOut => HandshakeFailure::CrowdedOut,
            SlotError::Closed => HandshakeFailure::Closed,
            SlotError::NoSlot => HandshakeFailure::NoSlot,
            SlotError::TooMany => HandshakeFailure::TooMany,
            SlotError::Stalled => HandshakeFailure::Stalled,
        });
    }

    fn connection_refused(&self, peer: PeerAddr, overloaded: Overloaded) {
        tracing::warn!(%peer, %overloaded, "connection refused");
        self.metrics.accept_errors.count(self.listener);
    }

    fn has_room(&self) -> bool {
        self.descriptors.has_room(match self.listener {
            ListenerLabel::Agent | ListenerLabel::Peer => Use::Agent,
            ListenerLabel::Frontend | ListenerLabel::Admin | ListenerLabel::Node => Use::Client,
        })
    }

    fn paused(&self) {
        let listener = self.listener.as_str();
        let descriptors = &self.descriptors;
        tracing::warn!(
            listener,
            %descriptors,
            "file descriptors run short: the listener accepts no connections until descriptors are free; raise the limit of \
             open files"
        );
        self.metrics.accept_pauses.count(self.listener);
    }

    fn accepted(&self) {
        self.descriptors.opened();
    }
}

/// TLS of a listener. Clients present a certificate if the files have a CA for clients.
pub(super) fn server_tls(files: &TlsFiles, policy: &TlsPolicy, alpn: Alpn) -> ServerTls {
    ServerTls {
        cert: files.cert.clone(),
        key: files.key.clone(),
        client_ca: files.client_ca.clone(),
        client_crl: None,
        client_may_be_anonymous: false,
        policy: policy.clone(),
        alpn,
    }
}

/// Opens the listeners of a server.
pub(super) struct Listening<'a> {
    pub(super) process: &'a Process,
    /// TLS versions and cipher suites of all listeners.
    policy: &'a TlsPolicy,
    /// Upstream's timings.
    compat: bool,
    /// TLS files to watch, with their name in the log.
    pub(super) watched: Vec<(&'static str, Arc<dyn Reload>)>,
}

impl<'a> Listening<'a> {
    pub(super) fn new(process: &'a Process, policy: &'a TlsPolicy, compat: bool) -> Self {
        Self {
            process,
            policy,
            compat,
            watched: Vec::new(),
        }
    }

    /// Loads the TLS of the listener for agents.
    ///
    /// # Errors
    /// A TLS file cannot be loaded; the error names it.
    pub(super) fn agent_tls(
        &mut self,
        agents: &AgentListenerPlan,
        port: &AgentPort,
    ) -> anyhow::Result<Arc<ReloadableServerTls>> {
        let may_be_anonymous = agents
            .tokens
            .as_ref()
            .is_some_and(|tokens| tokens.proof == AgentProof::Either);
        let alpn = Alpn::grpc::<&str>(&[]).with_records(lane::ALPN);
        let tls = ServerTls {
            client_crl: agents.crl.clone(),
            client_may_be_anonymous: may_be_anonymous,
            ..server_tls(&port.tls, self.policy, alpn)
        };
        self.tls(AGENT_LISTENER, tls)
    }

    /// Loads the TLS of the listener for peers.
    ///
    /// # Errors
    /// A TLS file cannot be loaded; the error names it.
    pub(super) fn peer_tls(
        &mut self,
        name: &'static str,
        peers: &PeersPlan,
    ) -> anyhow::Result<Arc<ReloadableServerTls>> {
        let tls = ServerTls {
            client_crl: peers.crl.clone(),
            ..server_tls(
                &peers.tls,
                self.policy,
                peer_alpn().with_records(lane::ALPN),
            )
        };
        self.tls(name, tls)
    }

    /// Listens for peers.
    ///
    /// # Errors
    /// The address cannot be used.
    pub(super) fn peers(
        &self,
        bind: &BindAddress,
        tls: Arc<ReloadableServerTls>,
        backend: Arc<Backend>,
        connections: &Tasks,
    ) -> anyhow::Result<SocketAddr> {
        self.links(bind, tls, backend, connections, ListenerLabel::Peer, &[])
    }

    /// Listens for agents.
    ///
    /// # Errors
    /// The address cannot be used; the error names the agent port.
    pub(super) fn agents(
        &self,
        agents: &AgentListenerPlan,
        port: &AgentPort,
        tls: Arc<ReloadableServerTls>,
        backend: Arc<Backend>,
        connections: &Tasks,
    ) -> anyhow::Result<SocketAddr> {
        let balancers = &agents.balancers;
        self.links(
            &port.bind,
            tls,
            backend,
            connections,
            ListenerLabel::Agent,
            balancers,
        )
        .context("agent port")
    }

    /// Listens for links and their lanes.
    fn links(
        &self,
        bind: &BindAddress,
        tls: Arc<ReloadableServerTls>,
        backend: Arc<Backend>,
        connections: &Tasks,
        label: ListenerLabel,
        balancers: &[IpNet],
    ) -> anyhow::Result<SocketAddr> {
        let listener = self.bind(&listen_addr(bind)?)?;
        let local = listener.tcp_addr().context("the listener has no address")?;
        let serve = move |stream: ByteStream| {
            let backend = Arc::clone(&backend);
            async move {
                if stream.alpn() == Some(lane::ALPN.as_bytes()) {
                    return backend.serve_lane(stream).await;
                }
                tune_link(&stream);
                let peer = stream.peer();
                let certificate = stream.principal().map(|principal| {
                    let now = UnixTime::now();
                    Certificate::new(Arc::clone(principal), stream.certificates(), now)
                });
                let account = stream.tcp().and_then(|tcp| backend.accounts().cookie(tcp));
                backend.serve(stream, peer, certificate, account).await;
            }
        };
        self.spawn(listener, Some(tls), connections, label, balancers, serve);
        Ok(local)
    }

    /// Listens for clients. Returns the addresses of frontends on TCP, in the order of the plan.
    ///
    /// # Errors
    /// See [`Self::frontend`].
    pub(super) fn frontends(
        &mut self,
        clients: &ClientsPlan,
        context: &Arc<FrontendContext>,
    ) -> anyhow::Result<Vec<SocketAddr>> {
        let mut addresses = Vec::new();
        for frontend in &clients.frontends {
            addresses.extend(self.frontend(frontend, clients, context)?);
        }
        Ok(addresses)
    }

    /// Listens for the clients of one frontend. Returns the address if it is TCP.
    ///
    /// # Errors
    /// The address, path or a TLS file cannot be used; the error names it.
    fn frontend(
        &mut self,
        plan: &FrontendPlan,
        clients: &ClientsPlan,
        context: &Arc<FrontendContext>,
    ) -> anyhow::Result<Option<SocketAddr>> {
        let (address, tls) = match &plan.listen {
            FrontendListen::Unix {
                path,
                delete_existing,
            } => {
                let stale = StaleFile::of(*delete_existing);
                (ListenAddr::Unix(path.clone(), stale), None)
            }
            FrontendListen::Tcp { bind, tls: None } => (listen_addr(bind)?, None),
            FrontendListen::Tcp {
                bind,
                tls: Some(files),
            } => {
                let alpn = match plan.dialect {
                    Dialect::Grpc => Alpn::grpc::<&str>(&[]),
                    Dialect::HttpConnect | Dialect::HttpProxy => Alpn::http11(),
                    Dialect::Socks5 => Alpn::none(),
                };
                (
                    listen_addr(bind)?,
                    Some(self.tls("frontend", server_tls(files, self.policy, alpn))?),
                )
            }
        };
        let listener = self
            .bind(&address)
            .with_context(|| format!("{} frontend", plan.dialect.name()))?;
        let local = listener.tcp_addr();
        let (tasks, context) = (&context.tasks, Arc::clone(context));
        let users = context.users.clone().filter(|_| plan.asks_for_users());
        let only_loopback = clients.only_loopback;
        let is_welcome = move |stream: &ByteStream| !only_loopback || stream.peer().is_loopback();
        match plan.dialect {
            Dialect::Grpc => {
                let keepalive = clients.keepalive;
                let serve = move |stream: ByteStream| {
                    // Here, not with the first tunnel: a connection without tunnels ends, too.
                    context.account_shared(&stream);
                    let admission = context.admit(stream.principal().map(AsRef::as_ref));
                    let stream = grpc::ClientSocket::new(stream, context.router.budget());
                    grpc::serve(stream, Arc::clone(&context), admission, keepalive)
                };
                self.spawn(listener, tls, tasks, ListenerLabel::Frontend, &[], serve);
            }
            Dialect::HttpConnect => {
                let heads = clients.connect;
                let serve = move |stream: ByteStream| {
                    let peer = stream.peer();
                    http_connect::serve(stream, peer, Arc::clone(&context), heads)
                };
                self.spawn(listener, tls, tasks, ListenerLabel::Frontend, &[], serve);
            }
            Dialect::HttpProxy => {
                let requests = clients.connect;
                let buffers = http_proxy::buffer_bytes(context.router.budget());
                let proxy = Arc::new(Proxy::new(buffers, context.leaving.clone()));
                let serve = move |stream: ByteStream| {
                    let peer = stream.peer();
                    let (context, proxy) = (Arc::clone(&context), Arc::clone(&proxy));
                    let users = users.clone();
                    let serve = is_welcome(&stream)
                        .then(|| http_proxy::serve(stream, peer, context, proxy, requests, users));
                    OptionFuture::from(serve).map(drop)
                };
                self.spawn(listener, tls, tasks, ListenerLabel::Frontend, &[], serve);
            }
            Dialect::Socks5 => {
                let requests = clients.connect;
                let serve = move |stream: ByteStream| {
                    let peer = stream.peer();
                    let (context, users) = (Arc::clone(&context), users.clone());
                    let serve = is_welcome(&stream)
                        .then(|| socks5::serve(stream, peer, context, requests, users));
                    OptionFuture::from(serve).map(drop)
                };
                self.spawn(listener, tls, tasks, ListenerLabel::Frontend, &[], serve);
            }
        }
        Ok(local)
    }

    /// Takes over the socket that the service manager opened at this address, or binds a new one. Connections accepted
    /// there take part in kernel accounting.
    pub(super) fn bind(&self, address: &ListenAddr) -> Result<Listener, ListenError> {
        let Process {
            accounts, controls, ..
        } = self.process;
        let inherited = controls
            .inherited
            .take(address, |socket| accounts.listening(&socket))
            .map_err(|cause| ListenError::inherited(address, cause))?;
        if let Some(listener) = inherited {
            tracing::info!(%address, "listening on a socket of the service manager");
            return Ok(listener);
        }
        Listener::bind_with(address, |socket| accounts.listening(&socket))
    }

    fn tls(
        &mut self,
        name: &'static str,
        tls: ServerTls,
    ) -> anyhow::Result<Arc<ReloadableServerTls>> {
        let tls = Reloadable::load(tls).context(name)?;
        self.watched
            .push((name, Arc::clone(&tls) as Arc<dyn Reload>));
        Ok(tls)
    }

    pub(super) fn spawn<H, F>(
        &self,
        listener: Listener,
        tls: Option<Arc<ReloadableServerTls>>,
        tasks: &Tasks,
        label: ListenerLabel,
        balancers: &[IpNet],
        serve: H,
    ) where
        H: Fn(ByteStream) -> F + Send + Sync + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        let deadline = if self.compat {
            limits::TLS_HANDSHAKE_TIMEOUT_COMPAT
        } else {
            limits::TLS_HANDSHAKE_TIMEOUT
        };
        let balancers = Arc::new(Balancers(balancers.to_vec()));
        let tls = tls.map(|tls| AcceptTls {
            tls,
            limits: handshake_limits(self.process.descriptors.limit()),
            deadline,
            balancers: Arc::clone(&balancers),
        });
        let events = Counted::new(self.process, label);
        let stop = self.process.stop.clone();
        let accepting = accept_loop(listener, tls, tasks.clone(), events, stop, serve);
        // The accept loop returns the listener; dropping it closes the socket and removes its file.
        let services = &self.process.services;
        services.spawn_always("listener", async move { drop(accepting.await) });
    }
}

/// Handshake limits under this limit of descriptors; `None`: unlimited.
fn handshake_limits(descriptors: Option<u64>) -> HandshakeLimits {
    let share = descriptors.map_or(u64::MAX, |limit| {
        (limit / limits::LISTENER_DESCRIPTORS_DIVISOR).max(1)
    });
    let share = usize::try_from(share).unwrap_or(usize::MAX);
    HandshakeLimits {
        handshakes_max: limits::HANDSHAKES_MAX,
        silent_max: limits::SILENT_MAX.min(share),
        waiting_max: limits::WAITING_MAX.min(share),
        answers_within: limits::ANSWERS_WITHIN,
    }
}

/// Tunes the socket so that unacknowledged data reveals a dead peer of a link.
pub(super) fn tune_link(stream: &ByteStream) {
    if let Some(tcp) = stream.tcp()
        && let Err(error) = socket::tune_link(tcp, limits::LINK_ACK_TIMEOUT)
    {
        tracing::debug!(%error, "cannot tune a link");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Limit (peers): TLS handshakes at once on a listener | 256; 128 from one IPv4 address or IPv6 /64. Further ones
    /// wait
    /// Limit (peers): TLS connections before their handshake | 1,024 silent: the oldest is closed. 4,096 waiting: one
    /// of the busiest address is closed; each at most 1/8 of the descriptors
    #[test]
    fn connections_before_a_tls_handshake_are_capped_at_an_eighth_of_the_descriptors() {
        for (descriptors, silent, waiting) in [
            (None, 1024, 4096),
            (Some(1 << 20), 1024, 4096),
            (Some(20_000), 1024, 2500),
            (Some(1024), 128, 128),
        ] {
            let limits = handshake_limits(descriptors);
            assert_eq!(
                (limits.handshakes_max, limits.silent_max, limits.waiting_max),
                (256, silent, waiting)
            );
        }
    }
}
