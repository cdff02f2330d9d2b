//! What the server's metrics say of lanes, in the words of the tests.

use super::wait::until;
use super::world::{World, sample};

/// Lanes that wait for a tunnel.
pub(crate) const IDLE: &str = "adit_lanes{state=\"idle\"}";
/// Lanes that carry one.
pub(crate) const BUSY: &str = "adit_lanes{state=\"busy\"}";
/// Dials that a lane took.
pub(crate) const HITS: &str = "adit_lane_dials_total{result=\"hit\"}";
/// Dials that found none.
pub(crate) const MISSES: &str = "adit_lane_dials_total{result=\"miss\"}";

/// Lanes that were bound since the start, by the text of a scrape: those that are open, and those that were closed.
pub(crate) fn opened(text: &str) -> f64 {
    let lanes = |line: &&str| {
        line.starts_with("adit_lanes{") || line.starts_with("adit_lanes_closed_total{")
    };
    text.lines()
        .filter(lanes)
        .filter_map(|line| line.rsplit_once(' '))
        .map(|(_, value)| value.parse::<f64>().expect("a number"))
        .sum()
}

/// A series that has to be there.
pub(crate) fn value(world: &World, series: &str) -> f64 {
    let text = world.server().metrics.scrape().text();
    sample(&text, series).unwrap_or_else(|| panic!("no series {series}"))
}

/// Waits until lanes are warm.
pub(crate) async fn warm(world: &World) {
    until("warm lanes", || value(world, IDLE) >= 4.0).await;
}
