//! Bounds how many lookups run at once. A lookup that gets no answer yields its slot to one that waits.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, Semaphore, SemaphorePermit};
use tokio::time::{Instant, sleep};

use super::ResolveError;

/// After this time a lookup yields its slot when another one waits: a name server that is alive answers sooner, and names of a
/// dead one must not block all others until their callers give up.
const PATIENCE: Duration = Duration::from_millis(500);
/// The same where name servers are slow: this multiple of the time that the last answer took, up to the maximum.
const PATIENCE_FACTOR: u32 = 4;
const PATIENCE_MAX: Duration = Duration::from_secs(2);

/// Slots for lookups. Where no name server answers, as many lookups as there are slots start in every [`PATIENCE`].
pub(super) struct YieldingSlots {
    slots: Semaphore,
    /// Numbers of the waiting lookups for which no running one has yielded.
    waiters: Mutex<VecDeque<u64>>,
    serial: AtomicU64,
    /// Notified once for each waiter. The running lookup that listens longest is woken.
    wanted: Notify,
    /// Time that the last answer took, in milliseconds.
    last_answer: AtomicU64,
}

impl YieldingSlots {
    pub(super) fn new(slots: usize) -> Self {
        Self {
            slots: Semaphore::new(slots),
            waiters: Mutex::default(),
            serial: AtomicU64::new(0),
            wanted: Notify::new(),
            last_answer: AtomicU64::new(0),
        }
    }

    /// Runs a lookup once there is a slot; slots are given in the order of the calls. A dropped call frees its slot.
    ///
    /// # Errors
    /// The failure of the lookup, or [`ResolveError::TimedOut`] when it yielded its slot.
    pub(super) async fn run<T>(
        &self,
        lookup: impl Future<Output = Result<T, ResolveError>>,
    ) -> Result<T, ResolveError> {
        let _slot = self.slot().await?;
        let began = Instant::now();
        let answer = tokio::select! {
            biased;
            answer = lookup => answer,
            () = self.has_to_yield() => return Err(ResolveError::TimedOut),
        };
        if answer.is_ok() {
            let took = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
            self.last_answer.store(took, Relaxed);
        }
        answer
    }

    async fn slot(&self) -> Result<SemaphorePermit<'_>, ResolveError> {
        if let Ok(slot) = self.slots.try_acquire() {
            return Ok(slot);
        }
        let _waiter = Waiter::new(self);
        let slot = self.slots.acquire().await;
        slot.map_err(|_closed| ResolveError::TimedOut)
    }

    /// Ready once this lookup has had its time and there is a waiter for which no other lookup has yielded.
    async fn has_to_yield(&self) {
        let last_answer = Duration::from_millis(self.last_answer.load(Relaxed));
        let patience = last_answer.saturating_mul(PATIENCE_FACTOR);
        sleep(patience.clamp(PATIENCE, PATIENCE_MAX)).await;
        while self.waiters().pop_front().is_none() {
            self.wanted.notified().await;
        }
    }

    fn waiters(&self) -> MutexGuard<'_, VecDeque<u64>> {
        // Nothing panics while it is held.
        self.waiters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A lookup without a slot.
struct Waiter<'a>(&'a YieldingSlots, u64);

