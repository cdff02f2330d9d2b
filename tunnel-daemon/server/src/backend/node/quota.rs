//! Limits on what one agent may ask for, over all its links.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use adit_core::ids::AgentId;
use tokio::sync::{Semaphore, SemaphorePermit};

use adit_net::source_quota::{Source, SourcePlaces, SourceQuota};
use adit_telemetry::rate::TokenBucket;

/// Tunnels that one agent may open per second on average: a node's pods that all reconnect after an outage are served within
/// seconds.
const OPENS_PER_SECOND: u32 = 200;
/// Tunnels that one agent may open at once.
const OPENS_BURST: u32 = 1000;
/// Limit on pending dials of one agent.
const DIALS_PER_AGENT_MAX: usize = 256;
/// Limit on pending dials of all agents.
const DIALS_MAX: usize = 4096;

/// Quotas of agents with links, and of agents that had some lately: reconnecting does not reset a quota.
pub(super) struct Quotas {
    agents: Mutex<HashMap<Asker, Arc<Quota>>>,
    dials: Arc<SourceQuota>,
    tunnels: Arc<SourceQuota>,
}

/// An agent's id and its certificate's holder.
type Asker = (AgentId, Arc<str>);

/// What one agent may ask for, over all its links.
pub(super) struct Quota {
    opens: Mutex<TokenBucket>,
    dials: Semaphore,
    /// Shared by all agents.
    all_dials: Arc<SourceQuota>,
    all_tunnels: Arc<SourceQuota>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while these are held; if it did, the state is still consistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Quota {
    /// Whether the agent may open one more tunnel now.
    pub(super) fn may_open(&self, now: Instant) -> bool {
        locked(&self.opens).try_take(now)
    }

    /// Reserves one dial until dropped. `None`: this agent, its trust source, or all agents together are at their limit.
    pub(super) fn dial(&self, source: &Source) -> Option<(SemaphorePermit<'_>, SourcePlaces)> {
        let own = self.dials.try_acquire().ok()?;
        let of_all = self.all_dials.take(source, 1)?;
        Some((own, of_all))
    }

    /// Reserves one tunnel until dropped, its dial included. `None`: the trust source, or all agents together are at their
    /// limit.
    pub(super) fn tunnel(&self, source: &Source) -> Option<SourcePlaces> {
        self.all_tunnels.take(source, 1)
    }

    /// Whether no link uses this quota and a new one would equal it. Call it under the table's lock: only the table hands out
    /// quotas.
    fn is_unused(self: &Arc<Self>, now: Instant) -> bool {
        Arc::strong_count(self) == 1 && locked(&self.opens).is_full(now)
    }
}

impl Quotas {
    /// Quotas for agents that together may have `tunnels_max` tunnels.
    pub(super) fn new(tunnels_max: usize) -> Self {
        Self {
            agents: Mutex::default(),
            dials: SourceQuota::new(DIALS_MAX),
            tunnels: SourceQuota::new(tunnels_max),
        }
    }

