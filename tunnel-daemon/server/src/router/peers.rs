//! Other servers at which a dial can find an agent.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{
    AtomicBool, AtomicI64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed,
};
use std::time::Duration;

use adit_core::dial::AnswerTimes;
use adit_core::failure::DialFailure;
use adit_core::ids::{LinkId, ServerId};
use adit_core::peer::Forward;
use adit_core::registry::{PeerExcess, PeerKey, Registry, Scope};
use adit_core::session::Moment;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::route::{Router, locked};
use crate::owner::owner_hash;
use adit_core::text::Excerpt;
use adit_telemetry::{GaugeGuard, PeerSeries};
use adit_tunnel::Endpoint;
use adit_tunnel::clock::moment;

/// Agents here whose owner is compared with that of a key at a peer.
const CONFLICT_AGENTS_MAX: usize = 16;

/// Keys of a packet that are compared so.
const CONFLICT_CHECKS_MAX: usize = 64;

/// A running question to a peer.
pub type Asking<'a> = Pin<Box<dyn Future<Output = PeerAnswer> + Send + 'a>>;

/// Opens tunnels at one peer.
pub trait PeerOpener: Send + Sync {
    /// Asks the peer for a tunnel. A dropped call gives the tunnel up.
    fn open<'a>(&'a self, protocol: &'a str, address: &'a str, forward: Forward) -> Asking<'a>;
}

/// What a peer answers.
pub enum PeerAnswer {
    /// The tunnel.
    Open(Endpoint),
    /// It has no agent under the key; nobody was asked.
    NotHere,
    /// It cannot have asked anybody.
    NotAsked,
    /// The dial failed there.
    Failed(DialFailure),
}

/// Handle to the link to a peer.
#[derive(Clone)]
pub struct PeerHandle {
    /// The link's id, among those of agents.
    pub id: LinkId,
    /// The peer.
    pub server: ServerId,
    /// When the link was registered.
    pub since: Instant,
    /// To how many servers the peer told agents to connect, when it was linked; `None`: to all.
    pub agent_links: Option<i64>,
    /// How soon the peer answers dials.
    pub(super) answers: Arc<AnswerTimes>,
    pub(super) opener: Arc<dyn PeerOpener>,
    pub(super) is_silent: Arc<AtomicBool>,
    /// Cancelled when others needed the room of its keys.
    displaced: CancellationToken,
    series: Arc<PeerSeries>,
    _link: Arc<GaugeGuard>,
}

impl PeerHandle {
    /// Its counts.
    #[must_use]
    pub fn series(&self) -> &Arc<PeerSeries> {
        &self.series
    }

    /// Waits until the peer has lost its keys, because all peers together have too many and it had most.
    pub async fn displaced(&self) {
        self.displaced.cancelled().await;
    }

    /// Whether the peer does not answer.
    #[must_use]
    pub fn is_silent(&self) -> bool {
        self.is_silent.load(Relaxed)
    }
}

/// There are too many peers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "this server has {} peers already, which is the limit",
    adit_core::peer::PEERS_MAX
)]
pub struct TooManyPeers;

/// A peer in the router; dropping it removes the peer with all its keys.
pub struct RegisteredPeer {
    router: Arc<Router>,
    handle: PeerHandle,
    has_told: AtomicBool,
    /// As counted.
    keys: AtomicI64,
}

/// What dials of a server that has just started wait for, until dropped.
pub struct ExpectedPeer(Arc<Router>);

impl Drop for ExpectedPeer {
    fn drop(&mut self) {
        self.0.expected_peers.fetch_sub(1, AcqRel);
        self.0.changed.notify_waiters();
    }
}

impl Router {
    /// Adds a peer without keys. `near`: it is in the zone of this server. `agent_links`: see [`PeerHandle`].
    ///
    /// # Errors
    /// There are too many.
    pub fn register_peer(
        self: &Arc<Self>,
        server: ServerId,
        near: bool,
        agent_links: Option<i64>,
        opener: Arc<dyn PeerOpener>,
        series: Arc<PeerSeries>,
    ) -> Result<RegisteredPeer, TooManyPeers> {
        let handle = PeerHandle {
            id: self.new_link(),
            server,
            since: Instant::now(),
            agent_links,
            answers: Arc::default(),
            opener,
            is_silent: Arc::default(),
            displaced: CancellationToken::new(),
            _link: Arc::new(GaugeGuard::new(&series.links)),
            series,
        };
        locked(&self.peers).insert(handle.id, handle.clone());
        let registered = RegisteredPeer {
            router: Arc::clone(self),
            handle,
            has_told: AtomicBool::new(false),
            keys: AtomicI64::new(0),
        };
        let id = registered.handle.id;
        // When it is refused, the dropped guard undoes the rest.
        if locked(&self.registry).add_peer(id, near) {
            Ok(registered)
        } else {
            Err(TooManyPeers)
        }
    }

