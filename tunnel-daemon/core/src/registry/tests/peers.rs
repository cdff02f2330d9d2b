//! Tests of keys at other servers: what peers announce, and their place in the choice.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use ipnet::IpNet;

use super::{Host, LinkId, Moment, Registry, Silence, Strategy};
use crate::ids::AgentId;
use crate::peer::PEERS_MAX;
use crate::registry::{PEER_KEYS_MAX, PeerExcess, PeerKey, Scope};
use crate::wire::identifiers::Identifiers;

/// Links from this number on are those of peers.
const PEER: u64 = 100;

struct World(Registry);

fn strategy_of(key: &str) -> (Strategy, &str) {
    match key.split_once('=') {
        None => (Strategy::Default, ""),
        Some(("host", host)) => (Strategy::DestHost, host),
        Some(("cidr", net)) => (Strategy::DestCidr, net),
        Some(_) => (Strategy::DefaultRoute, ""),
    }
}

/// A key as an identifier spells it; "" is the key of `default`.
fn scope(key: &str) -> Scope {
    let (strategy, key) = strategy_of(key);
    Scope::named(strategy, key).expect("a key")
}

fn ready(owner: u64) -> Option<PeerKey> {
    let draining = false;
    Some(PeerKey { owner, draining })
}

fn draining() -> Option<PeerKey> {
    let (owner, draining) = (0, true);
    Some(PeerKey { owner, draining })
}

impl World {
    fn new(strategies: &str) -> Self {
        Self(Registry::new(strategies.parse().unwrap()))
    }

    /// A local agent; its name is that of the link.
    fn agent(&mut self, link: u64, identifiers: &str, principal: &str) {
        let agent = AgentId::new(&link.to_string());
        let identifiers = Identifiers::parse(identifiers).unwrap();
        let principal = Some(principal);
        let _standing = self.0.add(LinkId(link), agent, &identifiers, principal);
    }

    fn peer(&mut self, link: u64, keys: &[&str]) {
        assert!(self.0.add_peer(LinkId(link), false));
        for key in keys {
            self.says(link, key, ready(1));
        }
    }

    fn says(&mut self, link: u64, key: &str, said: Option<PeerKey>) {
        let set = self.0.set_peer_key(LinkId(link), &scope(key), said);
        assert_eq!(set, Ok(()));
    }

    fn scope(&self, host: &str) -> Option<Scope> {
        self.scope_without(host, &[])
    }

    fn scope_without(&self, host: &str, not_here: &[u64]) -> Option<Scope> {
        let key = scope(&format!("host={host}"));
        let said = not_here.iter().map(|link| (LinkId(*link), key.clone()));
        let not_here: Vec<(LinkId, Scope)> = said.collect();
        let host = Host::parse(host);
        self.0.scope_without(&host, Moment::default(), &not_here)
    }

    /// Every link that at least one draw returns.
    fn choices(&self, host: &str) -> Vec<u64> {
        self.choices_without(host, &[])
    }

    fn choices_without(&self, host: &str, exclude: &[u64]) -> Vec<u64> {
        let exclude: Vec<LinkId> = exclude.iter().copied().map(LinkId).collect();
        let scope = self.scope(host);
        drawn(|draw| self.0.pick(scope.as_ref()?, draw, &exclude))
    }
}

fn drawn(pick: impl Fn(u64) -> Option<LinkId>) -> Vec<u64> {
    let links: BTreeSet<u64> = (0..60).filter_map(|draw| Some(pick(draw)?.0)).collect();
    links.into_iter().collect()
}

#[test]
fn a_key_of_a_peer_is_found_until_the_peer_takes_it_back() {
    let mut world = World::new("destHost");
    world.peer(PEER, &[]);
    assert_eq!(world.scope("h"), None);
    world.says(PEER, "host=h", ready(1));
    assert_eq!(world.scope("H."), Some(scope("host=h")));
    assert_eq!(world.choices("h"), [PEER]);
    // Repeated, and taken back by a peer that does not have it.
    world.says(PEER, "host=h", ready(1));
    world.peer(PEER + 1, &[]);
    world.says(PEER + 1, "host=h", None);
    assert_eq!(world.0.keys_of_peer(LinkId(PEER)), 1);
    assert_eq!(world.0.keys_of_peer(LinkId(PEER + 1)), 0);
    assert_eq!(world.choices("h"), [PEER]);
    world.says(PEER, "host=h", None);
    assert_eq!((world.scope("h"), world.0.peer_keys()), (None, 0));
    // What an unknown peer says has no effect.
    world.says(PEER + 9, "host=h", ready(1));
    assert_eq!(world.0.peer_keys(), 0);
}

