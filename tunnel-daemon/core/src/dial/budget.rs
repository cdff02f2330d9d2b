//! The budget of hedges.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use super::{TARGET_SLOW, TARGET_SLOW_FOR, TARGETS_SLOW_MAX};
use crate::session::Moment;

/// Hedges per second: 10 % of the dials of this or the previous second, and at least this many.
const HEDGES_MIN: u64 = 10;
const SECOND: Duration = Duration::from_secs(1);

/// Bounds the hedges of a process, and remembers slow targets, which are not hedged.
#[derive(Debug, Default)]
pub struct HedgeBudget {
    since: Moment,
    dials: u64,
    dials_before: u64,
    hedges: u64,
    slow: HashMap<String, Moment>,
    slow_order: VecDeque<(String, Moment)>,
}

impl HedgeBudget {
    /// A dial begins.
    pub fn dial(&mut self, now: Moment) {
        self.turn(now);
        self.dials += 1;
    }

    /// Whether a dial of `target` may be hedged now; if so, counts the hedge.
    pub fn try_hedge(&mut self, target: &str, now: Moment) -> bool {
        self.turn(now);
        let is_slow = self.slow.get(target);
        if is_slow.is_some_and(|since| now.since(*since) < TARGET_SLOW_FOR) {
            return false;
        }
        let most = (self.dials.max(self.dials_before) / 10).max(HEDGES_MIN);
        let may = self.hedges < most;
        self.hedges += u64::from(may);
        may
    }

    /// An agent reported, `after` this time, that it could not reach `target`.
    pub fn failed(&mut self, target: &str, after: Duration, now: Moment) {
        if after < TARGET_SLOW {
            return;
        }
        while let Some((oldest, since)) = self.slow_order.front() {
            let is_over = now.since(*since) >= TARGET_SLOW_FOR;
            if !is_over && self.slow_order.len() < TARGETS_SLOW_MAX {
                break;
            }
            if self.slow.get(oldest) == Some(since) {
                self.slow.remove(oldest);
            }
            self.slow_order.pop_front();
        }
        self.slow.insert(target.to_owned(), now);
        self.slow_order.push_back((target.to_owned(), now));
    }

    #[cfg(test)]
    pub(super) fn targets(&self) -> usize {
        self.slow.len()
    }

    fn turn(&mut self, now: Moment) {
        let passed = now.since(self.since);
        if passed < SECOND {
            return;
        }
        self.dials_before = if passed < 2 * SECOND { self.dials } else { 0 };
        (self.since, self.dials, self.hedges) = (now, 0, 0);
    }
}
