//! A dial and the agents it asks: retries, hedges and failover.
//!
//! [`Attempts`] decides when a dial asks another agent and how it ends; [`AnswerTimes`] knows how soon a link answers;
//! [`HedgeBudget`] bounds hedges. The caller picks the agent, sends the request, and owns the timers.

mod answers;
mod attempts;
mod budget;

pub use answers::AnswerTimes;
pub use attempts::{Attempts, LinkState, Reason, Step};
pub use budget::HedgeBudget;

use std::time::Duration;

/// An unanswered dial is not hedged before this.
pub const HEDGE_AFTER_MIN: Duration = Duration::from_millis(200);
/// An unanswered dial may be hedged after this, however slow its link usually is.
pub const HEDGE_AFTER_MAX: Duration = Duration::from_secs(2);
/// Between the two: this many times the median answer of the link.
const HEDGE_AFTER_MEDIANS: u32 = 10;
/// When one of two agents has refused, the other may take this long.
const REFUSED_WAIT: Duration = Duration::from_secs(1);
/// Agents that a dial asks because others are silent, at most.
const SILENT_MAX: u8 = 3;
/// A dial without any agent to ask waits this long for one that was silent.
const AGENT_WAIT: Duration = Duration::from_secs(10);
/// A target whose dial failed this late, or later, is taken for one that answers nothing.
const TARGET_SLOW: Duration = Duration::from_secs(2);
/// Such a target is not hedged for this long.
const TARGET_SLOW_FOR: Duration = Duration::from_secs(10);
/// Most such targets remembered.
const TARGETS_SLOW_MAX: usize = 1024;

#[cfg(test)]
mod tests;
