//! What every link of an agent shares.

use std::sync::Arc;

use adit_core::ids::{AgentId, ServerId};
use adit_core::session::{Isolation, ProcessBudget};

use crate::targets::{Dials, TargetDialer};
use adit_net::tasks::Tasks;
use adit_telemetry::labels::Path;
use adit_telemetry::{AgentMetrics, TunnelEntry, TunnelFacts, TunnelSide};
use adit_tunnel::lane::LaneRoom;
use adit_tunnel::{LaneWatch, RawLaneRelay};

/// What every link of an agent shares.
#[derive(Clone)]
pub struct LinkContext {
    /// This agent.
    pub agent: AgentId,
    /// Dials targets.
    pub dialer: Arc<dyn TargetDialer>,
    /// What one tunnel may cost the others.
    pub isolation: Isolation,
    /// Bytes held in the whole process.
    pub budget: Arc<ProcessBudget>,
    /// Log when the queue towards a target is full.
    pub warn_on_channel_limit: bool,
    /// Counters.
    pub metrics: AgentMetrics,
    /// Where dials and targets run.
    pub tasks: Tasks,
    /// Dials of targets, over the link and over lanes.
    pub dials: Arc<Dials>,
    /// Room for lanes in the whole process.
    pub lane_room: Arc<LaneRoom>,
    /// Looks after lanes in trouble.
    pub lane_watch: Arc<LaneWatch>,
    /// For tunnels on lanes in clear text; absent where no lane is.
    pub relay: Option<Arc<RawLaneRelay>>,
}

impl LinkContext {
    /// Enters a tunnel to a target among those that are open.
    pub fn enter(&self, server: &ServerId, destination: &str, path: Path) -> TunnelEntry {
        let table = self.metrics.adit().open_tunnels();
        table.enter(&TunnelFacts {
            side: TunnelSide::Target,
            peer: server.as_str(),
            link: 0,
            destination,
            path,
        })
    }
}
