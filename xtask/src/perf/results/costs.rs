//! What accounting costs: a peer that is accounted for beside the same program twice without.

use super::{Cell, Results};
use crate::perf::rows::{Better, Row};
use crate::perf::scenario::Way;

/// Peers without accounting, with it, and without it once more.
const ACCOUNTED: [[&str; 3]; 2] = [
    ["adit", "adit-account", "adit-again"],
    ["adit-cgroups", "adit-account-cgroups", "adit-again-cgroups"],
];

/// What an echo or a transfer may take more with accounting than without.
const OVERHEAD_MAX: f64 = 0.05;

/// What is judged. Not their tails, nor what the rest of the machine does.
const KINDS: [&str; 3] = ["echo_", "down_", "up_"];
const METRICS: [&str; 5] = ["per_s", "p50_us", "_cpu_us", "gbit_s", "_cpu_s_per_gib"];

impl Results {
    /// Whether some peer is there with accounting and twice without.
    pub(crate) fn has_accounted(&self) -> bool {
        self.accounted().next().is_some()
    }

    fn accounted(&self) -> impl Iterator<Item = &[&'static str; 3]> {
        let is_complete = |peers: &&[&str; 3]| peers.iter().all(|peer| self.has_measured(peer));
        ACCOUNTED.iter().filter(is_complete)
    }

    /// Rows of echoes and transfers in which accounting costs more than [`OVERHEAD_MAX`] and more than the rounds of one of the
    /// equal programs lie apart, with what it costs; and those of which one of the three has no number.
    pub(crate) fn costly(&self) -> Vec<String> {
        let mut costly = Vec::new();
        for peers in self.accounted() {
            for way in self.ways() {
                let rows = self.rows(way);
                for row in rows.iter().filter(|row| is_judged(&row.key)) {
                    costly.extend(self.cost_beyond(peers, way, row));
                }
            }
        }
        costly
    }

    fn cost_beyond(&self, peers: &[&str; 3], way: Way, row: &Row) -> Option<String> {
        let name = format!("{} {}", way.name(), row.key);
        let cells = peers.map(|peer| self.cell(peer, way, row));
        let [Cell::Value(without), Cell::Value(with), Cell::Value(again)] = cells else {
            return Some(format!("{name} could not be measured"));
        };
        let without = f64::midpoint(without, again);
        let ratio = match row.better {
            Better::Higher => without / with,
            Better::Lower => with / without,
        };
        let [first, _, again] = peers;
        let spreads = [first, again].map(|peer| self.spread(peer, way, &row.key));
        let within = spreads.into_iter().flatten().fold(OVERHEAD_MAX, f64::max);
        let is_within = ratio <= 1.0 + within;
        (!is_within).then(|| format!("{name} {ratio:.2} times"))
    }
}

fn is_judged(key: &str) -> bool {
    let is_machine = key.contains("machine");
    KINDS.iter().any(|kind| key.starts_with(kind))
        && METRICS.iter().any(|metric| key.ends_with(metric))
        && !is_machine
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    const P50: &str = "echo_1_p50_us";
    const RATE: &str = "down_8_gbit_s";

    /// Numbers of a round, in the order of the peers.
    fn add(results: &mut Results, round: usize, key: &str, numbers: [f64; 3]) {
        for (peer, number) in ACCOUNTED[1].iter().zip(numbers) {
            let way = (*peer, Way::HttpConnect);
            results.add(way, round, "echo", Ok(sample(key, number)));
        }
    }

    /// Peers are known by their entries, too.
    fn results() -> Results {
        let entry = |name: &&str| super::super::Entry {
            name: (*name).to_owned(),
            state: Ok("1".to_owned()),
        };
        Results {
            peers: ACCOUNTED[1].iter().map(entry).collect(),
            ..Results::default()
        }
    }

    #[test]
    fn more_than_a_twentieth_is_named_either_way_round() {
        let mut results = results();
        add(&mut results, 1, P50, [40.0, 41.5, 40.0]);
        add(&mut results, 1, RATE, [10.0, 9.6, 10.0]);
        assert!(results.has_accounted());
        assert!(results.costly().is_empty());

        let mut results = self::results();
        add(&mut results, 1, P50, [40.0, 43.0, 40.0]);
        add(&mut results, 1, RATE, [10.0, 9.0, 10.0]);
        assert_eq!(
            results.costly(),
            [
                "http-connect down_8_gbit_s 1.11 times",
                "http-connect echo_1_p50_us 1.07 times"
            ]
        );
    }

    #[test]
    fn what_equal_programs_lie_apart_is_no_cost() {
        let mut results = results();
        for (round, again) in [(1, 36.0), (2, 40.0), (3, 44.0)] {
            add(&mut results, round, P50, [40.0, 43.9, again]);
        }
        assert!(results.costly().is_empty(), "their spread is a tenth");
        for round in 4..8 {
            add(&mut results, round, P50, [40.0, 45.0, 40.0]);
        }
        assert_eq!(results.costly(), ["http-connect echo_1_p50_us 1.12 times"]);
    }

    #[test]
    fn tails_dials_and_the_rest_of_the_machine_are_not_judged() {
        let mut results = results();
        for key in [
            "echo_1_p99_us",
            "echo_1_p999_us",
            "dials_8_per_s",
            "down_1_machine_cpu_s_per_gib",
        ] {
            add(&mut results, 1, key, [10.0, 30.0, 10.0]);
        }
        assert!(results.costly().is_empty());
    }

    #[test]
    fn a_row_without_a_number_is_named_and_without_accounting_nothing_is_judged() {
        let mut results = results();
        add(&mut results, 1, P50, [40.0, 40.0, 40.0]);
        let accounted = (ACCOUNTED[1][1], Way::HttpConnect);
        results.add(accounted, 2, "echo", Err("broken".to_owned()));
        assert_eq!(
            results.costly(),
            ["http-connect echo_1_p50_us could not be measured"]
        );

        let mut alone = Results::default();
        let way = ("adit", Way::HttpConnect);
        alone.add(way, 1, "echo", Ok(sample(P50, 40.0)));
        assert!(!alone.has_accounted());
        assert!(alone.costly().is_empty());
    }
}
