//! Futures of one connection in one task. What one of them wakes is polled on the spot: the scheduler would wake another
//! thread for it.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;

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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::SeqCst;
    use std::task::Context;

    use tokio::sync::mpsc;

    use crate::tasks::Tasks;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, SeqCst);
        }
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
        let (sender, mut receiver) = mpsc::channel::<u32>(1);
        let tasks = Tasks::new(1);
        let sending = async move {
            for number in 0..20_000 {
                sender.send(number).await.unwrap();
            }
        };
        tasks.spawn("sends from another thread", sending).unwrap();
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
}
