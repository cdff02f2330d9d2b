//! Measurements of the demo's driver: bytes, answers, latencies.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Latencies kept; older ones are dropped.
const SAMPLES_MAX: usize = 4096;

/// Counts since the start.
#[derive(Default)]
pub(super) struct Stats {
    /// Bytes that clients received and compared.
    pub(super) down: AtomicU64,
    /// Bytes that clients sent and the target compared.
    pub(super) up: AtomicU64,
    /// Time to open a tunnel, TLS included where it is used.
    pub(super) dials: Samples,
    /// Time from request to answer on an open tunnel.
    pub(super) answers: Samples,
}

/// The latest latencies.
#[derive(Default)]
pub(super) struct Samples(Mutex<VecDeque<Duration>>);

/// Percentiles of [`Samples`]; `None` without any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Percentiles(Option<(Duration, Duration)>);

impl Samples {
    /// Adds the time since `started`.
    pub(super) fn add(&self, started: Instant) {
        let mut samples = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if samples.len() == SAMPLES_MAX {
            samples.pop_front();
        }
        samples.push_back(started.elapsed());
    }

    /// The 50th and 99th percentiles.
    #[must_use]
    pub(super) fn percentiles(&self) -> Percentiles {
        let samples = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut sorted: Vec<Duration> = samples.iter().copied().collect();
        drop(samples);
        sorted.sort_unstable();
        // Nearest rank: the smallest sample that is at least as large as p per cent of all samples.
        let rank = |p: usize| {
            let rank = (sorted.len() * p).div_ceil(100);
            sorted.get(rank.checked_sub(1)?).copied()
        };
        Percentiles(rank(50).zip(rank(99)))
    }
}

impl Samples {
    /// 50th percentile; `None` without samples.
    #[must_use]
    pub(super) fn median(&self) -> Option<Duration> {
        self.percentiles().0.map(|(half, _most)| half)
    }
}

impl fmt::Display for Percentiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((half, most)) = self.0 else {
            return f.write_str("none yet");
        };
        let millis = |time: Duration| time.as_secs_f64() * 1e3;
        write!(f, "p50 {:.2} ms, p99 {:.2} ms", millis(half), millis(most))
    }
}

/// A number of bytes with a unit that suits it.
#[must_use]
pub(super) fn bytes(count: u64) -> String {
    indicatif::BinaryBytes(count).to_string()
}

/// Bytes per second over the last few seconds: the mean of a load that comes in rounds.
pub(super) struct Rate(VecDeque<(Instant, u64)>);

impl Rate {
    /// Period of the mean.
    const WINDOW: Duration = Duration::from_secs(5);

    /// Starts with this count.
    #[must_use]
    pub(super) fn new(count: u64) -> Self {
        Self([(Instant::now(), count)].into())
    }

    /// The rate, given the count at `now`.
    pub(super) fn per_second(&mut self, now: Instant, count: u64) -> u64 {
        let old = |(at, _): &(Instant, u64)| now.saturating_duration_since(*at) > Self::WINDOW;
        while self.0.len() > 1 && self.0.front().is_some_and(old) {
            self.0.pop_front();
        }
        self.0.push_back((now, count));
        let (at, before) = self.0.front().copied().unwrap_or((now, count));
        let millis = now.saturating_duration_since(at).as_millis().max(1);
        let moved = u128::from(count.saturating_sub(before));
        u64::try_from(moved * 1000 / millis).unwrap_or(u64::MAX)
    }
}

impl Stats {
    /// Bytes down and up.
    #[must_use]
    pub(super) fn moved(&self) -> (u64, u64) {
        (self.down.load(Relaxed), self.up.load(Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples_of_nearest_rank() {
        let times = (1..=200).rev().map(Duration::from_millis).collect();
        let samples = Samples(Mutex::new(times));
        let expected = (Duration::from_millis(100), Duration::from_millis(198));
        assert_eq!(samples.percentiles(), Percentiles(Some(expected)));
    }

    #[test]
    fn one_sample_is_every_percentile_and_none_shows_none_yet() {
        let one = Duration::from_millis(3);
        let samples = Samples(Mutex::new([one].into()));
        assert_eq!(samples.percentiles(), Percentiles(Some((one, one))));
        assert_eq!(Samples::default().percentiles().to_string(), "none yet");
    }

    #[test]
    fn rate_is_the_mean_of_the_window_only() {
        let start = Instant::now();
        let mut rate = Rate([(start, 0)].into());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(rate.per_second(at(2), 2000), 1000);
        assert_eq!(rate.per_second(at(4), 2000), 500);
        assert_eq!(rate.per_second(at(8), 6000), 1000);
    }
}
