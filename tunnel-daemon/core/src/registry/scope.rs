//! The scope of a dial: the key by which it finds agents, and the links that it may ask.

use ipnet::IpNet;

use super::agents::{Key, Registry, SILENT_KEYS_FOR};
use super::pool::{Phase, Pool};
use super::strategy::Strategy;
use crate::ids::LinkId;
use crate::session::Moment;
use crate::target::Host;

/// The key by which a dial finds agents. All attempts of a dial keep the scope of the first.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Scope(Key);

impl Registry {
    /// The scope of a dial for a host: the first key that has a link. Strategies are tried in order; networks by longest
    /// prefix. `None`: no agent answers for the host.
    ///
    /// A key counts while it has a link, even a silent one, and for a minute after its last link ended while silent. The next
    /// key may lead to another machine with the same address.
    #[must_use]
    pub fn scope(&self, host: &Host, now: Moment) -> Option<Scope> {
        let key = self.strategies.iter().find_map(|strategy| match strategy {
            Strategy::Default => self.known(Key::Any, now),
            Strategy::DefaultRoute => self.known(Key::DefaultRoute, now),
            Strategy::DestHost => self.known(Key::of_host(host.clone()), now),
            Strategy::DestCidr => match host {
                Host::Ip(ip) => {
                    let nets = self.silent.iter().filter_map(|(key, since)| match key {
                        Key::Net(net) if net.contains(ip) => {
                            (now.since(*since) < SILENT_KEYS_FOR).then_some(*net)
                        }
                        _ => None,
                    });
                    let nets = nets.chain(self.nets.longest_around(*ip));
                    nets.max_by_key(IpNet::prefix_len).map(Key::Net)
                }
                Host::Name(_) => None,
            },
        });
        key.map(Scope)
    }

    fn known(&self, key: Key, now: Moment) -> Option<Key> {
        let has_links = self.pool(&key).is_some_and(|pool| !pool.is_empty());
        (has_links || self.is_remembered(&key, now)).then_some(key)
    }

    fn is_remembered(&self, key: &Key, now: Moment) -> bool {
        let since = self.silent.get(key);
        since.is_some_and(|since| now.since(*since) < SILENT_KEYS_FOR)
    }

    /// Chooses a link for the first attempt of a dial, except those in `exclude`. `None`: no link of the scope takes dials.
    ///
    /// Serving links come before draining links, draining links before suspected ones. Among serving links, agents in this
    /// server's zone come first. Among equal agents `draw` decides, evenly if `draw` is uniform. Within an agent the newest
    /// link is chosen.
    #[must_use]
    pub fn pick(&self, scope: &Scope, draw: u64, exclude: &[LinkId]) -> Option<LinkId> {
        self.pool(&scope.0)?
            .pick(Phase::LAST, draw, exclude, &|_| true)
    }

    /// As [`Self::pick`], for another attempt of a dial whose first attempt went to an agent of `principal`. Without grants
    /// identifiers are mere claims, so in scopes of an identifier only agents of the same principal are chosen. `heard`: no
    /// silent agent is chosen.
    #[must_use]
    pub fn pick_again(
        &self,
        scope: &Scope,
        principal: Option<&str>,
        heard: bool,
        draw: u64,
        exclude: &[LinkId],
    ) -> Option<LinkId> {
        let worst = if heard {
            Phase::LAST_HEARD
        } else {
            Phase::LAST
        };
        let is_claim = scope.0 != Key::Any && !self.granted;
        let fits = |link| {
            let known = self.links.get(&link);
            !is_claim || known.is_some_and(|known| known.principal.as_deref() == principal)
        };
        self.pool(&scope.0)?.pick(worst, draw, exclude, &fits)
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
