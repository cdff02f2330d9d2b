//! Counters of a relay, for metrics. Each thread writes its own; a snapshot sums them.

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::Relaxed};

use rustix::io::Errno;

/// A snapshot over all threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Pairs accepted and not yet ended, including queued pairs.
    pub active_pairs: u64,
    /// Slots in use; a slot stays in use after its pair until the kernel has released it.
    pub slots: u64,
    /// Pipes that hold or move bytes.
    pub pipes_in_use: u64,
    /// Empty pipes kept for the next direction.
    pub pipes_free: u64,
    /// How often a direction was copied because no pipe was available.
    pub pipes_exhausted: u64,
    /// Memory of buffers in use, bytes.
    pub buffer_bytes: u64,
    /// How often a buffer was not allowed to grow.
    pub buffers_refused: u64,
    /// Relay threads that panicked and were restarted.
    pub thread_panics: u64,
    /// Relay threads that were restarted because their driver failed.
    pub driver_failures: u64,
    /// Last errno of a driver that failed or could not be created, of one thread; 0 if none failed.
    pub driver_errno: i32,
    /// Threads that take no pairs because they have no working driver.
    pub suspended_threads: u64,
    /// How often a thread checked for events.
    pub wakeups: u64,
    /// System calls of the relay threads.
    pub syscalls: u64,
    /// Descriptors of the relay threads: pipes, eventfds and event queues, without the sockets of pairs.
    pub own_descriptors: u64,
}

/// Counters that one thread publishes once per turn.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) slots: AtomicU64,
    pub(crate) pipes_in_use: AtomicU64,
    pub(crate) pipes_free: AtomicU64,
    pub(crate) pipes_exhausted: AtomicU64,
    pub(crate) buffer_bytes: AtomicU64,
    pub(crate) buffers_refused: AtomicU64,
    pub(crate) thread_panics: AtomicU64,
    driver_failures: AtomicU64,
    driver_errno: AtomicI32,
    pub(crate) wakeups: AtomicU64,
    pub(crate) syscalls: AtomicU64,
}

impl Counters {
    pub(crate) fn driver_failed(&self, errno: Errno) {
        self.driver_errno(errno);
        self.driver_failures.fetch_add(1, Relaxed);
    }

    /// Records why a driver failed or could not be created.
    pub(crate) fn driver_errno(&self, errno: Errno) {
        self.driver_errno.store(errno.raw_os_error(), Relaxed);
    }

    pub(crate) fn add_to(&self, stats: &mut Stats) {
        stats.slots += self.slots.load(Relaxed);
        let (in_use, free) = (
            self.pipes_in_use.load(Relaxed),
            self.pipes_free.load(Relaxed),
        );
        stats.pipes_in_use += in_use;
        stats.pipes_free += free;
        stats.pipes_exhausted += self.pipes_exhausted.load(Relaxed);
        stats.buffer_bytes += self.buffer_bytes.load(Relaxed);
        stats.buffers_refused += self.buffers_refused.load(Relaxed);
        stats.thread_panics += self.thread_panics.load(Relaxed);
        stats.driver_failures += self.driver_failures.load(Relaxed);
        let errno = self.driver_errno.load(Relaxed);
        if errno != 0 {
            stats.driver_errno = errno;
        }
        stats.wakeups += self.wakeups.load(Relaxed);
        stats.syscalls += self.syscalls.load(Relaxed);
        stats.own_descriptors += 2 * (in_use + free) + 2;
    }
}
