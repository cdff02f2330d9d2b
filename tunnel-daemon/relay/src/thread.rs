//! One relay thread: a loop over its inbox, its ready pairs and its driver. The thread owns its pairs for their lifetime.

use std::{
    collections::VecDeque,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::Ordering::{Relaxed, SeqCst},
    },
    time::{Duration, Instant},
};

use rustix::io::Errno;

use crate::{
    buffers::Buffers,
    config::{RelayConfig, Thresholds},
    driver::{Driver, Event, Key},
    flow::{OpenPair, Pools, Verdict},
    inbox::Inbox,
    outcome::{PairEnd, Side},
    pair::Job,
    pipes::Pipes,
    probe::Engine,
};

/// Pause between attempts to create a working driver: a lasting fault costs ten attempts a second.
const RESTART_PAUSE: Duration = Duration::from_millis(100);

/// Configuration of one thread, also for its restarts.
pub(crate) struct Plan {
    pub(crate) engine: Engine,
    pub(crate) rules: Thresholds,
    pub(crate) pipe_bytes: usize,
    pub(crate) pipe_budget_bytes: usize,
    pub(crate) buffer_budget_bytes: usize,
}

impl Plan {
    /// One thread's share.
    pub(crate) fn new(config: &RelayConfig) -> Self {
        Self {
            engine: config.choice.engine,
            rules: config.thresholds.clone(),
            pipe_bytes: config.pipe_bytes,
            pipe_budget_bytes: config.pipe_budget_bytes / config.threads,
            buffer_budget_bytes: config.buffer_budget_bytes / config.threads,
        }
    }
}

/// Runs a thread until it is stopped and drained. `started` is called with the result of creating the driver.
pub(crate) fn run(plan: &Plan, inbox: &Arc<Inbox>, started: impl FnOnce(io::Result<()>)) {
    let mut engine = plan.engine;
    let mut thread = match Thread::new(plan, engine, Arc::clone(inbox)) {
        Ok(thread) => thread,
        Err(error) => return started(Err(error)),
    };
    started(Ok(()));
    loop {
        let since = Instant::now();
        let mut pause = None;
        match catch_unwind(AssertUnwindSafe(|| thread.run())) {
            Ok(Ok(())) => break,
            Ok(Err(error)) => {
                let errno = errno_of(&error);
                inbox.counters.driver_failed(errno);
                thread.abandon_pairs(|| PairEnd::DriverFailed {
                    error: errno.into(),
                });
                if engine == Engine::Epoll && since.elapsed() < RESTART_PAUSE {
                    pause = Some(errno);
                }
                // A ring that cannot wait would fail again.
                engine = Engine::Epoll;
            }
            Err(_panic) => {
                #[cfg(all(test, loom))]
                crate::sync::pass_on_findings(_panic);
                inbox.counters.thread_panics.fetch_add(1, Relaxed);
                thread.abandon_pairs(|| PairEnd::Panicked);
            }
        }
        // Closes its descriptors before new ones are created.
        drop(thread);
        match restart(plan, engine, inbox, pause) {
            Some(next) => thread = next,
            None => break,
        }
    }
    inbox.close();
}

/// A new thread state after a failure: with this driver, or with epoll if this driver cannot be created. Until a driver
/// works, the inbox refuses pairs and its queued pairs are reset. With `pause` the first attempt follows after a pause.
/// `None` if the relay is stopped meanwhile.
fn restart(
    plan: &Plan,
    engine: Engine,
    inbox: &Arc<Inbox>,
    mut pause: Option<Errno>,
) -> Option<Thread> {
    loop {
        let mut errno = pause.take();
        if errno.is_none() {
            for engine in [engine, Engine::Epoll] {
                let tried = Thread::new(plan, engine, Arc::clone(inbox));
                let tried = tried.and_then(|mut thread| {
                    thread.wait(Some(Duration::ZERO))?;
                    Ok(thread)
                });
                match tried {
                    Ok(thread) => {
                        inbox.resume();
                        return Some(thread);
                    }
                    Err(error) => errno = Some(errno_of(&error)),
                }
            }
        }
        inbox.suspend(errno.unwrap_or(Errno::IO));
        if inbox.deadline().is_some() {
            return None;
        }
        std::thread::sleep(RESTART_PAUSE);
    }
}

