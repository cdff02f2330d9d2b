//! Tests of the registry: the strategies' rules, draining, identity, and the index itself.

mod history;
mod peers;
mod zones;

use std::collections::{BTreeMap, BTreeSet};

use std::time::Duration;

use super::{Availability, Condition, Registry, Silence, Standing, Strategy};
use crate::ids::{AgentId, LinkId};
use crate::session::Moment;
use crate::target::Host;
use crate::wire::identifiers::Identifiers;

struct World(Registry);

impl World {
    fn new(strategies: &str) -> Self {
        Self(Registry::new(strategies.parse().unwrap()))
    }

    /// A world with these agents, each "NAME IDENTIFIERS", on links 1, 2 and so on.
    fn with(strategies: &str, agents: &str) -> Self {
        let mut world = Self::new(strategies);
        for (link, agent) in (1..).zip(agents.split(", ")) {
            let (name, identifiers) = agent.split_once(' ').unwrap_or((agent, ""));
            world.add(link, name, identifiers);
        }
        world
    }

    fn add(&mut self, link: u64, agent: &str, identifiers: &str) {
        let identifiers = Identifiers::parse(identifiers).unwrap();
        let agent = AgentId::new(agent);
        let standing = self.0.add(LinkId(link), agent, &identifiers, None);
        assert_eq!(standing, Standing::Serving);
    }

    fn add_as(&mut self, principal: &str, link: u64, agent: &str) -> Standing {
        let (agent, identifiers) = (AgentId::new(agent), Identifiers::default());
        self.0
            .add(LinkId(link), agent, &identifiers, Some(principal))
    }

    fn remove(&mut self, link: u64) {
        self.0.remove(LinkId(link), Moment::default());
    }

    fn silence(&mut self, link: u64, silence: Silence) {
        self.0.set_silence(LinkId(link), silence);
    }

    fn availability(&self) -> Vec<Availability> {
        let all = self.0.availability().into_iter();
        all.map(|(_, availability)| availability).collect()
    }

    fn drain(&mut self, link: u64) {
        self.0.set_draining(LinkId(link));
    }

    /// Every link that at least one draw returns.
    fn choices(&self, address: &str) -> Vec<u64> {
        self.choices_without(address, &[])
    }

    fn choices_without(&self, address: &str, exclude: &[u64]) -> Vec<u64> {
        let exclude: Vec<LinkId> = exclude.iter().copied().map(LinkId).collect();
        let host = Host::of_address(address);
        let Some(scope) = self.0.scope(&host, Moment::default()) else {
            return Vec::new();
        };
        let draws = (0..60).filter_map(|draw| self.0.pick(&scope, draw, &exclude));
        draws
            .map(|link| link.0)
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect()
    }
}

/// Upstream (choice): `default` spreads dials evenly over the agents.
#[test]
fn default_spreads_evenly_over_all_agents() {
    let mut world = World::new("default");
    assert_eq!(world.choices("x:1"), []);
    for (link, agent) in [(1, "a"), (2, "b"), (3, "c")] {
        world.add(link, agent, "");
    }
    let mut counts = BTreeMap::new();
    let scope = world.0.scope(&Host::parse("x"), Moment::default()).unwrap();
    for draw in 0..300 {
        *counts.entry(world.0.pick(&scope, draw, &[])).or_insert(0) += 1;
    }
    assert!(counts.values().all(|count| *count == 100), "{counts:?}");
    world.remove(1);
    world.remove(3);
    assert_eq!(world.choices("x:1"), [2]);
    world.remove(2);
    assert_eq!(world.choices("x:1"), []);
}

/// Upstream (choice): `defaultRoute` picks only agents with `default-route=true`.
#[test]
fn default_route_takes_only_agents_that_claim_it() {
    let mut world = World::with("defaultRoute", "a, b default-route=false");
    assert_eq!(world.choices("x:1"), []);
    world.add(3, "c", "default-route=true");
    assert_eq!(world.choices("x:1"), [3]);
}

