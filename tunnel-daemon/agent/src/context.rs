//! State shared by all links of an agent.

use std::sync::Arc;

use adit_core::ids::{AgentId, ServerId};
use adit_core::session::{Isolation, ProcessBudget};

use crate::targets::{Dials, TargetDialer};
use adit_net::tasks::Tasks;
use adit_telemetry::labels::Path;
use adit_telemetry::{AgentMetrics, TunnelEntry, TunnelFacts, TunnelSide};
use adit_tunnel::lane::LaneRoom;
use adit_tunnel::{LaneWatch, RawLaneRelay};

/// State shared by all links of an agent.
#[derive(Clone)]
pub struct LinkContext {
    /// The id of this agent.
    pub agent: AgentId,
    /// Dials targets.
    pub dialer: Arc<dyn TargetDialer>,
    /// How far one tunnel may affect the others.
    pub isolation: Isolation,
    /// Budget of bytes held in the whole process.
    pub budget: Arc<ProcessBudget>,
    /// Log when the queue towards a target is full.
    pub warn_on_channel_limit: bool,
    /// Counters.
    pub metrics: AgentMetrics,
    /// Runs dials and tunnels.
    pub tasks: Tasks,
    /// Counts dials of targets, over links and lanes.
    pub dials: Arc<Dials>,
    /// Slots for lanes in the whole process.
    pub lane_room: Arc<LaneRoom>,
    /// Checks stalled lanes and lanes without a link.
    pub lane_watch: Arc<LaneWatch>,
    /// Relays tunnels on raw lanes; `None` without lanes.
    pub relay: Option<Arc<RawLaneRelay>>,
}

impl LinkContext {
    /// Adds a tunnel to a target to the table of open tunnels.
    pub fn enter(&self, server: &ServerId, destination: &str, path: Path) -> TunnelEntry {
        let table = self.metrics.adit().open_tunnels();
        table.enter(&TunnelFacts {
            side: TunnelSide::Target,
            peer: server.as_str(),
            principal: None,
            link: 0,
            destination,
            path,
        })
    }
}
