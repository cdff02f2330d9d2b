//! Cancelled dials whose request was already sent: their answers may still arrive.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::Moment;
use super::control_pool::{ControlPool, LentEntries};
use crate::ids::DialId;

/// How long a late answer is recognised.
const KEPT_FOR: Duration = Duration::from_secs(60);
/// Most dials remembered; the oldest is forgotten first.
const KEPT_MAX: usize = 1024;
/// Dials that every link may remember; more only as far as all links together have room.
const KEPT_MIN: usize = 64;
/// Memory of one dial, in the map and in the order, bytes.
const ENTRY_BYTES: u64 = 96;

/// Ids of cancelled dials.
#[derive(Debug)]
pub(super) struct CancelledDials {
    since: HashMap<DialId, Moment>,
    order: VecDeque<(DialId, Moment)>,
    lent: LentEntries,
}

impl CancelledDials {
    pub(super) fn new(pool: &Arc<ControlPool>) -> Self {
        Self {
            since: HashMap::new(),
            order: VecDeque::new(),
            lent: LentEntries::new(pool, ENTRY_BYTES),
        }
    }

    pub(super) fn add(&mut self, dial: DialId, now: Moment) {
        while let Some(&(_dial, since)) = self.order.front()
            && (now.since(since) >= KEPT_FOR || self.order.len() >= KEPT_MAX)
        {
            self.forget_oldest();
        }
        self.since.insert(dial, now);
        self.order.push_back((dial, now));
        if !self
            .lent
            .has_room(self.order.len().saturating_sub(KEPT_MIN))
        {
            self.forget_oldest();
        }
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

    fn forget_oldest(&mut self) {
        if let Some((dial, since)) = self.order.pop_front()
            // The id may have been reused.
            && self.since.get(&dial) == Some(&since)
        {
            self.since.remove(&dial);
        }
    }
}
