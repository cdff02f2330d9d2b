//! Live links by the keys they answer to, and who owns an agent id.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use ipnet::IpNet;

use super::nets::{Nets, remove_from};
use super::pool::{Phase, Pool};
use super::strategy::{Strategies, Strategy};
use crate::ids::{AgentId, LinkId};
use crate::target::Host;
use crate::wire::identifiers::Identifiers;

/// What a link answers to.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Key {
    Any,
    DefaultRoute,
    Host(Host),
    Net(IpNet),
}

/// What came of adding a link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use = "a shadowed link deserves a warning: two principals claim one agent id"]
pub enum Standing {
    /// The link takes dials.
    Serving,
    /// Another principal's links hold this agent id; this one takes dials only once they are gone.
    Shadowed,
    /// The link was there before; nothing changed.
    Known,
}

/// What a link is good for at the moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Condition {
    /// It takes dials.
    Serving,
    /// It takes dials that no other link of its key takes.
    Draining,
    /// The same, behind those that drain: its peer has said nothing for a while.
    Suspected,
    /// It takes none, since its agent reads nothing.
    Retired,
    /// It takes none, since another principal holds its agent id.
    Shadowed,
}

/// All live links of a server, indexed for the strategies it was made with.
///
/// Pure: the random draw is an argument, and arrival order is the order of calls. An agent id belongs to
/// the principal that brought it first, for as long as that principal has a live link: a newer link wins
/// over an older one only within the same principal, so nobody can take an agent's dials by claiming its id.
#[derive(Debug)]
pub struct Registry {
    strategies: Strategies,
    links: HashMap<LinkId, Link>,
    agents: HashMap<AgentId, Claims>,
    any: Pool,
    default_route: Pool,
    hosts: HashMap<Host, Pool>,
    nets: Nets,
}

#[derive(Debug)]
struct Link {
    agent: AgentId,
    principal: Option<Arc<str>>,
    keys: Vec<Key>,
    draining: bool,
    suspected: bool,
    /// Takes no dials for now, see [`Registry::retire`].
    retired: bool,
}

impl Link {
    fn phase(&self) -> Phase {
        match self {
            Self {
                suspected: true, ..
            } => Phase::Suspected,
            Self { draining: true, .. } => Phase::Draining,
            _ => Phase::Ready,
        }
    }
}

/// Who claims an agent id: its owner, and all its live links in order of arrival.
#[derive(Debug)]
struct Claims {
    owner: Option<Arc<str>>,
    links: Vec<LinkId>,
}

