//! Room for lanes in one process: how many there may be, and whether there are descriptors for one more.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use adit_net::descriptors::{Descriptors, Use};

/// Room for one more lane, of its link and of the process.
#[derive(Debug)]
pub struct Slot {
    _link: OwnedSemaphorePermit,
    process: OwnedSemaphorePermit,
}

impl Slot {
    /// `None` when the link or the process has as many lanes as it may. See [`LaneRoom::take`].
    #[must_use]
    fn take(link: &Arc<Semaphore>, process: &Arc<Semaphore>) -> Option<Self> {
        let of = |slots: &Arc<Semaphore>| Arc::clone(slots).try_acquire_owned().ok();
        Some(Self {
            _link: of(link)?,
            process: of(process)?,
        })
    }

    /// Room of another link of this process in place of that of this one.
    ///
    /// # Errors
    /// That link has as many lanes as it may.
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

/// Shared by all links of a process.
#[derive(Debug)]
pub struct LaneRoom {
    slots: Arc<Semaphore>,
    lanes_max: usize,
    descriptors: Arc<Descriptors>,
    /// Idle lanes to be given up for others that need descriptors.
    closing: AtomicUsize,
    short: Notify,
}

impl LaneRoom {
    /// For at most `lanes_max` lanes.
    #[must_use]
    pub fn new(lanes_max: usize, descriptors: Arc<Descriptors>) -> Self {
        let lanes_max = lanes_max.min(Semaphore::MAX_PERMITS);
        Self {
            slots: Arc::new(Semaphore::new(lanes_max)),
            lanes_max,
            descriptors,
            closing: AtomicUsize::new(0),
            short: Notify::new(),
        }
    }

    /// Most lanes at once.
    #[must_use]
    pub fn lanes_max(&self) -> usize {
        self.lanes_max
    }

    /// Whether one more may be opened now.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.slots.available_permits() > 0 && self.has_descriptors()
    }

    /// Whether there are descriptors for one more.
    #[must_use]
    pub fn has_descriptors(&self) -> bool {
        self.descriptors.has_room(Use::Lane)
    }

    /// Room for one more lane; `None` when the link or the process has as many as it may.
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

    /// Has so many idle lanes given up; what was asked before and not done counts no more.
    pub fn give_up(&self, lanes: usize) {
        self.closing.store(lanes, Relaxed);
        self.short.notify_waiters();
    }

    /// Waits for [`Self::give_up`].
    pub async fn shortage(&self) {
        self.short.notified().await;
    }

    /// How many of `idle` lanes their owner has to give up. Each is asked for once, whoever has it.
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
    fn lanes_to_give_up_are_shared_by_their_owners() {
        let room = LaneRoom::new(10, Arc::new(Descriptors::unlimited()));
        assert_eq!(room.owed(4), 0);
        room.give_up(6);
        assert_eq!([room.owed(4), room.owed(4), room.owed(4)], [4, 2, 0]);
    }

    #[test]
    fn the_process_has_a_number_of_lanes_and_each_link_its_own() {
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
    fn a_slot_moves_to_a_link_that_has_room_and_stays_one_of_the_process() {
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
