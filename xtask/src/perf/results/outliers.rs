//! Rounds far from the others of their peer, such as one in which it hung: a table of medians does not show them.

use std::collections::BTreeSet;

use super::{Results, median};
use crate::perf::rows::{Better, Row};
use crate::perf::scenario::Way;

/// How many times worse than the median a round is that stands out.
const OUTLIER_RATIO_MIN: f64 = 10.0;

/// See the module.
#[derive(Debug, PartialEq)]
pub(crate) struct Outlier<'a> {
    /// Whose.
    pub(crate) peer: &'a str,
    /// In which dialect.
    pub(crate) way: Way,
    /// Of what.
    pub(crate) row: Row,
    /// Which, from 1.
    pub(crate) round: usize,
    /// What it gave.
    pub(crate) value: f64,
    /// What all rounds gave.
    pub(crate) median: f64,
}

impl Results {
    /// Every round that was [`OUTLIER_RATIO_MIN`] times worse than the median of all, such as one in which a peer hung.
    pub(crate) fn outliers(&self) -> Vec<Outlier<'_>> {
        let mut outliers = Vec::new();
        for ((peer, way), measured) in &self.measured {
            let rounds = measured.rounds.iter();
            let keys: BTreeSet<&str> = rounds
                .flat_map(|round| round.values.keys().map(String::as_str))
                .collect();
            for row in keys.into_iter().filter_map(Row::of) {
                let Some(median) = median(self.values(peer, *way, &row.key)) else {
                    continue;
                };
                for (round, sample) in (1..).zip(&measured.rounds) {
                    let Some(value) = sample.values.get(&row.key).copied() else {
                        continue;
                    };
                    let stands_out = match row.better {
                        Better::Higher => value * OUTLIER_RATIO_MIN < median,
                        // Of nothing everything is a multiple.
                        Better::Lower => median > 0.0 && value > median * OUTLIER_RATIO_MIN,
                    };
                    if stands_out {
                        let (way, row) = (*way, row.clone());
                        outliers.push(Outlier {
                            peer,
                            way,
                            row,
                            round,
                            value,
                            median,
                        });
                    }
                }
            }
        }
        outliers
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::perf::results::Sample;

    fn sample(key: &str, value: f64) -> Sample {
        Sample {
            values: BTreeMap::from([(key.to_owned(), value)]),
            distributions: BTreeMap::new(),
        }
    }

    #[test]
    fn round_far_worse_than_the_median_stands_out() {
        let mut results = Results::default();
        for (round, gbit, micros) in [(1, 9.0, 100.0), (2, 0.5, 110.0), (3, 8.0, 1200.0)] {
            let way = ("adit", Way::Grpc);
            results.add(way, round, "bulk", Ok(sample("down_1_gbit_s", gbit)));
            results.add(way, round, "echo", Ok(sample("echo_1_p50_us", micros)));
            results.add(
                way,
                round,
                "agents",
                Ok(sample("agents_1_idle_cpu_percent", 0.0)),
            );
        }
        let outliers = results.outliers();
        let told: Vec<_> = outliers
            .iter()
            .map(|one| (one.row.key.as_str(), one.round, one.value, one.median))
            .collect();
        assert_eq!(
            told,
            [
                ("down_1_gbit_s", 2, 0.5, 8.0),
                ("echo_1_p50_us", 3, 1200.0, 110.0)
            ]
        );
    }
}
