//! Every interleaving of submitters, cancellers and stoppers with a relay thread, up to a number of preemptions. The
//! thread is the real one, with the real epoll and real sockets on which nothing happens; only its sleep is modelled.
//! A call that is lost leaves it asleep while its caller waits, and loom reports that as a deadlock.

use std::{
    io::{Error, Result},
    os::unix::net::UnixStream,
    sync::{
        Arc,
        atomic::Ordering::{Relaxed, SeqCst},
    },
    time::Instant,
};

use loom::{
    model::Builder,
    sync::{Condvar, Mutex},
    thread::{self, JoinHandle},
};

use crate::{
    config::Thresholds,
    inbox::Inbox,
    outcome::{Outcome, PairEnd},
    pair::{Job, Pair, Promise, Shared, Submitted},
    probe::Engine,
    sync::{AtomicBool, AtomicUsize, OnceLock, Waker},
    thread::{Plan, run},
};

/// Switches away from a thread that could go on. Bugs that need more than three are rare, and each costs ten times more.
const PREEMPTIONS_MAX: usize = 3;
const QUEUE: usize = 2;

fn check(preemptions_max: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(preemptions_max);
    builder.check(model);
}

fn inbox(pairs_max: usize) -> Arc<Inbox> {
    Arc::new(Inbox::new(QUEUE, pairs_max).unwrap())
}

fn relay_thread(inbox: &Arc<Inbox>) -> JoinHandle<()> {
    let inbox = Arc::clone(inbox);
    thread::spawn(move || {
        let plan = Plan {
            engine: Engine::Epoll,
            rules: Thresholds::copy_only(),
            pipe_bytes: 1,
            pipe_budget_bytes: 0,
            buffer_budget_bytes: 0,
        };
        run(&plan, &inbox, |started: Result<()>| started.unwrap());
    })
}

/// What owners heard, in order.
#[derive(Clone)]
struct Ends(Arc<(Mutex<Vec<PairEnd>>, Condvar)>);

impl Ends {
    fn new() -> Self {
        Self(Arc::new((Mutex::new(Vec::new()), Condvar::new())))
    }

    fn add(&self, outcome: Outcome) {
        let (ends, changed) = &*self.0;
        ends.lock().unwrap().push(outcome.end);
        changed.notify_all();
    }

    fn count(&self) -> usize {
        self.0.0.lock().unwrap().len()
    }

    fn wait_for(&self, count: usize) {
        let (ends, changed) = &*self.0;
        let mut ends = ends.lock().unwrap();
        while ends.len() < count {
            ends = changed.wait(ends).unwrap();
        }
    }

    fn all(&self, expected: impl Fn(&PairEnd) -> bool) -> bool {
        self.0.0.lock().unwrap().iter().all(expected)
    }
}

type Peers = [UnixStream; 2];

