//! The agents of one key (a host, a network, any target), and the choice among them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::ids::{AgentId, LinkId};

/// The preference among links of a key: a later phase is chosen only if the key has no link of an earlier phase.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Phase {
    /// Ready, and in the zone of this server.
    Near,
    Ready,
    Draining,
    /// The agent is silent.
    Suspected,
    /// The agent has been silent for too long; its link gets no dials.
    Dead,
    /// The agent does not read; its link gets no dials and does not count.
    Retired,
}

impl Phase {
    /// All phases, best first.
    const ALL: [Self; 6] = [
        Self::Near,
        Self::Ready,
        Self::Draining,
        Self::Suspected,
        Self::Dead,
        Self::Retired,
    ];

    /// The last phase that gets dials.
    pub(super) const LAST: Self = Self::Suspected;
    /// The last phase of an agent that is not silent.
    pub(super) const LAST_HEARD: Self = Self::Draining;
}

/// Agents of one key, listed by the best phase of their links.
///
/// Adding, removing and marking cost O(links of the agent under this key). A pick is O(1) unless links are excluded.
#[derive(Default, Debug)]
pub(super) struct Pool {
    members: HashMap<AgentId, Member>,
    /// By [`Phase`].
    lists: [Vec<AgentId>; Phase::ALL.len()],
}

#[derive(Debug)]
struct Member {
    /// In order of arrival, newest last. Never empty.
    links: Vec<(LinkId, Phase)>,
    /// The list that contains this agent, and its position `at` in the list.
    list: Phase,
    at: usize,
}

impl Member {
    fn phase(&self) -> Phase {
        let phases = self.links.iter().map(|&(_, phase)| phase);
        phases.min().unwrap_or(Phase::Retired)
    }
}

impl Pool {
    /// Number of agents, except those with only retired links.
    pub(super) fn agents(&self) -> usize {
        let [.., retired] = &self.lists;
        self.members.len() - retired.len()
    }

    /// Whether the pool has no link.
    pub(super) fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Adds a link as the agent's newest.
    pub(super) fn add(&mut self, agent: &AgentId, link: LinkId, phase: Phase) {
        match self.members.entry(agent.clone()) {
            Entry::Occupied(mut member) => member.get_mut().links.push((link, phase)),
            Entry::Vacant(free) => {
                let list = &mut self.lists[phase as usize];
                free.insert(Member {
                    links: vec![(link, phase)],
                    list: phase,
                    at: list.len(),
                });
                list.push(agent.clone());
            }
        }
        self.settle(agent);
    }

    /// Sets the phase of a link.
    pub(super) fn set_phase(&mut self, agent: &AgentId, link: LinkId, phase: Phase) {
        if let Some(member) = self.members.get_mut(agent) {
            for (_, its) in member.links.iter_mut().filter(|(id, _)| *id == link) {
                *its = phase;
            }
        }
        self.settle(agent);
    }

    pub(super) fn remove(&mut self, agent: &AgentId, link: LinkId) {
        let Some(member) = self.members.get_mut(agent) else {
            return;
        };
        member.links.retain(|&(id, _)| id != link);
        if !member.links.is_empty() {
            self.settle(agent);
        } else if let Some(member) = self.members.remove(agent) {
            self.unlist(member.list, member.at);
        }
    }

    /// Whether an agent has a link that is ready.
    pub(super) fn has_ready(&self) -> bool {
        let ready = &self.lists[..=Phase::Ready as usize];
        ready.iter().any(|list| !list.is_empty())
    }

    /// The newest link of each agent.
    pub(super) fn newest(&self) -> impl Iterator<Item = LinkId> {
        let members = self.members.values();
        members.filter_map(|member| member.links.last().map(|&(link, _)| link))
    }

    /// Whether an agent has a link that is not silent.
    pub(super) fn has_heard(&self) -> bool {
        let heard = &self.lists[..Phase::Suspected as usize];
        heard.iter().any(|list| !list.is_empty())
    }

    /// Whether an agent gets no dials because its best link is dead.
    pub(super) fn has_dead(&self) -> bool {
        !self.lists[Phase::Dead as usize].is_empty()
    }

    /// The newest link of one agent, chosen by `draw` among agents with a link of the best phase, at most `worst`. Only links
    /// that `fits` accepts and `exclude` does not contain.
    ///
    /// Agents with an excluded link come last within a phase: if an agent's newest link just failed, its older links
    /// are least likely to work.
    pub(super) fn pick(
        &self,
        worst: Phase,
        draw: u64,
        exclude: &[LinkId],
        fits: &impl Fn(LinkId) -> bool,
    ) -> Option<LinkId> {
        let mut phases = Phase::ALL.into_iter().filter(|phase| *phase <= worst);
        phases.find_map(|phase| {
            // An agent is listed by its best link, which may be excluded; so better lists may hold links of this phase, too.
            let mut lists = self.lists[..=phase as usize].iter().rev();
            lists.find_map(|list| self.pick_from(list, phase, draw, exclude, fits))
        })
    }

    fn pick_from(
        &self,
        list: &[AgentId],
        phase: Phase,
        draw: u64,
        exclude: &[LinkId],
        fits: &impl Fn(LinkId) -> bool,
    ) -> Option<LinkId> {
        let count = u64::try_from(list.len()).ok().filter(|count| *count > 0)?;
        let start = usize::try_from(draw % count).ok()?;
        let mut second_choice = None;
        for agent in list.iter().cycle().skip(start).take(list.len()) {
            let Some(member) = self.members.get(agent) else {
                continue;
            };
            let mut links = member.links.iter().rev();
            let usable = |&&(link, its): &&(LinkId, Phase)| {
                its == phase && !exclude.contains(&link) && fits(link)
            };
            let Some(&(link, _)) = links.find(usable) else {
                continue;
            };
            if !member.links.iter().any(|(link, _)| exclude.contains(link)) {
                return Some(link);
            }
            second_choice.get_or_insert(link);
        }
        second_choice
    }

    /// Moves an agent to the list of its best phase.
    fn settle(&mut self, agent: &AgentId) {
        let Some(member) = self.members.get(agent) else {
            return;
        };
        let (from, at, to) = (member.list, member.at, member.phase());
        if from == to {
            return;
        }
        self.unlist(from, at);
        let list = &mut self.lists[to as usize];
        list.push(agent.clone());
        let at = list.len() - 1;
        if let Some(member) = self.members.get_mut(agent) {
            (member.list, member.at) = (to, at);
        }
    }

    /// Removes an entry of a list; the last entry takes its place.
    fn unlist(&mut self, phase: Phase, at: usize) {
        let list = &mut self.lists[phase as usize];
        if at < list.len() {
            list.swap_remove(at);
        }
        let Some(moved) = list.get(at).cloned() else {
            return;
        };
        if let Some(member) = self.members.get_mut(&moved) {
            member.at = at;
        }
    }
}
