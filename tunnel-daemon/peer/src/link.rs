//! One link to one peer, from its connection to its end.

use std::convert::Infallible;
use std::os::fd::AsFd as _;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use adit_agent::connector::{Connected, ConnectorError, ServerConnector};
use adit_agent::context::AskerEvents;
use adit_agent::lanes::{LaneKeeper, OpenError};
use adit_agent::link::{ConnectError, Identity, Opened, open};
use adit_config::address::ServerAddress;
use adit_config::limits;
use adit_config::plan::LaneSecurity;
use adit_core::ids::ServerId;
use adit_core::wire::metadata::PeerHello;
use adit_core::wire::packet::Keys;
use adit_server::backend::changes;
use adit_server::router::{ExpectedPeer, RegisteredPeer, TooManyPeers};
use adit_telemetry::AditMetrics;
use adit_telemetry::labels::{Offence, PeerDirection};
use adit_tls::cause::TlsCause;
use adit_tls::reload::ReloadableClientTls;
use adit_tls::stream::ByteStream;
use adit_tls::tls::server_name;
use adit_tunnel::lane::{Lane, LaneRights, bind_to_server};
use adit_tunnel::task::LinkExit;
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::held::NotKept;
use crate::opener::LaneOpener;
use crate::peers::{LeftPeers, PeerState, Shared};

/// Time for the first keys of a peer.
const KEYS_WITHIN: Duration = Duration::from_secs(10);
/// A peer that is silent for this long beyond the time after which it counts as silent is given up.
const DEAD_AFTER: Duration = Duration::from_secs(4);
/// Lanes between two peers in one direction, at most.
pub const LANES_MAX: usize = 1024;

