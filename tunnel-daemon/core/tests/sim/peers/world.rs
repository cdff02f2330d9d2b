//! Servers, agents, the links between them, and what happens to them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use adit_core::dial::{AnswerTimes, HedgeBudget};
use adit_core::failure::DialFailure;
use adit_core::ids::{AgentId, LinkId};
use adit_core::registry::{PeerKey, Registry, Scope, Silence};
use adit_core::session::{CancelledDial, Moment};
use adit_core::wire::identifiers::Identifiers;
use bytes::Bytes;

use super::dial::SimDial;
use super::forwarded::{Answer, SimForward};
use crate::rng::{Rng, mix};

const BEAT: Duration = Duration::from_millis(200);
/// Beats of the busy phase: 40 s.
const BUSY_BEATS: u64 = 200;
const SUSPECTED_AFTER: Duration = Duration::from_secs(4);
const DEAD_AFTER: Duration = Duration::from_secs(8);
/// Changes in one announcement.
const CHANGES_MAX: usize = 3;

const STRATEGIES: [&str; 6] = [
    "default",
    "destHost,default",
    "destHost,default",
    "destCIDR,destHost",
    "defaultRoute,destHost,default",
    "destHost,destCIDR,defaultRoute,default",
];
pub(super) const HOSTS: [&str; 4] = ["h0", "h1", "10.1.0.1", "10.2.0.1"];
const NETS: [&str; 3] = ["10.0.0.0/8", "10.1.0.0/16", "10.1.0.0/24"];

/// How often each case has occurred, over all seeds.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(super) opened_here: u64,
    pub(super) opened_at_peer: u64,
    pub(super) failed: u64,
    pub(super) timed_out: u64,
    pub(super) retried: u64,
    pub(super) hedged: u64,
    pub(super) hedged_at_peer: u64,
    pub(super) failed_over: u64,
    pub(super) waited: u64,
    pub(super) not_here: u64,
    pub(super) next_key: u64,
    pub(super) peers_silent: u64,
    pub(super) peers_lost: u64,
    pub(super) owners_changed: u64,
    pub(super) leaving: u64,
    pub(super) settled_at_peer: u64,
}

impl Seen {
    fn all(&mut self) -> [&mut u64; 16] {
        [
            &mut self.opened_here,
            &mut self.opened_at_peer,
            &mut self.failed,
            &mut self.timed_out,
            &mut self.retried,
            &mut self.hedged,
            &mut self.hedged_at_peer,
            &mut self.failed_over,
            &mut self.waited,
            &mut self.not_here,
            &mut self.next_key,
            &mut self.peers_silent,
            &mut self.peers_lost,
            &mut self.owners_changed,
            &mut self.leaving,
            &mut self.settled_at_peer,
        ]
    }

    /// Adds the cases of one world.
    pub(crate) fn add(&mut self, mut other: Self) {
        for (sum, count) in self.all().into_iter().zip(other.all()) {
            *sum += *count;
        }
    }

    /// Asserts that every case this simulation exists for has occurred.
    pub(crate) fn check(&mut self) {
        let occurred = self.all().iter().all(|count| **count > 0);
        assert!(occurred, "{self:?}");
    }
}

pub(super) struct Server {
    pub(super) registry: Registry,
    pub(super) hedges: HedgeBudget,
    /// It refuses dials, and ends at this moment.
    pub(super) leaves_at: Option<Moment>,
}

pub(super) struct Agent {
    pub(super) principal: &'static str,
    pub(super) identifiers: Identifiers,
}

/// Nothing passes a link until a moment, and since when.
#[derive(Clone, Copy)]
pub(super) struct Block {
    since: Moment,
    until: Moment,
}

pub(super) struct AgentLink {
    pub(super) server: usize,
    pub(super) agent: usize,
    pub(super) answers: Arc<AnswerTimes>,
    pub(super) is_silent: bool,
    block: Option<Block>,
}

