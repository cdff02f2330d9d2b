//! All peers of a server: one task for each address, and those that look names up.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use adit_agent::connector::{ForwardProxies, RecentServers, ServerConnector};
use adit_agent::context::LinkContext;
use adit_config::address::ServerAddress;
use adit_config::plan::PeerAddress;
use adit_core::peer::PEERS_MAX;
use adit_core::wire::metadata::AgentHello;
use adit_net::accounts::Accounts;
use adit_net::resolve::Resolve;
use adit_net::self_sockets::OwnSockets;
use adit_server::router::{ExpectedPeer, PeerHandle, Router};
use adit_telemetry::AditMetrics;
use adit_tls::reload::ReloadableClientTls;
use ipnet::IpNet;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::discovery::{Fixed, Known, PeerTarget};
use crate::held::{HeldPeers, NotKept};
use crate::link::{PeerError, run};

/// First pause after a failure.
const PAUSE_MIN: Duration = Duration::from_millis(200);
/// Longest pause after failures.
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// Pause before an address is tried again that leads to a server with a link.
const PAUSE_OF_DUPLICATE: Duration = Duration::from_secs(5);
/// Pause before an address is tried again that leads to this server.
const PAUSE_OF_OWN: Duration = Duration::from_secs(60);
/// Pause before a peer is called again that broke the protocol, announced too much, or had to give way.
const PAUSE_OF_OFFENCE: Duration = Duration::from_secs(60);
/// A link that lived this long was no failure.
const PROVED_AFTER: Duration = Duration::from_secs(5);
/// Pause between lookups of a name.
const LOOKUP_EVERY: Duration = Duration::from_secs(5);
/// Pause between lookups while no peer is linked: a server that has just started waits for its peers.
const LOOKUP_SOON: Duration = Duration::from_millis(500);
/// For how long.
const SOON_FOR: Duration = Duration::from_secs(60);
/// Time for one lookup.
const LOOKUP_MAX: Duration = Duration::from_secs(5);

/// What peers are linked with.
pub struct PeerSettings {
    /// Where peers are.
    pub peers: Vec<PeerAddress>,
    /// Networks inside which names may lead.
    pub networks: Vec<IpNet>,
    /// The name of the installation.
    pub group: String,
    /// What this server says of itself; the agent id is its server id.
    pub hello: AgentHello,
    /// Resolves names of peers.
    pub resolver: Arc<dyn Resolve>,
    /// TLS towards peers.
    pub tls: Arc<ReloadableClientTls>,
    /// HTTP/2 ping interval.
    pub keepalive: Duration,
    /// Kernel accounting.
    pub accounts: Accounts,
    /// Sockets that a redirect on this node must not capture.
    pub own_sockets: OwnSockets,
    /// Counters.
    pub metrics: AditMetrics,
    /// Once cancelled, all links end.
    pub stop: CancellationToken,
}

/// What is known of the peer at one address.
#[derive(Clone)]
pub enum PeerState {
    /// No link yet.
    Connecting,
    /// A link.
    Linked(PeerHandle),
    /// The last attempt failed, or the link ended, with this reason.
    Failed(Arc<str>),
    /// The address leads to this server.
    Own,
    /// The address leads to a server that has a link by another address.
    Duplicate,
}

/// One address and what is known of it.
#[derive(Clone)]
pub struct PeerView {
    /// The address that is called.
    pub address: SocketAddr,
    /// The peer there.
    pub state: PeerState,
}

/// When peers have left whose places no other has taken yet, [`PEERS_MAX`] at most.
#[derive(Default)]
pub(crate) struct LeftPeers(Mutex<Vec<Instant>>);

impl LeftPeers {
    fn left(&self) {
        let mut left = locked(&self.0);
        if left.len() < PEERS_MAX {
            left.push(Instant::now());
        }
    }

    /// A peer has announced its keys: it may take the place of one that has left.
    pub(crate) fn joined(&self) {
        locked(&self.0).pop();
    }

    fn within(&self, time: Duration) -> usize {
        let mut left = locked(&self.0);
        left.retain(|at| at.elapsed() < time);
        left.len()
    }
}

pub(crate) struct Shared {
    pub(crate) settings: PeerSettings,
    pub(crate) context: LinkContext,
    pub(crate) router: Arc<Router>,
    held: Mutex<HeldPeers>,
    known: Mutex<Known>,
    pub(crate) left: Arc<LeftPeers>,
    called: Mutex<BTreeMap<PeerTarget, Called>>,
}

struct Called {
    state: watch::Sender<PeerState>,
    /// Once cancelled, no further attempt begins; an open link lives on.
    gone: CancellationToken,
}

/// The peers of a server. Clones share them.
#[derive(Clone)]
pub struct Peers(Arc<Shared>);

impl Peers {
    /// Starts to look for peers; tasks run on those of `context`.
    #[must_use]
    pub fn start(settings: PeerSettings, context: LinkContext, router: Arc<Router>) -> Self {
        let known = Known::new(&settings.peers, &settings.networks);
        let names: Vec<(String, u16)> = settings
            .peers
            .iter()
            .filter_map(|peer| match peer {
                PeerAddress::Literal(_) => None,
                PeerAddress::Dns { name, port } => Some((name.clone(), *port)),
            })
            .collect();
        let shared = Arc::new(Shared {
            settings,
            context,
            router,
            held: Mutex::default(),
            known: Mutex::new(known),
            left: Arc::default(),
            called: Mutex::default(),
        });
        shared.call_known();
        for (name, port) in names {
            let looking = Arc::clone(&shared).look_up(name, port);
            let _room = shared.spawn("peer-lookup", looking);
        }
        Self(shared)
    }