/// Why a link to a peer could not be opened, or has ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PeerError {
    /// The connection failed.
    #[error(transparent)]
    Connect(#[from] ConnectorError),
    /// The call failed.
    #[error(transparent)]
    Call(#[from] ConnectError),
    /// Connecting took too long.
    #[error("no link within {} s", limits::LINK_CONNECT_TIMEOUT.as_secs())]
    Elapsed,
    /// The other end is no peer.
    #[error("the server there does not answer as a peer; is the address that of --peer-bind?")]
    NoPeer,
    /// The other end belongs to another installation.
    #[error(
        "the server there belongs to the installation {theirs:?}, not {ours:?}: --peer-group must be the same"
    )]
    Group {
        /// Its name.
        theirs: String,
        /// That of this server.
        ours: String,
    },
    /// The link is not kept.
    #[error(transparent)]
    NotKept(#[from] NotKept),
    /// There are too many peers.
    #[error(transparent)]
    TooMany(#[from] TooManyPeers),
    /// The peer grants no lanes.
    #[error("the server there has no room for lanes; give it more file descriptors")]
    NoLanes,
    /// The peer did not announce its keys.
    #[error("the server there announced no keys within {} s", KEYS_WITHIN.as_secs())]
    NoKeys,
    /// Files of this server that are new refuse the peer's certificate.
    #[error("the certificate of the server there is no longer accepted: {0}")]
    Certificate(TlsCause),
    /// The peer broke the protocol.
    #[error("the server there broke the protocol: {0}")]
    Offence(String),
    /// The peer does not answer.
    #[error("the server there does not answer")]
    Silent,
    /// All peers together have too many keys, and this one had most.
    #[error("all servers together announce too many keys, and this one had most")]
    Displaced,
    /// Another process with its id has taken its place.
    #[error("another process with its id has taken its place")]
    Replaced,
    /// The peer has ended the link, as a server does that leaves.
    #[error("the server there has left")]
    Left,
    /// The link ended.
    #[error("{0}")]
    Ended(String),
}

/// What the link tells about its peer.
struct Events {
    metrics: AditMetrics,
    /// Weak: tunnels that outlive the link keep this, and not the peer in the router.
    peer: OnceLock<Weak<RegisteredPeer>>,
    complete: watch::Sender<bool>,
    offence: Mutex<Option<String>>,
    ended: CancellationToken,
    /// Until the peer has announced all its keys.
    expected: Mutex<Option<ExpectedPeer>>,
    left: Arc<LeftPeers>,
}

impl Events {
    fn new(metrics: AditMetrics, expected: Option<ExpectedPeer>, left: &Arc<LeftPeers>) -> Self {
        Self {
            left: Arc::clone(left),
            expected: Mutex::new(expected),
            metrics,
            peer: OnceLock::new(),
            complete: watch::channel(false).0,
            offence: Mutex::default(),
            ended: CancellationToken::new(),
        }
    }

    /// Waits until the peer has broken the protocol.
    async fn broken(&self) -> PeerError {
        self.ended.cancelled().await;
        PeerError::Offence(self.offence().unwrap_or_default())
    }

    /// Waits until the peer's keys are overdue.
    async fn unannounced(&self) {
        let mut complete = self.complete.subscribe();
        let announced = timeout(KEYS_WITHIN, complete.wait_for(|complete| *complete));
        if announced.await.is_ok() {
            std::future::pending().await
        }
    }

    fn offended(&self, what: &str) {
        let mut offence = self.offence.lock().unwrap_or_else(PoisonError::into_inner);
        offence.get_or_insert_with(|| what.to_owned());
        self.ended.cancel();
    }

    fn offence(&self) -> Option<String> {
        let mut offence = self.offence.lock().unwrap_or_else(PoisonError::into_inner);
        offence.take()
    }
}

impl AskerEvents for Events {
    fn keys(&self, keys: Keys) {
        let Some(peer) = self.peer.get().and_then(Weak::upgrade) else {
            return;
        };
        match peer.announced(changes(&keys), keys.changes.len(), keys.complete) {
            Ok(()) if keys.complete => {
                if !self.complete.send_replace(true) {
                    self.left.joined();
                }
                let mut expected = self.expected.lock().unwrap_or_else(PoisonError::into_inner);
                drop(expected.take());
            }
            Ok(()) => (),
            Err(too_many) => self.offended(&too_many.to_string()),
        }
    }

    fn asked(&self, by: &'static str) {
        self.metrics.offences.count(Offence::Forward);
        self.offended(&format!(
            "it sent {by}, and this server dials nothing for it"
        ));
    }
}

/// The right of a peer to keep the tunnel on a lane, which may outlive its link: files in use accept the lane's certificate, and the
/// peer is neither dead nor an offender.
struct Rights {
    tls: Arc<ReloadableClientTls>,
    certificate: PeerCertificate,
    /// Replacements of files up to which the certificate was judged.
    judged: AtomicU64,
    /// Of all lanes of a link.
    are_revoked: Arc<AtomicBool>,
}

impl LaneRights for Rights {
    fn are_revoked(&self) -> bool {
        let replacements = self.tls.replacements();
        if !self.are_revoked.load(Relaxed) && self.judged.load(Relaxed) != replacements {
            let PeerCertificate { chain, name, at } = &self.certificate;
            if self.tls.verify_server_again(chain, name, *at).is_err() {
                // Not for other lanes, whose certificates may be newer.
                return true;
            }
            self.judged.store(replacements, Relaxed);
        }
        self.are_revoked.load(Relaxed)
    }

    fn revoke(&self) {
        self.are_revoked.store(true, Relaxed);
    }
}

impl std::fmt::Debug for Rights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rights").finish_non_exhaustive()
    }
}

/// Opens a link to the peer at an address, and runs it to its end.
pub(crate) async fn run(
    shared: &Shared,
    connector: &ServerConnector,
    address: &ServerAddress,
    state: &watch::Sender<PeerState>,
    expected: Option<ExpectedPeer>,
) -> PeerError {
    match timeout(
        limits::LINK_CONNECT_TIMEOUT,
        connect(shared, connector, address),
    )
    .await
    {
        Err(_elapsed) => PeerError::Elapsed,
        Ok(Err(error)) => error,
        Ok(Ok(found)) => {
            let (server, incarnation) =
                (found.opened.server.server.clone(), found.hello.incarnation);
            let entered = shared.held().enter(&server, incarnation, Instant::now());
            match entered {
                Err(why) => why.into(),
                Ok(replaced) => {
                    let found = (found, expected);
                    let over = keep(shared, connector, address, found, &replaced, state).await;
                    shared.held().leave(&server, incarnation);
                    over
                }
            }
        }
    }
}

