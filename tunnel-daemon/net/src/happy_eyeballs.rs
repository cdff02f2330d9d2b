//! Happy eyeballs (RFC 8305): attempts at several places, the next of which starts while earlier ones have not answered.
//! Connects race over the addresses of a name, DNS queries over name servers.

use std::pin::Pin;
use std::time::Duration;
use std::vec;

use futures_util::future::{Join, Ready, join, ready};
use tokio::time::sleep;

use crate::poll_set::first_of;

/// Time that one attempt has before the next one starts beside it; Go's value.
const STAGGER: Duration = Duration::from_millis(300);

/// An attempt that is under way, and its place.
type Attempt<P, F> = Pin<Box<Join<Ready<P>, F>>>;

/// Attempts at several places, in order: the next one starts 300 ms after the last or as soon as one is done.
/// Dropping it drops the attempts that are under way.
pub struct Race<P, A, F: Future> {
    waiting: vec::IntoIter<P>,
    attempt: A,
    running: Vec<Attempt<P, F>>,
}

impl<P, A, F> Race<P, A, F>
where
    P: Clone,
    A: Fn(P) -> F,
    F: Future,
{
    /// Nothing starts before [`Self::next`] is called.
    #[must_use]
    pub fn new(places: Vec<P>, attempt: A) -> Self {
        Self {
            waiting: places.into_iter(),
            attempt,
            running: Vec::new(),
        }
    }

    /// Starts one more attempt and waits for the next outcome, good or bad; `None` once each place had one. Between two
    /// calls, and after a dropped one, running attempts stay but are not polled.
    pub async fn next(&mut self) -> Option<(P, F::Output)> {
        loop {
            match self.waiting.next() {
                Some(place) => {
                    let attempt = (self.attempt)(place.clone());
                    self.running.push(Box::pin(join(ready(place), attempt)));
                }
                None if self.running.is_empty() => return None,
                None => (),
            }
            let more = self.waiting.len() > 0;
            tokio::select! {
                biased;
                done = first_of(&mut self.running) => return Some(done),
                () = sleep(STAGGER), if more => (),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::time::Instant;

    use super::*;

    /// Attempt 1 never ends, attempt 2 ends at once, attempt 3 ends a second after its start.
    #[tokio::test(start_paused = true)]
    async fn a_race_continues_after_an_outcome_until_the_last_attempt_ends() {
        let start = Instant::now();
        let attempt = |place: u8| async move {
            match place {
                1 => pending().await,
                2 => (),
                _ => sleep(Duration::from_secs(1)).await,
            }
        };
        let mut race = Race::new(vec![1, 2, 3], attempt);
        assert_eq!(race.next().await, Some((2, ())));
        assert_eq!(start.elapsed().as_millis(), 300);
        assert_eq!(race.next().await, Some((3, ())));
        assert_eq!(start.elapsed().as_millis(), 1300);
        let rest = tokio::time::timeout(Duration::from_secs(60), race.next());
        assert!(rest.await.is_err(), "the first is still under way");

        let mut race = Race::new(vec![2, 2], attempt);
        assert_eq!(race.next().await, Some((2, ())));
        assert_eq!(race.next().await, Some((2, ())));
        assert_eq!(race.next().await, None);
    }
}
