//! Ids of connections that this link has closed, so that packets that crossed the close are not answered one by one.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use super::control_pool::{ControlPool, LentEntries};
use crate::ids::ConnId;

/// Most ids that a link remembers.
const IDS_MAX: usize = 4096;
/// Ids that every link may remember; more only as far as all links together have room.
const IDS_MIN: usize = 256;
/// Memory of one id, in the set and in the order, bytes.
const ENTRY_BYTES: u64 = 32;

/// The ids, oldest first.
#[derive(Debug)]
pub(super) struct Forgotten {
    ids: HashSet<ConnId>,
    order: VecDeque<ConnId>,
    lent: LentEntries,
}

impl Forgotten {
    pub(super) fn new(pool: &Arc<ControlPool>) -> Self {
        Self {
            ids: HashSet::new(),
            order: VecDeque::new(),
            lent: LentEntries::new(pool, ENTRY_BYTES),
        }
    }

    pub(super) fn contains(&self, conn: ConnId) -> bool {
        self.ids.contains(&conn)
    }

    /// Remembers the id in place of the oldest one if there is no room; false if it was known.
    pub(super) fn insert(&mut self, conn: ConnId) -> bool {
        if !self.ids.insert(conn) {
            return false;
        }
        self.order.push_back(conn);
        let count = self.order.len();
        let is_full = count > IDS_MAX || !self.lent.has_room(count.saturating_sub(IDS_MIN));
        if is_full && let Some(oldest) = self.order.pop_front() {
            self.ids.remove(&oldest);
        }
        true
    }
}
