//! When attempts to open lanes are given up for a while.

use std::time::Duration;

use tokio::time::Instant;

/// Attempts in a row that may fail before there is a pause; and so many for each idle lane that is wanted may lead to another
/// server that needs none: behind a balancer of ten servers nine of ten do.
const MISSES_MAX: u32 = 3;
/// First pause after too many of them; each further one is twice as long.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// Longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// The time after failures during which no lane is tried.
#[derive(Default)]
pub(super) struct Backoff {
    misses: u32,
    /// Attempts that led to other servers since the last that led here, or the last pause for them.
    strays: usize,
    length: Duration,
    until: Option<Instant>,
    /// A lane was bound since the last attempt that failed.
    gained: bool,
}

impl Backoff {
    pub(super) fn note(&mut self, success: bool) {
        if success {
            *self = Self::default();
            return;
        }
        self.gained = false;
        self.misses += 1;
        if self.misses >= MISSES_MAX {
            self.begin();
        }
    }

    /// An attempt led to another server, which needs no lane; so many idle ones are `wanted` here.
    pub(super) fn stray(&mut self, wanted: usize) {
        self.strays += 1;
        if self.strays >= wanted.max(1).saturating_mul(MISSES_MAX as usize) {
            self.strays = 0;
            self.begin();
        }
    }

    fn begin(&mut self) {
        self.length = (self.length * 2).clamp(PAUSE_MIN, PAUSE_MAX);
        // A tenth at random, so that agents which lost the same server do not come back together.
        let spread = self.length.mul_f64(rand::random::<f64>() / 10.0);
        self.until = Some(Instant::now() + self.length + spread);
    }

    /// A lane was bound. What comes of it is not known yet.
    pub(super) fn gain(&mut self) {
        self.gained = true;
        self.strays = 0;
    }

    /// Whether one was since the last attempt that failed, or the last success.
    pub(super) fn has_gained(&self) -> bool {
        self.gained
    }

    /// How many attempts there may be at once, of `most`: one that follows a pause shows whether more are worth it.
    pub(super) fn at_once(&self, most: usize) -> usize {
        if self.misses < MISSES_MAX { most } else { 1 }
    }

    pub(super) fn left(&self) -> Option<Duration> {
        let left = self.until?.saturating_duration_since(Instant::now());
        (left > Duration::ZERO).then_some(left)
    }

    pub(super) fn lasts(&self) -> bool {
        self.left().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Limit (times): Backoff of lanes after three failures in a row | 1 s, doubled up to 60 s
    #[tokio::test(start_paused = true)]
    async fn three_misses_in_a_row_make_a_pause_that_doubles_up_to_a_minute() {
        let mut backoff = Backoff::default();
        backoff.note(false);
        backoff.note(false);
        assert!(!backoff.lasts());
        assert_eq!(backoff.at_once(4), 4);
        backoff.note(true);
        let mut lengths = Vec::new();
        for _miss in 0..12 {
            backoff.note(false);
            lengths.push(backoff.left().map_or(0, |left| left.as_millis() / 1000));
            tokio::time::advance(PAUSE_MAX * 2).await;
        }
        assert_eq!(lengths[..6], [0, 0, 1, 2, 4, 8]);
        assert_eq!(backoff.at_once(4), 1);
        assert!(lengths[9..].iter().all(|length| (60..66).contains(length)));
    }

    /// Limit (times): Backoff of lanes after three failures in a row
    #[tokio::test(start_paused = true)]
    async fn three_strays_for_each_lane_that_is_wanted_make_a_pause() {
        let mut backoff = Backoff::default();
        for wanted in [4, 1, 0] {
            for _stray in 1..3 * wanted.max(1) {
                backoff.stray(wanted);
            }
            assert!(!backoff.lasts(), "{wanted} wanted");
            // The balancer leads here now and then.
            backoff.gain();
            for _stray in 1..3 * wanted.max(1) {
                backoff.stray(wanted);
            }
            assert!(!backoff.lasts(), "{wanted} wanted");
            backoff.stray(wanted);
            assert!(backoff.lasts(), "{wanted} wanted");
            // They say nothing of how many may be tried at once.
            assert_eq!(backoff.at_once(4), 4);
            tokio::time::advance(PAUSE_MAX * 2).await;
        }
    }
}
