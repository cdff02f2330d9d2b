//! When a link without credit may be read a little slower: its legs take bytes fast, only not as fast as they come.
//!
//! A Go agent cannot be told to slow one tunnel down. A reader that stalls must not slow the link, so it
//! pays with its tunnel when the budget is full. A reader that takes a megabyte a second is no such case:
//! leaving the link unread for the moments it needs keeps its tunnel and costs the others little.

use std::time::Duration;

use adit_core::session::{Link, Moment};

/// Legs of the link together must take this many bytes a second.
const RATE_MIN_BYTES: u64 = 1 << 20;
/// The rate is judged over this long.
const SAMPLE: Duration = Duration::from_millis(500);
/// A link that has just become nearly full is left unread this long, until there is a rate to judge by:
/// a fast agent fills its budget sooner than a reader that takes its bytes in gulps shows what it can do.
const GRACE: Duration = Duration::from_millis(600);
/// How soon a link left unread is looked at again, drained or not.
pub(super) const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Samples of one link.
#[derive(Debug, Default)]
pub(super) struct Pace {
    sampled_at: Moment,
    drained: u64,
    fast: bool,
    full_since: Option<Moment>,
}

impl Pace {
    /// Whether the link is better left unread now.
    pub(super) fn holds(&mut self, link: &Link, now: Moment) -> bool {
        let elapsed = now.since(self.sampled_at);
        if elapsed >= SAMPLE {
            let taken = link.drained_bytes() - self.drained;
            let millis = u64::try_from(elapsed.as_millis())
                .unwrap_or(u64::MAX)
                .max(1);
            self.fast = taken.saturating_mul(1000) / millis >= RATE_MIN_BYTES;
            self.drained = link.drained_bytes();
            self.sampled_at = now;
        }
        if !link.is_nearly_full() {
            self.full_since = None;
            return false;
        }
        let since = *self.full_since.get_or_insert(now);
        self.fast || now.since(since) < GRACE
    }
}