#[test]
fn a_removed_peer_leaves_nothing() {
    let mut world = World::new("destHost,destCIDR,defaultRoute,default");
    let keys = [
        "host=h",
        "cidr=10.0.0.0/8",
        "cidr=fd00::/16",
        "default-route=true",
        "",
    ];
    for _round in 0..3 {
        world.peer(PEER, &keys);
        world.peer(PEER + 1, &keys[..2]);
        world.says(PEER + 1, "host=h", ready(2));
        world.says(PEER, "host=h", draining());
        world.0.set_peer_silent(LinkId(PEER), true);
        world.0.complete_peer(LinkId(PEER));
        world.0.complete_peer(LinkId(PEER));
        assert_eq!((world.0.peer_keys(), world.0.complete_peers()), (5, 1));
        assert_eq!(world.0.peers.remains(), [2, 1]);
        world.0.remove_peer(LinkId(PEER));
        assert_eq!((world.0.peer_keys(), world.0.complete_peers()), (2, 0));
        assert_eq!(world.0.peers.remains(), [1, 0]);
        assert_eq!(world.choices("h"), [PEER + 1]);
        assert_eq!(world.scope("fd00::1"), None);
        // The slot is used again: the marks of the old peer are gone.
        world.peer(PEER + 2, &["host=h"]);
        assert_eq!(world.choices("h"), [PEER + 1, PEER + 2]);
        for link in [PEER + 1, PEER + 2, PEER + 3] {
            world.0.remove_peer(LinkId(link));
        }
        assert_eq!(world.0.peer_keys(), 0);
        assert_eq!(world.0.peers.remains(), [0, 0]);
        assert_eq!(world.scope("10.0.0.1"), None);
    }
}

/// The number of networks of each prefix length follows the keys, however often a peer repeats one.
#[test]
fn a_prefix_length_is_forgotten_with_its_last_network() {
    let mut world = World::new("destCIDR");
    world.peer(
        PEER,
        &["cidr=10.0.0.0/8", "cidr=10.0.0.0/8", "cidr=11.0.0.0/8"],
    );
    world.peer(PEER + 1, &["cidr=10.0.0.0/8"]);
    world.says(PEER, "cidr=10.0.0.0/8", None);
    world.says(PEER, "cidr=11.0.0.0/8", None);
    assert_eq!(world.0.peers.remains(), [1, 0]);
    assert_eq!(world.choices("10.0.0.1"), [PEER + 1]);
    world.says(PEER + 1, "cidr=10.0.0.0/8", None);
    world.says(PEER + 1, "cidr=10.0.0.0/8", None);
    assert_eq!(world.0.peers.remains(), [0, 0]);
}

#[test]
fn there_are_64_peers_at_most() {
    let mut world = World::new("default");
    let last = PEERS_MAX as u64 - 1;
    for peer in 0..=last {
        world.peer(PEER + peer, &[""]);
    }
    assert!(!world.0.add_peer(LinkId(PEER + last + 1), false));
    let links: BTreeSet<LinkId> = (0..64)
        .filter_map(|draw| world.0.pick(&scope(""), draw, &[]))
        .collect();
    assert_eq!(links.len(), PEERS_MAX, "each has its share of the draws");
    world.0.remove_peer(LinkId(PEER + last));
    assert!(world.0.add_peer(LinkId(PEER + last + 1), false));
}

fn network(number: usize) -> Scope {
    let address = Ipv4Addr::from_bits(u32::try_from(number).unwrap());
    Scope(super::super::agents::Key::Net(
        IpNet::new(IpAddr::V4(address), 32).unwrap(),
    ))
}