#[test]
fn destination_class_is_the_identifier_that_matched_its_link() {
    let identifiers = "host=node1&ipv4=1.2.3.4&cidr=10.0.0.0/8&cidr=10.1.0.0/16&default-route=true";
    for (strategies, address, class) in [
        ("destHost,destCIDR", "node1:80", Some("node1")),
        ("destHost,destCIDR", "1.2.3.4:80", Some("1.2.3.4")),
        ("destHost,destCIDR", "10.1.2.3:80", Some("10.1.0.0/16")),
        ("destCIDR,destHost", "10.2.0.1", Some("10.0.0.0/8")),
        ("destHost,destCIDR", "192.0.2.1:80", None),
        ("destHost,destCIDR", "node2:80", None),
        ("default,destHost", "node1:80", None),
        ("defaultRoute,destHost", "node1:80", None),
        ("destHost,default", "node1:80", Some("node1")),
    ] {
        let mut world = World::new(strategies);
        world.add(1, "a", identifiers);
        let found = world.0.class(&Host::of_address(address), LinkId(1));
        assert_eq!(found.as_deref(), class, "{strategies} {address}");
    }
    let world = World::new("destHost");
    assert_eq!(world.0.class(&Host::parse("node1"), LinkId(1)), None);
}

/// Upstream (choice): `destHost` matches host or address without the port, never agents without identifiers.
#[test]
fn dest_host_matches_host_and_address_without_port_and_by_value() {
    let mut world = World::new("destHost");
    world.add(
        1,
        "a",
        "host=localhost&host=node1.mydomain.com&ipv4=1.2.3.4&ipv6=9878::7675:1292",
    );
    world.add(2, "b", "host=Node2.mydomain.com&ipv4=5.6.7.8&ipv6=::");
    world.add(3, "c", "");
    for (address, expected) in [
        ("localhost:8080", vec![1]),
        ("localhost", vec![1]),
        ("1.2.3.4:80", vec![1]),
        ("[9878:0::7675:1292]:80", vec![1]),
        ("9878::7675:1292", vec![1]),
        ("NODE2.mydomain.com:443", vec![2]),
        ("[::ffff:5.6.7.8]:1", vec![2]),
        ("::", vec![2]),
        ("[::]", vec![2]),
        ("node3.mydomain.com:443", vec![]),
        ("node2.mydomain", vec![]),
    ] {
        assert_eq!(world.choices(address), expected, "{address}");
    }
}

/// Upstream (choice): `destHost` matches host or address without the port, never agents without identifiers.
#[test]
fn dest_host_matches_a_name_with_and_without_its_final_dot() {
    let mut world = World::with(
        "destHost",
        "a host=plain.example.org, b host=Dotted.example.org.",
    );
    for (address, expected) in [
        ("plain.example.org.:443", vec![1]),
        ("PLAIN.example.org.", vec![1]),
        ("dotted.example.org:443", vec![2]),
        ("dotted.example.org.:443", vec![2]),
        ("plain.example.org..:443", vec![]),
    ] {
        assert_eq!(world.choices(address), expected, "{address}");
    }
    let class = |address, link| world.0.class(&Host::of_address(address), LinkId(link));
    let identifier = Some("plain.example.org".to_owned());
    assert_eq!(class("plain.example.org.:443", 1), identifier);
    world.remove(1);
    world.remove(2);
    assert_eq!(world.0.keys(Strategy::DestHost), 0);
}

/// Upstream (choice): When one of two agents with the same identifier goes, the other still matches.
#[test]
fn dest_host_spreads_over_agents_that_share_an_identifier_and_survives_the_loss_of_one() {
    let mut world = World::with("destHost", "a host=shared&ipv4=1.1.1.1, b host=shared");
    assert_eq!(world.choices("shared:1"), [1, 2]);
    world.remove(1);
    assert_eq!(world.choices("shared:1"), [2]);
    assert_eq!(world.choices("1.1.1.1:1"), []);
}

/// Upstream (choice): `destHost,default` asks the strategies in this order.
#[test]
fn strategies_are_asked_in_order() {
    let mut world = World::new("destHost,defaultRoute,default");
    world.add(1, "a", "host=node1");
    world.add(2, "b", "default-route=true");
    world.add(3, "c", "");
    assert_eq!(world.choices("node1:1"), [1]);
    assert_eq!(world.choices("node2:1"), [2]);
    world.remove(1);
    assert_eq!(world.choices("node1:1"), [2]);
    world.remove(2);
    assert_eq!(world.choices("node1:1"), [3]);
    world.remove(3);
    assert_eq!(world.choices("node1:1"), []);
}

