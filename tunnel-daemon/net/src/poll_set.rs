//! Several futures in one task. What one of them wakes is polled on the spot: the scheduler would wake another thread for it.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::sync::atomic::{AtomicBool, AtomicU8};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;
use slab::Slab;

/// Rounds before the task yields.
const ROUNDS_PER_POLL: usize = 16;

/// No round runs: a wake-up goes to the task.
const IDLE: u8 = 0;
/// A round runs.
const POLLING: u8 = 1;
/// A future was woken while the round ran: another round follows.
const AGAIN: u8 = 2;

#[derive(Default)]
struct Signal {
    state: AtomicU8,
    task: AtomicWaker,
}

impl Wake for Signal {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let again = |state| (state != IDLE).then_some(AGAIN);
        if self.state.fetch_update(AcqRel, Acquire, again).is_err() {
            self.task.wake();
        }
    }
}

/// Calls `round` until a whole round has woken none of its futures, or a round returns a value.
///
/// `round` must poll all its futures each time, with the context it is given.
pub async fn together<T>(mut round: impl FnMut(&mut Context<'_>) -> Poll<T>) -> T {
    let signal = Arc::new(Signal::default());
    let waker = Waker::from(Arc::clone(&signal));
    poll_fn(|cx| {
        signal.task.register(cx.waker());
        for _round in 0..ROUNDS_PER_POLL {
            // This round answers earlier wake-ups.
            signal.state.swap(POLLING, AcqRel);
            let polled = round(&mut Context::from_waker(&waker));
            let quiet = signal
                .state
                .compare_exchange(POLLING, IDLE, AcqRel, Acquire)
                .is_ok();
            if quiet || polled.is_ready() {
                return polled;
            }
        }
        signal.state.swap(IDLE, AcqRel);
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await
}

/// Waits for the first of a few futures that is done, and removes it; without any it waits for ever. For more than a few, or some
/// that live for long, there is [`PollSet`].
pub async fn first_of<F: Future + Unpin>(futures: &mut Vec<F>) -> F::Output {
    poll_fn(|cx| {
        let mut done = futures.iter_mut().enumerate().filter_map(|(at, future)| {
            match Pin::new(future).poll(cx) {
                Poll::Ready(output) => Some((at, output)),
                Poll::Pending => None,
            }
        });
        match done.next() {
            Some((at, output)) => {
                futures.remove(at);
                Poll::Ready(output)
            }
            None => Poll::Pending,
        }
    })
    .await
}

/// Room that a set keeps once all of its futures have ended, in futures.
const KEPT_ROOM: usize = 64;

/// Futures in one task; [`Self::poll`] polls those that were woken. It does not wake its task because all of them were polled, as
/// `FuturesUnordered` does: with one future, an idle round would follow each of its polls.
pub struct PollSet<F> {
    members: Slab<Member<F>>,
    woken: Arc<Woken>,
    /// Keys of the members that are being polled; kept for its memory.
    polled: Vec<usize>,
}

struct Member<F> {
    future: F,
    signal: Arc<MemberSignal>,
    waker: Waker,
}

#[derive(Default)]
struct Woken {
    keys: Mutex<Keys>,
    task: AtomicWaker,
}

#[derive(Default)]
struct Keys {
    woken: Vec<usize>,
    /// The task polls the set before it rests, and need not be woken.
    is_expected: bool,
}

struct MemberSignal {
    key: usize,
    is_woken: AtomicBool,
    set: Arc<Woken>,
}

impl Woken {
    fn keys(&self) -> MutexGuard<'_, Keys> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wake for MemberSignal {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.is_woken.swap(true, AcqRel) {
            return;
        }
        let mut keys = self.set.keys();
        keys.woken.push(self.key);
        let is_expected = keys.is_expected;
        drop(keys);
        if !is_expected {
            self.set.task.wake();
        }
    }
}

impl<F> Default for PollSet<F> {
    fn default() -> Self {
        Self {
            members: Slab::new(),
            woken: Arc::default(),
            polled: Vec::new(),
        }
    }
}

impl<F: Future<Output = ()> + Unpin> PollSet<F> {
    /// Whether all futures have ended.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Adds a future, which the next [`Self::poll`] polls; the task is not woken for it.
    pub fn push(&mut self, future: F) {
        let place = self.members.vacant_entry();
        let signal = Arc::new(MemberSignal {
            key: place.key(),
            is_woken: AtomicBool::new(true),
            set: Arc::clone(&self.woken),
        });
        self.woken.keys().woken.push(place.key());
        place.insert(Member {
            future,
            waker: Waker::from(Arc::clone(&signal)),
            signal,
        });
    }

    /// The caller will certainly call [`Self::poll`] before it returns: what is woken until then needs no other round.
    pub fn expect_poll(&self) {
        self.woken.keys().is_expected = true;
    }

    /// Polls the futures that were woken, each once, and drops those that have ended. What is woken meanwhile wakes the task.
    pub fn poll(&mut self, cx: &mut Context<'_>) {
        self.woken.task.register(cx.waker());
        let mut keys = self.woken.keys();
        keys.is_expected = false;
        std::mem::swap(&mut self.polled, &mut keys.woken);
        drop(keys);
        for key in self.polled.drain(..) {
            // One that has ended may be woken as well, and another one in its place.
            let Some(member) = self.members.get_mut(key) else {
                continue;
            };
            member.signal.is_woken.swap(false, AcqRel);
            let cx = &mut Context::from_waker(&member.waker);
            if Pin::new(&mut member.future).poll(cx).is_ready() {
                self.members.remove(key);
            }
        }
        if self.members.is_empty() && self.members.capacity() > KEPT_ROOM {
            self.members = Slab::new();
            self.polled = Vec::new();
            self.woken.keys().woken.shrink_to(KEPT_ROOM);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::SeqCst;
    use std::task::Context;

    use tokio::sync::{mpsc, oneshot};

    use crate::tasks::Tasks;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, SeqCst);
        }
    }

    /// Numbers below 20,000, sent by another task.
    fn numbers() -> mpsc::Receiver<u32> {
        let (sender, receiver) = mpsc::channel(1);
        let sending = async move {
            for number in 0..20_000 {
                sender.send(number).await.unwrap();
            }
        };
        Tasks::new(1)
            .spawn("sends from another thread", sending)
            .unwrap();
        receiver
    }

    #[test]
    fn wake_up_during_a_poll_repolls_without_the_scheduler() {
        let count = Arc::new(Count::default());
        let waker = Waker::from(Arc::clone(&count));
        let mut rounds = 0;
        let mut outer = Box::pin(together(|cx| {
            rounds += 1;
            if rounds == 5 {
                return Poll::Ready(rounds);
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        }));
        let polled = outer.as_mut().poll(&mut Context::from_waker(&waker));
        assert_eq!(polled, Poll::Ready(5));
        assert_eq!(count.0.load(SeqCst), 0);
    }

    #[test]
    fn endless_wake_ups_let_other_tasks_run() {
        let count = Arc::new(Count::default());
        let waker = Waker::from(Arc::clone(&count));
        let mut outer = Box::pin(together(|cx| {
            cx.waker().wake_by_ref();
            Poll::<()>::Pending
        }));
        assert!(
            outer
                .as_mut()
                .poll(&mut Context::from_waker(&waker))
                .is_pending()
        );
        assert_eq!(count.0.load(SeqCst), 1);
    }

    #[test]
    fn wake_up_between_polls_reaches_the_task() {
        let count = Arc::new(Count::default());
        let waker = Waker::from(Arc::clone(&count));
        let mut inner = None;
        let mut outer = Box::pin(together(|cx| {
            inner = Some(cx.waker().clone());
            Poll::<()>::Pending
        }));
        let mut cx = Context::from_waker(&waker);
        assert!(outer.as_mut().poll(&mut cx).is_pending());
        drop(outer);
        inner.unwrap().wake();
        assert_eq!(count.0.load(SeqCst), 1);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn no_wake_up_of_another_thread_is_lost() {
        let mut receiver = numbers();
        let mut sum = 0_u64;
        together(|cx| {
            while let Poll::Ready(next) = receiver.poll_recv(cx) {
                match next {
                    Some(number) => sum += u64::from(number),
                    None => return Poll::Ready(()),
                }
            }
            Poll::Pending
        })
        .await;
        assert_eq!(sum, 19_999 * 20_000 / 2);
    }

    /// A future that counts its polls, and wakes itself in the first `restless` ones; it ends when told.
    fn counting(
        polls: &Arc<AtomicUsize>,
        restless: usize,
        mut told: oneshot::Receiver<()>,
    ) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let polls = Arc::clone(polls);
        Box::pin(poll_fn(move |cx| {
            if polls.fetch_add(1, SeqCst) < restless {
                cx.waker().wake_by_ref();
            }
            Pin::new(&mut told).poll(cx).map(|_told| ())
        }))
    }

    #[test]
    fn only_woken_futures_are_polled_and_no_idle_round_follows() {
        let count = Arc::new(Count::default());
        let waker = Waker::from(Arc::clone(&count));
        let cx = &mut Context::from_waker(&waker);
        let mut set = PollSet::default();
        let polls: [Arc<AtomicUsize>; 2] = Default::default();
        let [(end, told), (end_other, told_other)] = [(); 2].map(|()| oneshot::channel());
        set.push(counting(&polls[0], 0, told));
        set.push(counting(&polls[1], 0, told_other));
        let seen = |wakes: &Count| {
            let [first, second] = [&polls[0], &polls[1]].map(|polls| polls.load(SeqCst));
            (first, second, wakes.0.load(SeqCst))
        };
        for _again in 0..3 {
            set.poll(cx);
            assert_eq!(seen(&count), (1, 1, 0));
        }
        end.send(()).unwrap();
        assert_eq!(seen(&count), (1, 1, 1));
        set.poll(cx);
        assert_eq!(seen(&count), (2, 1, 1));
        assert!(!set.is_empty());
        set.expect_poll();
        end_other.send(()).unwrap();
        assert_eq!(seen(&count), (2, 1, 1), "the task polls anyway");
        set.poll(cx);
        assert_eq!(seen(&count), (2, 2, 1));
        assert!(set.is_empty());
    }

    #[test]
    fn a_future_that_wakes_itself_is_polled_once_a_poll() {
        let count = Arc::new(Count::default());
        let waker = Waker::from(Arc::clone(&count));
        let cx = &mut Context::from_waker(&waker);
        let mut set = PollSet::default();
        let polls = Arc::default();
        let (_end, told) = oneshot::channel();
        set.push(counting(&polls, 3, told));
        for poll in 1..6 {
            set.poll(cx);
            assert_eq!(polls.load(SeqCst), poll.min(4));
            assert_eq!(count.0.load(SeqCst), poll.min(3));
        }
    }

    #[test]
    fn a_waker_that_outlives_its_future_polls_another_one_at_most() {
        let cx = &mut Context::from_waker(Waker::noop());
        let mut set: PollSet<Pin<Box<dyn Future<Output = ()> + Send>>> = PollSet::default();
        let kept = Arc::new(Mutex::new(None));
        let keeps = Arc::clone(&kept);
        set.push(Box::pin(poll_fn(move |cx| {
            *keeps.lock().unwrap() = Some(cx.waker().clone());
            Poll::Ready(())
        })));
        set.poll(cx);
        assert!(set.is_empty());
        let kept: Waker = kept.lock().unwrap().take().unwrap();
        let polls = Arc::default();
        let (end, told) = oneshot::channel();
        set.push(counting(&polls, 0, told));
        set.poll(cx);
        kept.wake_by_ref();
        kept.wake();
        set.poll(cx);
        assert_eq!(polls.load(SeqCst), 2);
        end.send(()).unwrap();
        set.poll(cx);
        assert!(set.is_empty());
    }

    #[test]
    fn a_burst_leaves_no_memory_behind() {
        let cx = &mut Context::from_waker(Waker::noop());
        let mut set = PollSet::default();
        for _future in 0..10 * KEPT_ROOM {
            set.push(std::future::ready(()));
        }
        set.poll(cx);
        assert!(set.is_empty());
        let room = [
            set.members.capacity(),
            set.polled.capacity(),
            set.woken.keys().woken.capacity(),
        ];
        assert!(room.iter().all(|room| *room <= KEPT_ROOM), "{room:?}");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn no_wake_up_of_a_member_by_another_thread_is_lost() {
        let mut receiver = numbers();
        let mut set = PollSet::default();
        set.push(Box::pin(async move {
            let mut sum = 0_u64;
            while let Some(number) = receiver.recv().await {
                sum += u64::from(number);
            }
            assert_eq!(sum, 19_999 * 20_000 / 2);
        }));
        together(|cx| {
            set.expect_poll();
            set.poll(cx);
            if set.is_empty() {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
    }

    #[tokio::test]
    async fn the_first_of_several_is_removed_and_the_others_go_on() {
        let mut futures = vec![
            Box::pin(std::future::pending()) as Pin<Box<dyn Future<Output = u8>>>,
            Box::pin(async { 1 }),
            Box::pin(async { 2 }),
        ];
        assert_eq!(first_of(&mut futures).await, 1);
        assert_eq!(first_of(&mut futures).await, 2);
        assert_eq!(futures.len(), 1);
        assert!(futures_util::poll!(Box::pin(first_of(&mut futures))).is_pending());
    }
}
