//! Limits on lanes in one process: how many may exist, and whether descriptors are left for one more.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use adit_core::lane::WarmLanes;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use adit_host::descriptors::{Descriptors, Use};

/// A slot for one lane, in its link and in the process.
#[derive(Debug)]
pub struct Slot {
    _link: OwnedSemaphorePermit,
    process: OwnedSemaphorePermit,
}

impl Slot {
    /// `None` when the link or the process has reached its limit of lanes. See [`LaneRoom::take`].
    #[must_use]
    fn take(link: &Arc<Semaphore>, process: &Arc<Semaphore>) -> Option<Self> {
        let of = |slots: &Arc<Semaphore>| Arc::clone(slots).try_acquire_owned().ok();
        Some(Self {
            _link: of(link)?,
            process: of(process)?,
        })
    }

    /// Exchanges the link's part of the slot for one of another link of this process.
    ///
    /// # Errors
    /// The other link has reached its limit of lanes.
    pub fn move_to(self, link: &Arc<Semaphore>) -> Result<Self, Self> {
        match Arc::clone(link).try_acquire_owned() {
            Ok(link) => Ok(Self {
                _link: link,
                process: self.process,
            }),
            Err(_none) => Err(self),
        }
    }
}

/// The limit on lanes, shared by all links of a process.
#[derive(Debug)]
pub struct LaneRoom {
    slots: Arc<Semaphore>,
    lanes_max: usize,
    descriptors: Arc<Descriptors>,
    /// Idle lanes to close, so that other uses get descriptors.
    closing: AtomicUsize,
    short: Notify,
    /// Server: counts links with lanes.
    warm: Mutex<WarmLanes>,
    /// Server: idle lanes for each link, read at the end of every tunnel.
    warm_each: AtomicUsize,
}

/// A link whose agent keeps idle lanes, counted until dropped.
#[derive(Debug)]
pub(crate) struct WarmShare(Arc<LaneRoom>);

impl Drop for WarmShare {
    fn drop(&mut self) {
        self.0.change_warm(WarmLanes::left);
    }
}

impl LaneRoom {
    /// Allows at most `lanes_max` lanes.
    #[must_use]
    pub fn new(lanes_max: usize, descriptors: Arc<Descriptors>) -> Self {
        let lanes_max = lanes_max.min(Semaphore::MAX_PERMITS);
        Self {
            slots: Arc::new(Semaphore::new(lanes_max)),
            lanes_max,
            descriptors,
            closing: AtomicUsize::new(0),
            short: Notify::new(),
            warm: Mutex::new(WarmLanes::new(lanes_max)),
            warm_each: AtomicUsize::new(WarmLanes::MAX),
        }
    }

    /// Counts one more link whose agent keeps idle lanes.
    pub(crate) fn join(self: &Arc<Self>) -> WarmShare {
        self.change_warm(WarmLanes::joined);
        WarmShare(Arc::clone(self))
    }

    /// Idle lanes that each agent keeps, so that this server can afford those of all.
    #[must_use]
    pub fn warm(&self) -> usize {
        self.warm_each.load(Relaxed)
    }

    fn change_warm(&self, change: impl FnOnce(&mut WarmLanes)) {
        let mut warm = self.warm.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut warm);
        self.warm_each.store(warm.each(), Relaxed);
    }

    /// Most lanes at once.
    #[must_use]
    pub fn lanes_max(&self) -> usize {
        self.lanes_max
    }

    /// Whether one more lane may be opened now.
    #[must_use]
    pub fn has_room(&self) -> bool {
        !self.is_closed() && self.slots.available_permits() > 0 && self.has_descriptors()
    }

    /// The process drains or stops: from now on no lane is opened. Lanes that exist stay.
    pub fn close(&self) {
        self.slots.close();
    }

    /// Whether [`Self::close`] was called.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.slots.is_closed()
    }

    /// Whether descriptors are left for one more lane.
    #[must_use]
    pub fn has_descriptors(&self) -> bool {
        self.descriptors.has_room(Use::Lane)
    }

    /// A slot for one more lane; `None` when the link or the process has reached its limit, descriptors are short, or the
    /// process drains.
    #[must_use]
    pub fn take(&self, link: &Arc<Semaphore>) -> Option<Slot> {
        if !self.has_room() {
            return None;
        }
        Slot::take(link, &self.slots)
    }

    /// The descriptors that lanes share with clients and targets.
    #[must_use]
    pub fn descriptors(&self) -> &Arc<Descriptors> {
        &self.descriptors
    }

    /// Asks owners to close so many idle lanes; replaces an earlier request.
    pub fn give_up(&self, lanes: usize) {
        self.closing.store(lanes, Relaxed);
        self.short.notify_waiters();
    }

    /// Waits for [`Self::give_up`].
    pub async fn shortage(&self) {
        self.short.notified().await;
    }

    /// How many of `idle` lanes the calling owner has to close. Each requested close is assigned to one owner.
    pub fn owed(&self, idle: usize) -> usize {
        let before = self.closing.fetch_update(Relaxed, Relaxed, |closing| {
            Some(closing.saturating_sub(idle))
        });
        before.unwrap_or(0).min(idle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_to_close_are_shared_among_their_owners() {
        let room = LaneRoom::new(10, Arc::new(Descriptors::unlimited()));
        assert_eq!(room.owed(4), 0);
        room.give_up(6);
        assert_eq!([room.owed(4), room.owed(4), room.owed(4)], [4, 2, 0]);
    }

    #[test]
    fn a_process_that_drains_opens_no_lane_and_keeps_those_that_exist() {
        let room = LaneRoom::new(2, Arc::new(Descriptors::unlimited()));
        let links = [1, 1].map(|lanes| Arc::new(Semaphore::new(lanes)));
        let slot = room.take(&links[0]).unwrap();
        room.close();
        assert!(!room.has_room() && room.take(&links[1]).is_none());
        assert!(slot.move_to(&links[1]).is_ok());
    }

    #[test]
    fn lanes_are_limited_per_process_and_per_link() {
        let room = LaneRoom::new(3, Arc::new(Descriptors::unlimited()));
        let links = [2, 2].map(|lanes| Arc::new(Semaphore::new(lanes)));
        let mut slots: Vec<Slot> = links.iter().filter_map(|link| room.take(link)).collect();
        slots.extend(room.take(&links[0]));
        assert_eq!((slots.len(), room.has_room()), (3, false));
        assert!(room.take(&links[0]).is_none() && room.take(&links[1]).is_none());
        slots.pop();
        assert!(room.has_room() && room.take(&links[1]).is_some());
    }

    #[test]
    fn a_slot_moves_to_a_link_with_room_and_still_counts_for_the_process() {
        let room = LaneRoom::new(2, Arc::new(Descriptors::unlimited()));
        let links = [2, 1].map(|lanes| Arc::new(Semaphore::new(lanes)));
        let free = || [0, 1].map(|link: usize| links[link].available_permits());
        let [first, second] = [0, 1].map(|_| room.take(&links[0]).unwrap());
        let moved = first.move_to(&links[1]).unwrap();
        assert_eq!((free(), room.has_room()), ([1, 0], false));
        let stays = second.move_to(&links[1]).unwrap_err();
        assert_eq!((free(), room.has_room()), ([1, 0], false));
        drop((moved, stays));
        assert_eq!((free(), room.has_room()), ([2, 1], true));
    }
}
