//! Metrics of a server's lanes.

use adit_testkit::scrape;
pub(crate) use adit_testkit::scrape::lanes_opened as opened;

use super::wait::until;
use super::world::World;

/// Lanes that wait for a tunnel.
pub(crate) const IDLE: &str = "adit_lanes{state=\"idle\"}";
/// Lanes that carry a tunnel.
pub(crate) const BUSY: &str = "adit_lanes{state=\"busy\"}";
/// Dials that got a lane.
pub(crate) const HITS: &str = "adit_lane_dials_total{result=\"hit\"}";
/// Dials that got no lane.
pub(crate) const MISSES: &str = "adit_lane_dials_total{result=\"miss\"}";

/// Bytes that relay threads have moved for ended tunnels.
pub(crate) const COPIED: &str = "adit_relay_bytes_total{mover=\"copy\"}";
pub(crate) const SPLICED: &str = "adit_relay_bytes_total{mover=\"splice\"}";
/// Agents that are linked to a server.
pub(crate) const LINKS: &str = "adit_links{peer=\"adit\"}";
/// Open tunnels of a server, and connections of an agent to targets.
pub(crate) const TUNNELS: &str = "konnectivity_network_proxy_server_established_connections";
pub(crate) const TARGETS: &str = "konnectivity_network_proxy_agent_open_endpoint_connections";

/// The series of tunnels that ended for this reason.
pub(crate) fn ended(reason: &str) -> String {
    format!("adit_tunnels_closed_total{{reason=\"{reason}\"}}")
}

/// The series of lanes that closed for this reason.
pub(crate) fn closed(reason: &str) -> String {
    format!("adit_lanes_closed_total{{reason=\"{reason}\"}}")
}

/// The value of a series, which must exist.
pub(crate) fn value(world: &World, series: &str) -> f64 {
    scrape::value(&world.server().metrics.scrape().text(), series)
}

/// Waits for four idle lanes of the agents.
pub(crate) async fn warm(world: &World) {
    let metrics = || world.of_agents().metrics.scrape().text();
    until("warm lanes", || scrape::value(&metrics(), IDLE) >= 4.0).await;
}