    /// The quota of an agent, shared by all its links.
    pub(super) fn of(&self, agent: &AgentId, principal: &Arc<str>) -> Arc<Quota> {
        let now = Instant::now();
        let mut agents = locked(&self.agents);
        if agents.len() == agents.capacity() {
            // Pruned whenever the table would grow, so it holds at most twice the quotas in use.
            agents.retain(|_, quota| !quota.is_unused(now));
        }
        let quota = agents
            .entry((agent.clone(), Arc::clone(principal)))
            .or_insert_with(|| {
                Arc::new(Quota {
                    opens: Mutex::new(TokenBucket::new(OPENS_PER_SECOND, OPENS_BURST, now)),
                    dials: Semaphore::new(DIALS_PER_AGENT_MAX),
                    all_dials: Arc::clone(&self.dials),
                    all_tunnels: Arc::clone(&self.tunnels),
                })
            });
        Arc::clone(quota)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use adit_tls::stream::PeerAddr;

    fn source(owner: &Arc<str>) -> Source {
        Source::new(owner, PeerAddr::Unix)
    }

    /// Limit (peers): Unanswered dials requested by agents | 256 per agent, 4,096 in total. The last quarter is
    /// reserved for trust sources below half of it
    #[test]
    fn dials_of_one_agent_are_capped_over_all_its_links() {
        let quotas = Quotas::new(8);
        let (name, other): (Arc<str>, Arc<str>) = ("one".into(), "other".into());
        let agent = AgentId::new("agent");
        let links = [(); 2].map(|()| quotas.of(&agent, &name));
        let dials: Vec<_> = (0..DIALS_PER_AGENT_MAX)
            .map(|n| links[n % 2].dial(&source(&name)).unwrap())
            .collect();
        assert_eq!(dials.len(), 256);
        assert!(
            links
                .iter()
                .all(|quota| quota.dial(&source(&name)).is_none())
        );
        // The same agent id with another certificate is another agent.
        let stranger = quotas.of(&agent, &other);
        assert!(stranger.dial(&source(&other)).is_some());
        for opens in 0..OPENS_BURST {
            let quota = &links[opens as usize % 2];
            assert!(quota.may_open(Instant::now()), "{opens}");
        }
        assert!(stranger.may_open(Instant::now()));
    }

    /// Limit (peers): Unanswered dials requested by agents
    #[test]
    fn dials_of_all_agents_are_capped_together() {
        let quotas = Quotas {
            dials: SourceQuota::new(2),
            ..Quotas::new(8)
        };
        let names: [Arc<str>; 3] = ["one", "two", "three"].map(Into::into);
        let agents = ["a", "b", "c"].map(|agent| quotas.of(&AgentId::new(agent), &names[0]));
        let dial = |at: usize| agents[at].dial(&source(&names[at]));
        let held = [dial(0).unwrap(), dial(1).unwrap()];
        assert!((0..3).all(|at| dial(at).is_none()));
        // Its own limit is unused.
        assert_eq!(agents[2].dials.available_permits(), DIALS_PER_AGENT_MAX);
        drop(held);
        assert!(dial(2).is_some());
    }

    /// Limit (peers): Unanswered dials requested by agents
    #[test]
    fn many_ids_of_one_source_leave_dials_to_others() {
        let quotas = Quotas::new(8);
        let (one, other): (Arc<str>, Arc<str>) = ("one".into(), "other".into());
        let agents: Vec<_> = (0..20)
            .map(|agent| quotas.of(&AgentId::new(&agent.to_string()), &one))
            .collect();
        let dial = || agents.iter().find_map(|agent| agent.dial(&source(&one)));
        let held: Vec<_> = std::iter::from_fn(dial).collect();
        assert_eq!(held.len(), 3072, "of 4,096");
        let stranger = quotas.of(&AgentId::new("stranger"), &other);
        assert!(stranger.dial(&source(&other)).is_some());
    }

    /// Limit (peers): Open tunnels requested by agents | a third of the descriptors of the process, shared fairly by
    /// trust sources
    #[test]
    fn many_ids_of_one_source_leave_tunnels_to_others() {
        let quotas = Quotas::new(8);
        let (one, other): (Arc<str>, Arc<str>) = ("one".into(), "other".into());
        let agents = ["a", "b"].map(|agent| quotas.of(&AgentId::new(agent), &one));
        let tunnel = || agents.iter().find_map(|agent| agent.tunnel(&source(&one)));
        let held: Vec<_> = std::iter::from_fn(tunnel).collect();
        assert_eq!(held.len(), 6);
        let stranger = quotas.of(&AgentId::new("stranger"), &other);
        assert!(stranger.tunnel(&source(&other)).is_some());
        drop(held);
        assert!(tunnel().is_some());
    }

    /// Otherwise a reconnecting agent could exceed its rate.
    ///
    /// Limit (memory): Tunnel quotas of agents | one per agent id and certificate in use, and at most as many unused
    #[test]
    fn a_reconnecting_agent_keeps_its_used_quota() {
        let quotas = Quotas::new(8);
        let (agent, name): (_, Arc<str>) = (AgentId::new("agent"), "one".into());
        let link = quotas.of(&agent, &name);
        // The time of the agent's last link, so that no quota has been refilled.
        let then = Instant::now();
        while link.may_open(then) {}
        drop(link);
        for stranger in 0..100 {
            drop(quotas.of(&AgentId::new(&stranger.to_string()), &name));
        }
        let mut opens = 0;
        let link = quotas.of(&agent, &name);
        while link.may_open(then) {
            opens += 1;
        }
        assert_eq!(opens, 0);
    }

    /// Limit (memory): Tunnel quotas of agents
    #[test]
    fn unused_agent_quotas_are_bounded() {
        let quotas = Quotas::new(8);
        for agent in 0..10_000 {
            let name: Arc<str> = "one".into();
            drop(quotas.of(&AgentId::new(&agent.to_string()), &name));
        }
        assert!(locked(&quotas.agents).len() < 10);
    }
}
