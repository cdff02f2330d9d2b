//! Which link carries a dial, and the table of live links.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use adit_core::failure::DialFailure;
use adit_core::ids::{AgentId, ConnId, DialId, LinkId};
use adit_core::registry::{Condition, Registry, Standing};
use adit_core::session::{CancelledDial, DialRequest};
use adit_core::target::Host;
use adit_core::wire::identifiers::Identifiers;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::Instant;

use super::conduit::Mailbox;
use super::handle::LinkHandle;
use super::leg::{Carrier, Leg};
use super::pool::{LanePool, OnLane};
use super::task::Command;
use crate::config::limits;
use crate::net::agent_identity::AgentIdentity;
use crate::net::stream::PeerAddr;

/// Commands a link may have waiting; a full queue sends the dial to another agent.
const COMMANDS_MAX: usize = 1024;
/// A link task answers at its deadline; this much later the waiting side gives up by itself.
const BACKSTOP: Duration = Duration::from_secs(1);
/// For so long a further link of an agent may be a trial: one that looks for further servers connects, learns who has answered,
/// and closes what leads to a server it has. That takes a round trip, of 100 ms on long paths.
const TRIAL_TIME: Duration = Duration::from_millis(200);

/// What is known of a link's peer.
#[derive(Clone, Debug)]
pub struct LinkInfo {
    /// As claimed by the agent.
    pub agent: AgentId,
    /// What the agent says it is good for.
    pub identifiers: Identifiers,
    /// What the agent has proved to be.
    pub identity: AgentIdentity,
    /// Whether both ends are Adit.
    pub credit: bool,
    /// Where its connection comes from, for those who look.
    pub address: PeerAddr,
}

/// Caps on dials of the whole process.
#[derive(Clone, Copy, Debug)]
pub struct DialLimits {
    /// Dials in flight, over all agents.
    pub pending_max: usize,
    /// Deadline of a dial; `None`: no limit.
    pub timeout: Option<Duration>,
}

/// An open tunnel, as a frontend gets it.
pub struct OpenTunnel<C = Leg> {
    /// This side of it.
    pub carrier: C,
    /// The id the agent chose, or on a lane this server.
    pub conn: ConnId,
    /// The link that carries it.
    pub link: LinkId,
    /// The agent at its other end.
    pub agent: AgentId,
}

/// The links of a server and the way a dial takes.
pub struct Hub {
    registry: Mutex<Registry>,
    links: Mutex<HashMap<LinkId, LinkHandle>>,
    next_link: AtomicU64,
    next_lane_conn: AtomicI64,
    pending: Semaphore,
    limits: DialLimits,
    refusing: AtomicBool,
    cutting: AtomicBool,
    retried: AtomicU64,
}

/// What a link task gets when it is entered into the hub.
pub struct Entered {
    /// Its handle, also held by the hub.
    pub handle: LinkHandle,
    /// What others ask of it.
    pub commands: mpsc::Receiver<Command>,
    /// Whether it takes dials, or another principal holds its agent id.
    pub standing: Standing,
    /// Takes the link out again when dropped.
    pub guard: LinkGuard,
}

/// A principal holds as many links under an agent id as it may.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("this agent id has {links_max} links already, which is the limit")]
pub struct TooManyLinks {
    /// The limit.
    pub links_max: usize,
}

/// Removes its link from the hub when dropped.
pub struct LinkGuard {
    hub: Arc<Hub>,
    id: LinkId,
}

