//! The scope of a dial: the key by which it finds agents, and the links that it may ask.

use ipnet::IpNet;

use super::agents::{Key, Registry, SILENT_KEYS_FOR};
use super::peers::PeerStage;
use super::pool::{Phase, Pool};
use super::strategy::Strategy;
use crate::ids::LinkId;
use crate::peer::{strategy_number, strategy_of};
use crate::session::Moment;
use crate::target::Host;

/// The key by which a dial finds agents. All attempts of a dial keep the scope of the first.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Scope(pub(super) Key);

impl Scope {
    /// The key as a peer names it: `None` if no agent can have it.
    #[must_use]
    pub fn named(strategy: Strategy, key: &str) -> Option<Self> {
        let key = match (strategy, key) {
            (Strategy::Default, "") => Key::Any,
            (Strategy::DefaultRoute, "") => Key::DefaultRoute,
            (Strategy::Default | Strategy::DefaultRoute, _) => return None,
            (Strategy::DestHost, host) => Key::of_host(Host::parse(host)),
            (Strategy::DestCidr, net) => Key::Net(net.parse::<IpNet>().ok()?.trunc()),
        };
        Some(Self(key))
    }

    /// As [`Self::named`], with the strategy's number between servers.
    #[must_use]
    pub fn numbered(strategy: u32, key: &str) -> Option<Self> {
        Self::named(strategy_of(strategy)?, key)
    }

    /// The strategy's number between servers.
    #[must_use]
    pub fn strategy_number(&self) -> u8 {
        strategy_number(self.strategy())
    }

    /// The strategy that the key belongs to.
    #[must_use]
    pub fn strategy(&self) -> Strategy {
        self.0.strategy()
    }

    /// The host or network; empty for strategies without one. [`Self::named`] reads it.
    #[must_use]
    pub fn key(&self) -> String {
        match &self.0 {
            Key::Any | Key::DefaultRoute => String::new(),
            Key::Host(Host::Ip(ip)) => ip.to_string(),
            Key::Host(Host::Name(name)) => name.clone(),
            Key::Net(net) => net.to_string(),
        }
    }
}

impl Registry {
    /// The scope of a dial for a host: the first key that has a link here or an agent at a peer. Strategies are tried in order; networks by longest
    /// prefix. `None`: no agent answers for the host.
    ///
    /// A key counts while it has a link, even a silent one, and for a minute after its last link ended while silent. The next
    /// key may lead to another machine with the same address.
    #[must_use]
    pub fn scope(&self, host: &Host, now: Moment) -> Option<Scope> {
        self.scope_without(host, now, &[])
    }

    /// As [`Self::scope`], without the keys of peers in `not_here`, which have just said that they have no such agent.
    #[must_use]
    pub fn scope_without(
        &self,
        host: &Host,
        now: Moment,
        not_here: &[(LinkId, Scope)],
    ) -> Option<Scope> {
        let known = |key| self.known(key, now, not_here);
        let key = self.strategies.iter().find_map(|strategy| match strategy {
            Strategy::Default => known(Key::Any),
            Strategy::DefaultRoute => known(Key::DefaultRoute),
            Strategy::DestHost => known(Key::of_host(host.clone())),
            Strategy::DestCidr => match host {
                Host::Ip(ip) => {
                    let nets = self.silent.iter().filter_map(|(key, since)| match key {
                        Key::Net(net) if net.contains(ip) => {
                            (now.since(*since) < SILENT_KEYS_FOR).then_some(*net)
                        }
                        _ => None,
                    });
                    let nets = nets.chain(self.nets.longest_around(*ip));
                    let nets = nets.chain(self.peers.longest_around(*ip, not_here));
                    nets.max_by_key(IpNet::prefix_len).map(Key::Net)
                }
                Host::Name(_) => None,
            },
        });
        key.map(Scope)
    }

    fn known(&self, key: Key, now: Moment, not_here: &[(LinkId, Scope)]) -> Option<Key> {
        let has_links = self.pool(&key).is_some_and(|pool| !pool.is_empty());
        let has_peers = || self.peers.has(&key, not_here);
        (has_links || self.is_remembered(&key, now) || has_peers()).then_some(key)
    }

    fn is_remembered(&self, key: &Key, now: Moment) -> bool {
        let since = self.silent.get(key);
        since.is_some_and(|since| now.since(*since) < SILENT_KEYS_FOR)
    }