#[test]
fn the_keys_of_one_peer_and_of_all_peers_are_bounded() {
    let mut world = World::new("destCIDR");
    for peer in 0..4 {
        world.peer(PEER + peer, &[]);
        let link = LinkId(PEER + peer);
        let first = usize::try_from(peer).unwrap() * PEER_KEYS_MAX;
        for number in first..first + PEER_KEYS_MAX {
            let set = world.0.set_peer_key(link, &network(number), ready(1));
            assert_eq!(set, Ok(()));
        }
        let next = network(first + PEER_KEYS_MAX);
        let more = world.0.set_peer_key(link, &next, ready(1));
        assert_eq!(more, Err(PeerExcess::Keys));
        // A known key may change; a key that is taken back makes room.
        for said in [draining(), None, ready(1)] {
            assert_eq!(world.0.set_peer_key(link, &network(first), said), Ok(()));
        }
        assert_eq!(world.0.keys_of_peer(link), PEER_KEYS_MAX);
    }
    let fifth = LinkId(PEER + 4);
    world.peer(fifth.0, &[]);
    let new = network(5 * PEER_KEYS_MAX);
    assert_eq!(world.0.set_peer_key(fifth, &network(7), ready(1)), Ok(()));
    // Peers that claim the most give way to one that has little.
    assert_eq!(world.0.set_peer_key(fifth, &new, ready(1)), Ok(()));
    let kept = (0..4).map(|peer| world.0.keys_of_peer(LinkId(PEER + peer)));
    assert_eq!(kept.filter(|kept| *kept == 0).count(), 1);
    assert_eq!(world.0.peer_keys(), 3 * PEER_KEYS_MAX + 1);
    let over = (0..4).map(|peer| LinkId(PEER + peer));
    let over: Vec<LinkId> = over
        .filter(|link| world.0.keys_of_peer(*link) == 0)
        .collect();
    assert_eq!(world.0.take_displaced(), Some(over[0]));
    let more = world.0.set_peer_key(over[0], &new, ready(1));
    assert_eq!(more, Err(PeerExcess::Keys));
    let more = world.0.count_peer_changes(over[0], 1, Moment::default());
    assert_eq!(more, Err(PeerExcess::Keys), "its next packet ends its link");
}

/// A peer that changes its keys for ever is stopped; one that has many that all change is not.
///
/// Limit (peers): Changes of keys that another server may announce | 393,216 at once, and 5,000 a second in the long run
#[test]
fn changes_of_a_peers_keys_are_bounded_in_time() {
    let mut world = World::new("destCIDR");
    world.peer(PEER, &[]);
    let link = LinkId(PEER);
    let at = |seconds: f64| Moment(Duration::from_secs_f64(seconds));
    for _way in ["come", "drain", "go"] {
        let all = world.0.count_peer_changes(link, PEER_KEYS_MAX, at(1.0));
        assert_eq!(all, Ok(()));
    }
    let more = |world: &mut World, seconds| world.0.count_peer_changes(link, 0, at(seconds));
    assert_eq!(more(&mut world, 1.0), Err(PeerExcess::Changes));
    assert_eq!(
        more(&mut world, 2.0),
        Ok(()),
        "a packet without changes counts as one"
    );
    let second = world.0.count_peer_changes(link, 5000, at(2.0));
    assert_eq!(second, Err(PeerExcess::Changes));
    let second = world.0.count_peer_changes(link, 4999, at(2.0));
    assert_eq!(second, Ok(()));
}

#[test]
fn the_owner_of_a_key_is_known_while_all_peers_agree() {
    let mut world = World::new("destHost");
    let key = "host=h";
    let owner = |world: &World| world.0.peer_owner(&scope(key));
    assert_eq!(owner(&world), None);
    world.peer(PEER, &[key]);
    world.peer(PEER + 1, &[key]);
    assert_eq!(owner(&world), Some(1));
    // The agent comes back as another principal: one peer says so after the other.
    world.says(PEER, key, ready(2));
    assert_eq!(owner(&world), None);
    world.says(PEER + 1, key, ready(2));
    assert_eq!(owner(&world), Some(2));
    // A peer whose agents differ, or that the key leaves.
    for leaves in [
        |world: &mut World| world.says(PEER, "host=h", None),
        |world: &mut World| {
            world.0.remove_peer(LinkId(PEER));
            world.peer(PEER, &[]);
        },
    ] {
        world.says(PEER, key, ready(0));
        assert_eq!(owner(&world), None);
        leaves(&mut world);
        assert_eq!(owner(&world), Some(2));
    }
    world.says(PEER, key, ready(3));
    world.peer(PEER + 2, &[]);
    world.says(PEER + 2, key, ready(3));
    world.says(PEER + 1, key, None);
    assert_eq!(owner(&world), Some(3));
    world.says(PEER, key, ready(0));
    world.says(PEER + 2, key, ready(0));
    assert_eq!(owner(&world), None, "all say that theirs differ");
    assert_eq!(world.0.peers.remains(), [0, 0]);
}

