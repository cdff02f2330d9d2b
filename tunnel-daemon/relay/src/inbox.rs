//! The way into a relay thread: a bounded queue of pairs, a list of cancels, and an eventfd that wakes the thread.
//!
//! The flag `noticed` saves the eventfd's system call while the thread is awake anyway. It is cleared before the queues
//! are emptied and set after something was put in, so whoever finds it set knows that the thread will look again.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Instant,
};

use crossbeam::queue::{ArrayQueue, SegQueue};
use rustix::event::{EventfdFlags, eventfd};

use crate::{
    pair::{Job, Shared},
    stats::Counters,
};

/// One thread's inbox.
#[derive(Debug)]
pub(crate) struct Inbox {
    jobs: ArrayQueue<Job>,
    cancels: SegQueue<Arc<Shared>>,
    bell: OwnedFd,
    noticed: AtomicBool,
    /// Pairs accepted and not yet ended.
    pairs: AtomicUsize,
    pairs_max: usize,
    /// When the thread has to be gone; set once.
    deadline: std::sync::OnceLock<Instant>,
    /// The thread is gone.
    closed: AtomicBool,
    /// The next turn panics: a test's way to plant a fault.
    fault: AtomicBool,
    pub(crate) counters: Counters,
}

impl Inbox {
    pub(crate) fn new(queue_pairs: usize, pairs_max: usize) -> io::Result<Self> {
        Ok(Self {
            jobs: ArrayQueue::new(queue_pairs),
            cancels: SegQueue::new(),
            bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            noticed: AtomicBool::new(false),
            pairs: AtomicUsize::new(0),
            pairs_max,
            deadline: std::sync::OnceLock::new(),
            closed: AtomicBool::new(false),
            fault: AtomicBool::new(false),
            counters: Counters::default(),
        })
    }

    /// Reports readiness each time the thread is called.
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    pub(crate) fn pairs(&self) -> usize {
        self.pairs.load(Ordering::Relaxed)
    }

    /// Counts a pair in, unless there are too many.
    pub(crate) fn enter(&self) -> bool {
        let count = self.pairs.fetch_add(1, Ordering::Relaxed);
        if count >= self.pairs_max {
            self.leave();
        }
        count < self.pairs_max
    }

    pub(crate) fn leave(&self) {
        self.pairs.fetch_sub(1, Ordering::Relaxed);
    }

    /// Puts a pair in. Gives it back when the queue is full.
    pub(crate) fn put(&self, job: Job) -> Result<(), Job> {
        self.jobs.push(job)?;
        self.ring();
        // The thread may have gone since the caller looked: then nobody else empties the queue.
        if self.closed.load(Ordering::SeqCst) {
            self.discard();
        }
        Ok(())
    }

    pub(crate) fn announce_cancel(&self, shared: Arc<Shared>) {
        if !self.closed.load(Ordering::SeqCst) {
            self.cancels.push(shared);
            self.ring();
        }
    }

    pub(crate) fn stop(&self, deadline: Instant) {
        let _earlier = self.deadline.set(deadline);
        self.ring();
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.deadline.get().copied()
    }

    pub(crate) fn plant_fault(&self) {
        self.fault.store(true, Ordering::SeqCst);
        self.ring();
    }

    pub(crate) fn take_fault(&self) -> bool {
        self.fault.load(Ordering::Relaxed) && self.fault.swap(false, Ordering::SeqCst)
    }

    /// For the thread: whether there may be something new since it last asked.
    pub(crate) fn take_notice(&self) -> bool {
        self.noticed.load(Ordering::SeqCst) && self.noticed.swap(false, Ordering::SeqCst)
    }

    pub(crate) fn take_job(&self) -> Option<Job> {
        self.jobs.pop()
    }

    pub(crate) fn take_cancel(&self) -> Option<Arc<Shared>> {
        self.cancels.pop()
    }

    /// The thread is gone: what is in the queue ends here, and what still comes ends in [`Self::put`].
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.discard();
    }

    fn discard(&self) {
        while let Some(job) = self.jobs.pop() {
            drop(job);
        }
        while self.cancels.pop().is_some() {}
    }

    fn ring(&self) {
        if !self.noticed.swap(true, Ordering::SeqCst) {
            // Fails only when 2^64 calls were not taken, and then the bell is ringing already.
            let _full = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
        }
    }
}
