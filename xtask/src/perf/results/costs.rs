//! What accounting costs: a peer that is accounted for beside the same program twice without.

use super::{Cell, Results};
use crate::perf::guard::{Round, judge};
use crate::perf::rows::Row;
use crate::perf::scenario::Way;

/// Peers without accounting, with it, and without it once more.
const ACCOUNTED: [[&str; 3]; 2] = [
    ["adit", "adit-account", "adit-again"],
    ["adit-cgroups", "adit-account-cgroups", "adit-again-cgroups"],
];

/// What an echo or a transfer may take more with accounting than without, as a share.
const OVERHEAD_MAX: f64 = 0.05;

/// What is judged. Not their tails, nor what the rest of the machine does.
const KINDS: [&str; 3] = ["echo_", "down_", "up_"];
const METRICS: [&str; 5] = ["per_s", "p50_us", "_cpu_us", "gbit_s", "_cpu_s_per_gib"];
/// Measured and not judged: on one processor an upload of one stream has two speeds, and a round may have either.
const TWO_SPEEDS: &str = "up_1_";

impl Results {
    /// Whether some peer is there with accounting and twice without.
    pub(crate) fn has_accounted(&self) -> bool {
        self.accounted().next().is_some()
    }

    fn accounted(&self) -> impl Iterator<Item = &[&'static str; 3]> {
        let is_complete = |peers: &&[&str; 3]| peers.iter().all(|peer| self.has_measured(peer));
        ACCOUNTED.iter().filter(is_complete)
    }

    /// Rows of echoes and transfers in which accounting costs more than [`OVERHEAD_MAX`], and more than noise, with what it costs;
    /// what could not be measured; and dialects in which nothing could.
    pub(crate) fn costly(&self) -> Vec<String> {
        let mut costly = Vec::new();
        for peers in self.accounted() {
            for (peer, way, measurement, _why) in self.failures() {
                if peers.contains(&peer) {
                    let way = way.name();
                    costly.push(format!(
                        "{way} {measurement} of {peer} could not be measured"
                    ));
                }
            }
            for way in self.ways() {
                let rows = self.rows(way);
                let mut judged = rows.iter().filter(|row| is_judged(&row.key)).peekable();
                if judged.peek().is_none() {
                    costly.push(format!("{} has no echo and no transfer", way.name()));
                }
                costly.extend(judged.filter_map(|row| self.cost_beyond(peers, way, row)));
            }
        }
        costly
    }

    /// `None`: it costs no more than it may, or has failed, which is told apart.
    fn cost_beyond(&self, peers: &[&str; 3], way: Way, row: &Row) -> Option<String> {
        let cells = peers.map(|peer| self.cell(peer, way, row));
        if cells.contains(&Cell::Failed) {
            return None;
        }
        let [without, with, again] = peers.map(|peer| self.values(peer, way, &row.key));
        let rounds = without.iter().zip(&with).zip(&again);
        let rounds: Vec<Round> = rounds
            .map(|((without, with), again)| Round {
                noise: (*again, *without),
                newer: *with,
                older: f64::midpoint(*without, *again),
            })
            .collect();
        let name = format!("{} {}", way.name(), row.key);
        match judge(&rounds, row.better, OVERHEAD_MAX) {
            None => Some(format!("{name} could not be measured")),
            Some(verdict) => verdict
                .is_worse()
                .then(|| format!("{name} {:.2} times", 1.0 + verdict.change)),
        }
    }
}

fn is_judged(key: &str) -> bool {
    KINDS.iter().any(|kind| key.starts_with(kind))
        && METRICS.iter().any(|metric| key.ends_with(metric))
        && !key.contains("machine")
        && !key.starts_with(TWO_SPEEDS)
}

#[cfg(test)]
mod tests {
    use super::super::{Entry, sample};
    use super::*;

    const P50: &str = "echo_1_p50_us";
    const RATE: &str = "down_8_gbit_s";

