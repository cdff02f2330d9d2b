//! Output of a run: numbers by name.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

/// Output of one run of a load tool.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Sample {
    /// Numbers by name.
    pub values: BTreeMap<String, f64>,
}

impl Sample {
    /// Records a number.
    pub fn value(&mut self, name: impl Into<String>, value: f64) {
        self.values.insert(name.into(), value);
    }

    /// Records p50, p99 and p99.9 of `samples`.
    ///
    /// # Errors
    /// There are no samples: the measurement has failed.
    pub fn latencies(&mut self, name: &str, mut samples: Vec<Duration>) -> anyhow::Result<()> {
        samples.sort_unstable();
        for (suffix, q) in [("p50", 0.5), ("p99", 0.99), ("p999", 0.999)] {
            let micros = quantile_us(&samples, q);
            let micros = micros.with_context(|| format!("{name}: not one answer came"))?;
            self.value(format!("{name}_{suffix}_us"), micros);
        }
        Ok(())
    }
}

/// The smallest of the sorted samples that is at least as large as the share `q` of all samples, in microseconds. Exact: no
/// sample is put into a bucket.
pub fn quantile_us(sorted: &[Duration], q: f64) -> Option<f64> {
    // The epsilon keeps 0.99 of 100 samples at the 99th, despite binary fractions.
    let below = ((q * sorted.len() as f64 - 1e-9).ceil() - 1.0).max(0.0);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "not negative, and no larger than a length in memory"
    )]
    let index = below as usize;
    sorted.get(index).map(|sample| sample.as_secs_f64() * 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn micros(micros: impl IntoIterator<Item = u64>) -> Vec<Duration> {
        micros.into_iter().map(Duration::from_micros).collect()
    }

    #[test]
    fn percentiles_become_values() {
        let mut sample = Sample::default();
        sample
            .latencies("echo_1", micros((1..=1000).rev()))
            .unwrap();
        assert_eq!(sample.values["echo_1_p50_us"], 500.0);
        assert_eq!(sample.values["echo_1_p99_us"], 990.0);
    }

    #[test]
    fn measurement_without_a_sample_is_an_error() {
        let error = Sample::default().latencies("echo_1", Vec::new());
        assert!(error.unwrap_err().to_string().contains("echo_1"));
    }

    #[test]
    fn quantiles_are_samples_by_nearest_rank() {
        let hundred = micros(1..=100);
        for (q, wanted) in [
            (0.0, 1.0),
            (0.5, 50.0),
            (0.99, 99.0),
            (0.991, 100.0),
            (1.0, 100.0),
        ] {
            assert_eq!(quantile_us(&hundred, q), Some(wanted), "quantile {q}");
        }
        assert_eq!(quantile_us(&micros([7]), 0.99), Some(7.0));
    }

    #[test]
    fn empty_samples_have_no_quantile() {
        assert_eq!(quantile_us(&[], 0.5), None);
    }
}
