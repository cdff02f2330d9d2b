//! Turns at the name servers: how many lookups are under way at once, and which one makes room for the next.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, Semaphore, SemaphorePermit};
use tokio::time::{Instant, sleep};

use super::ResolveError;

/// A lookup that has had this long makes room when another one waits: a name server that is alive answers sooner, and
/// names of a dead one must not keep all others waiting until their callers give up.
const PATIENCE: Duration = Duration::from_millis(500);
/// The same where name servers are slow: so many times what the last answer took, at most so long.
const PATIENCE_SHARE: u32 = 4;
const PATIENCE_MAX: Duration = Duration::from_secs(2);

/// Places for lookups. Where nobody answers, lookups can come at `places` in every [`PATIENCE`].
pub(super) struct Turns {
    places: Semaphore,
    /// A place is wanted for each of these, which are the lookups that have none, by number.
    wishes: Mutex<VecDeque<u64>>,
    serial: AtomicU64,
    /// Told once for each wish. Who waits here longest hears it.
    wanted: Notify,
    /// What the last answer took, in milliseconds.
    usual: AtomicU64,
}

impl Turns {
    pub(super) fn new(places: usize) -> Self {
        Self {
            places: Semaphore::new(places),
            wishes: Mutex::default(),
            serial: AtomicU64::new(0),
            wanted: Notify::new(),
            usual: AtomicU64::new(0),
        }
    }

    /// Makes a lookup once there is a place; those that wait get theirs in the order they came. A dropped call frees it.
    ///
    /// # Errors
    /// The failure of the lookup, or [`ResolveError::TimedOut`] when it had to make room.
    pub(super) async fn run<T>(
        &self,
        lookup: impl Future<Output = Result<T, ResolveError>>,
    ) -> Result<T, ResolveError> {
        let _place = self.place().await?;
        let began = Instant::now();
        let answer = tokio::select! {
            biased;
            answer = lookup => answer,
            () = self.crowded_out() => return Err(ResolveError::TimedOut),
        };
        if answer.is_ok() {
            let took = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
            self.usual.store(took, Relaxed);
        }
        answer
    }

    async fn place(&self) -> Result<SemaphorePermit<'_>, ResolveError> {
        if let Ok(place) = self.places.try_acquire() {
            return Ok(place);
        }
        let _wish = Wish::of(self);
        let place = self.places.acquire().await;
        place.map_err(|_closed| ResolveError::TimedOut)
    }

    /// Ready once this lookup has had its time and its place is wanted, by one that takes no other for it.
    async fn crowded_out(&self) {
        let usual = Duration::from_millis(self.usual.load(Relaxed));
        sleep(
            usual
                .saturating_mul(PATIENCE_SHARE)
                .clamp(PATIENCE, PATIENCE_MAX),
        )
        .await;
        while self.wishes().pop_front().is_none() {
            self.wanted.notified().await;
        }
    }

    fn wishes(&self) -> MutexGuard<'_, VecDeque<u64>> {
        // Nothing panics while it is held.
        self.wishes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Of a lookup without a place.
struct Wish<'a>(&'a Turns, u64);

impl<'a> Wish<'a> {
    fn of(turns: &'a Turns) -> Self {
        let number = turns.serial.fetch_add(1, Relaxed);
        turns.wishes().push_back(number);
        turns.wanted.notify_one();
        Self(turns, number)
    }
}

