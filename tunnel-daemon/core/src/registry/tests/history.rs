//! Random histories of links that come, drain, fall silent, retire and go, checked against the rules on a plain list.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use proptest::strategy::Strategy as Strategy_;

use super::World;
use crate::ids::{AgentId, LinkId};
use crate::registry::{Availability, Silence, Standing, Strategy};
use crate::wire::identifiers::Identifiers;

#[derive(Clone, Debug)]
enum Step {
    Add {
        agent: u8,
        hosts: u8,
        principal: bool,
    },
    Remove(usize),
    Drain(usize),
    /// Marks the link silent; if it is already dead, the link is heard again.
    Silence(usize),
    /// Retires the link, or revives a retired link.
    Retire(usize),
}

fn step() -> impl Strategy_<Value = Step> {
    prop_oneof![
        4 => (0..4u8, 0..8u8, prop::bool::weighted(0.2))
            .prop_map(|(agent, hosts, principal)| Step::Add { agent, hosts, principal }),
        2 => any::<usize>().prop_map(Step::Remove),
        2 => any::<usize>().prop_map(Step::Drain),
        2 => any::<usize>().prop_map(Step::Silence),
        2 => any::<usize>().prop_map(Step::Retire),
    ]
}

#[derive(Clone, Debug)]
struct Row {
    link: u64,
    agent: u8,
    hosts: u8,
    principal: bool,
    draining: bool,
    silence: Silence,
    retired: bool,
}

impl Row {
    /// Preference: a lower rank is chosen first.
    fn rank(&self) -> u8 {
        match self.silence {
            Silence::None => u8::from(self.draining),
            Silence::Suspected => 2,
            Silence::Dead => 3,
        }
    }
}

/// The rules on a plain list: which links may be chosen for a host, and with which preference. `silent`: hosts whose last
/// link ended in silence.
fn allowed(
    rows: &[Row],
    owners: &BTreeMap<u8, bool>,
    host: u8,
    silent: &BTreeSet<u8>,
) -> BTreeSet<u64> {
    let names =
        |row: &Row| owners.get(&row.agent) == Some(&row.principal) && row.hosts & (1 << host) != 0;
    let by_host = silent.contains(&host) || rows.iter().any(names);
    let newest = |by_host: bool, rank: u8| -> BTreeSet<u64> {
        let usable = rows.iter().filter(|row| {
            owners.get(&row.agent) == Some(&row.principal)
                && row.rank() == rank
                && !row.retired
                && (!by_host || row.hosts & (1 << host) != 0)
        });
        usable
            .map(|row| (row.agent, row.link))
            .collect::<BTreeMap<_, _>>()
            .into_values()
            .collect()
    };
    // A pass also takes worse links of agents that have a better link under the key, but then an earlier pass was not
    // empty.
    (0..3)
        .map(|rank| newest(by_host, rank))
        .find(|set| !set.is_empty())
        .unwrap_or_default()
}

