//! Live links by their keys, and the owner of each agent id.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;

use super::nets::{Nets, remove_from};
use super::peers::Peers;
use super::pool::{Phase, Pool};
use super::strategy::{Strategies, Strategy};
use crate::ids::{AgentId, LinkId};
use crate::session::Moment;
use crate::target::Host;
use crate::wire::identifiers::Identifiers;

/// How long the keys of a silent link that ended are remembered. Within this time the agent may reconnect before dials for
/// these keys go to the next strategy.
pub(super) const SILENT_KEYS_FOR: Duration = Duration::from_secs(60);
/// Most keys remembered this way.
const SILENT_KEYS_MAX: usize = 4096;

/// A key by which dials find links.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(super) enum Key {
    Any,
    DefaultRoute,
    /// A host without a final dot; made by [`Self::of_host`].
    Host(Host),
    Net(IpNet),
}

impl Key {
    pub(super) fn of_host(host: Host) -> Self {
        Self::Host(host.without_final_dot())
    }

    pub(super) fn strategy(&self) -> Strategy {
        match self {
            Self::Any => Strategy::Default,
            Self::DefaultRoute => Strategy::DefaultRoute,
            Self::Host(_) => Strategy::DestHost,
            Self::Net(_) => Strategy::DestCidr,
        }
    }
}

/// The result of adding a link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use = "a shadowed link deserves a warning: two principals claim one agent id"]
pub enum Standing {
    /// The link takes dials.
    Serving,
    /// Another principal's links hold this agent id; the link takes dials only after they have ended.
    Shadowed,
    /// The link was known before; nothing changed.
    Known,
}

/// Which dials a link takes now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Condition {
    /// The link takes dials.
    Serving,
    /// The link takes dials only if its key has no serving link.
    Draining,
    /// The agent is silent; the link takes dials only if its key has no serving or draining link.
    Suspected,
    /// The link takes no dials: its agent has been silent for too long.
    Dead,
    /// The link takes no dials: its agent does not read.
    Retired,
    /// The link takes no dials: another principal holds its agent id.
    Shadowed,
}

/// All live links of a server, indexed for the configured strategies.
///
/// Pure: the random draw is an argument, and arrival order is the order of calls. An agent id belongs to the principal
/// that first claimed it, as long as that principal has a live link. A newer link wins over an older one only within
/// the same principal, so another principal cannot take an agent's dials by claiming its id.
#[derive(Debug)]
pub struct Registry {
    pub(super) strategies: Strategies,
    pub(super) links: HashMap<LinkId, Link>,
    agents: HashMap<AgentId, Claims>,
    any: Pool,
    default_route: Pool,
    hosts: HashMap<Host, Pool>,
    pub(super) nets: Nets,
    /// Whether identifiers are checked against grants, not merely claimed.
    pub(super) granted: bool,
    /// The server's zone: agents of a key in the same zone are preferred.
    zone: Option<Box<str>>,
    /// Number of retired links.
    retired: usize,
    /// Keys whose last link ended while its agent was silent, and when.
    pub(super) silent: HashMap<Key, Moment>,
    /// Keys of other servers.
    pub(super) peers: Peers,
}

#[derive(Debug)]
pub(super) struct Link {
    agent: AgentId,
    pub(super) principal: Option<Arc<str>>,
    pub(super) keys: Vec<Key>,
    draining: bool,
    /// In the zone of this server.
    near: bool,
    silence: Silence,
    /// Takes no dials for now; see [`Registry::retire`].
    retired: bool,
}

/// Whether dials can find an agent by a strategy.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Availability {
    /// The strategy has no agent.
    None,
    /// The strategy has agents, and none of them responds.
    Silent,
    /// The strategy has an agent that responds.
    Ready,
}

impl Availability {
    /// The words for probes, status and log.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "no agent",
            Self::Silent => "silent",
            Self::Ready => "ready",
        }
    }

    fn of<'a>(pools: impl Iterator<Item = &'a Pool>) -> Self {
        let mut best = Self::None;
        for pool in pools.filter(|pool| !pool.is_empty()) {
            if pool.has_heard() {
                return Self::Ready;
            }
            best = Self::Silent;
        }
        best
    }
}

/// How long an agent has been silent.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Silence {
    /// Not silent.
    None,
    /// Silent long enough to prefer other agents.
    Suspected,
    /// Silent for too long to ask the agent.
    Dead,
}