/// Upstream (choice): `destCIDR` picks an agent with the longest `cidr` identifier around the destination.
#[test]
fn dest_cidr_takes_the_longest_prefix_and_falls_back_to_shorter_ones() {
    let mut world = World::new("destCIDR,default");
    world.add(1, "a", "cidr=10.0.0.0/8&cidr=fd00::/8&cidr=bad");
    world.add(2, "b", "cidr=10.1.99.99/16");
    world.add(3, "c", "cidr=10.1.2.0/24");
    world.add(4, "d", "cidr=10.1.2.0/24");
    assert_eq!(world.choices("10.1.2.3:1"), [3, 4]);
    assert_eq!(world.choices("10.1.3.3:1"), [2]);
    assert_eq!(world.choices("10.2.0.0:1"), [1]);
    assert_eq!(world.choices("[fd12::1]:1"), [1]);
    assert_eq!(world.choices("some.name:1"), [1, 2, 3, 4]);
    assert_eq!(world.0.keys(Strategy::DestCidr), 4);
    world.drain(3);
    world.remove(4);
    assert_eq!(
        world.choices("10.1.2.3:1"),
        [3],
        "one that drains beats a shorter prefix, whose agents may know another machine of that address"
    );
    world.remove(3);
    assert_eq!(world.choices("10.1.2.3:1"), [2]);
    world.remove(2);
    world.remove(1);
    assert_eq!(world.choices("10.1.2.3:1"), []);
    assert_eq!(world.0.keys(Strategy::DestCidr), 0);
}

/// Upstream (choice): A new link of an agent id replaces a dead one, and takes new dials.
#[test]
fn the_newest_live_link_of_an_agent_takes_new_dials() {
    let mut world = World::with("default", "a, a");
    assert_eq!(world.choices("x:1"), [2]);
    world.drain(2);
    let older = "an older link that is not draining";
    assert_eq!(world.choices("x:1"), [1], "{older}");
    world.add(3, "a", "");
    assert_eq!(world.choices("x:1"), [3]);
    world.remove(3);
    world.remove(1);
    assert_eq!(world.choices("x:1"), [2]);
}

/// Upstream (choice): A draining agent is picked only when all agents for the destination are draining.
#[test]
fn a_draining_agent_is_chosen_when_its_key_has_no_other() {
    let mut world = World::with("destHost,default", "a host=h, b host=h, c");
    world.drain(1);
    assert_eq!(world.choices("h:1"), [2]);
    world.drain(2);
    // As upstream, the next strategy is not tried.
    assert_eq!(world.choices("h:1"), [1, 2]);
    assert_eq!(world.choices("other:1"), [3]);
    world.drain(3);
    assert_eq!(world.choices("other:1"), [1, 2, 3]);
}

/// The same address may name another machine behind an agent of the next strategy.
///
/// Limit (times): A silent agent | PING after 3 s; avoided after 4 s while another agent of its key answers
#[test]
fn a_suspected_agent_is_avoided_within_its_key_and_never_replaced_by_another_key() {
    let mut world = World::with("destHost,default", "a host=h, b host=h, c");
    world.silence(1, Silence::Suspected);
    assert_eq!(world.choices("h:1"), [2]);
    assert_eq!(world.0.condition(LinkId(1)), Some(Condition::Suspected));
    world.drain(2);
    assert_eq!(world.choices("h:1"), [2], "a draining agent answers still");
    assert_eq!(world.availability(), [Availability::Ready; 2]);
    world.silence(2, Silence::Suspected);
    assert_eq!(world.choices("h:1"), [1, 2]);
    assert!(world.0.first_has_agent());
    let other_serves = [Availability::Silent, Availability::Ready];
    assert_eq!(world.availability(), other_serves);
    let scope = world.0.scope(&Host::parse("h"), Moment::default()).unwrap();
    let again = |world: &World| world.0.pick_owned(&scope, &|of| of.is_none(), true, 0, &[]);
    assert_eq!(again(&world), None, "instead of a silent agent");
    world.silence(1, Silence::None);
    assert_eq!(again(&world), Some(LinkId(1)));
    assert_eq!(world.choices("h:1"), [1]);
    world.silence(2, Silence::None);
    assert_eq!(world.0.condition(LinkId(2)), Some(Condition::Draining));
}