/// Mutation caught: networks of peers are looked at only where no agent here has a network.
#[test]
fn the_longest_network_wins_wherever_it_is() {
    let mut world = World::new("destCIDR");
    world.agent(1, "cidr=10.0.0.0/8&cidr=10.1.2.0/24", "p");
    world.peer(
        PEER,
        &["cidr=10.1.0.0/16", "cidr=10.1.2.0/24", "cidr=fd00::/16"],
    );
    world.peer(PEER + 1, &["cidr=10.0.0.0/8", "cidr=10.9.0.0/16"]);
    for (host, net, links) in [
        ("10.2.0.1", "cidr=10.0.0.0/8", vec![1]),
        ("10.1.9.1", "cidr=10.1.0.0/16", vec![PEER]),
        ("10.1.2.1", "cidr=10.1.2.0/24", vec![1]),
        ("10.9.0.1", "cidr=10.9.0.0/16", vec![PEER + 1]),
        ("fd00::1", "cidr=fd00::/16", vec![PEER]),
    ] {
        assert_eq!(world.scope(host), Some(scope(net)), "{host}");
        assert_eq!(world.choices(host), links, "{host}");
    }
    // Of the other family, none, and a name.
    for host in ["fe80::1", "192.0.2.1", "node"] {
        assert_eq!(world.scope(host), None, "{host}");
    }
    assert_eq!(world.choices_without("10.1.2.1", &[1]), [PEER]);
    assert_eq!(world.choices_without("10.2.0.1", &[1]), [PEER + 1]);
}

/// Mutation caught: `scope` searches agents here through all strategies before it looks at peers. The address may be another
/// machine under the later strategy.
#[test]
fn a_peers_match_under_an_earlier_strategy_goes_before_a_local_match_under_a_later_one() {
    let mut world = World::new("destHost,destCIDR,defaultRoute,default");
    world.agent(1, "cidr=10.0.0.0/8&default-route=true", "p");
    world.peer(PEER, &["host=10.0.0.7", "cidr=192.0.2.0/24"]);
    assert_eq!(world.choices("10.0.0.7"), [PEER]);
    assert_eq!(world.choices("192.0.2.1"), [PEER]);
    assert_eq!(world.choices("10.0.0.8"), [1]);
    assert_eq!(world.choices("node"), [1]);
    // However badly the peer does: the key is its own.
    world.says(PEER, "host=10.0.0.7", draining());
    world.0.set_peer_silent(LinkId(PEER), true);
    assert_eq!(world.choices("10.0.0.7"), [PEER]);
    assert_eq!(world.choices_without("10.0.0.7", &[PEER]), []);
}

/// Mutation caught: `choose` asks peers before agents here of the same phase.
#[test]
fn agents_here_come_first_then_peers_of_the_zone_then_other_peers() {
    let mut world = World::new("default");
    world.0 = world.0.with_zone(Some("east".into()));
    world.agent(1, "zone=east", "p");
    world.agent(2, "zone=west", "p");
    world.peer(PEER, &[""]);
    for link in [PEER + 1, PEER + 2] {
        assert!(world.0.add_peer(LinkId(link), true));
        world.says(link, "", ready(0));
    }
    assert_eq!(world.choices("x"), [1]);
    assert_eq!(world.choices_without("x", &[1]), [2]);
    let near = [PEER + 1, PEER + 2];
    assert_eq!(world.choices_without("x", &[1, 2]), near);
    assert_eq!(world.choices_without("x", &[1, 2, near[0]]), [near[1]]);
    let all_near = [1, 2, near[0], near[1]];
    assert_eq!(world.choices_without("x", &all_near), [PEER]);
}

