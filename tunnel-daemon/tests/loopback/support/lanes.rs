//! Metrics of a server's lanes.

pub(crate) use adit_testkit::scrape::lanes_opened as opened;

use super::wait::until;
use super::world::{World, sample};

/// Lanes that wait for a tunnel.
pub(crate) const IDLE: &str = "adit_lanes{state=\"idle\"}";
/// Lanes that carry a tunnel.
pub(crate) const BUSY: &str = "adit_lanes{state=\"busy\"}";
/// Dials that got a lane.
pub(crate) const HITS: &str = "adit_lane_dials_total{result=\"hit\"}";
/// Dials that got no lane.
pub(crate) const MISSES: &str = "adit_lane_dials_total{result=\"miss\"}";

/// The value of a series, which must exist.
pub(crate) fn value(world: &World, series: &str) -> f64 {
    let text = world.server().metrics.scrape().text();
    sample(&text, series).unwrap_or_else(|| panic!("no series {series}"))
}

/// Waits for four idle lanes.
pub(crate) async fn warm(world: &World) {
    until("warm lanes", || value(world, IDLE) >= 4.0).await;
}