/// Limit (times): A link whose agent stays silent | gets no dials after 8 s, with a Go agent 20 s; its tunnels live on
#[test]
fn a_dead_link_gets_no_dials_counts_still_and_keeps_its_key() {
    let mut world = World::with("destHost,default", "a host=h, b host=h, c");
    world.silence(1, Silence::Dead);
    assert_eq!(world.choices("h:1"), [2]);
    world.silence(2, Silence::Dead);
    assert_eq!(world.0.condition(LinkId(2)), Some(Condition::Dead));
    assert_eq!(world.choices("h:1"), [], "the next strategy is not asked");
    let scope = world.0.scope(&Host::parse("h"), Moment::default()).unwrap();
    assert!(world.0.is_silent(&scope, Moment::default()));
    // In compat mode a server that reports unready would reject its own agents.
    assert!(world.0.first_has_agent());
    let other_serves = [Availability::Silent, Availability::Ready];
    assert_eq!(world.availability(), other_serves);
    assert_eq!(world.0.keys(Strategy::DestHost), 1);
    assert_eq!(world.0.silent_links(), 2);
    world.silence(2, Silence::None);
    assert_eq!(world.choices("h:1"), [2]);
}

/// Limit (isolation): Agents of other keys | not asked while a key is silent, nor for 60 s after its last link ended
#[test]
fn a_key_whose_last_link_ended_in_silence_is_remembered_for_a_minute() {
    let minute = Moment(Duration::from_secs(60));
    let before = Moment(Duration::from_secs(59));
    for identifiers in ["host=10.1.2.3", "cidr=10.1.0.0/16"] {
        let mut world = World::new("destHost,destCIDR,defaultRoute,default");
        world.add(1, "a", identifiers);
        world.add(2, "b", "cidr=10.0.0.0/8");
        let host = Host::parse("10.1.2.3");
        let own = world.0.scope(&host, Moment::default()).unwrap();
        world.silence(1, Silence::Suspected);
        world.remove(1);
        let is_own = |world: &World, now| world.0.scope(&host, now) == Some(own.clone());
        assert!(is_own(&world, before), "{identifiers}");
        assert!(world.0.is_silent(&own, before) && !world.0.is_silent(&own, minute));
        assert_eq!(world.0.pick(&own, 0, &[]), None, "{identifiers}");
        assert_eq!(
            world.0.pick(&world.0.scope(&host, minute).unwrap(), 0, &[]),
            Some(LinkId(2))
        );
        world.add(3, "a", identifiers);
        assert!(!world.0.is_silent(&own, before), "its agent is back");
        world.remove(3);
        assert!(
            !is_own(&world, before),
            "a link that ends in order leaves nothing"
        );
    }
}

/// Limit (isolation): Agents of other keys
#[test]
fn another_attempt_asks_no_agent_that_merely_claims_the_key() {
    let claim = |granted| {
        let strategies = "destHost,default".parse().unwrap();
        let mut registry = Registry::new(strategies).with_granted_identifiers(granted);
        let identifiers = Identifiers::parse("host=h").unwrap();
        for (link, principal) in [(1, "p"), (2, "p"), (3, "q")] {
            let agent = AgentId::new(&link.to_string());
            let _ = registry.add(LinkId(link), agent, &identifiers, Some(principal));
        }
        registry
    };
    let again = |registry: &Registry, host: &str| -> BTreeSet<u64> {
        let scope = registry
            .scope(&Host::parse(host), Moment::default())
            .unwrap();
        let again =
            |draw| registry.pick_owned(&scope, &|of| of == Some("p"), false, draw, &[LinkId(1)]);
        (0..30).filter_map(again).map(|link| link.0).collect()
    };
    assert_eq!(again(&claim(false), "h"), [2].into());
    assert_eq!(again(&claim(true), "h"), [2, 3].into());
    assert_eq!(
        again(&claim(false), "any"),
        [2, 3].into(),
        "no claim is needed"
    );
}

/// Upstream (choice): A draining agent is picked only when all agents for the destination are draining.
#[test]
fn an_agents_draining_leaves_other_hosts_alone() {
    let mut world = World::with("destHost", "a host=one, b host=two");
    world.drain(1);
    assert_eq!(world.choices("two:1"), [2]);
    assert_eq!(world.choices("one:1"), [1]);
}