    /// All addresses, with what is known of each.
    #[must_use]
    pub fn all(&self) -> Vec<PeerView> {
        let called = locked(&self.0.called);
        let views = called.iter().map(|(target, called)| PeerView {
            address: target.address,
            state: called.state.borrow().clone(),
        });
        views.collect()
    }

    /// Number of peers that have left within this time, and were not lost. A server that was linked since takes the place of one.
    #[must_use]
    pub fn left_within(&self, time: Duration) -> usize {
        self.0.left.within(time)
    }
}

impl Shared {
    pub(crate) fn held(&self) -> MutexGuard<'_, HeldPeers> {
        locked(&self.held)
    }

    /// False if there is no room, or this process stops.
    fn spawn(&self, name: &'static str, work: impl Future<Output = ()> + Send + 'static) -> bool {
        let stop = self.settings.stop.clone();
        let work = async move {
            stop.run_until_cancelled(work).await;
        };
        let spawned = self.context.tasks.spawn(name, work).is_ok();
        if !spawned && !self.settings.stop.is_cancelled() {
            tracing::error!("no room for a task that calls another server");
        }
        spawned
    }

    /// Calls addresses that are not called yet, and gives up those that are gone.
    fn call_known(self: &Arc<Self>) {
        let known = locked(&self.known);
        let mut called = locked(&self.called);
        for (target, called) in called.iter() {
            if !known.targets().any(|known| known == target) {
                called.gone.cancel();
            }
        }
        for target in known.targets() {
            if called.contains_key(target) {
                continue;
            }
            let (state, gone) = (
                watch::channel(PeerState::Connecting).0,
                CancellationToken::new(),
            );
            let expected = self.router.expect_peer();
            let own = (state.clone(), gone.clone());
            let calling = Arc::clone(self).call(target.clone(), own, expected);
            called.insert(target.clone(), Called { state, gone });
            let (shared, of_task) = (Arc::clone(self), target.clone());
            let spawned = self.spawn("peer", async move {
                calling.await;
                // With its last link; the address may be known again by now.
                locked(&shared.called).remove(&of_task);
                shared.call_known();
            });
            if !spawned {
                // The next lookup tries again.
                called.remove(target);
            }
        }
    }

    async fn look_up(self: Arc<Self>, name: String, port: u16) {
        let mut told = None;
        let since = Instant::now();
        let mut expected = Some(self.router.expect_peer());
        loop {
            let found = timeout(LOOKUP_MAX, self.settings.resolver.lookup_ip(&name)).await;
            match found {
                Ok(Ok(found)) => {
                    let outside = locked(&self.known).found(&name, port, &found, Instant::now());
                    if let Some(ip) = outside.first()
                        && told != Some(*ip)
                    {
                        told = Some(*ip);
                        tracing::warn!(name, %ip, "a name of peers has an address outside of --peer-network, which is not called");
                    }
                    self.call_known();
                }
                Ok(Err(error)) => tracing::debug!(name, %error, "cannot look up peers"),
                Err(_elapsed) => tracing::debug!(name, "the lookup of peers takes too long"),
            }
            // From here on each address stands for itself.
            drop(expected.take());
            let is_alone = self.router.peers().is_empty() && since.elapsed() < SOON_FOR;
            sleep(if is_alone { LOOKUP_SOON } else { LOOKUP_EVERY }).await;
        }
    }

    /// Calls one address again and again.
    async fn call(
        self: Arc<Self>,
        target: PeerTarget,
        (state, gone): (watch::Sender<PeerState>, CancellationToken),
        expected: ExpectedPeer,
    ) {
        let connector = ServerConnector {
            resolver: Arc::new(Fixed(target.address.ip())),
            tls: Arc::clone(&self.settings.tls),
            proxies: ForwardProxies::none(),
            accounts: self.settings.accounts.clone(),
            own_sockets: self.settings.own_sockets.clone(),
            agent: self.settings.hello.agent.clone(),
            recent_servers: RecentServers::default(),
        };
        let address = ServerAddress::Host {
            host: target.name.clone(),
            port: target.address.port(),
        };
        let mut pause = PAUSE_MIN;
        let mut told = String::new();
        let mut expected = Some(expected);
        loop {
            let since = Instant::now();
            let over = run(&self, &connector, &address, &state, expected.take()).await;
            let was_linked = matches!(&*state.borrow(), PeerState::Linked(_));
            if let PeerError::Left = over {
                self.left.left();
            }
            let wait = match &over {
                PeerError::NotKept(NotKept::Own) => {
                    state.send_replace(PeerState::Own);
                    PAUSE_OF_OWN
                }
                error => {
                    let text = error.to_string();
                    let is_duplicate = matches!(error, PeerError::NotKept(NotKept::Duplicate));
                    if was_linked {
                        tracing::warn!(address = %target.address, error = text, "the link to another server has ended");
                    } else if text != told && !is_duplicate {
                        tracing::warn!(address = %target.address, error = text, "cannot link to another server");
                    }
                    state.send_replace(if is_duplicate {
                        PeerState::Duplicate
                    } else {
                        PeerState::Failed(text.as_str().into())
                    });
                    told = text;
                    if is_duplicate {
                        PAUSE_OF_DUPLICATE
                    } else if matches!(error, PeerError::Offence(_) | PeerError::Displaced) {
                        PAUSE_OF_OFFENCE
                    } else {
                        if was_linked && since.elapsed() >= PROVED_AFTER {
                            pause = PAUSE_MIN;
                        }
                        let wait = pause.mul_f64(0.5 + rand::random::<f64>());
                        pause = (pause * 2).min(PAUSE_MAX);
                        wait
                    }
                }
            };
            if gone.run_until_cancelled(sleep(wait)).await.is_none() {
                return;
            }
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while these are held.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