/// Nothing happens on the pair's sockets as long as its peers live.
fn sockets() -> (Pair, Peers) {
    let ((client, a), (target, b)) = (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
    (Pair::new(a.into(), b.into()), [client, target])
}

/// A pair whose peers are gone: it ends in its first turn, and nobody needs to cancel it.
fn ended() -> Pair {
    sockets().0
}

/// As `RelayHandle::submit`.
fn submit(inbox: &Arc<Inbox>, ends: &Ends, pair: Pair) -> Option<Submitted> {
    if !inbox.enter() {
        return None;
    }
    let shared = Arc::new(Shared::default());
    let ends = ends.clone();
    let done = Box::new(move |outcome| ends.add(outcome));
    let job = Job {
        pair,
        promise: Promise::new(done, Arc::clone(inbox), Engine::Epoll, Arc::clone(&shared)),
    };
    let inbox = Arc::clone(inbox);
    match inbox.put(job) {
        Ok(()) => Some(Submitted { shared, inbox }),
        Err(refused) => {
            drop(refused.promise.withdraw());
            None
        }
    }
}

fn is_finished(end: &PairEnd) -> bool {
    matches!(end, PairEnd::Finished)
}

fn is_cancelled(end: &PairEnd) -> bool {
    matches!(end, PairEnd::Cancelled)
}

fn assert_nothing_left(inbox: &Inbox) {
    assert_eq!(inbox.pairs(), 0, "pairs counted and gone");
    assert!(inbox.take_job().is_none(), "a job is left");
    assert!(inbox.take_cancel().is_none(), "a cancel is left");
}

#[test]
fn put_and_cancel_wake_a_sleeping_thread() {
    check(PREEMPTIONS_MAX, || {
        let (inbox, ends) = (inbox(2), Ends::new());
        let relay = relay_thread(&inbox);
        let (pair, _peers) = sockets();
        let submitted = submit(&inbox, &ends, pair).unwrap();
        submitted.cancel();
        ends.wait_for(1);
        inbox.stop(Instant::now());
        relay.join().unwrap();
        assert!(ends.count() == 1 && ends.all(is_cancelled));
        assert_nothing_left(&inbox);
    });
}

#[test]
fn put_alone_wakes_a_sleeping_thread() {
    check(PREEMPTIONS_MAX, || {
        let (inbox, ends) = (inbox(1), Ends::new());
        let relay = relay_thread(&inbox);
        submit(&inbox, &ends, ended()).unwrap();
        ends.wait_for(1);
        inbox.stop(Instant::now());
        relay.join().unwrap();
        assert!(ends.count() == 1 && ends.all(is_finished));
        assert_nothing_left(&inbox);
    });
}

#[test]
fn puts_and_cancels_of_two_threads_are_all_noticed() {
    check(2, || {
        let (inbox, ends) = (inbox(2), Ends::new());
        let relay = relay_thread(&inbox);
        let other = thread::spawn({
            let (inbox, ends) = (Arc::clone(&inbox), ends.clone());
            move || drop(submit(&inbox, &ends, ended()).unwrap())
        });
        let (pair, _peers) = sockets();
        let submitted = submit(&inbox, &ends, pair).unwrap();
        submitted.cancel();
        ends.wait_for(2);
        other.join().unwrap();
        inbox.stop(Instant::now());
        relay.join().unwrap();
        assert!(ends.count() == 2 && !ends.all(is_finished) && !ends.all(is_cancelled));
        assert_nothing_left(&inbox);
    });
}

#[test]
fn pair_cancelled_by_two_owners_is_cancelled_once() {
    check(2, || {
        let (inbox, ends) = (inbox(1), Ends::new());
        let relay = relay_thread(&inbox);
        let (pair, _peers) = sockets();
        let submitted = submit(&inbox, &ends, pair).unwrap();
        let other = thread::spawn({
            let submitted = submitted.clone();
            move || submitted.cancel()
        });
        submitted.cancel();
        ends.wait_for(1);
        other.join().unwrap();
        inbox.stop(Instant::now());
        relay.join().unwrap();
        assert!(ends.count() == 1 && ends.all(is_cancelled));
        assert_nothing_left(&inbox);
    });
}

#[test]
fn put_during_stop_is_adopted_or_discarded_and_reported_once() {
    check(PREEMPTIONS_MAX, || {
        let (inbox, ends) = (inbox(2), Ends::new());
        let relay = relay_thread(&inbox);
        let stopper = thread::spawn({
            let inbox = Arc::clone(&inbox);
            move || inbox.stop(Instant::now())
        });
        let (pair, _peers) = sockets();
        let submitted = submit(&inbox, &ends, pair).unwrap();
        submitted.cancel();
        stopper.join().unwrap();
        relay.join().unwrap();
        assert_eq!(ends.count(), 1);
        assert!(ends.all(|end| matches!(end, PairEnd::Stopped | PairEnd::Cancelled)));
        assert_nothing_left(&inbox);
    });
}

#[test]
fn panic_of_the_thread_loses_no_put_and_no_cancel() {
    check(2, || {
        let (inbox, ends) = (inbox(2), Ends::new());
        let relay = relay_thread(&inbox);
        let fault = thread::spawn({
            let inbox = Arc::clone(&inbox);
            move || inbox.plant_fault()
        });
        let (pair, _peers) = sockets();
        let submitted = submit(&inbox, &ends, pair).unwrap();
        submitted.cancel();
        ends.wait_for(1);
        fault.join().unwrap();
        inbox.stop(Instant::now());
        relay.join().unwrap();
        assert_eq!(ends.count(), 1);
        assert!(ends.all(|end| matches!(end, PairEnd::Panicked | PairEnd::Cancelled)));
        assert_nothing_left(&inbox);
    });
}

#[test]
fn closed_inbox_keeps_neither_jobs_nor_cancels() {
    check(PREEMPTIONS_MAX, || {
        let (inbox, ends) = (inbox(2), Ends::new());
        let submitters = [(); 2].map(|()| {
            let (inbox, ends) = (Arc::clone(&inbox), ends.clone());
            thread::spawn(move || {
                submit(&inbox, &ends, ended()).unwrap().cancel();
            })
        });
        inbox.close();
        submitters.into_iter().for_each(|one| one.join().unwrap());
        assert_eq!(ends.count(), 2);
        assert!(ends.all(|end| matches!(end, PairEnd::Stopped)));
        assert_nothing_left(&inbox);
    });
}

/// Limit (peers): Raw lanes queued for one relay thread | 4,096
#[test]
fn full_queue_returns_the_pair_and_frees_its_place() {
    check(PREEMPTIONS_MAX, || {
        let (inbox, ends) = (inbox(3), Ends::new());
        let submitters = [(); 2].map(|()| {
            let (inbox, ends) = (Arc::clone(&inbox), ends.clone());
            thread::spawn(move || submit(&inbox, &ends, ended()).is_some())
        });
        let ours = submit(&inbox, &ends, ended()).is_some();
        let theirs = submitters.map(|one| one.join().unwrap());
        let accepted = usize::from(ours) + theirs.into_iter().map(usize::from).sum::<usize>();
        assert_eq!((accepted, inbox.pairs()), (QUEUE, QUEUE));
        inbox.close();
        assert_eq!(ends.count(), QUEUE);
        assert_nothing_left(&inbox);
    });
}

/// Limit (peers): Raw lanes of the relay | as many as lanes
#[test]
fn pairs_stay_within_the_cap_and_refused_ones_take_no_place() {
    check(PREEMPTIONS_MAX, || {
        const CAP: usize = 1;
        let inbox = inbox(CAP);
        let (inside, others) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let visit = {
            let (inbox, inside) = (Arc::clone(&inbox), Arc::clone(&inside));
            move || {
                let is_in = inbox.enter();
                if is_in {
                    assert!(inside.fetch_add(1, SeqCst) < CAP, "more than the cap");
                    inside.fetch_sub(1, SeqCst);
                    inbox.leave();
                }
                is_in
            }
        };
        let visitors = [(); 2].map(|()| {
            let (visit, others) = (visit.clone(), Arc::clone(&others));
            thread::spawn(move || others.fetch_add(usize::from(visit()), Relaxed))
        });
        let first = visit();
        let second = visit();
        for one in visitors {
            one.join().unwrap();
        }
        let others = others.load(Relaxed);
        assert!(
            others > 0 || (first && second),
            "refused with nobody inside"
        );
        assert_nothing_left(&inbox);
    });
}

/// The model can fail: with a waker that is used before the notice is set, a call is lost.
#[test]
#[should_panic(expected = "deadlock")]
fn model_detects_a_wake_up_before_the_flag() {
    check(PREEMPTIONS_MAX, || {
        let parts = Arc::new((
            Waker::new().unwrap(),
            AtomicBool::new(false),
            OnceLock::new(),
        ));
        let thread = thread::spawn({
            let parts = Arc::clone(&parts);
            move || {
                let (waker, noticed, value) = &*parts;
                while !(noticed.swap(false, SeqCst) && value.get().is_some()) {
                    waker.wait();
                }
            }
        });
        let (waker, noticed, value) = &*parts;
        waker.wake();
        value
            .set(())
            .map_err(|()| Error::other("set twice"))
            .unwrap();
        noticed.store(true, SeqCst);
        thread.join().unwrap();
    });
}