#[test]
fn another_principal_never_displaces_the_owner_of_an_agent_id() {
    let mut world = World::new("default");
    assert_eq!(world.add_as("node-a", 1, "a"), Standing::Serving);
    assert_eq!(world.add_as("intruder", 2, "a"), Standing::Shadowed);
    assert_eq!(world.choices("x:1"), [1]);
    assert_eq!(world.add_as("node-a", 3, "a"), Standing::Serving);
    assert_eq!(world.choices("x:1"), [3]);
    world.remove(1);
    let why = "though the intruder's link is older";
    assert_eq!(world.choices("x:1"), [3], "{why}");
    world.drain(3);
    assert_eq!(world.choices("x:1"), [3]);
    assert_eq!(world.0.keys(Strategy::Default), 1);
    assert_eq!(world.0.links_of(&AgentId::new("a")), [LinkId(2), LinkId(3)]);
    let held = |principal| world.0.links_held(&AgentId::new("a"), principal);
    assert_eq!(
        [Some("intruder"), Some("node-a"), None].map(held),
        [1, 1, 0]
    );
    world.remove(3);
    assert_eq!(world.choices("x:1"), [2], "the owner is gone");
    assert_eq!(world.add_as("node-a", 4, "a"), Standing::Shadowed);
}

#[test]
fn a_shadowed_draining_link_takes_over_as_draining() {
    let mut world = World::new("default");
    let _ = world.add_as("p", 1, "a");
    let _ = world.add_as("q", 2, "a");
    let _ = world.add_as("r", 3, "b");
    world.drain(2);
    world.remove(1);
    assert_eq!(world.choices("x:1"), [3]);
    world.remove(3);
    assert_eq!(world.choices("x:1"), [2]);
}

/// A retired link is never chosen; after its revival it is back in its old place.
///
/// Upstream (dials): After 500 ms an unsent dial gets status 504. Its link gets no dials until it reads again.
#[test]
fn a_retired_link_is_not_chosen_until_it_is_revived() {
    let mut world = World::with("destHost,default", "a host=h, a host=h, b");
    world.0.retire(LinkId(2));
    assert_eq!(world.choices("h:1"), [1]);
    world.0.retire(LinkId(1));
    world.0.retire(LinkId(1));
    assert_eq!(world.choices("h:1"), [], "its key is still its own");
    assert_eq!(world.choices("i:1"), [3]);
    let keys = |world: &World| [Strategy::DestHost, Strategy::Default].map(|s| world.0.keys(s));
    assert_eq!(keys(&world), [0, 1]);
    world.0.revive(LinkId(2));
    world.0.revive(LinkId(1));
    let why = "1 is not the newest by coming back";
    assert_eq!(world.choices("h:1"), [2], "{why}");
    assert_eq!(keys(&world), [1, 2]);
    world.0.retire(LinkId(1));
    world.remove(1);
    world.remove(2);
    assert_eq!(keys(&world), [0, 1]);
}

#[test]
fn a_retired_link_keeps_its_agent_id_from_others() {
    let mut world = World::new("default");
    let _ = world.add_as("p", 1, "a");
    world.0.retire(LinkId(1));
    assert_eq!(world.add_as("q", 2, "a"), Standing::Shadowed);
    assert_eq!(world.choices("x:1"), []);
    world.0.revive(LinkId(2));
    assert_eq!(world.choices("x:1"), []);
    world.0.revive(LinkId(1));
    assert_eq!(world.choices("x:1"), [1]);
}

#[test]
fn excluded_links_are_never_chosen_and_their_agents_come_last() {
    let world = World::with("default", "a, a, b");
    assert_eq!(world.choices_without("x:1", &[2]), [3]);
    assert_eq!(world.choices_without("x:1", &[2, 3]), [1]);
    assert_eq!(world.choices_without("x:1", &[1, 2, 3]), []);
}

#[test]
fn an_excluded_match_does_not_fall_to_the_next_strategy() {
    let world = World::with("destHost,default", "a host=h, b");
    assert_eq!(world.choices_without("h:1", &[1]), []);
}

/// Upstream (agents): Adding a link twice changes nothing, and an agent id goes with its last link.
#[test]
fn adding_a_link_twice_changes_nothing() {
    let mut world = World::new("default,destHost");
    world.add(1, "a", "host=h");
    let again = world
        .0
        .add(LinkId(1), AgentId::new("b"), &Identifiers::default(), None);
    assert_eq!(again, Standing::Known);
    assert_eq!((world.0.keys(Strategy::Default), world.0.links()), (1, 1));
    world.remove(1);
    world.remove(1);
    world.drain(1);
    let keys = [Strategy::Default, Strategy::DestHost].map(|strategy| world.0.keys(strategy));
    assert_eq!(keys, [0, 0]);
}

