//! Readiness by io_uring: a multishot poll per socket, a poll for room while a sink is full, and one for the eventfd. The
//! call that waits submits all changes of a turn.
//!
//! The kernel reports a half-close to every poll, even if not requested. So on a half-closed sink a one-shot poll for room
//! would complete at once each time. A multishot poll is used there, which reports each change once.

use std::{io, os::fd::BorrowedFd, time::Duration};

// The kernel uses epoll's flag values for polls.
use rustix::{event::epoll::EventFlags, io::Errno};

use super::{Event, KEY_BITS, Key};
use crate::{
    outcome::Side,
    syscall::ring::{Completion, Ring},
};

/// The kind of a poll, in the upper bits of its user data. 0 and 1 are polls for bytes (by side), 2 and 3 for room.
const ROOM: u64 = 2;
const WATCHES: u64 = 4;
const WAKER: u64 = 4;
const CANCEL: u64 = 5;

/// The kernel's polls for one slot.
#[derive(Clone, Copy, Default)]
struct PollSlot {
    /// Bit by watch: the last completion is still due.
    pending: u8,
    /// Bit by side: the peer has half-closed.
    half_closed: u8,
    /// The pair is gone; the slot is released with the last completion.
    is_closing: bool,
}

pub(crate) struct Uring {
    ring: Ring,
    slots: Vec<PollSlot>,
    taken: Vec<Completion>,
    released: Vec<u32>,
}

impl Uring {
    pub(super) fn new(waker: BorrowedFd<'_>) -> io::Result<Self> {
        let mut ring = Ring::new()?;
        watch_waker(&mut ring, waker)?;
        Ok(Self {
            ring,
            slots: Vec::new(),
            taken: Vec::new(),
            released: Vec::new(),
        })
    }

    pub(super) fn watch(&mut self, key: Key, side: Side, fd: BorrowedFd<'_>) -> io::Result<()> {
        if self.slots.len() <= key.index() {
            self.slots.resize(key.index() + 1, PollSlot::default());
        }
        // Without PRI: wake-ups for bytes carry PRI as well, and the ring reports it without a check, so each byte would
        // look urgent.
        let flags = EventFlags::IN | EventFlags::RDHUP;
        self.add(key, side.index() as u64, fd, flags, true)
    }

    pub(super) fn want_room(&mut self, key: Key, side: Side, fd: BorrowedFd<'_>) -> io::Result<()> {
        let half_closed = self.slots[key.index()].half_closed;
        let lasting = half_closed & (1 << side.index()) != 0;
        // A multishot poll stays until the end of the pair: for a TCP socket it reports only changes that were waited for.
        self.add(
            key,
            ROOM + side.index() as u64,
            fd,
            EventFlags::OUT,
            lasting,
        )
    }

    fn add(
        &mut self,
        key: Key,
        watch: u64,
        fd: BorrowedFd<'_>,
        flags: EventFlags,
        multi: bool,
    ) -> io::Result<()> {
        let slot = &mut self.slots[key.index()];
        if slot.pending & (1 << watch) == 0 {
            let data = key.to_bits() | watch << KEY_BITS;
            self.ring.watch(fd, flags.bits(), multi, data)?;
            slot.pending |= 1 << watch;
        }
        Ok(())
    }

    pub(super) fn remove(&mut self, key: Key) -> bool {
        let slot = &mut self.slots[key.index()];
        for watch in (0..WATCHES).filter(|watch| slot.pending & (1 << watch) != 0) {
            let data = key.to_bits() | watch << KEY_BITS;
            // Fails only if the ring is broken, which the next wait reports.
            let _broken = self.ring.cancel(data, CANCEL << KEY_BITS);
        }
        slot.half_closed = 0;
        slot.is_closing = slot.pending != 0;
        !slot.is_closing
    }

    pub(super) fn released(&mut self) -> Option<u32> {
        self.released.pop()
    }

    pub(super) fn wait(
        &mut self,
        timeout: Option<Duration>,
        waker: BorrowedFd<'_>,
        events: &mut Vec<Event>,
    ) -> io::Result<u64> {
        let entered = self.ring.enter(timeout)?;
        self.taken.clear();
        self.ring.take(&mut self.taken);
        for at in 0..self.taken.len() {
            let completion = self.taken[at];
            match completion.user_data >> KEY_BITS {
                WAKER if !completion.more => watch_waker(&mut self.ring, waker)?,
                watch if watch < WATCHES => events.extend(self.completed(watch, completion)),
                _ => {}
            }
        }
        Ok(u64::from(entered))
    }

    fn completed(&mut self, watch: u64, completion: Completion) -> Option<Event> {
        let key = Key::from_bits(completion.user_data);
        let slot = self.slots.get_mut(key.index())?;
        if !completion.more {
            slot.pending &= !(1 << watch);
        }
        if slot.is_closing {
            if slot.pending == 0 {
                slot.is_closing = false;
                self.released.push(key.slot);
            }
            return None;
        }
        let is_room = watch >= ROOM;
        let side = if watch.is_multiple_of(2) {
            Side::A
        } else {
            Side::B
        };
        let event = Event {
            key,
            side,
            readable: false,
            ends: false,
            urgent: None,
            room: false,
            error: false,
            lapsed: !completion.more && !is_room,
            failure: None,
        };
        let Ok(flags) = u32::try_from(completion.result) else {
            return Some(Event {
                failure: Some(
                    completion
                        .result
                        .checked_neg()
                        .unwrap_or(Errno::IO.raw_os_error()),
                ),
                ..event
            });
        };
        let flags = EventFlags::from_bits_retain(flags);
        if flags.contains(EventFlags::RDHUP) {
            slot.half_closed |= 1 << side.index();
        }
        let over = EventFlags::HUP | EventFlags::ERR;
        let ends = flags.intersects(EventFlags::RDHUP | over);
        Some(Event {
            readable: ends || flags.contains(EventFlags::IN),
            ends,
            room: flags.intersects(EventFlags::OUT | over),
            error: flags.contains(EventFlags::ERR),
            ..event
        })
    }
}

fn watch_waker(ring: &mut Ring, waker: BorrowedFd<'_>) -> io::Result<()> {
    let flags = EventFlags::IN.bits();
    ring.watch(waker, flags, true, WAKER << KEY_BITS)
}
