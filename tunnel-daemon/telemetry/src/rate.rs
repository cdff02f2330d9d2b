//! A token bucket whose time is an argument, so that tests are deterministic, and a limit on log lines built on it.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use prometheus::IntCounter;

/// Admits `burst` events at once and `per_second` on average.
#[derive(Debug)]
pub struct TokenBucket {
    /// Cost of one event, in refill time.
    cost: Duration,
    /// Limit on saved refill time.
    capacity: Duration,
    saved: Duration,
    refilled: Instant,
}

impl TokenBucket {
    /// A full bucket. A rate of 0 admits nothing.
    #[must_use]
    pub fn new(per_second: u32, burst: u32, now: Instant) -> Self {
        let cost = Duration::from_secs(1)
            .checked_div(per_second)
            .unwrap_or(Duration::MAX);
        let capacity = if per_second == 0 {
            Duration::ZERO
        } else {
            cost.saturating_mul(burst.max(1))
        };
        Self {
            cost,
            capacity,
            saved: capacity,
            refilled: now,
        }
    }

    /// Whether the bucket is full, and so equals a new one.
    #[must_use]
    pub fn is_full(&self, now: Instant) -> bool {
        self.saved_at(now) == self.capacity
    }

    fn saved_at(&self, now: Instant) -> Duration {
        let passed = now.saturating_duration_since(self.refilled);
        self.saved.saturating_add(passed).min(self.capacity)
    }

    /// Takes one token if there is one.
    pub fn try_take(&mut self, now: Instant) -> bool {
        self.saved = self.saved_at(now);
        self.refilled = self.refilled.max(now);
        match self.saved.checked_sub(self.cost) {
            Some(left) => {
                self.saved = left;
                true
            }
            None => false,
        }
    }
}

/// A limit on log lines of one kind. Suppressed lines are counted, and the next line can report their number.
#[derive(Debug)]
pub struct EventLimit {
    /// `None`: every line is written.
    state: Option<Mutex<LimitState>>,
    suppressed_total: IntCounter,
}

#[derive(Debug)]
struct LimitState {
    bucket: TokenBucket,
    /// Lines suppressed since the last written line.
    suppressed: u64,
}

impl EventLimit {
    /// At most `per_second` lines per second on average and `burst` at once; 0 per second means no limit.
    #[must_use]
    pub fn new(per_second: u32, burst: u32, suppressed_total: IntCounter) -> Self {
        let state = (per_second > 0).then(|| {
            Mutex::new(LimitState {
                bucket: TokenBucket::new(per_second, burst, Instant::now()),
                suppressed: 0,
            })
        });
        Self {
            state,
            suppressed_total,
        }
    }

    /// Number of lines suppressed before this one; `None` if this one is to be suppressed, too.
    #[must_use]
    pub fn admit(&self) -> Option<u64> {
        self.admit_at(Instant::now())
    }

    /// Like [`Self::admit`], at `now`.
    #[must_use]
    pub fn admit_at(&self, now: Instant) -> Option<u64> {
        let Some(state) = &self.state else {
            return Some(0);
        };
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.bucket.try_take(now) {
            return Some(std::mem::take(&mut state.suppressed));
        }
        state.suppressed = state.suppressed.saturating_add(1);
        drop(state);
        self.suppressed_total.inc();
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(per_second: u32, burst: u32) -> EventLimit {
        EventLimit::new(per_second, burst, IntCounter::new("c", "c").unwrap())
    }

    /// Limit (operations): Log lines about failed dials | 10 per second, 50 at once
    #[test]
    fn suppressed_lines_are_reported_with_the_next_one() {
        let limit = limit(1, 2);
        let now = Instant::now();
        let admitted: Vec<_> = (0..5).map(|_| limit.admit_at(now)).collect();
        assert_eq!(admitted, [Some(0), Some(0), None, None, None]);
        let later = now + Duration::from_secs(2);
        assert_eq!(limit.admit_at(later), Some(3));
        assert_eq!(limit.admit_at(later), Some(0));
        assert_eq!(limit.suppressed_total.get(), 3);
    }

    #[test]
    fn limit_of_zero_suppresses_no_line() {
        let limit = limit(0, 1);
        let now = Instant::now();
        assert!((0..1_000).all(|_| limit.admit_at(now) == Some(0)));
        assert_eq!(limit.suppressed_total.get(), 0);
    }

    fn taken(bucket: &mut TokenBucket, tries: usize, now: Instant) -> usize {
        (0..tries).filter(|_| bucket.try_take(now)).count()
    }

    #[test]
    fn burst_passes_at_once_and_no_more() {
        let now = Instant::now();
        let mut bucket = TokenBucket::new(100, 200, now);
        assert_eq!(taken(&mut bucket, 1_000, now), 200);
    }

    #[test]
    fn refill_follows_the_rate_up_to_the_burst() {
        let now = Instant::now();
        let mut bucket = TokenBucket::new(100, 200, now);
        taken(&mut bucket, 200, now);
        let later = now + Duration::from_millis(500);
        assert_eq!(taken(&mut bucket, 1_000, later), 50);
        assert_eq!(
            taken(&mut bucket, 1_000, later + Duration::from_secs(3_600)),
            200
        );
    }

    #[test]
    fn bucket_is_full_again_after_a_complete_refill() {
        let now = Instant::now();
        let mut bucket = TokenBucket::new(100, 200, now);
        assert!(bucket.is_full(now));
        assert!(bucket.try_take(now));
        assert!(!bucket.is_full(now + Duration::from_millis(9)));
        assert!(bucket.is_full(now + Duration::from_millis(10)));
    }

    #[test]
    fn tries_between_refills_lose_no_fraction_of_a_token() {
        let now = Instant::now();
        let mut bucket = TokenBucket::new(10, 1, now);
        assert!(bucket.try_take(now));
        let passed = (1..=1_000_u64)
            .filter(|ms| bucket.try_take(now + Duration::from_millis(*ms)))
            .count();
        assert_eq!(passed, 10);
    }

    #[test]
    fn rate_of_zero_lets_nothing_through() {
        let now = Instant::now();
        let mut bucket = TokenBucket::new(0, 5, now);
        assert!(!bucket.try_take(now + Duration::from_secs(1_000)));
    }

    #[test]
    fn clock_read_earlier_by_another_thread_is_harmless() {
        let now = Instant::now();
        let mut bucket = TokenBucket::new(1, 1, now + Duration::from_secs(5));
        assert!(bucket.try_take(now));
        assert!(!bucket.try_take(now + Duration::from_secs(5)));
    }
}
