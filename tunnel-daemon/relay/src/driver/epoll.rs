//! Readiness by epoll, edge triggered. Writability is watched only while a sink is full: a unix socket would report it
//! after each read of its peer.

use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd},
    time::Duration,
};

use rustix::{
    buffer::spare_capacity,
    event::{
        Timespec,
        epoll::{self, CreateFlags, EventData, EventFlags},
    },
    io::Errno,
};

use super::{Event, KEY_BITS, Key};
use crate::outcome::Side;

/// Most events per `epoll_wait`.
const EVENTS: usize = 256;
/// The eventfd's user data, which no pair uses.
const WAKER: u64 = u64::MAX;

pub(crate) struct Epoll {
    epoll: OwnedFd,
    taken: Vec<epoll::Event>,
    /// Whether writability is watched, by slot and side.
    room: Vec<[bool; 2]>,
    syscalls: u64,
}

impl Epoll {
    pub(super) fn new(waker: BorrowedFd<'_>) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        // Edge triggered, so the eventfd need not be read.
        let flags = EventFlags::IN | EventFlags::ET;
        epoll::add(&epoll, waker, EventData::new_u64(WAKER), flags)?;
        Ok(Self {
            epoll,
            taken: Vec::with_capacity(EVENTS),
            room: Vec::new(),
            syscalls: 0,
        })
    }

    pub(super) fn watch(&mut self, key: Key, side: Side, fd: BorrowedFd<'_>) -> io::Result<()> {
        if self.room.len() <= key.index() {
            self.room.resize(key.index() + 1, [false; 2]);
        }
        self.room[key.index()][side.index()] = false;
        self.syscalls += 1;
        Ok(epoll::add(&self.epoll, fd, data(key, side), flags(false))?)
    }

    pub(super) fn watch_room(
        &mut self,
        key: Key,
        side: Side,
        fd: BorrowedFd<'_>,
        wanted: bool,
    ) -> io::Result<()> {
        let watched = &mut self.room[key.index()][side.index()];
        if *watched != wanted {
            *watched = wanted;
            self.syscalls += 1;
            epoll::modify(&self.epoll, fd, data(key, side), flags(wanted))?;
        }
        Ok(())
    }

    pub(super) fn remove(&mut self, _key: Key, a: BorrowedFd<'_>, b: BorrowedFd<'_>) -> bool {
        // Closing alone does not remove a descriptor that has a duplicate.
        for fd in [a, b] {
            let _not_watched = epoll::delete(&self.epoll, fd);
        }
        self.syscalls += 2;
        true
    }

    pub(super) fn wait(
        &mut self,
        timeout: Option<Duration>,
        events: &mut Vec<Event>,
    ) -> io::Result<u64> {
        let timeout = timeout.map(|limit| {
            // Whole milliseconds, rounded up: finer timeouts need a newer system call.
            let limit = Duration::from_millis(
                u64::try_from(limit.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX),
            );
            Timespec::try_from(limit).unwrap_or_default()
        });
        self.taken.clear();
        match epoll::wait(
            &self.epoll,
            spare_capacity(&mut self.taken),
            timeout.as_ref(),
        ) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        for event in &self.taken {
            let (bits, flags) = (event.data.u64(), event.flags);
            if bits != WAKER {
                events.push(translate(bits, flags));
            }
        }
        Ok(1)
    }

    pub(super) fn take_syscalls(&mut self) -> u64 {
        std::mem::take(&mut self.syscalls)
    }
}

fn data(key: Key, side: Side) -> EventData {
    EventData::new_u64(key.to_bits() | (side.index() as u64) << KEY_BITS)
}

fn flags(room: bool) -> EventFlags {
    let flags = EventFlags::IN | EventFlags::PRI | EventFlags::RDHUP | EventFlags::ET;
    if room { flags | EventFlags::OUT } else { flags }
}

fn translate(bits: u64, flags: EventFlags) -> Event {
    let over = EventFlags::HUP | EventFlags::ERR;
    let ends = flags.intersects(EventFlags::RDHUP | over);
    Event {
        key: Key::from_bits(bits),
        side: if bits >> KEY_BITS == 0 {
            Side::A
        } else {
            Side::B
        },
        readable: ends || flags.intersects(EventFlags::IN | EventFlags::PRI),
        ends,
        urgent: Some(flags.contains(EventFlags::PRI)),
        room: flags.intersects(EventFlags::OUT | over),
        error: flags.contains(EventFlags::ERR),
        lapsed: false,
        failure: None,
    }
}
