//! Counts of a relay, for metrics. Each thread writes its own; a snapshot adds them up.

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::Relaxed};

use rustix::io::Errno;

/// A snapshot over all threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Pairs accepted and not yet ended, those still waiting in a queue included.
    pub active_pairs: u64,
    /// Slots of threads in use; a slot outlives its pair until the kernel has let go of it.
    pub slots: u64,
    /// Pipes that hold or move bytes.
    pub pipes_in_use: u64,
    /// Empty pipes kept for the next direction.
    pub pipes_free: u64,
    /// How often a direction was copied because there was no pipe for it.
    pub pipes_exhausted: u64,
    /// Memory of buffers in use, bytes.
    pub buffer_bytes: u64,
    /// How often a buffer was not allowed to grow.
    pub buffers_refused: u64,
    /// Relay threads that panicked and were restarted.
    pub thread_panics: u64,
    /// Times a relay thread got no events from the kernel any more, and was restarted.
    pub driver_failures: u64,
    /// Why a driver did not work or could not be made, the last errno of one thread; 0: all did.
    pub driver_errno: i32,
    /// Threads that take no pairs, since the kernel gives them no driver.
    pub suspended_threads: u64,
    /// Times a thread looked for events.
    pub wakeups: u64,
    /// System calls of the relay threads.
    pub syscalls: u64,
    /// Descriptors of relay threads themselves: pipes, wake-ups, event queues; sockets of pairs not counted.
    pub own_descriptors: u64,
}

/// What one thread publishes, once a turn.
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

    /// Notes why a driver does not work or cannot be made.
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