/// HyperShift runs its workers this way; upstream's gauge reads 1 there, because no worker has a host identifier.
#[test]
fn agents_are_counted_once_whatever_strategy_holds_them() {
    let mut world = World::new("destHost,defaultRoute");
    world.add(1, "a", "default-route=1");
    assert_eq!(world.0.agents(), 1);
    world.add(2, "a", "default-route=1&host=h&host=i");
    world.add(3, "b", "host=h");
    assert_eq!(world.0.agents(), 2);
    // No configured strategy uses the identifiers of these agents.
    world.add(4, "c", "cidr=10.0.0.0/8");
    world.add(5, "d", "");
    assert_eq!(world.0.agents(), 2);
    for link in [1, 2] {
        world.remove(link);
    }
    world.0.retire(LinkId(3));
    assert_eq!(world.0.agents(), 0);
    world.0.revive(LinkId(3));
    assert_eq!(world.0.agents(), 1);
}

/// Upstream (choice): The gauges of ready agents follow, for each strategy.
#[test]
fn gauges_count_agents_but_for_dest_host_distinct_identifiers() {
    let mut world = World::new("destHost,default,defaultRoute");
    assert!(!world.0.first_has_agent());
    world.add(1, "a", "default-route=1");
    assert!(
        !world.0.first_has_agent(),
        "the first strategy has no agent"
    );
    world.add(2, "b", "host=h&host=H&ipv4=1.1.1.1");
    world.add(3, "b", "host=h&ipv6=::ffff:1.1.1.1");
    assert!(world.0.first_has_agent());
    let counts = |world: &World| Strategy::ALL.map(|strategy| world.0.keys(strategy));
    assert_eq!(counts(&world), [2, 2, 1, 0]);
    world.remove(2);
    assert_eq!(counts(&world), [2, 2, 1, 0]);
    world.remove(3);
    assert_eq!(counts(&world), [1, 0, 1, 0]);
}

#[test]
fn availability_is_known_of_each_strategy() {
    use Availability::{None, Ready, Silent};
    let mut world = World::new("destHost,destCIDR,default,defaultRoute,destHost");
    assert_eq!(world.availability(), [None; 4]);
    world.add(1, "a", "default-route=1");
    assert_eq!(world.availability(), [None, None, Ready, Ready]);
    world.add(2, "b", "host=h&cidr=10.0.0.0/8");
    assert_eq!(world.availability(), [Ready; 4]);
    world.silence(2, Silence::Suspected);
    assert_eq!(world.availability(), [Silent, Silent, Ready, Ready]);
    world.drain(1);
    assert_eq!(world.availability(), [Silent, Silent, Ready, Ready]);
    world.0.retire(LinkId(1));
    assert_eq!(world.availability(), [Silent; 4]);
    world.remove(2);
    assert_eq!(world.availability(), [None, None, Silent, Silent]);
}

/// Limit (memory): Registry entries of agents | removed with their links
#[test]
fn removed_agents_leave_no_registry_entries() {
    let mut world = World::new("destHost,destCIDR,defaultRoute,default");
    let name = |n: u64| format!("agent-{n}");
    for n in 0..10_000 {
        let (a, b) = (n / 256, n % 256);
        world.add(
            n,
            &name(n),
            &format!("ipv4=10.0.{a}.{b}&cidr=10.{a}.{b}.0/24&host=node-{n}&default-route=1"),
        );
    }
    assert_eq!(world.choices("10.0.4.1:1"), [4 * 256 + 1]);
    assert_eq!(world.choices("10.7.9.1:1"), [7 * 256 + 9]);
    for n in 0..10_000 {
        world.remove(n);
    }
    assert_eq!(Strategy::ALL.map(|strategy| world.0.keys(strategy)), [0; 4]);
    assert_eq!(world.choices("10.0.4.1:1"), []);
}

#[test]
fn the_condition_of_a_link_is_reported() {
    let mut world = World::new("default");
    let _ = world.add_as("p", 1, "a");
    let _ = world.add_as("q", 2, "a");
    let condition = |world: &World, link| world.0.condition(LinkId(link));
    assert_eq!(condition(&world, 1), Some(Condition::Serving));
    assert_eq!(condition(&world, 2), Some(Condition::Shadowed));
    assert_eq!(condition(&world, 3), None);
    world.0.set_draining(LinkId(1));
    assert_eq!(condition(&world, 1), Some(Condition::Draining));
    world.0.retire(LinkId(1));
    assert_eq!(condition(&world, 1), Some(Condition::Retired));
    world.0.revive(LinkId(1));
    assert_eq!(condition(&world, 1), Some(Condition::Draining));
    world.remove(1);
    assert_eq!(condition(&world, 2), Some(Condition::Serving));
}
