//! Measurements of the demo's driver: bytes, answers, latencies.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Counts since the start.
#[derive(Default)]
pub(super) struct Stats {
    /// Bytes that clients received and compared.
    pub(super) down: AtomicU64,
    /// Bytes that clients sent and the target compared.
    pub(super) up: AtomicU64,
    /// Failures of the load that follows acts and checks.
    pub(super) wrong: AtomicU64,
}

/// Latencies.
#[derive(Default)]
pub(super) struct Samples(Vec<Duration>);

impl Samples {
    /// Adds the time since `started`.
    pub(super) fn add(&mut self, started: Instant) {
        self.0.push(started.elapsed());
    }

    /// The 50th and 99th percentiles; `None` without samples.
    pub(super) fn percentiles(&self) -> Option<(Duration, Duration)> {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        // Nearest rank: the smallest sample that is at least as large as p per cent of all samples.
        let rank = |p: usize| {
            let rank = (sorted.len() * p).div_ceil(100);
            sorted.get(rank.checked_sub(1)?).copied()
        };
        rank(50).zip(rank(99))
    }

    /// The percentiles as text.
    pub(super) fn text(&self) -> String {
        self.percentiles().map_or_else(
            || "none yet".to_owned(),
            |(half, most)| format!("p50 {}, p99 {}", millis(half), millis(most)),
        )
    }
}

/// A time in milliseconds.
pub(super) fn millis(time: Duration) -> String {
    format!("{:.2} ms", time.as_secs_f64() * 1e3)
}

/// A number of bytes in MiB.
pub(super) fn mib(count: u64) -> String {
    format!("{} MiB", count >> 20)
}

/// Bytes moved since `started`, and their rate.
pub(super) fn speed(length: u64, started: Instant) -> String {
    let millis = started.elapsed().as_millis().max(1);
    let rate = u64::try_from(u128::from(length) * 1000 / millis).unwrap_or(u64::MAX);
    format!("{} at {}/s", mib(length), mib(rate))
}

impl Stats {
    /// Bytes down and up, as text.
    pub(super) fn moved(&self) -> String {
        let [down, up] = [&self.down, &self.up].map(|count| mib(count.load(Relaxed)));
        format!("{down} down, {up} up")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples_of_nearest_rank() {
        let times = (1..=200).rev().map(Duration::from_millis).collect();
        let samples = Samples(times);
        let expected = (Duration::from_millis(100), Duration::from_millis(198));
        assert_eq!(samples.percentiles(), Some(expected));
    }

    #[test]
    fn one_sample_is_every_percentile_and_none_shows_none_yet() {
        let one = Duration::from_millis(3);
        let samples = Samples(vec![one]);
        assert_eq!(samples.percentiles(), Some((one, one)));
        assert_eq!(Samples::default().text(), "none yet");
    }
}