impl Link {
    fn phase(&self) -> Phase {
        match self {
            Self { retired: true, .. } => Phase::Retired,
            Self {
                silence: Silence::Dead,
                ..
            } => Phase::Dead,
            Self {
                silence: Silence::Suspected,
                ..
            } => Phase::Suspected,
            Self { draining: true, .. } => Phase::Draining,
            Self { near: true, .. } => Phase::Near,
            _ => Phase::Ready,
        }
    }
}

/// An agent id's owner, and all live links that claim the id, in order of arrival.
#[derive(Debug)]
struct Claims {
    owner: Option<Arc<str>>,
    links: Vec<LinkId>,
}

impl Registry {
    /// An empty registry with these `strategies`.
    #[must_use]
    pub fn new(strategies: Strategies) -> Self {
        Self {
            strategies,
            links: HashMap::new(),
            agents: HashMap::new(),
            any: Pool::default(),
            default_route: Pool::default(),
            hosts: HashMap::new(),
            nets: Nets::default(),
            granted: false,
            zone: None,
            retired: 0,
            silent: HashMap::new(),
            peers: Peers::default(),
        }
    }

    /// Sets whether identifiers are checked against grants.
    #[must_use]
    pub fn with_granted_identifiers(self, granted: bool) -> Self {
        Self { granted, ..self }
    }

    /// Sets the server's zone; among equally matching agents those of this zone are preferred.
    #[must_use]
    pub fn with_zone(self, zone: Option<Box<str>>) -> Self {
        Self { zone, ..self }
    }

    /// Adds a link as the newest of its agent. `principal` is the identity in the link's certificate or token; links
    /// without one share the principal "none". `cidr` identifiers that are not valid networks are ignored.
    pub fn add(
        &mut self,
        link: LinkId,
        agent: AgentId,
        identifiers: &Identifiers,
        principal: Option<&str>,
    ) -> Standing {
        let keys = self.keys_of(identifiers);
        let principal: Option<Arc<str>> = principal.map(Arc::from);
        let Entry::Vacant(free) = self.links.entry(link) else {
            return Standing::Known;
        };
        free.insert(Link {
            agent: agent.clone(),
            principal: principal.clone(),
            keys,
            draining: false,
            near: self.zone.is_some() && self.zone.as_deref() == identifiers.zone.as_deref(),
            silence: Silence::None,
            retired: false,
        });
        let claims = self.agents.entry(agent).or_insert_with(|| Claims {
            owner: principal.clone(),
            links: Vec::new(),
        });
        claims.links.push(link);
        if claims.owner != principal {
            return Standing::Shadowed;
        }
        self.list(link);
        Standing::Serving
    }

    /// Removes a link. If it was the owner's last link for the agent id, the id passes to the principal that has waited
    /// longest. If it was the last link of a key and was silent or retired, the key is remembered for a minute. Unknown
    /// links have no effect.
    pub fn remove(&mut self, link: LinkId, now: Moment) {
        let serves = self
            .condition(link)
            .is_some_and(|condition| condition != Condition::Shadowed);
        let Some(gone) = self.links.remove(&link) else {
            return;
        };
        self.retired -= usize::from(gone.retired);
        for key in &gone.keys {
            self.unlist(key, &gone.agent, link);
        }
        self.silent
            .retain(|_, since| now.since(*since) < SILENT_KEYS_FOR);
        if serves && (gone.silence > Silence::None || gone.retired) {
            for key in &gone.keys {
                let is_last = self.pool(key).is_none_or(Pool::is_empty);
                if is_last && self.silent.len() < SILENT_KEYS_MAX {
                    self.silent.insert(key.clone(), now);
                }
            }
        }
        let Some(claims) = self.agents.get_mut(&gone.agent) else {
            return;
        };
        claims.links.retain(|id| *id != link);
        let principal_of = |id: &LinkId| self.links.get(id).map(|link| link.principal.clone());
        let Some(heir) = claims.links.first().and_then(principal_of) else {
            self.agents.remove(&gone.agent);
            return;
        };
        if claims
            .links
            .iter()
            .filter_map(principal_of)
            .any(|principal| principal == claims.owner)
        {
            return;
        }
        claims.owner.clone_from(&heir);
        let inherited: Vec<LinkId> = claims
            .links
            .iter()
            .copied()
            .filter(|id| principal_of(id).is_some_and(|principal| principal == heir))
            .collect();
        for id in inherited {
            self.list(id);
        }
    }