pub(super) struct PeerLink {
    pub(super) asker: usize,
    pub(super) holder: usize,
    pub(super) is_near: bool,
    pub(super) answers: Arc<AnswerTimes>,
    pub(super) is_silent: bool,
    /// What the asker knows.
    pub(super) heard: BTreeMap<Scope, PeerKey>,
    /// What the holder has said; `None`: nothing yet.
    told: Option<Vec<(Scope, PeerKey)>>,
    /// No announcement overtakes another.
    last_at: Moment,
    block: Option<Block>,
}

/// A change of a key as it stands in an announcement.
type Change = (u32, String, Option<PeerKey>);

#[derive(Debug)]
pub(super) enum Event {
    Keys {
        link: LinkId,
        changes: Vec<Change>,
        complete: bool,
    },
    /// A question reaches an agent.
    Ask {
        link: LinkId,
        ask: usize,
    },
    /// The outcome of a question reaches the server.
    Outcome {
        link: LinkId,
        ask: usize,
        outcome: Result<(), CancelledDial>,
    },
    /// A forwarded dial reaches the holder.
    Forward {
        link: LinkId,
        forward: usize,
        bytes: Bytes,
    },
    /// The asker withdraws a forwarded dial.
    Withdraw {
        link: LinkId,
        forward: usize,
    },
    /// The answer of the holder.
    Answer {
        link: LinkId,
        forward: usize,
        answer: Answer,
    },
    ForwardDeadline {
        forward: usize,
    },
    Wake {
        dial: usize,
    },
    Deadline {
        dial: usize,
    },
    Backstop {
        dial: usize,
    },
}

impl Event {
    /// The link that carries it.
    fn link(&self) -> Option<LinkId> {
        match self {
            Self::Keys { link, .. }
            | Self::Ask { link, .. }
            | Self::Outcome { link, .. }
            | Self::Forward { link, .. }
            | Self::Withdraw { link, .. }
            | Self::Answer { link, .. } => Some(*link),
            Self::ForwardDeadline { .. }
            | Self::Wake { .. }
            | Self::Deadline { .. }
            | Self::Backstop { .. } => None,
        }
    }
}

#[derive(Clone, Copy)]
pub(super) enum Asker {
    Dial(usize),
    Forward(usize),
}

/// A question to an agent.
pub(super) struct Ask {
    pub(super) link: LinkId,
    pub(super) by: Asker,
    pub(super) is_over: bool,
}

pub(crate) struct PeerWorld {
    pub(super) rng: Rng,
    pub(super) now: Moment,
    pub(super) seen: Seen,
    pub(super) timeout: Duration,
    pub(super) servers: Vec<Server>,
    strategies: Vec<&'static str>,
    granted: bool,
    pub(super) agents: Vec<Agent>,
    pub(super) links: BTreeMap<LinkId, AgentLink>,
    pub(super) peers: BTreeMap<LinkId, PeerLink>,
    /// Links that ended in silence.
    pub(super) lost_in_silence: BTreeSet<LinkId>,
    next_link: u64,
    events: BTreeMap<(Moment, u64), Event>,
    next_event: u64,
    pub(super) asks: Vec<Ask>,
    pub(super) forwards: Vec<SimForward>,
    pub(super) dials: Vec<SimDial>,
    /// Dials without an outcome.
    pub(super) active: BTreeSet<usize>,
    /// Servers whose links or keys have changed.
    changed: BTreeSet<usize>,
    /// No faults any more.
    pub(super) is_calm: bool,
}

/// The hash of an owner, never 0.
pub(super) fn hash(principal: Option<&str>) -> u64 {
    let bytes = principal.unwrap_or_default().bytes();
    bytes
        .fold(1, |hash, byte| mix(hash ^ u64::from(byte)))
        .max(1)
}

