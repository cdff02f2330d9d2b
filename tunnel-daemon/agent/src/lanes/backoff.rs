//! Backoff for attempts to open lanes.

use std::time::Duration;

use tokio::time::Instant;

/// Failed attempts in a row before a backoff. Also the attempts per wanted idle lane that may lead to another server without
/// need of a lane: behind a balancer with ten servers, nine of ten do.
const MISSES_MAX: u32 = 3;
/// First backoff; each further one is twice as long.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// Longest backoff.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// Pause of an agent that had no descriptors left for a lane that it opened. Always the same: servers are not the cause, and the
/// shortage may end at any time.
const PAUSE_SHORT: Duration = Duration::from_secs(5);

/// Period after failures during which no lane is opened.
#[derive(Default)]
pub(super) struct Backoff {
    misses: u32,
    /// Attempts that led to other servers since the last one that led here, or since the last backoff for such attempts.
    misrouted: usize,
    length: Duration,
    until: Option<Instant>,
    /// A lane was bound since the last failed attempt.
    gained: bool,
    /// The first of the failures in a row.
    since: Option<Instant>,
    /// The log has a line about these failures.
    told: bool,
}

impl Backoff {
    pub(super) fn note(&mut self, success: bool) {
        if success {
            *self = Self::default();
            return;
        }
        self.gained = false;
        self.since.get_or_insert_with(Instant::now);
        self.misses += 1;
        if self.misses >= MISSES_MAX {
            self.begin();
        }
    }

    /// A lane was bound that this agent has no descriptors for.
    pub(super) fn short(&mut self) {
        self.until = self.until.max(Some(Instant::now() + PAUSE_SHORT));
    }

    /// An attempt led to another server that needs no lane; `wanted` idle lanes are wanted here.
    pub(super) fn misrouted(&mut self, wanted: usize) {
        self.misrouted += 1;
        if self.misrouted >= wanted.max(1).saturating_mul(MISSES_MAX as usize) {
            self.misrouted = 0;
            self.begin();
        }
    }

    /// Whether a failure should be in the log: once in a row of failures. A server that goes away refuses lanes a moment before its
    /// link ends, which is no news.
    pub(super) fn is_news(&mut self) -> bool {
        let lasts = self.since.is_some_and(|since| since.elapsed() >= PAUSE_MIN);
        lasts && !std::mem::replace(&mut self.told, true)
    }

    /// Whether the log has a line about the last failures.
    pub(super) fn is_told(&self) -> bool {
        self.told
    }

    fn begin(&mut self) {
        self.length = (self.length * 2).clamp(PAUSE_MIN, PAUSE_MAX);
        // Up to a tenth is added at random, so that agents that lost the same server do not return together.
        let spread = self.length.mul_f64(rand::random::<f64>() / 10.0);
        self.until = Some(Instant::now() + self.length + spread);
    }

    /// A lane was bound. Whether it lasts is not known yet.
    pub(super) fn gain(&mut self) {
        self.gained = true;
        self.misrouted = 0;
    }

    /// Whether a lane was bound since the last failed attempt or the last success.
    pub(super) fn has_gained(&self) -> bool {
        self.gained
    }

    /// Attempts allowed at once, of `most`: after a backoff a single one, to see whether the server accepts lanes.
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
    async fn backoff_starts_after_three_failures_and_doubles_to_a_minute() {
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

    /// Limit (times): Backoff of lanes while the agent is short of descriptors | 5 s
    #[tokio::test(start_paused = true)]
    async fn a_shortage_of_descriptors_pauses_for_the_same_time_each_time() {
        let mut backoff = Backoff::default();
        for _shortage in 0..10 {
            backoff.short();
            assert_eq!(backoff.left(), Some(PAUSE_SHORT));
            assert_eq!(backoff.at_once(4), 4, "no server is blamed");
            tokio::time::advance(PAUSE_SHORT).await;
            assert!(!backoff.lasts());
        }
        for _miss in 0..8 {
            backoff.note(false);
        }
        let of_server = backoff.left();
        assert!(of_server > Some(PAUSE_SHORT));
        backoff.short();
        assert_eq!(
            backoff.left(),
            of_server,
            "a server's pause is not cut short"
        );
    }

    /// Limit (times): Backoff of lanes after three failures in a row
    #[tokio::test(start_paused = true)]
    async fn three_misrouted_lanes_per_wanted_lane_start_a_backoff() {
        let mut backoff = Backoff::default();
        for wanted in [4, 1, 0] {
            for _stray in 1..3 * wanted.max(1) {
                backoff.misrouted(wanted);
            }
            assert!(!backoff.lasts(), "{wanted} wanted");
            // The balancer routes an attempt to this server from time to time.
            backoff.gain();
            for _stray in 1..3 * wanted.max(1) {
                backoff.misrouted(wanted);
            }
            assert!(!backoff.lasts(), "{wanted} wanted");
            backoff.misrouted(wanted);
            assert!(backoff.lasts(), "{wanted} wanted");
            // Strays do not limit the number of concurrent attempts.
            assert_eq!(backoff.at_once(4), 4);
            tokio::time::advance(PAUSE_MAX * 2).await;
        }
    }

    /// A server that goes away refuses lanes before its link ends: only failures that last are news, and only once in a row.
    #[tokio::test(start_paused = true)]
    async fn failures_in_a_row_are_news_once_they_last() {
        let mut backoff = Backoff::default();
        for _row in 0..2 {
            for _failure in 0..MISSES_MAX {
                backoff.note(false);
                assert!(!backoff.is_news());
            }
            tokio::time::advance(PAUSE_MIN).await;
            backoff.note(false);
            assert!(backoff.is_news() && backoff.is_told());
            backoff.note(false);
            assert!(!backoff.is_news());
            backoff.note(true);
            assert!(!backoff.is_told());
        }
    }
}