impl<'a> Waiter<'a> {
    fn new(limit: &'a YieldingSlots) -> Self {
        let number = limit.serial.fetch_add(1, Relaxed);
        limit.waiters().push_back(number);
        limit.wanted.notify_one();
        Self(limit, number)
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.0.waiters().retain(|number| *number != self.1);
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::sync::Arc;

    use tokio::task::JoinSet;
    use tokio::time::Instant;

    use super::*;

    type Ended = Result<&'static str, ResolveError>;

    /// Starts a lookup that takes that many seconds, or forever. It yields its name, its result and its end in
    /// milliseconds.
    fn start(
        limit: &Arc<YieldingSlots>,
        lookups: &mut JoinSet<(&'static str, Ended, u128)>,
        name: &'static str,
        seconds: Option<u64>,
    ) {
        let (limit, zero) = (Arc::clone(limit), Instant::now());
        lookups.spawn(async move {
            let lookup = async {
                match seconds {
                    Some(seconds) => sleep(Duration::from_secs(seconds)).await,
                    None => pending().await,
                }
                Ok(name)
            };
            let ended = limit.run(lookup).await;
            (name, ended, zero.elapsed().as_millis())
        });
    }

    #[tokio::test(start_paused = true)]
    async fn a_lookup_without_an_answer_yields_when_another_waits() {
        let limit = Arc::new(YieldingSlots::new(1));
        let mut lookups = JoinSet::new();
        start(&limit, &mut lookups, "dead", None);
        tokio::task::yield_now().await;
        start(&limit, &mut lookups, "good", Some(0));
        let first = lookups.join_next().await.unwrap().unwrap();
        assert_eq!(first, ("dead", Err(ResolveError::TimedOut), 500));
        let second = lookups.join_next().await.unwrap().unwrap();
        assert_eq!((second.0, second.1), ("good", Ok("good")));
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_lookup_goes_on_while_none_waits() {
        let limit = Arc::new(YieldingSlots::new(2));
        let mut lookups = JoinSet::new();
        start(&limit, &mut lookups, "slow", Some(60));
        start(&limit, &mut lookups, "good", Some(1));
        let first = lookups.join_next().await.unwrap().unwrap();
        assert_eq!(first, ("good", Ok("good"), 1000));
        let second = lookups.join_next().await.unwrap().unwrap();
        assert_eq!(second, ("slow", Ok("slow"), 60_000));
    }

    /// Limit (times): An unanswered lookup while another one waits | ends after 500 ms, or 4 times the last answer, at
    /// most 2 s
    #[tokio::test(start_paused = true)]
    async fn a_waiter_ends_one_of_the_lookups_that_began_together() {
        let limit = Arc::new(YieldingSlots::new(3));
        let mut lookups = JoinSet::new();
        for name in ["first", "second", "third"] {
            start(&limit, &mut lookups, name, None);
        }
        tokio::task::yield_now().await;
        start(&limit, &mut lookups, "good", Some(1));
        let first = lookups.join_next().await.unwrap().unwrap();
        assert_eq!((first.1, first.2), (Err(ResolveError::TimedOut), 500));
        let good = lookups.join_next().await.unwrap().unwrap();
        assert_eq!((good.0, good.1), ("good", Ok("good")));
        sleep(Duration::from_secs(60)).await;
        assert!(lookups.try_join_next().is_none(), "the others go on");
    }

    /// Limit (times): An unanswered lookup while another one waits
    #[tokio::test(start_paused = true)]
    async fn slow_name_servers_have_more_time() {
        let limit = Arc::new(YieldingSlots::new(1));
        let mut lookups = JoinSet::new();
        start(&limit, &mut lookups, "slow", Some(1));
        lookups.join_next().await.unwrap().unwrap().1.unwrap();
        start(&limit, &mut lookups, "dead", None);
        tokio::task::yield_now().await;
        start(&limit, &mut lookups, "good", Some(0));
        let first = lookups.join_next().await.unwrap().unwrap();
        assert_eq!(first, ("dead", Err(ResolveError::TimedOut), 2000));
    }

    #[tokio::test(start_paused = true)]
    async fn a_waiter_ends_only_the_oldest_lookup() {
        let limit = Arc::new(YieldingSlots::new(3));
        let mut lookups = JoinSet::new();
        for name in ["first", "second", "third"] {
            start(&limit, &mut lookups, name, None);
            sleep(Duration::from_millis(100)).await;
        }
        sleep(Duration::from_secs(2)).await;
        start(&limit, &mut lookups, "good", Some(0));
        let first = lookups.join_next().await.unwrap().unwrap();
        assert_eq!((first.0, first.1), ("first", Err(ResolveError::TimedOut)));
        let good = lookups.join_next().await.unwrap().unwrap();
        assert_eq!((good.0, good.1), ("good", Ok("good")));
        sleep(Duration::from_secs(60)).await;
        assert!(lookups.try_join_next().is_none(), "the others go on");
    }
}