proptest! {
    /// Upstream (choice): `default` spreads dials evenly over the agents.
    /// Upstream (agents): Adding a link twice changes nothing, and an agent id goes with its last link.
    #[test]
    fn any_history_matches_the_reference_model(steps in prop::collection::vec(step(), 1..60)) {
        let mut world = World::new("destHost,default");
        let mut rows: Vec<Row> = Vec::new();
        let mut owners: BTreeMap<u8, bool> = BTreeMap::new();
        let mut silent: BTreeSet<u8> = BTreeSet::new();
        for (link, step) in (0u64..).zip(steps) {
            match step {
                Step::Add { agent, hosts, principal } => {
                    let named = (0..3).filter(|bit| hosts & (1 << bit) != 0);
                    let host = named.map(|bit| format!("h{bit}")).collect();
                    let identifiers = Identifiers { host, ..Identifiers::default() };
                    let principal_name = if principal { "p" } else { "q" };
                    let standing = world.0.add(
                        LinkId(link), AgentId::new(&agent.to_string()), &identifiers, Some(principal_name));
                    owners.entry(agent).or_insert(principal);
                    prop_assert_eq!(standing == Standing::Serving, owners[&agent] == principal);
                    rows.push(Row { link, agent, hosts, principal, draining: false, silence: Silence::None, retired: false });
                }
                Step::Remove(at) if !rows.is_empty() => {
                    let gone = rows.remove(at % rows.len());
                    world.remove(gone.link);
                    let is_owner = owners[&gone.agent] == gone.principal;
                    if is_owner && (gone.silence > Silence::None || gone.retired) {
                        silent.extend((0..3).filter(|host| gone.hosts & (1 << host) != 0));
                    }
                    let mut left = rows.iter().filter(|row| row.agent == gone.agent);
                    if !left.clone().any(|row| row.principal == owners[&gone.agent]) {
                        match left.next() {
                            Some(heir) => owners.insert(gone.agent, heir.principal),
                            None => owners.remove(&gone.agent),
                        };
                    }
                }
                Step::Drain(at) if !rows.is_empty() => {
                    let at = at % rows.len();
                    rows[at].draining = true;
                    world.drain(rows[at].link);
                }
                Step::Silence(at) if !rows.is_empty() => {
                    let at = at % rows.len();
                    rows[at].silence = match rows[at].silence {
                        Silence::None => Silence::Suspected,
                        Silence::Suspected => Silence::Dead,
                        Silence::Dead => Silence::None,
                    };
                    world.silence(rows[at].link, rows[at].silence);
                }
                Step::Retire(at) if !rows.is_empty() => {
                    let at = at % rows.len();
                    rows[at].retired = !rows[at].retired;
                    if rows[at].retired {
                        world.0.retire(LinkId(rows[at].link));
                    } else {
                        world.0.revive(LinkId(rows[at].link));
                    }
                }
                Step::Remove(_) | Step::Drain(_) | Step::Silence(_) | Step::Retire(_) => (),
            }
            silent.retain(|host| {
                let names = |row: &Row| owners[&row.agent] == row.principal && row.hosts & (1 << host) != 0;
                !rows.iter().any(names)
            });
            for host in 0..3u8 {
                let chosen: BTreeSet<u64> = world.choices(&format!("h{host}:1")).into_iter().collect();
                prop_assert_eq!(&chosen, &allowed(&rows, &owners, host, &silent));
                let exclude: Vec<u64> = chosen.iter().copied().take(2).collect();
                let others = world.choices_without(&format!("h{host}:1"), &exclude);
                prop_assert!(others.iter().all(|link| !exclude.contains(link)));
                let of_host = |row: &&Row| owners[&row.agent] == row.principal && row.hosts & (1 << host) != 0;
                let by_host = silent.contains(&host) || rows.iter().any(|row| of_host(&row));
                let serving = rows.iter().filter(|row| {
                    owners[&row.agent] == row.principal && !row.retired && row.rank() < 3 && (!by_host || of_host(row))
                });
                prop_assert_eq!(others.is_empty(), serving.count() <= exclude.len());
            }
            prop_assert_eq!(world.0.links(), rows.len());
            let listed: BTreeSet<u8> = rows.iter()
                .filter(|row| owners[&row.agent] == row.principal && !row.retired)
                .map(|row| row.agent)
                .collect();
            prop_assert_eq!(world.0.keys(Strategy::Default), listed.len());
            let availability = |is_listed: fn(&Row) -> bool| {
                let known = rows.iter().filter(|row| owners[&row.agent] == row.principal && is_listed(row));
                known.map(|row| match row.silence {
                    Silence::None if !row.retired => Availability::Ready,
                    _ => Availability::Silent,
                }).max().unwrap_or(Availability::None)
            };
            prop_assert_eq!(world.availability(), [availability(|row| row.hosts & 7 != 0), availability(|_| true)]);
        }
    }
}
