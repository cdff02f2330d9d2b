//! Rounds far from the others of their peer, such as one in which it hung: a table of medians does not show them.

use std::collections::BTreeSet;

use super::{Results, median};
use crate::perf::rows::{Better, Row};
use crate::perf::scenario::Way;

/// How many times worse than the median of the other rounds one is that stands out.
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
    /// What all rounds gave, as the table has it.
    pub(crate) median: f64,
}

impl Results {
    /// Every round that was [`OUTLIER_RATIO_MIN`] times worse than the median of the others, such as one in which a peer hung. Not
    /// of all: of two rounds the one that hung takes their median with it.
    pub(crate) fn outliers(&self) -> Vec<Outlier<'_>> {
        let mut outliers = Vec::new();
        for ((peer, way), measured) in &self.measured {
            let rounds = measured.rounds.iter();
            let keys: BTreeSet<&str> = rounds
                .flat_map(|round| round.values.keys().map(String::as_str))
                .collect();
            for row in keys.into_iter().filter_map(Row::of) {
                let values: Vec<(usize, f64)> = (1..)
                    .zip(&measured.rounds)
                    .filter_map(|(round, sample)| Some((round, *sample.values.get(&row.key)?)))
                    .collect();
                let Some(of_all) = median(values.iter().map(|(_, value)| *value).collect()) else {
                    continue;
                };
                for &(round, value) in &values {
                    let others = values.iter().filter(|(other, _)| *other != round);
                    let others = median(others.map(|(_, value)| *value).collect());
                    if others.is_some_and(|others| is_far(row.better, value, others)) {
                        outliers.push(Outlier {
                            peer,
                            way: *way,
                            row: row.clone(),
                            round,
                            value,
                            median: of_all,
                        });
                    }
                }
            }
        }
        outliers
    }
}

/// Whether a round was [`OUTLIER_RATIO_MIN`] times worse than what the others gave.
fn is_far(better: Better, value: f64, others: f64) -> bool {
    match better {
        Better::Higher => value * OUTLIER_RATIO_MIN < others,
        // Of nothing everything is a multiple.
        Better::Lower => others > 0.0 && value > others * OUTLIER_RATIO_MIN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::results::sample;

    #[test]
    fn round_far_worse_than_the_median_stands_out() {
        let mut results = Results::default();
        for (round, gbit, micros, percent) in [
            (1, 9.0, 100.0, 0.0),
            (2, 0.5, 110.0, 0.0),
            // A server that was idle in the others has no ratio.
            (3, 8.0, 1200.0, 3.0),
        ] {
            let way = ("adit", Way::Grpc);
            results.add(way, round, "bulk", Ok(sample("down_1_gbit_s", gbit)));
            results.add(way, round, "echo", Ok(sample("echo_1_p50_us", micros)));
            results.add(
                way,
                round,
                "agents",
                Ok(sample("agents_1_idle_cpu_percent", percent)),
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

    #[test]
    fn of_two_rounds_the_one_in_which_a_peer_hung_stands_out() {
        let mut results = Results::default();
        for (round, micros) in [(1, 310.0), (2, 5_000_000.0)] {
            let one = Ok(sample("paced_1000_p50_us", micros));
            results.add(("haproxy", Way::Tcp), round, "paced", one);
        }
        let outliers = results.outliers();
        let told: Vec<_> = outliers.iter().map(|one| (one.round, one.value)).collect();
        assert_eq!(told, [(2, 5_000_000.0)]);
    }
}