impl PeerWorld {
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let count = rng.length(2..=4);
        let same = (!rng.once_in(5)).then(|| rng.pick(&STRATEGIES));
        let strategies: Vec<&str> = (0..count)
            .map(|_server| same.unwrap_or_else(|| rng.pick(&STRATEGIES)))
            .collect();
        let mut world = Self {
            timeout: Duration::from_secs(rng.pick(&[3, 15])),
            granted: rng.once_in(4),
            servers: Vec::new(),
            strategies,
            agents: Vec::new(),
            rng,
            now: Moment::default(),
            seen: Seen::default(),
            links: BTreeMap::new(),
            peers: BTreeMap::new(),
            lost_in_silence: BTreeSet::new(),
            next_link: 1,
            events: BTreeMap::new(),
            next_event: 0,
            asks: Vec::new(),
            forwards: Vec::new(),
            dials: Vec::new(),
            active: BTreeSet::new(),
            changed: BTreeSet::new(),
            is_calm: false,
        };
        world.servers = (0..count).map(|at| world.server(at)).collect();
        let agents = world.rng.length(2..=5);
        world.agents = (0..agents).map(|_agent| world.agent()).collect();
        world
    }

    pub(crate) fn live(&mut self) -> Seen {
        for _beat in 0..BUSY_BEATS {
            self.fate();
            self.beat(BEAT);
        }
        self.settle();
        std::mem::take(&mut self.seen)
    }

    pub(crate) fn simulated(&self) -> Duration {
        self.now.0
    }

    pub(super) fn server(&self, at: usize) -> Server {
        let strategies = self.strategies[at].parse().unwrap();
        Server {
            registry: Registry::new(strategies).with_granted_identifiers(self.granted),
            hedges: HedgeBudget::default(),
            leaves_at: None,
        }
    }

    fn agent(&mut self) -> Agent {
        let mut query = Vec::new();
        for host in HOSTS {
            if self.rng.once_in(3) {
                let kind = if host.starts_with('1') {
                    "ipv4"
                } else {
                    "host"
                };
                query.push(format!("{kind}={host}"));
            }
        }
        for net in NETS {
            if self.rng.once_in(4) {
                query.push(format!("cidr={net}"));
            }
        }
        if self.rng.once_in(4) {
            query.push("default-route=true".to_owned());
        }
        Agent {
            principal: self.rng.pick(&["p", "p", "q"]),
            identifiers: Identifiers::parse(&query.join("&")).unwrap(),
        }
    }

    pub(super) fn send(&mut self, at: Moment, event: Event) {
        self.events.insert((at, self.next_event), event);
        self.next_event += 1;
    }

    /// The time a message takes.
    pub(super) fn delay(&mut self) -> Duration {
        let most = if self.is_calm { 10 } else { 40 };
        Duration::from_millis(self.rng.within(1..=most))
    }

    pub(super) fn carry(&mut self, event: Event) {
        let at = self.now.after(self.delay());
        self.send(at, event);
    }

    fn new_link(&mut self) -> LinkId {
        self.next_link += 1;
        LinkId(self.next_link)
    }

    /// Lets time pass: delivers what is due, and notices silence.
    pub(super) fn beat(&mut self, time: Duration) {
        let end = self.now.after(time);
        while let Some(entry) = self.events.first_entry()
            && entry.key().0 <= end
        {
            let ((at, number), event) = entry.remove_entry();
            self.now = self.now.max(at);
            if let Some(link) = event.link() {
                let agent = self.links.get(&link).map(|link| link.block);
                let peer = self.peers.get(&link).map(|link| link.block);
                match agent.or(peer) {
                    // The link has ended, and with it what was on its way.
                    None => continue,
                    Some(Some(block)) if block.until > self.now => {
                        self.events.insert((block.until, number), event);
                        continue;
                    }
                    Some(_) => (),
                }
            }
            self.handle(event);
            self.wake_waiting();
        }
        self.now = end;
        self.notice();
        self.announce();
        self.wake_waiting();
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Keys {
                link,
                changes,
                complete,
            } => {
                self.hear(link, changes);
                let asker = self.peers[&link].asker;
                if complete {
                    self.servers[asker].registry.complete_peer(link);
                }
            }
            Event::Ask { ask, .. } => self.agent_asked(ask),
            Event::Outcome { ask, outcome, .. } => self.agent_answered(ask, outcome),
            Event::Forward { forward, bytes, .. } => self.forwarded(forward, &bytes),
            Event::Withdraw { forward, .. } => self.forwards[forward].is_over = true,
            Event::Answer {
                forward, answer, ..
            } => self.peer_answered(forward, answer),
            Event::ForwardDeadline { forward } => self.forward_timed_out(forward),
            Event::Wake { dial } => self.woken(dial),
            Event::Deadline { dial } => self.deadline(dial),
            Event::Backstop { dial } => self.backstop(dial),
        }
    }

    fn wake_waiting(&mut self) {
        while let Some(server) = self.changed.pop_first() {
            let waiting: Vec<usize> = self.active.iter().copied().collect();
            for dial in waiting {
                if self.dials[dial].server == server && self.dials[dial].listens {
                    self.check_dial(dial);
                }
            }
        }
    }

    /// Notices which links are silent.
    fn notice(&mut self) {
        let now = self.now;
        let ids: Vec<LinkId> = self.links.keys().copied().collect();
        for id in ids {
            let link = self.links.get_mut(&id).unwrap();
            link.block = link.block.filter(|block| block.until > now);
            let silence = match link.block.map(|block| now.since(block.since)) {
                Some(quiet) if quiet >= DEAD_AFTER => Silence::Dead,
                Some(quiet) if quiet >= SUSPECTED_AFTER => Silence::Suspected,
                _ => Silence::None,
            };
            link.is_silent = silence > Silence::None;
            let server = link.server;
            if self.servers[server].registry.set_silence(id, silence) {
                self.changed.insert(server);
            }
        }
        let ids: Vec<LinkId> = self.peers.keys().copied().collect();
        for id in ids {
            let link = self.peers.get_mut(&id).unwrap();
            link.block = link.block.filter(|block| block.until > now);
            let quiet = link
                .block
                .map_or(Duration::ZERO, |block| now.since(block.since));
            if quiet >= DEAD_AFTER {
                self.remove_peer(id);
                continue;
            }
            let is_silent = quiet >= SUSPECTED_AFTER;
            if link.is_silent != is_silent {
                link.is_silent = is_silent;
                let asker = link.asker;
                self.servers[asker].registry.set_peer_silent(id, is_silent);
                self.changed.insert(asker);
                self.seen.peers_silent += u64::from(is_silent);
            }
        }
    }

    /// Holders send what has changed: in parts, in order, late.
    fn announce(&mut self) {
        let all: Vec<_> = self
            .servers
            .iter()
            .map(|server| {
                let mut keys = server.registry.announced(self.now, hash);
                keys.sort_unstable();
                // A server that goes away says so of each of its keys.
                for (_, said) in &mut keys {
                    said.draining |= server.leaves_at.is_some();
                }
                keys
            })
            .collect();
        let ids: Vec<LinkId> = self.peers.keys().copied().collect();
        for id in ids {
            let peer = &self.peers[&id];
            let keys = &all[peer.holder];
            if peer.told.as_ref() == Some(keys) || !self.is_calm && self.rng.once_in(3) {
                continue;
            }
            let told = self.peers[&id].told.as_deref().unwrap_or_default();
            let gone = told
                .iter()
                .filter(|(scope, _)| keys.iter().all(|(now, _)| now != scope))
                .map(|(scope, _)| (scope, None));
            let set = keys
                .iter()
                .filter(|key| !told.contains(key))
                .map(|(scope, said)| (scope, Some(*said)));
            let changes: Vec<Change> = gone
                .chain(set)
                .map(|(scope, said)| (scope.strategy_number().into(), scope.key(), said))
                .collect();
            let slow = !self.is_calm && self.rng.once_in(4);
            let mut left = changes.as_slice();
            loop {
                let (part, rest) = left.split_at(left.len().min(CHANGES_MAX));
                let wait = if slow { self.rng.within(1..=3_000) } else { 5 };
                let peer = self.peers.get_mut(&id).unwrap();
                peer.last_at = peer
                    .last_at
                    .max(self.now.after(Duration::from_millis(wait)));
                let at = peer.last_at;
                let event = Event::Keys {
                    link: id,
                    changes: part.to_vec(),
                    complete: rest.is_empty(),
                };
                self.send(at, event);
                left = rest;
                if left.is_empty() {
                    break;
                }
            }
            self.peers.get_mut(&id).unwrap().told = Some(keys.clone());
        }
    }

    fn hear(&mut self, link: LinkId, changes: Vec<Change>) {
        let peer = self.peers.get_mut(&link).unwrap();
        let (asker, mut scopes) = (peer.asker, Vec::new());
        let registry = &mut self.servers[asker].registry;
        for (strategy, key, said) in changes {
            let scope = Scope::numbered(strategy, &key).unwrap();
            registry.set_peer_key(link, &scope, said).unwrap();
            match said {
                Some(said) => peer.heard.insert(scope.clone(), said),
                None => peer.heard.remove(&scope),
            };
            scopes.push(scope);
        }
        assert_eq!(registry.keys_of_peer(link), peer.heard.len());
        for scope in scopes {
            self.check_owner(asker, &scope);
        }
        self.changed.insert(asker);
    }

    fn fate(&mut self) {
        for agent in 0..self.agents.len() {
            let links = self.links.values().filter(|link| link.agent == agent);
            let held = links.count() as u64;
            if held < 2 && self.rng.once_in(4 + 36 * held) {
                let server = self.rng.length(0..=self.servers.len() - 1);
                self.connect_agent(agent, server);
            }
            if self.rng.once_in(150) {
                self.change_agent(agent);
            }
        }
        let ids: Vec<LinkId> = self.links.keys().copied().collect();
        for id in ids {
            self.agent_link_fate(id);
        }
        for asker in 0..self.servers.len() {
            for holder in 0..self.servers.len() {
                if self.rng.once_in(4) {
                    self.connect_peer(asker, holder);
                }
            }
            self.server_fate(asker);
        }
        let ids: Vec<LinkId> = self.peers.keys().copied().collect();
        for id in ids {
            if self.rng.once_in(150) {
                self.remove_peer(id);
            } else if self.rng.once_in(60) {
                let block = self.block(12);
                let link = self.peers.get_mut(&id).unwrap();
                link.block.get_or_insert(block);
            }
        }
        for _dial in 0..self.rng.within(0..=1) {
            let server = self.rng.length(0..=self.servers.len() - 1);
            let host = self.rng.pick(&HOSTS);
            self.dial(server, host);
        }
    }

    fn agent_link_fate(&mut self, id: LinkId) {
        let link = &self.links[&id];
        let (server, agent, is_silent) = (link.server, link.agent, link.is_silent);
        match self.rng.within(0..=179) {
            0 => self.remove_agent_link(id),
            1 => {
                // The agent moves to another server.
                let to = self.rng.length(0..=self.servers.len() - 1);
                self.connect_agent(agent, to);
                self.remove_agent_link(id);
            }
            2 => {
                self.servers[server].registry.set_draining(id);
                self.changed.insert(server);
            }
            3..=4 => {
                let block = self.block(14);
                let link = self.links.get_mut(&id).unwrap();
                link.block.get_or_insert(block);
            }
            5..=20 if is_silent => self.remove_agent_link(id),
            _ => (),
        }
    }

    fn server_fate(&mut self, at: usize) {
        if self.servers[at]
            .leaves_at
            .is_some_and(|end| self.now >= end)
            || self.rng.once_in(400)
        {
            self.restart(at);
        } else if self.rng.once_in(250) && self.servers[at].leaves_at.is_none() {
            let seconds = self.rng.within(1..=3);
            self.servers[at].leaves_at = Some(self.now.after(Duration::from_secs(seconds)));
        }
    }

    fn block(&mut self, seconds_max: u64) -> Block {
        let seconds = self.rng.within(1..=seconds_max);
        Block {
            since: self.now,
            until: self.now.after(Duration::from_secs(seconds)),
        }
    }

    pub(super) fn connect_agent(&mut self, agent: usize, server: usize) {
        let is_linked = |link: &AgentLink| link.agent == agent && link.server == server;
        if self.servers[server].leaves_at.is_some() || self.links.values().any(is_linked) {
            return;
        }
        let id = self.new_link();
        let known = &self.agents[agent];
        let name = AgentId::new(&agent.to_string());
        let registry = &mut self.servers[server].registry;
        let _standing = registry.add(id, name, &known.identifiers, Some(known.principal));
        let link = AgentLink {
            server,
            agent,
            answers: Arc::default(),
            is_silent: false,
            block: None,
        };
        self.links.insert(id, link);
        self.changed.insert(server);
    }

    /// The agent comes back as another one: with other keys, perhaps of another owner.
    fn change_agent(&mut self, agent: usize) {
        let links = self.links.iter().filter(|(_, link)| link.agent == agent);
        let links: Vec<LinkId> = links.map(|(id, _)| *id).collect();
        for link in links {
            self.remove_agent_link(link);
        }
        let new = self.agent();
        self.seen.owners_changed += u64::from(new.principal != self.agents[agent].principal);
        if self.rng.once_in(2) {
            self.agents[agent].principal = new.principal;
        } else {
            self.agents[agent] = new;
        }
    }

    fn remove_agent_link(&mut self, id: LinkId) {
        let link = self.links.remove(&id).unwrap();
        if link.is_silent {
            self.lost_in_silence.insert(id);
        }
        self.servers[link.server].registry.remove(id, self.now);
        self.changed.insert(link.server);
        let lost = (0..self.asks.len())
            .filter(|ask| self.asks[*ask].link == id && !self.asks[*ask].is_over)
            .collect::<Vec<_>>();
        for ask in lost {
            let (failure, written) = (DialFailure::LinkLost, true);
            self.agent_answered(ask, Err(CancelledDial { failure, written }));
        }
    }

    pub(super) fn connect_peer(&mut self, asker: usize, holder: usize) {
        let is_linked = |link: &PeerLink| link.asker == asker && link.holder == holder;
        let is_leaving = |at: usize| self.servers[at].leaves_at.is_some();
        if asker == holder
            || is_leaving(asker)
            || is_leaving(holder)
            || self.peers.values().any(is_linked)
        {
            return;
        }
        let id = self.new_link();
        let is_near = self.rng.once_in(2);
        assert!(self.servers[asker].registry.add_peer(id, is_near));
        let link = PeerLink {
            asker,
            holder,
            is_near,
            answers: Arc::default(),
            is_silent: false,
            heard: BTreeMap::new(),
            told: None,
            last_at: self.now,
            block: None,
        };
        self.peers.insert(id, link);
        self.changed.insert(asker);
    }

    /// Property 6: what a peer has said goes with its link.
    pub(super) fn remove_peer(&mut self, id: LinkId) {
        let link = self.peers.remove(&id).unwrap();
        if link.is_silent {
            self.lost_in_silence.insert(id);
        }
        self.seen.peers_lost += 1;
        let registry = &mut self.servers[link.asker].registry;
        registry.remove_peer(id);
        assert_eq!(registry.keys_of_peer(id), 0);
        for scope in link.heard.keys() {
            self.check_owner(link.asker, scope);
        }
        self.changed.insert(link.asker);
        self.peer_lost(id);
    }

    /// The process ends without a word; another one takes its place.
    fn restart(&mut self, at: usize) {
        let own: Vec<usize> = self.active.iter().copied().collect();
        for dial in own {
            if self.dials[dial].server == at {
                self.active.remove(&dial);
            }
        }
        let links = self.links.iter().filter(|(_, link)| link.server == at);
        let links: Vec<LinkId> = links.map(|(id, _)| *id).collect();
        let peers = self.peers.iter();
        let peers = peers.filter(|(_, link)| link.asker == at || link.holder == at);
        let peers: Vec<LinkId> = peers.map(|(id, _)| *id).collect();
        for link in links {
            self.remove_agent_link(link);
        }
        for peer in peers {
            self.remove_peer(peer);
        }
        self.servers[at] = self.server(at);
    }

    pub(super) fn host(&mut self) -> &'static str {
        self.rng.pick(&HOSTS)
    }

    pub(super) fn ends_leaving(&mut self) {
        for server in &mut self.servers {
            server.leaves_at = None;
        }
    }

    pub(super) fn is_silent(&self, link: LinkId) -> bool {
        let agent = self.links.get(&link).is_some_and(|link| link.is_silent);
        let peer = self.peers.get(&link).is_some_and(|link| link.is_silent);
        agent || peer || self.lost_in_silence.contains(&link)
    }
}