fn errno_of(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

#[derive(Default)]
struct PairSlot {
    generation: u32,
    pair: Option<OpenPair>,
}

fn pair_in(slots: &mut [PairSlot], key: Key) -> Option<&mut OpenPair> {
    let slot = slots.get_mut(key.index())?;
    slot.pair
        .as_mut()
        .filter(|_| slot.generation == key.generation)
}

struct Thread {
    inbox: Arc<Inbox>,
    driver: Driver,
    rules: Thresholds,
    pools: Pools,
    slots: Vec<PairSlot>,
    free: Vec<u32>,
    /// Pairs with work, each once.
    ready: VecDeque<Key>,
    events: Vec<Event>,
    wakeups: u64,
    is_first_turn: bool,
}

impl Thread {
    fn new(plan: &Plan, engine: Engine, inbox: Arc<Inbox>) -> io::Result<Self> {
        Ok(Self {
            driver: Driver::new(engine, inbox.waker())?,
            rules: plan.rules.clone(),
            pools: Pools {
                buffers: Buffers::new(plan.buffer_budget_bytes),
                pipes: Pipes::new(plan.pipe_bytes, plan.pipe_budget_bytes),
                syscalls: 0,
            },
            slots: Vec::new(),
            free: Vec::new(),
            ready: VecDeque::new(),
            events: Vec::new(),
            wakeups: inbox.counters.wakeups.load(Relaxed),
            inbox,
            is_first_turn: true,
        })
    }

    /// Returns once the relay is stopped and no pair remains.
    ///
    /// # Errors
    /// The driver's error: without events the thread cannot work.
    fn run(&mut self) -> io::Result<()> {
        loop {
            if self.inbox.take_notice() || std::mem::take(&mut self.is_first_turn) {
                self.look_into_inbox();
            }
            self.give_turns();
            let left = match self.inbox.deadline() {
                None => None,
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        self.stop_pairs();
                    }
                    if self.is_empty() {
                        self.publish();
                        return Ok(());
                    }
                    Some(left.max(Duration::from_millis(1)))
                }
            };
            self.publish();
            let timeout = if self.ready.is_empty() {
                left
            } else {
                Some(Duration::ZERO)
            };
            self.wait(timeout)?;
        }
    }

    fn look_into_inbox(&mut self) {
        assert!(!self.inbox.take_fault(), "planted fault of a test");
        while let Some(job) = self.inbox.take_job() {
            self.adopt(job);
        }
        while let Some(shared) = self.inbox.take_cancel() {
            // Keys restart after a failure, so equal keys may belong to different pairs.
            let key = Key::from_bits(shared.key.load(Relaxed));
            if pair_in(&mut self.slots, key).is_some_and(|pair| Arc::ptr_eq(pair.shared(), &shared))
            {
                self.end(key, PairEnd::Cancelled);
            }
        }
    }

    fn adopt(&mut self, job: Job) {
        let mut pair = OpenPair::new(job, &self.rules);
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(PairSlot::default());
            u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
        });
        let place = &mut self.slots[slot as usize];
        place.generation = Key::next_generation(place.generation);
        let key = Key {
            slot,
            generation: place.generation,
        };
        pair.shared().key.store(key.to_bits(), SeqCst);
        let is_cancelled = pair.shared().cancelled.load(SeqCst);
        for side in [Side::A, Side::B] {
            if let Err(error) = self.driver.watch(key, side, pair.socket(side)) {
                pair.fail(side, error);
            }
        }
        pair.is_queued = true;
        place.pair = Some(pair);
        self.ready.push_back(key);
        if is_cancelled {
            self.end(key, PairEnd::Cancelled);
        }
    }

    fn end(&mut self, key: Key, end: PairEnd) {
        if pair_in(&mut self.slots, key).is_none() {
            return;
        }
        let Some(pair) = self.slots[key.index()].pair.take() else {
            return;
        };
        if self
            .driver
            .remove(key, pair.socket(Side::A), pair.socket(Side::B))
        {
            self.free.push(key.slot);
        }
        pair.close(end, &mut self.pools);
    }

    /// Gives each ready pair one turn; pairs with more work continue after the next check for events.
    fn give_turns(&mut self) {
        for _ in 0..self.ready.len() {
            let Some(key) = self.ready.pop_front() else {
                return;
            };
            let Some(pair) = pair_in(&mut self.slots, key) else {
                continue;
            };
            pair.is_queued = false;
            let room_on = match pair.run(&mut self.pools, &self.rules) {
                Verdict::Over(end) => {
                    self.end(key, end);
                    continue;
                }
                Verdict::Wait { room_on } => room_on,
                Verdict::Again { room_on } => {
                    pair.is_queued = true;
                    self.ready.push_back(key);
                    room_on
                }
            };
            for side in [Side::A, Side::B] {
                let fd = pair.socket(side);
                let watched = if room_on[side.index()] {
                    self.driver.want_room(key, side, fd)
                } else {
                    Ok(())
                };
                if let Err(error) = watched {
                    pair.fail(side, error);
                    if !std::mem::replace(&mut pair.is_queued, true) {
                        self.ready.push_back(key);
                    }
                }
            }
        }
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let mut events = std::mem::take(&mut self.events);
        events.clear();
        #[cfg(all(test, loom))]
        let timeout = self.sleep_as_modelled(timeout);
        self.pools.syscalls += self.driver.wait(timeout, self.inbox.waker(), &mut events)?;
        self.wakeups += 1;
        for event in &events {
            self.note(event);
        }
        self.events = events;
        while let Some(slot) = self.driver.released() {
            self.free.push(slot);
        }
        Ok(())
    }

    /// The loom model has no socket events: an idle thread sleeps until the waker is used.
    #[cfg(all(test, loom))]
    fn sleep_as_modelled(&self, timeout: Option<Duration>) -> Option<Duration> {
        if timeout != Some(Duration::ZERO) {
            self.inbox.sleep();
        }
        Some(Duration::ZERO)
    }

    fn note(&mut self, event: &Event) {
        let (key, side) = (event.key, event.side);
        let Some(pair) = pair_in(&mut self.slots, key) else {
            return; // A late event: the pair is gone.
        };
        pair.note(event);
        let renewed = if event.lapsed {
            self.driver.watch(key, side, pair.socket(side))
        } else if event.room {
            self.driver.forget_room(key, side, pair.socket(side))
        } else {
            Ok(())
        };
        if let Err(error) = renewed {
            pair.fail(side, error);
        }
        if !std::mem::replace(&mut pair.is_queued, true) {
            self.ready.push_back(key);
        }
    }

    fn is_empty(&self) -> bool {
        self.slots.iter().all(|slot| slot.pair.is_none())
    }

    fn stop_pairs(&mut self) {
        for slot in 0..self.slots.len() {
            let key = Key {
                slot: u32::try_from(slot).unwrap_or(u32::MAX),
                generation: self.slots[slot].generation,
            };
            self.end(key, PairEnd::Stopped);
        }
    }

    /// After a failure: resets each pair and calls its callback, even if another callback panics.
    fn abandon_pairs(&mut self, end: impl Fn() -> PairEnd) {
        for slot in &mut self.slots {
            if let Some(pair) = slot.pair.take() {
                let _panicked_again = catch_unwind(AssertUnwindSafe(|| pair.abandon(end())));
            }
        }
        self.slots.clear();
        self.pools.pipes = Pipes::new(1, 0);
        self.pools.buffers = Buffers::new(0);
        self.publish();
    }

    fn publish(&mut self) {
        let counters = &self.inbox.counters;
        let pipes = &self.pools.pipes;
        let store = |counter: &std::sync::atomic::AtomicU64, value: usize| {
            counter.store(value as u64, Relaxed);
        };
        store(
            &counters.slots,
            self.slots.len() - self.free.len().min(self.slots.len()),
        );
        store(&counters.pipes_in_use, pipes.lent());
        store(&counters.pipes_free, pipes.free());
        store(&counters.buffer_bytes, self.pools.buffers.lent_bytes());
        counters.wakeups.store(self.wakeups, Relaxed);
        let syscalls = std::mem::take(&mut self.pools.syscalls) + self.driver.take_syscalls();
        counters.syscalls.fetch_add(syscalls, Relaxed);
        let exhausted = self.pools.pipes.take_exhausted();
        counters.pipes_exhausted.fetch_add(exhausted, Relaxed);
        let refused = self.pools.buffers.take_refused();
        counters.buffers_refused.fetch_add(refused, Relaxed);
    }
}
