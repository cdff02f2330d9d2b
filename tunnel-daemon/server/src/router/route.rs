//! The table of live links.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use adit_core::ids::{AgentId, ConnId, LinkId, ServerId};
use adit_core::registry::{Registry, Silence, Standing};
use adit_core::session::ProcessBudget;
use adit_core::target::Host;
use tokio::sync::futures::Notified;
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio::time::Instant;

use crate::router::dial::DialState;
use crate::router::handle::{LinkHandle, LinkInfo};
use crate::router::peers::PeerHandle;
use adit_telemetry::DialCounts;
use adit_tunnel::channel::DirtyList;
use adit_tunnel::clock::moment;
use adit_tunnel::endpoint::Endpoint;
use adit_tunnel::pool::LanePool;
use adit_tunnel::task::Command;

/// Commands queued for one link; with a full queue the dial goes to another agent.
const COMMANDS_MAX: usize = 1024;
/// Least silence after which a Go agent counts as dead.
const GO_DEAD_AFTER_MIN: Duration = Duration::from_secs(20);

/// Limits on dials of the whole process.
#[derive(Clone, Copy, Debug)]
pub struct DialLimits {
    /// Dials in flight, over all agents.
    pub pending_max: usize,
    /// Deadline of a dial; `None`: no limit.
    pub timeout: Option<Duration>,
    /// A link whose agent has been silent for this long gets no dials.
    pub dead_after: Duration,
}

impl DialLimits {
    fn dead_after(&self, is_adit: bool) -> Duration {
        if is_adit {
            self.dead_after
        } else {
            self.dead_after.max(GO_DEAD_AFTER_MIN)
        }
    }
}

/// An open tunnel, as a frontend receives it.
pub struct OpenTunnel<C = Endpoint> {
    /// This side of the tunnel.
    pub carrier: C,
    /// Connection id: chosen by the agent, or on a lane by this server.
    pub conn: ConnId,
    /// The link that carries it.
    pub link: LinkId,
    /// The agent at its other end.
    pub agent: AgentId,
    /// What the agent has proved.
    pub principal: Option<Arc<str>>,
    /// The server whose agent it is, if not this one; `agent` is then unknown, and names that server, too.
    pub via: Option<ServerId>,
}

/// The links of a server, and how a dial finds one.
pub struct Router {
    pub(super) registry: Mutex<Registry>,
    links: Mutex<HashMap<LinkId, LinkHandle>>,
    pub(super) peers: Mutex<HashMap<LinkId, PeerHandle>>,
    next_link: AtomicU64,
    pub(super) next_lane_conn: AtomicI64,
    pub(super) pending: Semaphore,
    pub(super) limits: DialLimits,
    /// Memory for tunnels: none is opened while the budget is full.
    pub(super) budget: Arc<ProcessBudget>,
    /// Until then dials without an agent wait for a first peer, if this server asks any.
    pub(super) peers_until: OnceLock<Instant>,
    /// Peers, and names of peers, that have not shown what they have.
    pub(super) expected_peers: AtomicUsize,
    refusing: AtomicBool,
    cutting: AtomicBool,
    /// Notified when a link is added, removed, retired or revived, falls silent or responds again.
    pub(super) changed: Notify,
    pub(super) dials: DialState,
}

/// What a link task receives when it is registered.
pub struct RegisteredLink {
    /// The link's handle, also held by the router.
    pub handle: LinkHandle,
    /// The link's commands.
    pub commands: mpsc::Receiver<Command>,
    /// Whether the link takes dials, or another principal holds its agent id.
    pub standing: Standing,
    /// Removes the link when dropped.
    pub guard: LinkGuard,
}

/// A principal has reached its limit of links under an agent id.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("this agent id has {links_max} links already, which is the limit")]
pub struct TooManyLinks {
    /// The limit.
    pub links_max: usize,
}

/// Removes its link from the router when dropped.
pub struct LinkGuard {
    router: Arc<Router>,
    id: LinkId,
    is_heard: bool,
}

