//! The rules on plain lists.

use adit_core::ids::LinkId;
use adit_core::registry::{Condition, PeerKey, Scope, Strategy};
use adit_core::target::Host;
use adit_core::wire::identifiers::Identifiers;
use ipnet::IpNet;

use super::world::PeerWorld;

/// Every scope for which an agent with these identifiers answers.
fn scopes_of(identifiers: &Identifiers) -> Vec<Scope> {
    let hosts = identifiers.ipv4.iter().chain(&identifiers.host);
    let hosts = hosts.map(|host| Scope::named(Strategy::DestHost, host));
    let nets = identifiers.cidr.iter();
    let nets = nets.map(|net| Scope::named(Strategy::DestCidr, net));
    let route = Scope::named(Strategy::DefaultRoute, "");
    let route = route.filter(|_route| identifiers.default_route);
    let any = Scope::named(Strategy::Default, "");
    hosts
        .chain(nets)
        .flatten()
        .chain(route)
        .chain(any)
        .collect()
}

/// Whether the key of `scope` is one for `host`; with the length of its prefix.
fn covers(scope: &Scope, host: &Host) -> Option<u8> {
    match scope.strategy() {
        Strategy::Default | Strategy::DefaultRoute => Some(0),
        Strategy::DestHost => (Host::parse(&scope.key()) == *host).then_some(0),
        Strategy::DestCidr => {
            let net: IpNet = scope.key().parse().unwrap();
            match host {
                Host::Ip(ip) => net.contains(ip).then(|| net.prefix_len()),
                Host::Name(_) => None,
            }
        }
    }
}

/// Property 2: the agent has the key, and the key is one for the host.
pub(super) fn assert_answers(identifiers: &Identifiers, scope: &Scope, host: &Host) {
    assert!(covers(scope, host).is_some(), "{scope:?} is none of {host}");
    assert!(
        scopes_of(identifiers).contains(scope),
        "a dial for {host} by {scope:?} reaches {}",
        identifiers.encode()
    );
}

impl PeerWorld {
    /// The keys of agents linked to a server, each with its link.
    fn keys_here(&self, server: usize) -> impl Iterator<Item = (LinkId, Scope)> {
        let strategies = self.servers[server].registry.strategies();
        let links = self.links.iter();
        let links = links.filter(move |(_, link)| link.server == server);
        links.flat_map(move |(id, link)| {
            let scopes = scopes_of(&self.agents[link.agent].identifiers).into_iter();
            let scopes = scopes.filter(|scope| strategies.contains(scope.strategy()));
            scopes.map(|scope| (*id, scope))
        })
    }

    fn best(&self, server: usize, host: &Host, keys: &[Scope]) -> Option<Scope> {
        let mut strategies = self.servers[server].registry.strategies().iter();
        strategies.find_map(|strategy| {
            let of = keys.iter().filter(|scope| scope.strategy() == strategy);
            let covering = of.filter_map(|scope| Some((covers(scope, host)?, scope)));
            covering.max().map(|(_, scope)| scope.clone())
        })
    }

    /// The scope by what the server knows: of its own agents, and of what peers have said.
    fn scope_known(&self, server: usize, host: &Host) -> Option<Scope> {
        let here = self.keys_here(server).map(|(_, scope)| scope);
        let peers = self.peers.values().filter(|link| link.asker == server);
        let peers = peers.flat_map(|link| link.heard.keys().cloned());
        let keys: Vec<Scope> = here.chain(peers).collect();
        self.best(server, host, &keys)
    }

    /// The scope by what is true: of agents here, and at the servers that this one is linked to.
    pub(super) fn scope_true(&self, server: usize, host: &Host) -> Option<Scope> {
        let here = self.keys_here(server);
        let peers = self.peers.values().filter(|link| link.asker == server);
        let there = peers.flat_map(|link| self.keys_here(link.holder));
        let keys: Vec<Scope> = here.chain(there).map(|(_, scope)| scope).collect();
        self.best(server, host, &keys)
    }

    pub(super) fn is_here(&self, server: usize, scope: &Scope) -> bool {
        self.keys_here(server).any(|(_, key)| key == *scope)
    }

    /// The strategies in their order, and the longest network of one, wherever the agent is; unless an agent here was lost in
    /// silence.
    pub(super) fn check_scope(&self, server: usize, host: &Host, scope: Option<&Scope>) {
        let known = self.scope_known(server, host);
        if known.as_ref() == scope {
            return;
        }
        let registry = &self.servers[server].registry;
        let scope = scope.expect("an agent or a peer has a key of the host");
        assert!(
            !self.is_here(server, scope) && registry.is_silent(scope, self.now),
            "{host}: {scope:?} instead of {known:?}"
        );
        let rank = |scope: &Scope| {
            let mut order = registry.strategies().iter();
            let at = order.position(|strategy| strategy == scope.strategy());
            (at.unwrap(), u8::MAX - covers(scope, host).unwrap())
        };
        assert!(known.is_none_or(|known| rank(scope) < rank(&known)));
    }

    /// Phases in their order; within one, agents here before peers of this zone before other peers.
    pub(super) fn check_pick(&self, at: usize, picked: LinkId, is_first: bool) {
        let (server, scope) = (self.dials[at].server, &self.dials[at].scope);
        let registry = &self.servers[server].registry;
        let here = self.keys_here(server).filter(|(_, key)| key == scope);
        let here = here.filter_map(|(id, _)| match registry.condition(id)? {
            Condition::Serving => Some((0, id)),
            Condition::Draining => Some((3, id)),
            Condition::Suspected => Some((6, id)),
            Condition::Dead | Condition::Retired | Condition::Shadowed => None,
        });
        let peers = self.peers.iter().filter(|(_, link)| link.asker == server);
        let peers = peers.filter_map(|(id, link)| {
            let said = link.heard.get(scope)?;
            let phase = match link.is_silent {
                true => 6,
                false if said.draining => 3,
                false => 0,
            };
            Some((phase + if link.is_near { 1 } else { 2 }, *id))
        });
        let all: Vec<(u8, LinkId)> = here.chain(peers).collect();
        let rank = all.iter().find(|(_, id)| *id == picked);
        let (rank, _) = rank.expect("a live link of this server that has the key");
        let best = all.iter().map(|(rank, _)| rank).min();
        assert!(!is_first || best == Some(rank), "{picked:?} of {all:?}");
    }

    /// The owner of a key is known if all peers that have the key say the same.
    pub(super) fn check_owner(&self, asker: usize, scope: &Scope) {
        let peers = self.peers.values().filter(|link| link.asker == asker);
        let said: Vec<&PeerKey> = peers.filter_map(|link| link.heard.get(scope)).collect();
        let owner = said.first().map_or(0, |said| said.owner);
        let agree = owner != 0 && said.iter().all(|said| said.owner == owner);
        let registry = &self.servers[asker].registry;
        assert_eq!(registry.peer_owner(scope), agree.then_some(owner));
    }
}
