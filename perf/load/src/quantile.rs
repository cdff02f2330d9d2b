//! Exact quantiles: every sample is kept, none is put into a bucket.

use std::time::Duration;

/// Durations of one measurement, sorted.
#[derive(Debug)]
pub(crate) struct Sorted(Vec<Duration>);

impl Sorted {
    /// Sorts the samples.
    pub(crate) fn new(mut samples: Vec<Duration>) -> Self {
        samples.sort_unstable();
        Self(samples)
    }

    /// Number of samples.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The smallest sample that is at least as large as the share `q` of all samples, in microseconds.
    pub(crate) fn micros(&self, q: f64) -> Option<f64> {
        // The epsilon keeps 0.99 of 100 samples at the 99th, despite binary fractions.
        let below = ((q * self.0.len() as f64 - 1e-9).ceil() - 1.0).max(0.0);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "not negative, and no larger than a length in memory"
        )]
        let index = below as usize;
        self.0.get(index).map(|sample| sample.as_secs_f64() * 1e6)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sorted(micros: impl IntoIterator<Item = u64>) -> Sorted {
        Sorted::new(micros.into_iter().map(Duration::from_micros).collect())
    }

    #[test]
    fn quantiles_are_samples_by_nearest_rank() {
        let hundred = sorted((1..=100).rev());
        for (q, wanted) in [
            (0.0, 1.0),
            (0.5, 50.0),
            (0.99, 99.0),
            (0.991, 100.0),
            (1.0, 100.0),
        ] {
            assert_eq!(hundred.micros(q), Some(wanted), "quantile {q}");
        }
        assert_eq!(sorted([7]).micros(0.99), Some(7.0));
    }

    #[test]
    fn empty_samples_have_no_quantile() {
        assert_eq!(sorted([]).micros(0.5), None);
    }
}