#[test]
fn a_later_phase_counts_only_when_an_earlier_one_has_neither_agent_nor_peer() {
    let mut world = World::new("default");
    world.agent(1, "", "p");
    world.agent(2, "", "p");
    for peer in 0..4 {
        assert!(world.0.add_peer(LinkId(PEER + peer), peer == 2));
        world.says(PEER + peer, "", ready(0));
    }
    world.0.set_draining(LinkId(1));
    world.0.set_silence(LinkId(2), Silence::Suspected);
    // The agents of all but one are draining (one of them is the nearest), and one of these is silent, too.
    for peer in 1..4 {
        world.says(PEER + peer, "", draining());
    }
    world.0.set_peer_silent(LinkId(PEER + 3), true);
    let order = [PEER, 1, PEER + 2, PEER + 1, 2, PEER + 3];
    for at in 0..order.len() {
        let chosen = world.choices_without("x", &order[..at]);
        assert_eq!(chosen, [order[at]], "after {:?}", &order[..at]);
    }
    assert_eq!(world.choices_without("x", &order), []);
    // Another attempt of a dial asks nobody who is silent.
    let again = |world: &World, exclude: &[LinkId]| {
        drawn(|draw| {
            world
                .0
                .pick_owned(&scope(""), &|of| of == Some("p"), true, draw, exclude)
        })
    };
    let heard = order.map(LinkId);
    assert_eq!(again(&world, &heard[..3]), [PEER + 1]);
    assert_eq!(again(&world, &heard[..4]), []);
    // The silent one is heard again, and its agents serve again.
    world.0.set_peer_silent(LinkId(PEER + 3), false);
    assert_eq!(again(&world, &heard[..4]), [PEER + 3]);
    world.says(PEER + 1, "", ready(0));
    assert_eq!(world.choices("x"), [PEER, PEER + 1]);
}

#[test]
fn without_the_peers_that_have_no_such_agent_the_next_key_counts() {
    let mut world = World::new("destHost,destCIDR,default");
    world.agent(1, "cidr=10.0.0.0/8", "p");
    world.peer(PEER, &["host=10.1.0.7", "cidr=10.1.0.0/16"]);
    world.peer(PEER + 1, &["host=10.1.0.7"]);
    let without = |not_here: &[u64]| world.scope_without("10.1.0.7", not_here);
    assert_eq!(without(&[]), Some(scope("host=10.1.0.7")));
    assert_eq!(without(&[PEER]), Some(scope("host=10.1.0.7")));
    assert_eq!(without(&[PEER + 1]), Some(scope("host=10.1.0.7")));
    let both = [PEER, PEER + 1];
    // Of the peer's other keys that says nothing.
    assert_eq!(without(&both), Some(scope("cidr=10.1.0.0/16")));
    // A peer that is unknown takes nobody else's keys away.
    assert_eq!(without(&[PEER + 9]), Some(scope("host=10.1.0.7")));
    // An agent here keeps its key, whatever peers say.
    world.agent(2, "host=10.1.0.7", "p");
    assert_eq!(
        world.scope_without("10.1.0.7", &both),
        Some(scope("host=10.1.0.7"))
    );
}

/// Mutation caught: `pick_local` chooses as `pick` does. The dial would go on to a third server.
#[test]
fn a_forwarded_dial_is_never_sent_to_a_peer() {
    let mut world = World::new("destHost,default");
    world.agent(1, "", "p");
    world.peer(PEER, &["", "host=h"]);
    let local = |world: &World, key: &str, exclude: &[LinkId]| {
        drawn(|draw| world.0.pick_local(&scope(key), &|_| true, draw, exclude))
    };
    // Nor to an agent under another key.
    assert_eq!(local(&world, "host=h", &[]), []);
    assert_eq!(local(&world, "", &[]), [1]);
    assert_eq!(local(&world, "", &[LinkId(1)]), []);
    for silence in [Silence::Suspected, Silence::Dead] {
        world.0.set_silence(LinkId(1), silence);
        let expected: &[u64] = if silence == Silence::Dead { &[] } else { &[1] };
        assert_eq!(local(&world, "", &[]), expected, "{silence:?}");
    }
}

/// Mutation caught: `owned` accepts any owner, so a hedge reaches an agent that merely claims the host.
#[test]
fn another_attempt_stays_with_the_owner_of_the_first() {
    let mut world = World::new("destHost,default");
    world.agent(1, "host=h", "p");
    world.agent(2, "host=h", "q");
    world.peer(PEER, &["host=h"]);
    let is_q = |principal: Option<&str>| principal == Some("q");
    let host = scope("host=h");
    let owned = |world: &World, scope: &Scope, exclude: &[LinkId]| {
        drawn(|draw| world.0.pick_owned(scope, &is_q, false, draw, exclude))
    };
    let local =
        |world: &World, scope: &Scope| drawn(|draw| world.0.pick_local(scope, &is_q, draw, &[]));
    assert_eq!(owned(&world, &host, &[]), [2]);
    // The peer is told whose, and decides.
    assert_eq!(owned(&world, &host, &[LinkId(2)]), [PEER]);
    assert_eq!(local(&world, &host), [2]);
    // `default` is no claim, and granted identifiers are none.
    assert_eq!(local(&world, &scope("")), [1, 2]);
    assert!(world.0.is_claim(&host) && !world.0.is_claim(&scope("")));
    world.0 = world.0.with_granted_identifiers(true);
    assert!(!world.0.is_claim(&host));
    assert_eq!(owned(&world, &host, &[]), [1, 2]);
    assert_eq!(local(&world, &host), [1, 2]);
}

