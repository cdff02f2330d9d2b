//! Readiness of sockets and of the inbox's eventfd, by epoll or io_uring. A driver knows keys and descriptors; the pair
//! interprets events.

mod epoll;
mod uring;

use std::{io, os::fd::BorrowedFd, time::Duration};

use crate::{outcome::Side, probe::Engine};

/// Identifies one pair on one thread. A reused slot has a new generation, so late events of the old pair are ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) slot: u32,
    /// 24 bits, never zero.
    pub(crate) generation: u32,
}

/// Generations count up to this and then restart at one.
const GENERATION_MAX: u32 = (1 << 24) - 1;
/// Bits of a key.
const KEY_BITS: u32 = 56;

impl Key {
    pub(crate) fn next_generation(generation: u32) -> u32 {
        generation % GENERATION_MAX + 1
    }

    /// Never zero; the upper eight bits are free.
    pub(crate) fn to_bits(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.slot)
    }

    pub(crate) fn from_bits(bits: u64) -> Self {
        let part = |value: u64| u32::try_from(value & u64::from(u32::MAX)).unwrap_or_default();
        Self {
            slot: part(bits),
            generation: part(bits >> 32) & GENERATION_MAX,
        }
    }

    pub(crate) fn index(self) -> usize {
        usize::try_from(self.slot).unwrap_or(usize::MAX)
    }
}

/// An event of one socket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    pub(crate) key: Key,
    pub(crate) side: Side,
    /// Bytes, EOF or an error can be read.
    pub(crate) readable: bool,
    /// The peer has closed its writing half.
    pub(crate) ends: bool,
    /// There is an urgent byte, at which reads and splices stop. `None`: not known.
    pub(crate) urgent: Option<bool>,
    /// There is room to write, or an error.
    pub(crate) room: bool,
    /// The socket holds an error.
    pub(crate) error: bool,
    /// The watch for bytes has ended and must be renewed.
    pub(crate) lapsed: bool,
    /// The errno if the socket cannot be watched.
    pub(crate) failure: Option<i32>,
}

/// A driver, owned by the thread that created it.
pub(crate) enum Driver {
    Epoll(epoll::Epoll),
    Uring(Box<uring::Uring>),
}

impl Driver {
    /// A driver that wakes up when the eventfd `waker` becomes readable.
    pub(crate) fn new(engine: Engine, waker: BorrowedFd<'_>) -> io::Result<Self> {
        match engine {
            Engine::Epoll => epoll::Epoll::new(waker).map(Self::Epoll),
            Engine::IoUring => uring::Uring::new(waker).map(|ring| Self::Uring(Box::new(ring))),
        }
    }

    /// Watches a socket for bytes and EOF.
    pub(crate) fn watch(&mut self, key: Key, side: Side, fd: BorrowedFd<'_>) -> io::Result<()> {
        match self {
            Self::Epoll(epoll) => epoll.watch(key, side, fd),
            Self::Uring(ring) => ring.watch(key, side, fd),
        }
    }

    /// Also watches a socket for room to write. An event follows at once if there is room.
    pub(crate) fn want_room(&mut self, key: Key, side: Side, fd: BorrowedFd<'_>) -> io::Result<()> {
        match self {
            Self::Epoll(epoll) => epoll.watch_room(key, side, fd, true),
            Self::Uring(ring) => ring.want_room(key, side, fd),
        }
    }

    /// Stops watching a socket for room.
    pub(crate) fn forget_room(
        &mut self,
        key: Key,
        side: Side,
        fd: BorrowedFd<'_>,
    ) -> io::Result<()> {
        match self {
            Self::Epoll(epoll) => epoll.watch_room(key, side, fd, false),
            Self::Uring(_) => Ok(()), // Reported once; the poll then ends.
        }
    }

    /// Stops watching both sockets. `true` if the slot may be reused now; otherwise [`Self::released`] returns the slot later.
    pub(crate) fn remove(&mut self, key: Key, a: BorrowedFd<'_>, b: BorrowedFd<'_>) -> bool {
        match self {
            Self::Epoll(epoll) => epoll.remove(key, a, b),
            Self::Uring(ring) => ring.remove(key),
        }
    }

    /// Waits for events, at most `timeout`. Returns the number of system calls made.
    pub(crate) fn wait(
        &mut self,
        timeout: Option<Duration>,
        waker: BorrowedFd<'_>,
        events: &mut Vec<Event>,
    ) -> io::Result<u64> {
        match self {
            Self::Epoll(epoll) => epoll.wait(timeout, events),
            Self::Uring(ring) => ring.wait(timeout, waker, events),
        }
    }

    /// A removed slot that the kernel has released.
    pub(crate) fn released(&mut self) -> Option<u32> {
        match self {
            Self::Epoll(_) => None,
            Self::Uring(ring) => ring.released(),
        }
    }

    /// System calls made outside [`Self::wait`] since the last call.
    pub(crate) fn take_syscalls(&mut self) -> u64 {
        match self {
            Self::Epoll(epoll) => epoll.take_syscalls(),
            Self::Uring(_) => 0, // `wait` submits all entries.
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_round_trip_and_leave_eight_bits() {
        for generation in [1, 7, GENERATION_MAX] {
            let key = Key {
                slot: u32::MAX,
                generation,
            };
            assert_eq!(Key::from_bits(key.to_bits() | 0xab << KEY_BITS), key);
            assert!(key.to_bits() < 1 << KEY_BITS && key.to_bits() != 0);
        }
        assert_eq!(Key::next_generation(GENERATION_MAX), 1);
        assert_eq!(Key::next_generation(0), 1);
    }
}