impl LinkGuard {
    /// The link's end shows that its agent is not silent: dials for its keys need not wait for the agent.
    pub fn heard(&mut self) {
        self.is_heard = true;
    }
}

impl Drop for LinkGuard {
    fn drop(&mut self) {
        let left = locked(&self.router.links).remove(&self.id);
        let mut registry = locked(&self.router.registry);
        if self.is_heard {
            registry.set_silence(self.id, Silence::None);
            registry.revive(self.id);
        }
        registry.remove(self.id, moment());
        drop(registry);
        self.router.changed.notify_waiters();
        if let Some(lanes) = left.and_then(|handle| handle.lanes) {
            lanes.close();
        }
    }
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while these are held; if it did, the tables are still consistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Router {
    /// A router without links, and without a memory limit.
    #[must_use]
    pub fn new(registry: Registry, limits: DialLimits) -> Arc<Self> {
        Self::within(registry, limits, Arc::new(ProcessBudget::new(u64::MAX)))
    }

    /// Limits on dials.
    #[must_use]
    pub fn limits(&self) -> DialLimits {
        self.limits
    }

    /// The memory that all tunnels share.
    #[must_use]
    pub fn budget(&self) -> &Arc<ProcessBudget> {
        &self.budget
    }

    /// A router without links whose tunnels share `budget`.
    #[must_use]
    pub fn within(registry: Registry, limits: DialLimits, budget: Arc<ProcessBudget>) -> Arc<Self> {
        Arc::new(Self {
            registry: Mutex::new(registry),
            links: Mutex::new(HashMap::new()),
            peers: Mutex::new(HashMap::new()),
            next_link: AtomicU64::new(1),
            next_lane_conn: AtomicI64::new(1),
            pending: Semaphore::new(limits.pending_max),
            limits,
            budget,
            peers_until: OnceLock::new(),
            expected_peers: AtomicUsize::new(0),
            refusing: AtomicBool::new(false),
            cutting: AtomicBool::new(false),
            changed: Notify::new(),
            dials: DialState::default(),
        })
    }

    /// Registers a link. Dials may arrive at once; if the agent has an older link, after a moment. `links_max`: limit on links
    /// of the principal under this agent id. `lanes`: the pool for the link's lanes, if it may have lanes.
    ///
    /// # Errors
    /// The principal has reached `links_max`; the link was not registered.
    pub fn register(
        self: &Arc<Self>,
        info: LinkInfo,
        links_max: usize,
        lanes: Option<Arc<LanePool>>,
    ) -> Result<RegisteredLink, TooManyLinks> {
        let id = self.new_link();
        let (sender, commands) = mpsc::channel(COMMANDS_MAX);
        let handle = LinkHandle {
            id,
            info: Arc::new(info),
            commands: sender,
            dirty_list: Arc::new(DirtyList::default()),
            lanes,
            since: Instant::now(),
            answers: Arc::default(),
            is_silent: Arc::default(),
            is_ending: Arc::default(),
        };
        let info = &handle.info;
        let principal = info.identity.owner().map(AsRef::as_ref);
        // Counted and added under one lock, or concurrent links could pass the limit together.
        let mut registry = locked(&self.registry);
        if registry.links_held(&info.agent, principal) >= links_max {
            return Err(TooManyLinks { links_max });
        }
        locked(&self.links).insert(id, handle.clone());
        let standing = registry.add(id, info.agent.clone(), &info.identifiers, principal);
        drop(registry);
        self.changed.notify_waiters();
        Ok(RegisteredLink {
            handle,
            commands,
            standing,
            guard: LinkGuard {
                router: Arc::clone(self),
                id,
                is_heard: false,
            },
        })
    }

    pub(super) fn new_link(&self) -> LinkId {
        LinkId(self.next_link.fetch_add(1, Relaxed))
    }

    /// Prefers other agents from now on, since this one sent DRAIN.
    pub fn set_draining(&self, link: LinkId) {
        locked(&self.registry).set_draining(link);
        self.changed.notify_waiters();
    }

    /// Records how long the agent of a link has been silent; zero: it responds. Returns the agent if that changes which dials
    /// the link gets.
    pub fn set_silence(&self, link: LinkId, quiet: Duration) -> Option<(AgentId, Silence)> {
        let handle = self.handle(link)?;
        let dead_after = self.limits.dead_after(handle.info.credit);
        let silence = match quiet {
            Duration::ZERO => Silence::None,
            quiet if quiet < dead_after => Silence::Suspected,
            _ => Silence::Dead,
        };
        if !locked(&self.registry).set_silence(link, silence) {
            return None;
        }
        handle.is_silent.store(silence > Silence::None, Relaxed);
        if silence == Silence::Suspected {
            self.dials.suspicions.fetch_add(1, Relaxed);
        }
        self.changed.notify_waiters();
        Some((handle.info.agent.clone(), silence))
    }

    /// Excludes a link from dials until [`Self::revive`].
    pub fn retire(&self, link: LinkId) {
        locked(&self.registry).retire(link);
        self.changed.notify_waiters();
    }

    /// Includes a retired link in dials again.
    pub fn revive(&self, link: LinkId) {
        locked(&self.registry).revive(link);
        self.changed.notify_waiters();
    }

    /// Refuses new dials from now on; open tunnels go on.
    pub fn refuse_dials(&self) {
        self.refusing.store(true, Relaxed);
        self.changed.notify_waiters();
    }

    /// Whether [`Self::refuse_dials`] was called.
    #[must_use]
    pub fn refuses_dials(&self) -> bool {
        self.refusing.load(Relaxed)
    }

    /// From now on links end because this process ends.
    pub fn announce_shutdown(&self) {
        self.cutting.store(true, Relaxed);
    }

    /// Whether [`Self::announce_shutdown`] was called.
    #[must_use]
    pub fn is_shutting_down(&self) -> bool {
        self.cutting.load(Relaxed)
    }

    /// Runs `read` on the registry, under its lock; keep it short.
    pub fn with_registry<T>(&self, read: impl FnOnce(&Registry) -> T) -> T {
        read(&locked(&self.registry))
    }

    /// Completes at the first change after this call of which links get dials.
    pub fn changed(&self) -> Notified<'_> {
        self.changed.notified()
    }