impl Registry {
    /// An empty registry that answers by `strategies`.
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
        }
    }

    /// Adds a link as the newest of its agent. `principal` is whom the link's certificate or token names;
    /// links without one share the principal "none". Identifiers that are no valid network are passed over.
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
            suspected: false,
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

    /// Removes a link. When it was the last of its agent's owner, the principal that has waited longest
    /// takes the agent id over. Unknown links have no effect.
    pub fn remove(&mut self, link: LinkId) {
        let Some(gone) = self.links.remove(&link) else {
            return;
        };
        for key in &gone.keys {
            self.unlist(key, &gone.agent, link);
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

    /// What a link may be chosen for; `None`: it is not known.
    #[must_use]
    pub fn condition(&self, link: LinkId) -> Option<Condition> {
        let known = self.links.get(&link)?;
        let owner = self.agents.get(&known.agent).map(|claims| &claims.owner);
        Some(if owner != Some(&known.principal) {
            Condition::Shadowed
        } else if known.retired {
            Condition::Retired
        } else {
            match known.phase() {
                Phase::Ready => Condition::Serving,
                Phase::Draining => Condition::Draining,
                Phase::Suspected => Condition::Suspected,
            }
        })
    }

    /// Marks a link as draining, for good. Unknown links have no effect.
    pub fn set_draining(&mut self, link: LinkId) {
        self.change(link, |known| known.draining = true);
    }

    /// Marks a link as one whose peer says nothing, or is heard again. Unknown links have no effect.
    pub fn set_suspected(&mut self, link: LinkId, suspected: bool) {
        self.change(link, |known| known.suspected = suspected);
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

    /// Takes a link out of every choice until [`Self::revive`]: it does not take what is sent. It still holds its
    /// agent id for its principal. Unknown links have no effect.
    pub fn retire(&mut self, link: LinkId) {
        if let Some(known) = self.links.get_mut(&link) {
            known.retired = true;
        }
        self.unlist_all(link);
    }

    /// Takes a retired link back, in its old place among the links of its agent. Unknown links have no effect.
    pub fn revive(&mut self, link: LinkId) {
        let Some(known) = self.links.get_mut(&link) else {
            return;
        };
        known.retired = false;
        let Some(claims) = self.agents.get(&known.agent) else {
            return;
        };
        let owned = |id: &LinkId| {
            self.links
                .get(id)
                .is_some_and(|link| link.principal == claims.owner)
        };
        let in_order: Vec<LinkId> = claims.links.iter().copied().filter(owned).collect();
        for id in &in_order {
            self.unlist_all(*id);
        }
        for id in in_order {
            self.list(id);
        }
    }

    /// Chooses a link for a destination host, never one of `exclude`.
    ///
    /// The first key decides that has any link: the strategies are asked in order, for networks the longest first. Within a key
    /// a link that serves comes before one that drains, and that before one whose peer says nothing: who answers to the next
    /// key may be another machine of the same address. Among equal agents `draw` decides, evenly when it is uniform; within an
    /// agent the newest link does.
    #[must_use]
    pub fn pick(&self, host: &Host, draw: u64, exclude: &[LinkId]) -> Option<LinkId> {
        self.strategies.iter().find_map(|strategy| match strategy {
            Strategy::Default => self.any.pick(draw, exclude),
            Strategy::DefaultRoute => self.default_route.pick(draw, exclude),
            Strategy::DestHost => self.hosts.get(host)?.pick(draw, exclude),
            Strategy::DestCidr => match host {
                Host::Ip(ip) => self
                    .nets
                    .around(*ip)
                    .find_map(|pool| pool.pick(draw, exclude)),
                Host::Name(_) => None,
            },
        })
    }

    /// The identifier by which a link answers for a host, by the first strategy that it answers to: the host itself, or the
    /// longest network around it. `None`: by that strategy it answers for hosts of all kinds, or it answers to none.
    #[must_use]
    pub fn class(&self, host: &Host, link: LinkId) -> Option<String> {
        let keys = &self.links.get(&link)?.keys;
        for strategy in self.strategies.iter() {
            let class = match strategy {
                Strategy::Default => return None,
                Strategy::DefaultRoute if keys.contains(&Key::DefaultRoute) => return None,
                Strategy::DefaultRoute => None,
                Strategy::DestHost => keys
                    .contains(&Key::Host(host.clone()))
                    .then(|| host.to_string()),
                Strategy::DestCidr => longest_around(keys, host).map(|net| net.to_string()),
            };
            if class.is_some() {
                return class;
            }
        }
        None
    }

    /// Number of keys under a strategy, for `ready_backends`: agents, but for `destHost` distinct hosts and
    /// for `destCIDR` distinct networks. 0 for a strategy that is not in use.
    #[must_use]
    pub fn keys(&self, strategy: Strategy) -> usize {
        match strategy {
            Strategy::Default => self.any.len(),
            Strategy::DefaultRoute => self.default_route.len(),
            Strategy::DestHost => self.hosts.len(),
            Strategy::DestCidr => self.nets.pools.len(),
        }
    }

    /// Number of agents that some strategy in use has a key for, each counted once: for `ready_backend_connections`. Agents
    /// whose links get no dials for now do not count.
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

    /// Whether the server is ready: the first strategy has an agent.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.keys(self.strategies.first()) > 0
    }

    /// Whether an agent of the first strategy was heard lately: a server that has only links whose peers say nothing serves
    /// nobody.
    #[must_use]
    pub fn is_heard(&self) -> bool {
        match self.strategies.first() {
            Strategy::Default => self.any.has_heard(),
            Strategy::DefaultRoute => self.default_route.has_heard(),
            Strategy::DestHost => self.hosts.values().any(Pool::has_heard),
            Strategy::DestCidr => self.nets.pools.values().any(Pool::has_heard),
        }
    }

    /// Number of live links whose peers say nothing.
    #[must_use]
    pub fn suspected(&self) -> usize {
        self.links.values().filter(|link| link.suspected).count()
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

    /// Live links of one principal that claim an agent id. Those of another principal do not count: it could use up a cap.
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

    /// The keys of a link, each once, only those that a strategy in use asks for.
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
            keys.extend(hosts.map(|host| Key::Host(Host::parse(host))));
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

    fn unlist_all(&mut self, id: LinkId) {
        let Some(link) = self.links.get(&id) else {
            return;
        };
        let (agent, keys) = (link.agent.clone(), link.keys.clone());
        for key in &keys {
            self.unlist(key, &agent, id);
        }
    }

    /// Enters a known link into the pools of its keys, unless it is retired.
    fn list(&mut self, id: LinkId) {
        let Some(link) = self.links.get(&id).filter(|link| !link.retired) else {
            return;
        };
        for key in &link.keys {
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

    fn pool_mut(&mut self, key: &Key) -> Option<&mut Pool> {
        match key {
            Key::Any => Some(&mut self.any),
            Key::DefaultRoute => Some(&mut self.default_route),
            Key::Host(host) => self.hosts.get_mut(host),
            Key::Net(net) => self.nets.pools.get_mut(net),
        }
    }
}

fn longest_around(keys: &[Key], host: &Host) -> Option<IpNet> {
    let Host::Ip(ip) = host else {
        return None;
    };
    let around = keys.iter().filter_map(|key| match key {
        Key::Net(net) if net.contains(ip) => Some(*net),
        _ => None,
    });
    around.max_by_key(IpNet::prefix_len)
}
