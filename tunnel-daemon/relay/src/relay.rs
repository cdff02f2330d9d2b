//! The relay's interface: start, submit, stop.

use std::{
    fmt, io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use crate::{
    config::RelayConfig,
    inbox::Inbox,
    pair::{Done, Job, Pair, Promise, Shared, Submitted},
    probe::{Choice, Engine},
    stats::Stats,
    thread::{self, Plan},
};

/// The relay threads. Dropping resets the remaining pairs.
#[derive(Debug)]
pub struct Relay {
    handle: RelayHandle,
    threads: Vec<JoinHandle<()>>,
}

/// Submits pairs to a relay, from any thread.
#[derive(Clone)]
pub struct RelayHandle(Arc<RelayShared>);

struct RelayShared {
    inboxes: Vec<Arc<Inbox>>,
    next: AtomicUsize,
    stopping: AtomicBool,
    choice: Choice,
}

/// Why a pair was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Why {
    /// All threads have reached their limit of pairs or queued pairs.
    #[error("the relay is full")]
    Full,
    /// The relay is being stopped.
    #[error("the relay is stopping")]
    Stopping,
    /// No thread has a working driver; each retries ten times a second.
    #[error("no relay thread gets events from the kernel")]
    Suspended,
}

/// A refused pair and its callback, both unchanged, except that closing the sockets may send RST: see [`RelayHandle::submit`].
#[derive(thiserror::Error)]
#[error("pair refused: {why}")]
pub struct Rejected {
    /// The pair.
    pub pair: Box<Pair>,
    /// The callback, not called.
    pub done: Done,
    /// The reason.
    pub why: Why,
}

impl fmt::Debug for Rejected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rejected")
            .field("pair", &self.pair)
            .field("why", &self.why)
            .finish_non_exhaustive()
    }
}

impl Relay {
    /// Starts the threads and their drivers.
    ///
    /// # Errors
    /// A value of `config` is invalid, or a thread, a driver or a descriptor could not be created.
    pub fn start(config: &RelayConfig) -> io::Result<Self> {
        config
            .check()
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        let pairs_max = config.pairs_max.div_ceil(config.threads);
        let inboxes = (0..config.threads)
            .map(|_| Inbox::new(config.queue_pairs, pairs_max).map(Arc::new))
            .collect::<io::Result<Vec<_>>>()?;
        let mut relay = Self {
            threads: Vec::new(),
            handle: RelayHandle(Arc::new(RelayShared {
                inboxes,
                next: AtomicUsize::new(0),
                stopping: AtomicBool::new(false),
                choice: config.choice.clone(),
            })),
        };
        for number in 0..config.threads {
            let inbox = Arc::clone(&relay.handle.0.inboxes[number]);
            let plan = Plan::new(config);
            let begin = config.on_thread_start;
            let (tell, told) = mpsc::sync_channel(1);
            relay.threads.push(
                std::thread::Builder::new()
                    .name(format!("relay-{number}"))
                    .spawn(move || {
                        begin();
                        thread::run(&plan, &inbox, |started| {
                            // Fails only if the starting thread has ended.
                            let _dropped = tell.send(started);
                        });
                    })?,
            );
            told.recv().map_err(io::Error::other)??;
        }
        Ok(relay)
    }

    /// A handle to submit pairs.
    #[must_use]
    pub fn handle(&self) -> RelayHandle {
        self.handle.clone()
    }

    /// Refuses further pairs, lets open pairs run until `deadline`, resets the rest, and waits for the threads.
    pub fn stop(mut self, deadline: Duration) {
        self.stop_threads(deadline);
    }

    fn stop_threads(&mut self, deadline: Duration) {
        self.handle.0.stopping.store(true, Ordering::SeqCst);
        let now = Instant::now();
        let deadline = now.checked_add(deadline).unwrap_or(now);
        for inbox in &self.handle.0.inboxes {
            inbox.stop(deadline);
        }
        let own = std::thread::current().id();
        // A callback may call this on a relay thread, which cannot join itself; that thread ends on its own.
        let others = |thread: &JoinHandle<()>| thread.thread().id() != own;
        for thread in self.threads.drain(..).filter(others) {
            // Panics of the loop are counted and handled inside the thread.
            let _panicked = thread.join();
        }
        for inbox in &self.handle.0.inboxes {
            inbox.close();
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stop_threads(Duration::ZERO);
    }
}

impl RelayHandle {
    /// Submits a pair to the thread with the fewest pairs. `done` is called once with the outcome. From here on closing the
    /// sockets sends RST, unless the pair finishes.
    ///
    /// # Errors
    /// The relay is full, stopping or without a working driver. The pair and `done` are returned, with no bytes moved
    /// and `done` not called.
    pub fn submit(&self, pair: Pair, done: Done) -> Result<Submitted, Rejected> {
        let inner = &self.0;
        let refused = |pair, done, why| {
            Err(Rejected {
                pair: Box::new(pair),
                done,
                why,
            })
        };
        if inner.stopping.load(Ordering::SeqCst) {
            return refused(pair, done, Why::Stopping);
        }
        // Among equal threads round robin; otherwise the first would get every pair of an idle relay.
        let count = inner.inboxes.len();
        let first = inner.next.fetch_add(1, Ordering::Relaxed) % count;
        let inbox = (first..first + count)
            .filter_map(|number| inner.inboxes.get(number % count))
            .filter(|inbox| !inbox.is_suspended())
            .min_by_key(|inbox| inbox.pairs());
        let Some(inbox) = inbox else {
            return refused(pair, done, Why::Suspended);
        };
        if !inbox.enter() {
            return refused(pair, done, Why::Full);
        }
        // Before the pair is queued, because its thread may have ended.
        pair.arm();
        let shared = Arc::new(Shared::default());
        let job = Job {
            pair,
            promise: Promise::new(done, Arc::clone(inbox), self.engine(), Arc::clone(&shared)),
        };
        match inbox.put(job) {
            Ok(()) => Ok(Submitted {
                shared,
                inbox: Arc::clone(inbox),
            }),
            Err(job) => {
                let Job { pair, promise } = job;
                let done = promise.withdraw();
                refused(pair, done, Why::Full)
            }
        }
    }

    /// Counters, summed over all threads.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let mut stats = Stats::default();
        for inbox in &self.0.inboxes {
            stats.active_pairs += inbox.pairs() as u64;
            inbox.counters.add_to(&mut stats);
            stats.suspended_threads += u64::from(inbox.is_suspended());
        }
        stats
    }

    /// Whether at least one thread has a working driver and takes pairs.
    #[must_use]
    pub fn is_able(&self) -> bool {
        self.0.inboxes.iter().any(|inbox| !inbox.is_suspended())
    }

    /// The driver in use, and why.
    #[must_use]
    pub fn choice(&self) -> &Choice {
        &self.0.choice
    }

    fn engine(&self) -> Engine {
        self.0.choice.engine
    }

    /// Makes every thread panic in its next turn, for tests.
    #[doc(hidden)]
    pub fn plant_fault(&self) {
        self.0.inboxes.iter().for_each(|inbox| inbox.plant_fault());
    }
}

impl fmt::Debug for RelayHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RelayHandle")
            .field("choice", &self.0.choice)
            .field("stats", &self.stats())
            .finish()
    }
}
