//! Decides when a lane may connect while servers are searched for. Behind a load balancer each connection takes a turn: a
//! lane may take the turn that leads to the missing server.

use std::time::Duration;

use tokio::time::Instant;

/// Attempts in a row without a new server after which lanes get turns again.
const FRUITLESS_MAX: u32 = 10;
/// Longest wait of the next lane after that. Attempts may be rare: a dead server is tried every `--sync-interval-cap`.
const LANE_WAIT_MAX: Duration = Duration::from_secs(2);

/// Turns of lanes while the search goes on.
#[derive(Debug, Default)]
pub(super) struct LaneTurns {
    /// Attempts in a row that found no new server.
    fruitless: u32,
    /// Lanes that may connect before the next attempt.
    left: u32,
    /// When the last lane got a turn.
    last: Option<Instant>,
}

impl LaneTurns {
    /// There is reason to expect a new server.
    pub(super) fn news(&mut self) {
        *self = Self::default();
    }

    /// An attempt found no new server; `chance` is uniform in `0..1`. Lanes get every second turn on average. A fixed number
    /// of lanes for each attempt would keep step with a balancer that goes round, and hide a server for ever.
    pub(super) fn fruitless(&mut self, chance: f64) {
        self.fruitless = self.fruitless.saturating_add(1);
        self.left = u32::from(chance > 1.0 / 3.0) + u32::from(chance > 2.0 / 3.0);
    }

    /// Takes a turn for a lane. `fresh_until`: links go first until then.
    ///
    /// # Errors
    /// The time at which to ask again, or after the next attempt.
    pub(super) fn take(&mut self, now: Instant, fresh_until: Instant) -> Result<(), Instant> {
        if now < fresh_until && self.fruitless < FRUITLESS_MAX {
            return Err(fresh_until);
        }
        let due = self.last.map_or(now, |last| last + LANE_WAIT_MAX);
        if self.left == 0 && now < due {
            return Err(due);
        }
        self.left = self.left.saturating_sub(1);
        self.last = Some(now);
        Ok(())
    }
}
