//! The agents that answer to one key (a host, a network, everything), and the choice among them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::ids::{AgentId, LinkId};

/// Whether a link takes new dials gladly or only when nobody else does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    Ready,
    Draining,
}

/// Agents of one key, split by whether they have a link that is not draining.
///
/// Adding, removing and marking cost O(links of that agent under this key). A pick is O(1) unless links
/// are excluded.
#[derive(Default, Debug)]
pub(super) struct Pool {
    members: HashMap<AgentId, Member>,
    ready: Vec<AgentId>,
    draining: Vec<AgentId>,
}

#[derive(Debug)]
struct Member {
    /// In order of arrival, the newest last. Never empty.
    links: Vec<(LinkId, Phase)>,
    /// The list that names this agent, and where in it.
    list: Phase,
    at: usize,
}

impl Member {
    fn phase(&self) -> Phase {
        let any_ready = self.links.iter().any(|&(_, phase)| phase == Phase::Ready);
        if any_ready {
            Phase::Ready
        } else {
            Phase::Draining
        }
    }
}

impl Pool {
    /// Number of agents.
    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    /// Adds a link as the agent's newest.
    pub(super) fn add(&mut self, agent: &AgentId, link: LinkId, phase: Phase) {
        match self.members.entry(agent.clone()) {
            Entry::Occupied(mut member) => member.get_mut().links.push((link, phase)),
            Entry::Vacant(free) => {
                let list = if phase == Phase::Ready {
                    &mut self.ready
                } else {
                    &mut self.draining
                };
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

    pub(super) fn set_draining(&mut self, agent: &AgentId, link: LinkId) {
        if let Some(member) = self.members.get_mut(agent) {
            for (_, phase) in member.links.iter_mut().filter(|(id, _)| *id == link) {
                *phase = Phase::Draining;
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

    /// One agent at random (`draw`) that has a link in `phase`, by its newest such link; never one of
    /// `exclude`.
    ///
    /// Agents with an excluded link come last: when the newest link of an agent just failed, its older
    /// ones are the least likely to be better.
    pub(super) fn pick(&self, phase: Phase, draw: u64, exclude: &[LinkId]) -> Option<LinkId> {
        match phase {
            Phase::Ready => self.pick_from(&self.ready, phase, draw, exclude),
            // An agent counts as ready while one link is; with that one excluded a draining one is left.
            Phase::Draining => self
                .pick_from(&self.draining, phase, draw, exclude)
                .or_else(|| self.pick_from(&self.ready, phase, draw, exclude)),
        }
    }

    fn pick_from(
        &self,
        list: &[AgentId],
        phase: Phase,
        draw: u64,
        exclude: &[LinkId],
    ) -> Option<LinkId> {
        let count = u64::try_from(list.len()).ok().filter(|count| *count > 0)?;
        let start = usize::try_from(draw % count).ok()?;
        let mut second_choice = None;
        for agent in list.iter().cycle().skip(start).take(list.len()) {
            let Some(member) = self.members.get(agent) else {
                continue;
            };
            let mut links = member.links.iter().rev();
            let usable =
                |&&(link, its): &&(LinkId, Phase)| its == phase && !exclude.contains(&link);
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

    fn list_mut(&mut self, phase: Phase) -> &mut Vec<AgentId> {
        match phase {
            Phase::Ready => &mut self.ready,
            Phase::Draining => &mut self.draining,
        }
    }

    /// Moves an agent to the list that its links call for.
    fn settle(&mut self, agent: &AgentId) {
        let Some(member) = self.members.get(agent) else {
            return;
        };
        let (from, at, to) = (member.list, member.at, member.phase());
        if from == to {
            return;
        }
        self.unlist(from, at);
        let list = self.list_mut(to);
        list.push(agent.clone());
        let at = list.len() - 1;
        if let Some(member) = self.members.get_mut(agent) {
            (member.list, member.at) = (to, at);
        }
    }

    /// Takes an entry out of a list; the last entry moves into its place.
    fn unlist(&mut self, phase: Phase, at: usize) {
        let list = self.list_mut(phase);
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