    /// Chooses a link for the first attempt of a dial, except those in `exclude`: of an agent here, or of a peer that has the
    /// key. `None`: no link of the scope takes dials.
    ///
    /// Serving links come before draining links, draining links before suspected ones. Within each, agents here come first,
    /// those in this server's zone before others, then peers in this server's zone, then other peers. Among equal agents or
    /// peers `draw` decides, evenly if `draw` is uniform. Within an agent the newest link is chosen.
    #[must_use]
    pub fn pick(&self, scope: &Scope, draw: u64, exclude: &[LinkId]) -> Option<LinkId> {
        self.choose(scope, PeerStage::Silent, draw, exclude, &|_| true)
    }

    /// As [`Self::pick`], for another attempt of a dial. `is_owner` tells whether a principal is that of the first attempt. Without
    /// grants identifiers are mere claims, so in scopes of an identifier only agents of the same principal are chosen; peers are
    /// told the principal, and decide. `heard`: no silent agent is chosen.
    #[must_use]
    pub fn pick_owned(
        &self,
        scope: &Scope,
        is_owner: &dyn Fn(Option<&str>) -> bool,
        heard: bool,
        draw: u64,
        exclude: &[LinkId],
    ) -> Option<LinkId> {
        let last = if heard {
            PeerStage::Draining
        } else {
            PeerStage::Silent
        };
        self.choose(scope, last, draw, exclude, &self.owned(scope, is_owner))
    }

    /// Chooses a link for a dial that a peer forwards: of an agent here alone. `is_owner`: as for [`Self::pick_owned`].
    #[must_use]
    pub fn pick_local(
        &self,
        scope: &Scope,
        is_owner: &dyn Fn(Option<&str>) -> bool,
        draw: u64,
        exclude: &[LinkId],
    ) -> Option<LinkId> {
        let pool = self.pool(&scope.0)?;
        pool.pick(Phase::LAST, draw, exclude, &self.owned(scope, is_owner))
    }

    fn owned(
        &self,
        scope: &Scope,
        is_owner: &dyn Fn(Option<&str>) -> bool,
    ) -> impl Fn(LinkId) -> bool {
        let is_claim = self.is_claim(scope);
        move |link| {
            let known = self.links.get(&link);
            !is_claim || known.is_some_and(|known| is_owner(known.principal.as_deref()))
        }
    }

    fn choose(
        &self,
        scope: &Scope,
        last: PeerStage,
        draw: u64,
        exclude: &[LinkId],
        fits: &impl Fn(LinkId) -> bool,
    ) -> Option<LinkId> {
        let pool = self.pool(&scope.0);
        let stages = [
            (Phase::Ready, PeerStage::Ready),
            (Phase::LAST_HEARD, PeerStage::Draining),
            (Phase::LAST, PeerStage::Silent),
        ];
        let mut stages = stages.into_iter().filter(|(_, stage)| *stage <= last);
        stages.find_map(|(worst, stage)| {
            let here = pool.and_then(|pool| pool.pick(worst, draw, exclude, fits));
            here.or_else(|| self.peers.pick(&scope.0, stage, draw, exclude))
        })
    }

    /// Whether an agent of the scope may return: an agent that is silent, or was when its last link ended.
    #[must_use]
    pub fn is_silent(&self, scope: &Scope, now: Moment) -> bool {
        self.pool(&scope.0).is_some_and(Pool::has_dead) || self.is_remembered(&scope.0, now)
    }

    /// The identifier by which a link answers for a host, under the first matching strategy: the host, or the longest
    /// network that contains it. `None`: that strategy needs no identifier of the host, or no strategy matches.
    #[must_use]
    pub fn class(&self, host: &Host, link: LinkId) -> Option<String> {
        let keys = &self.links.get(&link)?.keys;
        for strategy in self.strategies.iter() {
            let class = match strategy {
                Strategy::Default => return None,
                Strategy::DefaultRoute if keys.contains(&Key::DefaultRoute) => return None,
                Strategy::DefaultRoute => None,
                Strategy::DestHost => {
                    let own = host.clone().without_final_dot();
                    let text = own.to_string();
                    keys.contains(&Key::Host(own)).then_some(text)
                }
                Strategy::DestCidr => longest_around(keys, host).map(|net| net.to_string()),
            };
            if class.is_some() {
                return class;
            }
        }
        None
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