    /// Peers are known by their entries, too.
    fn results() -> Results {
        let entry = |name: &&str| Entry {
            name: (*name).to_owned(),
            state: Ok("1".to_owned()),
        };
        Results {
            peers: ACCOUNTED[1].iter().map(entry).collect(),
            ..Results::default()
        }
    }

    /// Numbers of each round, in the order of the peers.
    fn add(results: &mut Results, key: &str, rounds: &[[f64; 3]]) {
        for (round, numbers) in (1..).zip(rounds) {
            for (peer, number) in ACCOUNTED[1].iter().zip(numbers) {
                let way = (*peer, Way::HttpConnect);
                results.add(way, round, "echo", Ok(sample(key, *number)));
            }
        }
    }

    /// Rounds with so many times the cost, whose equal programs differ by this share at most.
    fn rounds(times: f64, noise: f64) -> Vec<[f64; 3]> {
        [1.0, -0.5, 0.2, -1.0, 0.6]
            .map(|swing| [40.0, 40.0 * times, 40.0 * (1.0 + noise * swing)])
            .to_vec()
    }

    #[test]
    fn more_than_a_twentieth_is_named_either_way_round() {
        let mut few = results();
        add(&mut few, P50, &rounds(1.04, 0.0));
        add(&mut few, RATE, &rounds(0.96, 0.0));
        assert!(few.has_accounted());
        assert!(few.costly().is_empty(), "{:?}", few.costly());

        let mut many = results();
        add(&mut many, P50, &rounds(1.07, 0.0));
        add(&mut many, RATE, &rounds(0.9, 0.0));
        assert_eq!(
            many.costly(),
            [
                "http-connect down_8_gbit_s 1.11 times",
                "http-connect echo_1_p50_us 1.07 times"
            ]
        );
    }

    #[test]
    fn what_equal_programs_differ_by_is_no_cost_and_one_slow_round_of_theirs_hides_none() {
        let mut noisy = results();
        add(&mut noisy, P50, &rounds(1.1, 0.2));
        assert!(noisy.costly().is_empty(), "{:?}", noisy.costly());

        let mut slow = results();
        let mut once = rounds(1.1, 0.01);
        once[0] = [40.0, 44.0, 80.0];
        add(&mut slow, P50, &once);
        assert_eq!(slow.costly(), ["http-connect echo_1_p50_us 1.10 times"]);
    }

    #[test]
    fn tails_dials_the_rest_of_the_machine_and_what_has_two_speeds_are_not_judged() {
        let mut results = results();
        add(&mut results, P50, &rounds(1.0, 0.0));
        for key in [
            "echo_1_p99_us",
            "echo_1_p999_us",
            "dials_8_per_s",
            "down_1_machine_cpu_s_per_gib",
            "up_1_gbit_s",
        ] {
            add(&mut results, key, &[[10.0, 30.0, 10.0]; 5]);
        }
        assert!(results.costly().is_empty(), "{:?}", results.costly());
    }

    #[test]
    fn what_could_not_be_measured_is_named_and_so_is_nothing_at_all() {
        let way = |peer| (ACCOUNTED[1][peer], Way::HttpConnect);
        let mut some = results();
        add(&mut some, P50, &rounds(1.0, 0.0));
        some.add(way(1), 5, "echo", Err("broken".to_owned()));
        let said = "http-connect echo of adit-account-cgroups could not be measured";
        assert_eq!(some.costly(), [said]);

        let mut none = results();
        for peer in 0..3 {
            none.add(way(peer), 1, "echo", Err("broken".to_owned()));
        }
        let said = none.costly();
        assert_eq!(said.len(), 4, "{said:?}");
        assert!(said[3].contains("no echo"), "{said:?}");
    }

    #[test]
    fn without_accounting_nothing_is_judged() {
        let mut alone = Results::default();
        let way = ("adit", Way::HttpConnect);
        alone.add(way, 1, "echo", Ok(sample(P50, 40.0)));
        assert!(!alone.has_accounted());
        assert!(alone.costly().is_empty());
    }
}