    /// The condition of a link; `None` for unknown links.
    #[must_use]
    pub fn condition(&self, link: LinkId) -> Option<Condition> {
        let known = self.links.get(&link)?;
        let owner = self.agents.get(&known.agent).map(|claims| &claims.owner);
        Some(if owner != Some(&known.principal) {
            Condition::Shadowed
        } else {
            match known.phase() {
                Phase::Near | Phase::Ready => Condition::Serving,
                Phase::Draining => Condition::Draining,
                Phase::Suspected => Condition::Suspected,
                Phase::Dead => Condition::Dead,
                Phase::Retired => Condition::Retired,
            }
        })
    }

    /// Marks a link as draining, permanently. Unknown links have no effect.
    pub fn set_draining(&mut self, link: LinkId) {
        self.change(link, |known| known.draining = true);
    }

    /// Sets how long a link's agent has been silent; false if nothing changed. Unknown links have no effect.
    pub fn set_silence(&mut self, link: LinkId, silence: Silence) -> bool {
        let known = self.links.get(&link);
        let changes = known.is_some_and(|known| known.silence != silence);
        if changes {
            self.change(link, |known| known.silence = silence);
        }
        changes
    }

    fn change(&mut self, link: LinkId, change: impl FnOnce(&mut Link)) {
        let Some(known) = self.links.get_mut(&link) else {
            return;
        };
        change(known);
        let phase = known.phase();
        let (agent, keys) = (known.agent.clone(), known.keys.clone());
        for key in &keys {
            if let Some(pool) = self.pool_mut(key) {
                pool.set_phase(&agent, link, phase);
            }
        }
    }

    /// Gives a link no dials until [`Self::revive`], because its agent does not read. The link keeps its keys and its
    /// agent id. Unknown links have no effect.
    pub fn retire(&mut self, link: LinkId) {
        self.set_retired(link, true);
    }

    /// Gives a retired link dials again. Unknown links have no effect.
    pub fn revive(&mut self, link: LinkId) {
        self.set_retired(link, false);
    }

    fn set_retired(&mut self, link: LinkId, retired: bool) {
        let Some(known) = self.links.get(&link) else {
            return;
        };
        if known.retired != retired {
            self.retired = self.retired - usize::from(known.retired) + usize::from(retired);
            self.change(link, |known| known.retired = retired);
        }
    }

    /// Number of keys of a strategy, for `ready_backends`: agents, for `destHost` distinct hosts, for `destCIDR`
    /// distinct networks. 0 for a strategy that is not in use.
    #[must_use]
    pub fn keys(&self, strategy: Strategy) -> usize {
        match strategy {
            Strategy::Default => self.any.agents(),
            Strategy::DefaultRoute => self.default_route.agents(),
            Strategy::DestHost => self.counted(self.hosts.len(), self.hosts.values()),
            Strategy::DestCidr => self.counted(self.nets.pools.len(), self.nets.pools.values()),
        }
    }