impl Drop for LinkGuard {
    fn drop(&mut self) {
        let left = locked(&self.hub.links).remove(&self.id);
        locked(&self.hub.registry).remove(self.id);
        if let Some(lanes) = left.and_then(|handle| handle.lanes) {
            lanes.close();
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while these are held; if it did, the tables are still consistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Hub {
    /// A hub without links.
    #[must_use]
    pub fn new(registry: Registry, limits: DialLimits) -> Arc<Self> {
        Arc::new(Self {
            registry: Mutex::new(registry),
            links: Mutex::new(HashMap::new()),
            next_link: AtomicU64::new(1),
            next_lane_conn: AtomicI64::new(1),
            pending: Semaphore::new(limits.pending_max),
            limits,
            refusing: AtomicBool::new(false),
            cutting: AtomicBool::new(false),
            retried: AtomicU64::new(0),
        })
    }

    /// Enters a link; new dials may come at once, beside an older one of its agent after a moment. `links_max`: links that its principal may hold under its agent id.
    /// `lanes`: where lanes of this link go, if it may have some.
    ///
    /// # Errors
    /// The principal holds that many; nothing was entered.
    pub fn enter(
        self: &Arc<Self>,
        info: LinkInfo,
        links_max: usize,
        lanes: Option<Arc<LanePool>>,
    ) -> Result<Entered, TooManyLinks> {
        let id = LinkId(self.next_link.fetch_add(1, Relaxed));
        let (sender, commands) = mpsc::channel(COMMANDS_MAX);
        let handle = LinkHandle {
            id,
            info: Arc::new(info),
            commands: sender,
            mailbox: Arc::new(Mailbox::default()),
            lanes,
            since: Instant::now(),
            is_ending: Arc::default(),
        };
        let info = &handle.info;
        let principal = info.identity.owner().map(AsRef::as_ref);
        // Counted and added under one lock, or links that come together would pass the limit together.
        let mut registry = locked(&self.registry);
        if registry.links_held(&info.agent, principal) >= links_max {
            return Err(TooManyLinks { links_max });
        }
        locked(&self.links).insert(id, handle.clone());
        let standing = registry.add(id, info.agent.clone(), &info.identifiers, principal);
        drop(registry);
        Ok(Entered {
            handle,
            commands,
            standing,
            guard: LinkGuard {
                hub: Arc::clone(self),
                id,
            },
        })
    }

    /// Prefers other agents from now on.
    pub fn set_draining(&self, link: LinkId) {
        locked(&self.registry).set_draining(link);
    }

    /// Prefers other agents of its key while its peer says nothing.
    pub fn suspect(&self, link: LinkId, is_silent: bool) {
        locked(&self.registry).set_suspected(link, is_silent);
    }

    /// Gives a link no dials until [`Self::revive`].
    pub fn retire(&self, link: LinkId) {
        locked(&self.registry).retire(link);
    }

    /// Gives a retired link dials again.
    pub fn revive(&self, link: LinkId) {
        locked(&self.registry).revive(link);
    }

    /// Refuses new dials from now on; running tunnels go on.
    pub fn refuse_dials(&self) {
        self.refusing.store(true, Relaxed);
    }

    /// From now on links end because this process does.
    pub fn announce_shutdown(&self) {
        self.cutting.store(true, Relaxed);
    }

    /// Whether [`Self::announce_shutdown`] was called.
    #[must_use]
    pub fn is_shutting_down(&self) -> bool {
        self.cutting.load(Relaxed)
    }

    /// Runs `read` over the registry; keep it short.
    pub fn with_registry<T>(&self, read: impl FnOnce(&Registry) -> T) -> T {
        read(&locked(&self.registry))
    }

    /// Links now.
    #[must_use]
    pub fn links(&self) -> Vec<LinkHandle> {
        locked(&self.links).values().cloned().collect()
    }

    /// Whether clients that are gone have left nothing on a link that its agent is still to get.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        locked(&self.links)
            .values()
            .all(|link| link.mailbox.is_settled())
    }

    /// The lanes of a link, if it lives and may have some.
    #[must_use]
    pub fn lanes_of(&self, link: LinkId) -> Option<Arc<LanePool>> {
        locked(&self.links).get(&link)?.lanes.clone()
    }

    /// The agent at the other end of a link, if the link lives.
    #[must_use]
    pub fn agent_of(&self, link: LinkId) -> Option<AgentId> {
        Some(locked(&self.links).get(&link)?.info.agent.clone())
    }

    /// The identifier by which a link's agent answers for a destination; `None`: it answers for all, or is gone.
    #[must_use]
    pub fn class_of(&self, address: &str, link: LinkId) -> Option<String> {
        locked(&self.registry).class(&Host::of_address(address), link)
    }

    /// Dials waiting for an answer now.
    #[must_use]
    pub fn pending_dials(&self) -> usize {
        self.limits.pending_max - self.pending.available_permits()
    }

    /// Dials that were given to another agent because the first could not take them.
    #[must_use]
    pub fn retried_dials(&self) -> u64 {
        self.retried.load(Relaxed)
    }

    /// Dials `address` through a matching agent. Dropping the call cancels the dial.
    ///
    /// # Errors
    /// [`DialFailure`]; another agent is tried only while nobody can have seen the request.
    pub async fn dial(
        &self,
        dial: DialId,
        protocol: &str,
        address: &str,
    ) -> Result<OpenTunnel, DialFailure> {
        let open = self.dial_for(dial, protocol, address, false).await?;
        match open.carrier {
            Carrier::Leg(carrier) => Ok(OpenTunnel {
                carrier,
                conn: open.conn,
                link: open.link,
                agent: open.agent,
            }),
            // Not asked for.
            Carrier::Pipe(_) => Err(DialFailure::LinkLost),
        }
    }

    /// As [`Self::dial`]; `pipe`: the client's end is a socket in clear text, so that the tunnel may do without frames.
    ///
    /// # Errors
    /// As [`Self::dial`].
    pub async fn dial_for(
        &self,
        dial: DialId,
        protocol: &str,
        address: &str,
        pipe: bool,
    ) -> Result<OpenTunnel<Carrier>, DialFailure> {
        if self.refusing.load(Relaxed) {
            return Err(DialFailure::ShuttingDown);
        }
        if protocol.len() + address.len() > limits::DIAL_BYTES_MAX {
            return Err(DialFailure::TooLong);
        }
        let Ok(_permit) = self.pending.try_acquire() else {
            return Err(DialFailure::TooManyPending { per_agent: false });
        };
        let attempt = self.dial_any(dial, protocol, address, pipe);
        match self.limits.timeout {
            None => attempt.await,
            Some(timeout) => tokio::time::timeout(timeout + BACKSTOP, attempt)
                .await
                .unwrap_or(Err(DialFailure::TimedOut)),
        }
    }

    async fn dial_any(
        &self,
        dial: DialId,
        protocol: &str,
        address: &str,
        pipe: bool,
    ) -> Result<OpenTunnel<Carrier>, DialFailure> {
        let mut tried: Vec<LinkId> = Vec::new();
        let mut failure = DialFailure::NoAgent;
        let mut dialed = false;
        while let Some(handle) = self.pick(address, &mut tried) {
            if !self.outlasts_trial(&handle).await {
                continue;
            }
            if dialed {
                self.retried.fetch_add(1, Relaxed);
            }
            dialed = true;
            let attempt = self.dial_on(&handle, dial, protocol, address, pipe);
            match attempt.await {
                Ok(tunnel) => return Ok(tunnel),
                // Nobody has seen it, but its whole time is spent.
                Err(CancelledDial {
                    failure: failure @ DialFailure::SendTimedOut,
                    ..
                }) => return Err(failure),
                Err(CancelledDial {
                    failure: reason,
                    written: false,
                }) => failure = reason,
                Err(CancelledDial {
                    failure,
                    written: true,
                }) => return Err(failure),
            }
        }
        Err(failure)
    }

    async fn dial_on(
        &self,
        handle: &LinkHandle,
        dial: DialId,
        protocol: &str,
        address: &str,
        pipe: bool,
    ) -> Result<OpenTunnel<Carrier>, CancelledDial> {
        let opened = |carrier, conn| OpenTunnel {
            carrier,
            conn,
            link: handle.id,
            agent: handle.info.agent.clone(),
        };
        if let Some(lanes) = &handle.lanes {
            let timeout = self.limits.timeout;
            match lanes.open(protocol, address, timeout, pipe).await {
                OnLane::Open(carrier) => {
                    let conn = self.next_lane_conn.fetch_add(1, Relaxed);
                    return Ok(opened(carrier, ConnId(conn)));
                }
                OnLane::Failed(failure) => {
                    let written = !matches!(failure, DialFailure::TooManyPending { .. });
                    return Err(CancelledDial { failure, written });
                }
                OnLane::NotSeen => (),
            }
        }
        let (leg, conduit) = Leg::new(&handle.mailbox);
        let (reply, outcome) = oneshot::channel();
        let spare = DialId(rand::random::<i64>() & i64::MAX);
        let request = DialRequest {
            dial,
            spare,
            protocol: protocol.to_owned(),
            address: address.to_owned(),
        };
        if handle
            .commands
            .try_send(Command::Dial {
                request,
                conduit,
                reply,
            })
            .is_err()
        {
            return Err(CancelledDial {
                failure: DialFailure::LinkBusy,
                written: false,
            });
        }
        match outcome.await {
            Ok(Ok(conn)) => Ok(opened(Carrier::Leg(leg), conn)),
            Ok(Err(cancelled)) => Err(cancelled),
            Err(_dropped) => Err(CancelledDial {
                failure: DialFailure::LinkLost,
                written: true,
            }),
        }
    }

    /// Whether a link is still there once it can be no trial any more. Nothing is sent before: nobody would read it.
    async fn outlasts_trial(&self, handle: &LinkHandle) -> bool {
        let left = TRIAL_TIME.saturating_sub(handle.since.elapsed());
        if left.is_zero() || !self.has_older(handle) {
            return true;
        }
        tokio::select! {
            biased;
            () = handle.commands.closed() => false,
            () = tokio::time::sleep(left) => true,
        }
    }

    /// Whether the agent of a link had one before that takes dials.
    fn has_older(&self, handle: &LinkHandle) -> bool {
        let registry = locked(&self.registry);
        let links = registry.links_of(&handle.info.agent).iter();
        let mut older = links.take_while(|link| **link != handle.id);
        older.any(|link| registry.condition(*link) == Some(Condition::Serving))
    }

    /// The next link to try, which is then among the tried. `None`: no other agent fits.
    fn pick(&self, address: &str, tried: &mut Vec<LinkId>) -> Option<LinkHandle> {
        let host = Host::of_address(address);
        loop {
            let link = locked(&self.registry).pick(&host, rand::random(), tried)?;
            tried.push(link);
            // A link that is just leaving is gone here before it is gone from the registry.
            if let Some(handle) = locked(&self.links).get(&link) {
                return Some(handle.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests;
