//! Output of a run: numbers by name, and the distributions behind its percentiles.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use crate::quantile::Sorted;

/// Quantiles that are printed; the samples would take megabytes.
const POINTS: [f64; 12] = [
    0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 0.9999, 1.0,
];

/// All results so far.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Outcome {
    values: BTreeMap<String, f64>,
    distributions: BTreeMap<String, Distribution>,
}

/// Exact quantiles of one measurement.
#[derive(Debug, Serialize)]
struct Distribution {
    samples: usize,
    /// Share of samples, and the microseconds that this share does not exceed.
    quantiles_us: Vec<(f64, f64)>,
}

impl Outcome {
    /// Records a number.
    pub(crate) fn value(&mut self, name: impl Into<String>, value: f64) {
        self.values.insert(name.into(), value);
    }

    /// Records p50, p99 and p99.9 of `samples` as values, and their distribution.
    ///
    /// # Errors
    /// There are no samples: the measurement has failed.
    pub(crate) fn latencies(&mut self, name: &str, samples: Vec<Duration>) -> anyhow::Result<()> {
        let sorted = Sorted::new(samples);
        for (suffix, q) in [("p50", 0.5), ("p99", 0.99), ("p999", 0.999)] {
            let micros = sorted
                .micros(q)
                .ok_or_else(|| anyhow::anyhow!("{name}: not one answer came"))?;
            self.value(format!("{name}_{suffix}_us"), micros);
        }
        let quantiles_us = POINTS
            .iter()
            .filter_map(|q| sorted.micros(*q).map(|micros| (*q, micros)))
            .collect();
        self.distributions.insert(
            name.to_owned(),
            Distribution {
                samples: sorted.len(),
                quantiles_us,
            },
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_become_values_and_a_distribution() {
        let mut outcome = Outcome::default();
        let samples = (1..=1000).map(Duration::from_micros).collect();
        outcome.latencies("echo_1", samples).unwrap();
        assert_eq!(outcome.values["echo_1_p50_us"], 500.0);
        assert_eq!(outcome.values["echo_1_p99_us"], 990.0);
        let distribution = &outcome.distributions["echo_1"];
        assert_eq!(distribution.samples, 1000);
        assert_eq!(distribution.quantiles_us.last(), Some(&(1.0, 1000.0)));
    }

    #[test]
    fn measurement_without_a_sample_is_an_error() {
        let error = Outcome::default().latencies("echo_1", Vec::new());
        assert!(error.unwrap_err().to_string().contains("echo_1"));
    }
}