#[test]
fn keys_of_agents_here_are_announced_also_those_that_are_silent() {
    let mut world = World::new("destHost,destCIDR,defaultRoute,default");
    let hash = |principal: Option<&str>| principal.map_or(9, |name| name.len() as u64);
    let announced = |world: &World| {
        let mut keys = world.0.announced(Moment::default(), hash);
        keys.sort_unstable();
        keys
    };
    world.peer(PEER, &["host=away", ""]);
    assert_eq!(announced(&world), [], "not those of peers");
    world.agent(1, "host=a&cidr=10.0.0.0/8", "p");
    world.agent(2, "host=a&default-route=true", "qq");
    let key = |key: &str, owner, draining| (scope(key), PeerKey { owner, draining });
    let mut all = vec![
        key("", 0, false),
        key("default-route=true", 2, false),
        // Claimed by two.
        key("host=a", 0, false),
        key("cidr=10.0.0.0/8", 1, false),
    ];
    all.sort_unstable();
    assert_eq!(announced(&world), all);
    world.0.set_silence(LinkId(2), Silence::Suspected);
    let route = key("default-route=true", 2, true);
    assert!(announced(&world).contains(&route));
    world.0.set_silence(LinkId(2), Silence::Dead);
    let announces = |world: &World, key: &str| {
        let keys = announced(world);
        keys.iter().any(|(announced, _)| *announced == scope(key))
    };
    // Without it dials would go to the next key, which may be another machine's.
    assert!(announces(&world, "default-route=true"));
    world.0.remove(LinkId(2), Moment::default());
    assert!(announces(&world, "default-route=true"), "remembered");
    let later = world
        .0
        .announced(Moment::default().after(Duration::from_secs(60)), hash);
    assert!(
        !later
            .iter()
            .any(|(key, _)| *key == scope("default-route=true"))
    );
    assert!(announced(&world).contains(&key("host=a", 1, false)));
}

/// A key that agents here had in silence is not left for a later strategy, and a peer that has the key is asked meanwhile.
#[test]
fn a_peer_stands_in_for_an_agent_that_fell_silent_here() {
    let mut world = World::new("destHost,default");
    world.agent(1, "host=h", "p");
    world.agent(2, "", "p");
    world.0.set_silence(LinkId(1), Silence::Dead);
    assert_eq!(
        (world.scope("h"), world.choices("h")),
        (Some(scope("host=h")), vec![])
    );
    world.0.remove(LinkId(1), Moment::default());
    assert_eq!(
        (world.scope("h"), world.choices("h")),
        (Some(scope("host=h")), vec![])
    );
    world.peer(PEER, &["host=h"]);
    assert_eq!(world.choices("h"), [PEER]);
    assert!(world.0.has_local(&scope("")) && !world.0.has_local(&scope("host=h")));
    assert!(!world.0.a_peer_serves(Strategy::Default));
    world.says(PEER, "", ready(0));
    assert!(world.0.a_peer_serves(Strategy::Default));
}

/// Both of the others have links of all agents. The server's own list of what it announces comes on top.
#[test]
fn three_keys_of_five_thousand_agents_take_two_mebibytes() {
    const MIB: usize = 1 << 20;
    let mut world = World::new("destHost,destCIDR,default");
    for peer in [PEER, PEER + 1] {
        world.peer(peer, &[]);
        for agent in 0..5_000 {
            let (high, low) = (agent / 250, agent % 250);
            world.says(peer, &format!("host=node-{agent}.example"), ready(agent));
            world.says(peer, &format!("host=10.0.{high}.{low}"), ready(agent));
            world.says(peer, &format!("cidr=10.{high}.{low}.0/24"), ready(agent));
        }
    }
    assert_eq!(world.0.peers.remains(), [1, 0]);
    let bytes = world.0.peers.bytes();
    assert!((MIB / 2..2 * MIB).contains(&bytes), "{bytes}");
    let announced = 15_000 * size_of::<(Scope, PeerKey)>();
    assert!(announced < MIB, "{announced}");
}