impl Drop for Wish<'_> {
    fn drop(&mut self) {
        self.0.wishes().retain(|number| *number != self.1);
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

    /// Starts a lookup that takes so many seconds; none: for ever. Gives its name and when it was over, in ms.
    fn start(
        turns: &Arc<Turns>,
        lookups: &mut JoinSet<(&'static str, Ended, u128)>,
        name: &'static str,
        seconds: Option<u64>,
    ) {
        let (turns, zero) = (Arc::clone(turns), Instant::now());
        lookups.spawn(async move {
            let lookup = async {
                match seconds {
                    Some(seconds) => sleep(Duration::from_secs(seconds)).await,
                    None => pending().await,
                }
                Ok(name)
            };
            let ended = turns.run(lookup).await;
            (name, ended, zero.elapsed().as_millis())
        });
    }

    #[tokio::test(start_paused = true)]
    async fn a_lookup_without_an_answer_makes_room_when_another_waits() {
        let turns = Arc::new(Turns::new(1));
        let mut lookups = JoinSet::new();
        start(&turns, &mut lookups, "dead", None);
        tokio::task::yield_now().await;
        start(&turns, &mut lookups, "good", Some(0));
        let first = lookups.join_next().await.unwrap().unwrap();
        assert_eq!(first, ("dead", Err(ResolveError::TimedOut), 500));
        let second = lookups.join_next().await.unwrap().unwrap();
        assert_eq!((second.0, second.1), ("good", Ok("good")));
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_lookup_is_left_alone_while_nobody_waits() {
        let turns = Arc::new(Turns::new(2));
        let mut lookups = JoinSet::new();
        start(&turns, &mut lookups, "slow", Some(60));
        start(&turns, &mut lookups, "good", Some(1));
        let first = lookups.join_next().await.unwrap().unwrap();
        assert_eq!(first, ("good", Ok("good"), 1000));
        let second = lookups.join_next().await.unwrap().unwrap();
        assert_eq!(second, ("slow", Ok("slow"), 60_000));
    }

    /// Limit (times): An unanswered lookup while another one waits | ends after 500 ms, or 4 times the last answer, at
    /// most 2 s
    #[tokio::test(start_paused = true)]
    async fn one_that_waits_ends_one_of_those_that_began_together() {
        let turns = Arc::new(Turns::new(3));
        let mut lookups = JoinSet::new();
        for name in ["first", "second", "third"] {
            start(&turns, &mut lookups, name, None);
        }
        tokio::task::yield_now().await;
        start(&turns, &mut lookups, "good", Some(1));
        let first = lookups.join_next().await.unwrap().unwrap();
        assert_eq!((first.1, first.2), (Err(ResolveError::TimedOut), 500));
        let good = lookups.join_next().await.unwrap().unwrap();
        assert_eq!((good.0, good.1), ("good", Ok("good")));
        sleep(Duration::from_secs(60)).await;
        assert!(lookups.try_join_next().is_none(), "the others go on");
    }

    /// Limit (times): An unanswered lookup while another one waits
    #[tokio::test(start_paused = true)]
    async fn slow_name_servers_are_given_more_time() {
        let turns = Arc::new(Turns::new(1));
        let mut lookups = JoinSet::new();
        start(&turns, &mut lookups, "slow", Some(1));
        lookups.join_next().await.unwrap().unwrap().1.unwrap();
        start(&turns, &mut lookups, "dead", None);
        tokio::task::yield_now().await;
        start(&turns, &mut lookups, "good", Some(0));
        let first = lookups.join_next().await.unwrap().unwrap();
        assert_eq!(first, ("dead", Err(ResolveError::TimedOut), 2000));
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_waits_takes_one_place_and_the_oldest_gives_it() {
        let turns = Arc::new(Turns::new(3));
        let mut lookups = JoinSet::new();
        for name in ["first", "second", "third"] {
            start(&turns, &mut lookups, name, None);
            sleep(Duration::from_millis(100)).await;
        }
        sleep(Duration::from_secs(2)).await;
        start(&turns, &mut lookups, "good", Some(0));
        let first = lookups.join_next().await.unwrap().unwrap();
        assert_eq!((first.0, first.1), ("first", Err(ResolveError::TimedOut)));
        let good = lookups.join_next().await.unwrap().unwrap();
        assert_eq!((good.0, good.1), ("good", Ok("good")));
        sleep(Duration::from_secs(60)).await;
        assert!(lookups.try_join_next().is_none(), "the others go on");
    }
}