    /// How many of `all` pools have a link that is not retired. Iterates over the pools only if there are retired links.
    fn counted<'a>(&self, all: usize, pools: impl Iterator<Item = &'a Pool>) -> usize {
        if self.retired == 0 {
            return all;
        }
        pools.filter(|pool| pool.agents() > 0).count()
    }

    /// Number of distinct agents with a key of some strategy in use, for `ready_backend_connections`. Agents with only
    /// retired or shadowed links do not count.
    #[must_use]
    pub fn agents(&self) -> usize {
        let is_held = |claims: &&Claims| {
            claims.links.iter().any(|id| {
                self.links.get(id).is_some_and(|link| {
                    link.principal == claims.owner && !link.retired && !link.keys.is_empty()
                })
            })
        };
        self.agents.values().filter(is_held).count()
    }

    /// Upstream's answer to whether a server is ready: the first strategy has an agent.
    #[must_use]
    pub fn first_has_agent(&self) -> bool {
        self.keys(self.strategies.first()) > 0
    }

    /// The strategies in use, each once, and whether dials can find an agent by them.
    #[must_use]
    pub fn availability(&self) -> Vec<(Strategy, Availability)> {
        let mut all: Vec<(Strategy, Availability)> = Vec::new();
        for strategy in self.strategies.iter() {
            if all.iter().all(|(known, _)| *known != strategy) {
                all.push((strategy, self.availability_of(strategy)));
            }
        }
        all
    }

    fn availability_of(&self, strategy: Strategy) -> Availability {
        match strategy {
            Strategy::Default => Availability::of(std::iter::once(&self.any)),
            Strategy::DefaultRoute => Availability::of(std::iter::once(&self.default_route)),
            Strategy::DestHost => Availability::of(self.hosts.values()),
            Strategy::DestCidr => Availability::of(self.nets.pools.values()),
        }
    }

    /// Number of live links whose agents are silent.
    #[must_use]
    pub fn silent_links(&self) -> usize {
        let silent = |link: &&Link| link.silence > Silence::None;
        self.links.values().filter(silent).count()
    }

    /// The strategies in use.
    #[must_use]
    pub fn strategies(&self) -> &Strategies {
        &self.strategies
    }

    /// Number of live links, shadowed ones included.
    #[must_use]
    pub fn links(&self) -> usize {
        self.links.len()
    }

    /// Number of one principal's live links that claim an agent id. Links of other principals do not count, because they
    /// could exhaust a cap.
    #[must_use]
    pub fn links_held(&self, agent: &AgentId, principal: Option<&str>) -> usize {
        let held = |id: &&LinkId| {
            self.links
                .get(id)
                .is_some_and(|link| link.principal.as_deref() == principal)
        };
        self.links_of(agent).iter().filter(held).count()
    }

    /// Live links that claim an agent id, oldest first.
    #[must_use]
    pub fn links_of(&self, agent: &AgentId) -> &[LinkId] {
        self.agents.get(agent).map_or(&[], |claims| &claims.links)
    }

    /// The distinct keys of a link, for the strategies in use.
    fn keys_of(&self, identifiers: &Identifiers) -> Vec<Key> {
        let mut keys = Vec::new();
        if self.strategies.contains(Strategy::Default) {
            keys.push(Key::Any);
        }
        if self.strategies.contains(Strategy::DefaultRoute) && identifiers.default_route {
            keys.push(Key::DefaultRoute);
        }
        if self.strategies.contains(Strategy::DestHost) {
            let hosts = identifiers
                .ipv4
                .iter()
                .chain(&identifiers.ipv6)
                .chain(&identifiers.host);
            keys.extend(hosts.map(|host| Key::of_host(Host::parse(host))));
        }
        if self.strategies.contains(Strategy::DestCidr) {
            let nets = identifiers
                .cidr
                .iter()
                .filter_map(|cidr| cidr.parse::<IpNet>().ok());
            keys.extend(nets.map(|net| Key::Net(net.trunc())));
        }
        let mut seen = HashSet::new();
        keys.retain(|key| seen.insert(key.clone()));
        keys
    }

    /// Adds a known link to the pools of its keys.
    fn list(&mut self, id: LinkId) {
        let Some(link) = self.links.get(&id) else {
            return;
        };
        for key in &link.keys {
            self.silent.remove(key);
            let pool = match key {
                Key::Any => &mut self.any,
                Key::DefaultRoute => &mut self.default_route,
                Key::Host(host) => self.hosts.entry(host.clone()).or_default(),
                Key::Net(net) => self.nets.entry(*net),
            };
            pool.add(&link.agent, id, link.phase());
        }
    }

    fn unlist(&mut self, key: &Key, agent: &AgentId, link: LinkId) {
        match key {
            Key::Any => self.any.remove(agent, link),
            Key::DefaultRoute => self.default_route.remove(agent, link),
            Key::Host(host) => {
                remove_from(&mut self.hosts, host, agent, link);
            }
            Key::Net(net) => self.nets.remove(*net, agent, link),
        }
    }

    pub(super) fn pool(&self, key: &Key) -> Option<&Pool> {
        match key {
            Key::Any => Some(&self.any),
            Key::DefaultRoute => Some(&self.default_route),
            Key::Host(host) => self.hosts.get(host),
            Key::Net(net) => self.nets.pools.get(net),
        }
    }

    /// All pools with their keys.
    pub(super) fn pools(&self) -> impl Iterator<Item = (Key, &Pool)> {
        let hosts = self.hosts.iter();
        let hosts = hosts.map(|(host, pool)| (Key::Host(host.clone()), pool));
        let nets = self.nets.pools.iter();
        let nets = nets.map(|(net, pool)| (Key::Net(*net), pool));
        let single = [
            (Key::Any, &self.any),
            (Key::DefaultRoute, &self.default_route),
        ];
        single.into_iter().chain(hosts).chain(nets)
    }

    fn pool_mut(&mut self, key: &Key) -> Option<&mut Pool> {
        match key {
            Key::Any => Some(&mut self.any),
            Key::DefaultRoute => Some(&mut self.default_route),
            Key::Host(host) => self.hosts.get_mut(host),
            Key::Net(net) => self.nets.pools.get_mut(net),
        }
    }
}