/// A peer that has answered.
struct AnsweredPeer {
    opened: Opened,
    hello: PeerHello,
    certificate: PeerCertificate,
}

/// The certificates that a peer has shown, its own first, for this name, and when they were accepted.
struct PeerCertificate {
    chain: Vec<CertificateDer<'static>>,
    name: ServerName<'static>,
    at: UnixTime,
}

impl PeerCertificate {
    /// Of a connection that was opened just now.
    fn of(stream: &ByteStream, address: &ServerAddress) -> Result<Self, PeerError> {
        let ServerAddress::Host { host, .. } = address else {
            // Peers are found by name or address.
            return Err(PeerError::NoPeer);
        };
        Ok(Self {
            chain: stream.certificates().to_vec(),
            name: server_name(host).map_err(|_invalid| PeerError::NoPeer)?,
            at: UnixTime::now(),
        })
    }
}

async fn connect(
    shared: &Shared,
    connector: &ServerConnector,
    address: &ServerAddress,
) -> Result<AnsweredPeer, PeerError> {
    let Connected { stream, authority } = connector.connect(address).await?;
    let certificate = PeerCertificate::of(&stream, address)?;
    let socket = stream
        .tcp()
        .and_then(|socket| socket.as_fd().try_clone_to_owned().ok());
    let settings = &shared.settings;
    let identity = Identity {
        hello: settings.hello.clone(),
        token: None,
    };
    let opened = open(stream, &authority, &identity, settings.keepalive, socket).await?;
    let hello = opened.server.peer.clone().ok_or(PeerError::NoPeer)?;
    if opened.server.server.as_str() == settings.hello.agent.as_str() {
        let own = settings.hello.peer.as_ref().map(|own| own.incarnation);
        return Err(if own == Some(hello.incarnation) {
            NotKept::Own.into()
        } else {
            NotKept::OwnId.into()
        });
    }
    if hello.group != settings.group {
        return Err(PeerError::Group {
            theirs: hello.group,
            ours: settings.group.clone(),
        });
    }
    Ok(AnsweredPeer {
        opened,
        hello,
        certificate,
    })
}

