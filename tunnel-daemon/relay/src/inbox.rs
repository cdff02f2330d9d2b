//! The inbox of a relay thread: a bounded queue of pairs, a list of cancels, and an eventfd that wakes the thread.
//!
//! The flag `noticed` saves the eventfd's system call while the thread is awake. The thread clears the flag before it
//! empties the queues; submitters set it after they queue an item. A submitter that finds the flag set knows that the
//! thread will check the queues again.

use std::{
    io,
    os::fd::BorrowedFd,
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use rustix::io::Errno;

use crate::{
    outcome::PairEnd,
    pair::{Job, Shared},
    stats::Counters,
    sync::{ArrayQueue, AtomicBool, AtomicUsize, OnceLock, SegQueue, Waker},
};

/// One thread's inbox.
#[derive(Debug)]
pub(crate) struct Inbox {
    jobs: ArrayQueue<Job>,
    cancels: SegQueue<Arc<Shared>>,
    waker: Waker,
    noticed: AtomicBool,
    /// Pairs accepted and not yet ended.
    pairs: AtomicUsize,
    pairs_max: usize,
    /// When the thread must stop; set once.
    deadline: OnceLock<Instant>,
    /// The thread has ended.
    closed: AtomicBool,
    /// The thread has no working driver at present.
    suspended: AtomicBool,
    /// Makes the next turn panic, for tests.
    fault: AtomicBool,
    pub(crate) counters: Counters,
}

impl Inbox {
    pub(crate) fn new(queue_pairs: usize, pairs_max: usize) -> io::Result<Self> {
        Ok(Self {
            jobs: ArrayQueue::new(queue_pairs),
            cancels: SegQueue::new(),
            waker: Waker::new()?,
            noticed: AtomicBool::new(false),
            pairs: AtomicUsize::new(0),
            pairs_max,
            deadline: OnceLock::new(),
            closed: AtomicBool::new(false),
            suspended: AtomicBool::new(false),
            fault: AtomicBool::new(false),
            counters: Counters::default(),
        })
    }

    /// The eventfd, which becomes readable whenever the thread is woken.
    pub(crate) fn waker(&self) -> BorrowedFd<'_> {
        self.waker.fd()
    }

    pub(crate) fn pairs(&self) -> usize {
        self.pairs.load(Ordering::Relaxed)
    }

    /// Counts a pair; false if the limit is reached.
    pub(crate) fn enter(&self) -> bool {
        // Not an addition that is undone on overflow: meanwhile it could make the inbox refuse other pairs.
        let one_more = |count: usize| (count < self.pairs_max).then_some(count + 1);
        self.pairs
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more)
            .is_ok()
    }

    pub(crate) fn leave(&self) {
        self.pairs.fetch_sub(1, Ordering::Relaxed);
    }

    /// Queues a pair; returns the pair if the queue is full.
    #[expect(
        clippy::result_large_err,
        reason = "the pair is the caller's again, which is rare"
    )]
    pub(crate) fn put(&self, job: Job) -> Result<(), Job> {
        self.jobs.push(job)?;
        self.announce();
        Ok(())
    }

    pub(crate) fn announce_cancel(&self, shared: Arc<Shared>) {
        self.cancels.push(shared);
        self.announce();
    }

    fn announce(&self) {
        self.wake();
        // If the thread has ended, this call must empty the queues. Otherwise the thread empties them when it ends.
        if self.closed.load(Ordering::SeqCst) {
            self.discard();
        }
    }

    pub(crate) fn stop(&self, deadline: Instant) {
        let _earlier = self.deadline.set(deadline);
        self.wake();
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.deadline.get().copied()
    }

    pub(crate) fn plant_fault(&self) {
        self.fault.store(true, Ordering::SeqCst);
        self.wake();
    }

    pub(crate) fn take_fault(&self) -> bool {
        self.fault.load(Ordering::Relaxed) && self.fault.swap(false, Ordering::SeqCst)
    }

    /// For the thread: whether items may have been queued since the last call.
    pub(crate) fn take_notice(&self) -> bool {
        self.noticed.load(Ordering::SeqCst) && self.noticed.swap(false, Ordering::SeqCst)
    }

    pub(crate) fn take_job(&self) -> Option<Job> {
        self.jobs.pop()
    }

    pub(crate) fn take_cancel(&self) -> Option<Arc<Shared>> {
        self.cancels.pop()
    }

    /// The thread has ended: discards the queues. Submitters discard items that they queue later.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.discard();
    }

    /// Whether the thread refuses pairs because it has no working driver.
    pub(crate) fn is_suspended(&self) -> bool {
        self.suspended.load(Ordering::Relaxed)
    }

    /// For a thread without a working driver: refuses further pairs and ends the queued ones. A pair queued concurrently
    /// ends with the next call, or is adopted later.
    pub(crate) fn suspend(&self, why: Errno) {
        self.suspended.store(true, Ordering::Relaxed);
        self.counters.driver_errno(why);
        while let Some(job) = self.jobs.pop() {
            job.reset(PairEnd::DriverFailed { error: why.into() });
        }
    }

    /// For a thread whose driver works again.
    pub(crate) fn resume(&self) {
        self.suspended.store(false, Ordering::Relaxed);
    }

    fn discard(&self) {
        while let Some(job) = self.jobs.pop() {
            drop(job);
        }
        while self.cancels.pop().is_some() {}
    }

    /// The loom model's sleep, in place of a driver's wait.
    #[cfg(all(test, loom))]
    pub(crate) fn sleep(&self) {
        self.waker.wait();
    }

    fn wake(&self) {
        if !self.noticed.swap(true, Ordering::SeqCst) {
            self.waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixStream, sync::mpsc, thread};

    use super::*;
    use crate::{
        pair::{Pair, Promise},
        probe::Engine,
    };

    /// Loom's models use other queues; these are the real ones. Miri detects data races and stale reads.
    #[test]
    fn jobs_of_several_threads_are_each_taken_or_discarded_once() {
        for _ in 0..if cfg!(miri) { 30 } else { 500 } {
            race_of_two_submitters_and_a_thread_that_goes();
        }
    }

    /// For example the promise of a pair that its thread was serving when it panicked.
    #[test]
    fn a_dropped_promise_reports_the_delivered_bytes() {
        let inbox = Arc::new(Inbox::new(1, 1).unwrap());
        assert!(inbox.enter());
        let (tell, told) = mpsc::channel();
        let done = Box::new(move |outcome| tell.send(outcome).unwrap());
        let shared = Arc::new(Shared::default());
        let promise = Promise::new(done, Arc::clone(&inbox), Engine::Epoll, Arc::clone(&shared));
        shared.to_a.store(5, Ordering::Relaxed);
        shared.to_b.store(7, Ordering::Relaxed);
        drop(promise);
        let outcome: crate::Outcome = told.try_recv().unwrap();
        assert_eq!((outcome.to_a.bytes, outcome.to_b.bytes), (5, 7));
        assert!(matches!(outcome.end, PairEnd::Stopped), "{outcome:?}");
    }

    fn race_of_two_submitters_and_a_thread_that_goes() {
        const EACH: usize = 3;
        let inbox = Arc::new(Inbox::new(2 * EACH, 2 * EACH).unwrap());
        let (tell, told) = mpsc::channel();
        let submit = || {
            let (a, b) = UnixStream::pair().unwrap();
            let tell = tell.clone();
            let done = Box::new(move |outcome: crate::Outcome| tell.send(outcome.end).unwrap());
            let shared = Arc::new(Shared::default());
            assert!(inbox.enter());
            let job = Job {
                pair: Pair::new(a.into(), b.into()),
                promise: Promise::new(done, Arc::clone(&inbox), Engine::Epoll, Arc::clone(&shared)),
            };
            assert!(inbox.put(job).is_ok());
            inbox.announce_cancel(shared);
        };
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| (0..EACH).for_each(|_| submit()));
            }
            while !inbox.take_notice() {
                thread::yield_now();
            }
            let none = crate::Flow::default();
            let first = inbox.take_job().expect("noticed after it was put");
            first.promise.keep(none, none, PairEnd::Finished);
            inbox.close();
        });
        let ends: Vec<_> = told.try_iter().collect();
        let stopped = |end: &&PairEnd| matches!(end, PairEnd::Stopped);
        assert_eq!(ends.len(), 2 * EACH, "each promise is kept once");
        assert_eq!(ends.iter().filter(stopped).count(), 2 * EACH - 1);
        assert_eq!(inbox.pairs(), 0);
        assert!(inbox.take_job().is_none() && inbox.take_cancel().is_none());
    }
}
