//! A dial and the agents it asks: retries, hedges and failover.
//!
//! [`Attempts`] decides when a dial asks another agent and how the dial ends; [`AnswerTimes`] measures how fast a link
//! answers; [`HedgeBudget`] bounds hedges. The caller picks the agent, sends the request, and owns the timers.

mod answers;
mod attempts;
mod budget;

pub use answers::AnswerTimes;
pub use attempts::{Attempts, LinkState, Reason, Step};
pub use budget::HedgeBudget;

use std::time::Duration;

/// Earliest time at which an unanswered dial is hedged.
pub const HEDGE_AFTER_MIN: Duration = Duration::from_millis(200);
/// After this time an unanswered dial may be hedged even on a slow link.
pub const HEDGE_AFTER_MAX: Duration = Duration::from_secs(2);
/// Between these two bounds a dial may be hedged after this many median answer times of the link.
const HEDGE_AFTER_MEDIANS: u32 = 10;
/// After one of two agents has refused, the other may take this long.
const REFUSED_WAIT: Duration = Duration::from_secs(1);
/// Most agents that a dial asks because the previous ones are silent or have lost their links.
const REPLACEMENTS_MAX: u8 = 3;
/// How long a dial without an agent waits for a silent agent to return.
const AGENT_WAIT: Duration = Duration::from_secs(10);
/// A target whose dial fails after this time or later counts as slow.
const TARGET_SLOW: Duration = Duration::from_secs(2);
/// Dials of a slow target are not hedged for this long.
const TARGET_SLOW_FOR: Duration = Duration::from_secs(10);
/// Most slow targets remembered.
const TARGETS_SLOW_MAX: usize = 1024;

#[cfg(test)]
mod tests;