/// Serves an open link to its end.
async fn keep(
    shared: &Shared,
    connector: &ServerConnector,
    address: &ServerAddress,
    (found, expected): (AnsweredPeer, Option<ExpectedPeer>),
    replaced: &CancellationToken,
    state: &watch::Sender<PeerState>,
) -> PeerError {
    let AnsweredPeer {
        opened,
        hello: PeerHello { agent_links, .. },
        certificate,
    } = found;
    let settings = &shared.settings;
    let events = Arc::new(Events::new(
        settings.metrics.clone(),
        expected,
        &shared.left,
    ));
    let mut context = shared.context.clone();
    context.asker = Some(Arc::<Events>::clone(&events));
    let server = opened.server.server.clone();
    let zone = settings.hello.zone.as_deref();
    let near = zone.is_some() && zone == opened.server.zone.as_deref();
    let (link, silence, running) = opened.start(&context, LANES_MAX);
    let Some(lanes) = link.lanes.clone() else {
        return PeerError::NoLanes;
    };
    let link_over = CancellationToken::new();
    // However this ends: dials that wait for an answer learn it.
    let _over = link_over.clone().drop_guard();
    let opener = Arc::new(LaneOpener {
        lanes: lanes.clone(),
        over: link_over,
    });
    let series = settings.metrics.peer(server.as_str(), PeerDirection::To);
    let peer = match shared
        .router
        .register_peer(server.clone(), near, agent_links, opener, series)
    {
        Ok(peer) => Arc::new(peer),
        Err(error) => return error.into(),
    };
    let _first = events.peer.set(Arc::downgrade(&peer));
    state.send_replace(PeerState::Linked(peer.handle().clone()));
    tracing::info!(%server, %address, version = link.version.as_str().unwrap_or_default(), "linked to another server");
    let (tell, told) = watch::channel(false);
    let watching = silence.watch(|is_silent| {
        peer.silent(is_silent);
        if is_silent {
            tracing::warn!(%server, "another server is silent: dials go elsewhere where they can");
        } else {
            tracing::info!(%server, "another server responds again");
        }
        tell.send_replace(is_silent);
    });
    let are_revoked = Arc::<AtomicBool>::default();
    let keeping = lanes.clone().run(|_cause| {
        let revoked = Arc::clone(&are_revoked);
        Box::pin(open_lane(connector, address, &server, &lanes, revoked))
    });
    let aside = async {
        let _over = tokio::join!(watching, keeping);
        std::future::pending::<Infallible>().await
    };
    let PeerCertificate { chain, name, at } = &certificate;
    let refused = settings.tls.refuses_server(chain, name, *at);
    let (running, aside, refused) = (pin!(running), pin!(aside), pin!(refused));
    let over = tokio::select! {
        biased;
        over = running => match over {
            LinkExit::Finished => PeerError::Left,
            over => PeerError::Ended(over.to_string()),
        },
        broken = events.broken() => broken,
        () = replaced.cancelled() => PeerError::Replaced,
        () = dead(told) => PeerError::Silent,
        () = events.unannounced() => PeerError::NoKeys,
        error = refused => PeerError::Certificate(TlsCause::of(&error)),
        () = peer.handle().displaced() => PeerError::Displaced,
        () = settings.stop.cancelled() => PeerError::Ended("this server stops".to_owned()),
        never = aside => match never {},
    };
    match over {
        PeerError::Silent => {
            // Dials that it has not answered go on to others.
            peer.silent(true);
            are_revoked.store(true, Relaxed);
        }
        PeerError::Certificate(_) | PeerError::Offence(_) => are_revoked.store(true, Relaxed),
        _ => (),
    }
    lanes.close();
    over
}

/// Waits until the peer has been silent for too long.
async fn dead(mut told: watch::Receiver<bool>) {
    loop {
        if *told.borrow_and_update() {
            tokio::select! {
                _changed = told.changed() => continue,
                () = sleep(DEAD_AFTER) => return,
            }
        }
        if told.changed().await.is_err() {
            return std::future::pending().await;
        }
    }
}

/// Connects a lane to the peer and binds it to the link.
async fn open_lane(
    connector: &ServerConnector,
    address: &ServerAddress,
    server: &ServerId,
    lanes: &LaneKeeper,
    are_revoked: Arc<AtomicBool>,
) -> Result<(LaneKeeper, Lane), OpenError> {
    let failed = |error: &dyn std::fmt::Display| OpenError(error.to_string());
    // Before the handshake: files that come during it are judged.
    let judged = connector.tls.replacements();
    let connecting = timeout(
        limits::LINK_CONNECT_TIMEOUT,
        connector.connect_lane(address),
    );
    let stream = connecting
        .await
        .map_err(|_elapsed| failed(&PeerError::Elapsed))?
        .map_err(|error| failed(&error))?;
    let rights = Rights {
        tls: Arc::clone(&connector.tls),
        certificate: PeerCertificate::of(&stream, address).map_err(|error| failed(&error))?,
        judged: AtomicU64::new(judged),
        are_revoked,
    };
    let keeper_of =
        |answering: &ServerId| (answering == server).then(|| (lanes.bind(), lanes.clone()));
    let bound = bind_to_server(stream, LaneSecurity::Tls, keeper_of).await;
    let (keeper, mut lane) = bound.map_err(|error| failed(&error))?;
    lane.depend_on(Arc::new(rights));
    Ok((keeper, lane))
}
