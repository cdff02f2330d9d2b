//! Cancelled dials whose request was already sent: their answers may still arrive.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use super::Moment;
use crate::ids::DialId;

/// How long a late answer is recognised.
const KEPT_FOR: Duration = Duration::from_secs(60);
/// Most dials remembered; the oldest is forgotten first.
const KEPT_MAX: usize = 1024;

/// Ids of cancelled dials.
#[derive(Debug, Default)]
pub(super) struct CancelledDials {
    since: HashMap<DialId, Moment>,
    order: VecDeque<(DialId, Moment)>,
}

impl CancelledDials {
    pub(super) fn add(&mut self, dial: DialId, now: Moment) {
        self.forget_old(now);
        self.since.insert(dial, now);
        self.order.push_back((dial, now));
    }

    /// Whether a dial's answer is a late one; forgets the dial.
    pub(super) fn take(&mut self, dial: DialId, now: Moment) -> bool {
        let since = self.since.remove(&dial);
        since.is_some_and(|since| now.since(since) < KEPT_FOR)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    fn forget_old(&mut self, now: Moment) {
        while let Some(&(dial, since)) = self.order.front() {
            if now.since(since) < KEPT_FOR && self.order.len() < KEPT_MAX {
                return;
            }
            self.order.pop_front();
            // The id may have been reused.
            if self.since.get(&dial) == Some(&since) {
                self.since.remove(&dial);
            }
        }
    }
}