    /// The handle of a live link.
    pub(super) fn handle(&self, link: LinkId) -> Option<LinkHandle> {
        locked(&self.links).get(&link).cloned()
    }

    /// All live links.
    #[must_use]
    pub fn links(&self) -> Vec<LinkHandle> {
        locked(&self.links).values().cloned().collect()
    }

    /// Whether all data that departed clients left on links has been sent to the agents.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        locked(&self.links)
            .values()
            .all(|link| link.dirty_list.is_settled())
    }

    /// The lanes of a live link, if it may have lanes.
    #[must_use]
    pub fn lanes_of(&self, link: LinkId) -> Option<Arc<LanePool>> {
        locked(&self.links).get(&link)?.lanes.clone()
    }

    /// The agent of a live link.
    #[must_use]
    pub fn agent_of(&self, link: LinkId) -> Option<AgentId> {
        Some(locked(&self.links).get(&link)?.info.agent.clone())
    }

    /// What the agent of a live link has proved.
    #[must_use]
    pub fn principal_of(&self, link: LinkId) -> Option<Arc<str>> {
        locked(&self.links)
            .get(&link)?
            .info
            .identity
            .owner()
            .cloned()
    }

    /// The identifier that matches this link's agent to a destination; `None`: the agent serves all destinations, or is gone.
    #[must_use]
    pub fn class_of(&self, address: &str, link: LinkId) -> Option<String> {
        locked(&self.registry).class(&Host::of_address(address), link)
    }

    /// Pending dials.
    #[must_use]
    pub fn pending_dials(&self) -> usize {
        self.limits.pending_max - self.pending.available_permits()
    }

    /// Counts of dial outcomes since the start.
    #[must_use]
    pub fn dial_counts(&self) -> DialCounts {
        self.dials.counts()
    }
}

#[cfg(test)]
mod tests;
