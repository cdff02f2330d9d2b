//! Tunnels that agents asked for, by agent: what a server has beside the sums over all of them. Absent until an agent asks.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus::IntCounterVec;

use super::families::Registrar;
use super::labels::{Direction, Label as _};

/// Agents with series of their own: four each.
const AGENTS_MAX: usize = 1000;
/// Agents beyond those with series of their own.
const OTHER: &str = "other";

/// Handles of these families. Cheap to clone; clones share the series.
#[derive(Clone)]
pub struct NodeAgents(Arc<Inner>);

struct Inner {
    opened: IntCounterVec,
    refused: IntCounterVec,
    bytes: IntCounterVec,
    /// Ids come from agents, so there is an end to them. None is forgotten: a counter must not begin again.
    named: Mutex<HashSet<String>>,
    max: usize,
}

/// Counts of one agent.
#[derive(Clone)]
pub struct NodeAgent {
    agents: NodeAgents,
    name: Arc<str>,
}

impl NodeAgents {
    pub(super) fn register(families: &Registrar<'_>) -> Self {
        Self::with_max(families, AGENTS_MAX)
    }

    fn with_max(families: &Registrar<'_>, max: usize) -> Self {
        Self(Arc::new(Inner {
            opened: families.counter_vec(
                "node_agent_tunnels_opened_total",
                "Tunnels opened that an agent asked for, by agent",
                &["agent"],
            ),
            refused: families.counter_vec(
                "node_agent_refusals_total",
                "Tunnels an agent asked for and did not get, by agent",
                &["agent"],
            ),
            bytes: families.counter_vec(
                "node_agent_tunnel_bytes_total",
                "Payload bytes moved through tunnels that an agent asked for, by agent and direction",
                &["agent", "direction"],
            ),
            named: Mutex::default(),
            max,
        }))
    }

    /// Those of an agent; of the many, those called other.
    #[must_use]
    pub fn of(&self, agent: &str) -> NodeAgent {
        let mut named = self.0.named.lock().unwrap_or_else(PoisonError::into_inner);
        if !named.contains(agent) && named.len() < self.0.max {
            named.insert(agent.to_owned());
        }
        let name = if named.contains(agent) { agent } else { OTHER };
        NodeAgent {
            agents: self.clone(),
            name: name.into(),
        }
    }
}

impl NodeAgent {
    /// It got a tunnel.
    pub fn opened(&self) {
        let opened = &self.agents.0.opened;
        opened.with_label_values(&[&*self.name]).inc();
    }

    /// It got none.
    pub fn refused(&self) {
        let refused = &self.agents.0.refused;
        refused.with_label_values(&[&*self.name]).inc();
    }

    /// Its tunnels moved so many bytes more.
    pub fn moved(&self, to_target: u64, to_client: u64) {
        for (direction, bytes) in [
            (Direction::ToTarget, to_target),
            (Direction::ToClient, to_client),
        ] {
            let labels = [&*self.name, direction.as_str()];
            self.agents.0.bytes.with_label_values(&labels).inc_by(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use prometheus::Registry;

    use super::*;

    #[test]
    fn agents_beyond_the_limit_share_a_name() {
        let registry = Registry::new();
        let agents = NodeAgents::with_max(&Registrar::new(&registry, "adit_"), 2);
        assert!(registry.gather().is_empty(), "absent until an agent asks");
        for agent in ["a", "b", "c", "d", "a"] {
            agents.of(agent).opened();
        }
        agents.of("c").refused();
        agents.of("b").moved(3, 4);
        let value =
            |family: &IntCounterVec, labels: &[&str]| family.with_label_values(labels).get();
        let Inner {
            opened,
            refused,
            bytes,
            ..
        } = &*agents.0;
        let of = ["a", "b", "other"].map(|agent| value(opened, &[agent]));
        assert_eq!(of, [2, 1, 2]);
        assert_eq!(value(refused, &["other"]), 1);
        let of = ["to_target", "to_client"].map(|way| value(bytes, &["b", way]));
        assert_eq!(of, [3, 4]);
    }
}