    /// This server has just started, and asks peers: until then dials without an agent wait for them. Only the first call counts.
    pub fn expect_peers(&self, until: Instant) {
        let _first = self.peers_until.set(until);
    }

    /// Dials of a server that has just started wait for what this stands for: a peer's keys, or the addresses of peers.
    #[must_use]
    pub fn expect_peer(self: &Arc<Self>) -> ExpectedPeer {
        self.expected_peers.fetch_add(1, AcqRel);
        ExpectedPeer(Arc::clone(self))
    }

    /// Whether dials wait for peers; no more once all have announced their keys or cannot be reached, and one has, or the time is
    /// over.
    pub(super) fn expects_peers(&self) -> bool {
        let until = self.peers_until.get();
        until.is_some_and(|until| Instant::now() < *until)
            && (self.expected_peers.load(Acquire) > 0
                || self.with_registry(Registry::complete_peers) == 0)
    }

    /// All live peers.
    #[must_use]
    pub fn peers(&self) -> Vec<PeerHandle> {
        locked(&self.peers).values().cloned().collect()
    }

    /// The handle of a live peer.
    pub(super) fn peer(&self, link: LinkId) -> Option<PeerHandle> {
        locked(&self.peers).get(&link).cloned()
    }
}

impl RegisteredPeer {
    /// The peer's handle.
    #[must_use]
    pub fn handle(&self) -> &PeerHandle {
        &self.handle
    }

    /// The peer has announced changes of its keys, as many as `changes` with those that are not known here. `complete`: it has
    /// announced all of them.
    ///
    /// # Errors
    /// It has too many, or changes them too often.
    pub fn announced(
        &self,
        keys: impl Iterator<Item = (Scope, Option<PeerKey>)>,
        changes: usize,
        complete: bool,
    ) -> Result<(), PeerExcess> {
        let mut registry = locked(&self.router.registry);
        registry.count_peer_changes(self.handle.id, changes, moment())?;
        let (mut conflict, mut checks) = (None, 0);
        for (scope, said) in keys {
            // A few a packet: a check hashes what agents have proved.
            if let Some(said) = said
                && conflict.is_none()
                && checks < CONFLICT_CHECKS_MAX
                && registry.has_local(&scope)
                && {
                    checks += 1;
                    is_conflict(&registry, &scope, said)
                }
            {
                self.handle.series.conflicts.inc();
                conflict = Some(scope.clone());
            }
            registry.set_peer_key(self.handle.id, &scope, said)?;
        }
        if complete {
            registry.complete_peer(self.handle.id);
        }
        let keys = registry.keys_of_peer(self.handle.id);
        let displaced = registry.take_displaced();
        drop(registry);
        if let Some(peer) = displaced.and_then(|link| self.router.peer(link)) {
            peer.displaced.cancel();
        }
        let keys = i64::try_from(keys).unwrap_or(i64::MAX);
        let before = self.keys.swap(keys, Relaxed);
        self.handle.series.keys.add(keys.saturating_sub(before));
        if let Some(scope) = conflict
            && !self.has_told.swap(true, Relaxed)
        {
            let (server, strategy, key) = (&self.handle.server, scope.strategy(), scope.key());
            tracing::warn!(
                %server, %strategy, key = %Excerpt(&key),
                "another server has an agent of another owner under a key of an agent here; dials go to the agent here: grant each \
                 identifier to one owner, and look at that server"
            );
        }
        // Dials that wait for an agent find one, perhaps.
        self.router.changed.notify_waiters();
        Ok(())
    }

    /// The peer does not answer, or answers again.
    pub fn silent(&self, is_silent: bool) {
        self.handle.is_silent.store(is_silent, Relaxed);
        locked(&self.router.registry).set_peer_silent(self.handle.id, is_silent);
        self.router.changed.notify_waiters();
    }
}

impl Drop for RegisteredPeer {
    fn drop(&mut self) {
        locked(&self.router.peers).remove(&self.handle.id);
        locked(&self.router.registry).remove_peer(self.handle.id);
        self.handle.series.keys.sub(self.keys.load(Relaxed));
        self.router.changed.notify_waiters();
    }
}

/// Whether agents here under the same key have proved something else. A peer that says no owner has agents of several, or none any
/// more: a conflict if those here are one's.
fn is_conflict(registry: &Registry, scope: &Scope, said: PeerKey) -> bool {
    if (said.owner == 0 && said.draining) || !registry.is_claim(scope) {
        return false;
    }
    let principals = registry.principals_of(scope).take(CONFLICT_AGENTS_MAX + 1);
    let mut owners: Vec<u64> = principals.map(owner_hash).collect();
    let are_all = owners.len() <= CONFLICT_AGENTS_MAX;
    owners.dedup();
    match said.owner {
        0 => owners.len() == 1,
        owner => are_all && !owners.is_empty() && !owners.contains(&owner),
    }
}

/// Time left until `deadline`.
pub(super) fn time_left(deadline: Option<Moment>, now: Moment) -> Option<Duration> {
    deadline.map(|deadline| deadline.since(now))
}
