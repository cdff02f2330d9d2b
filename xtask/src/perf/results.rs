//! Everything that was measured, and everything that was not and why.

mod costs;
mod machines;
mod outliers;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::rows::{Better, Row};
use super::scenario::Way;

/// What one run of a load tool printed.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Sample {
    /// Numbers by name.
    pub(crate) values: BTreeMap<String, f64>,
    /// Exact quantiles by measurement.
    #[serde(default)]
    pub(crate) distributions: BTreeMap<String, Distribution>,
}

/// Exact quantiles of one measurement in one round.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Distribution {
    samples: u64,
    quantiles_us: Vec<(f64, f64)>,
}

/// A peer in the report.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    /// Column.
    pub(crate) name: String,
    /// Its version, or why it is missing.
    pub(crate) state: Result<String, String>,
}

/// One peer in one dialect.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Measured {
    /// A sample for each round.
    rounds: Vec<Sample>,
    /// The first failure of each measurement.
    failures: BTreeMap<String, String>,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Results {
    /// All peers, in the order of the columns.
    pub(crate) peers: Vec<Entry>,
    /// Dialects whose load cannot be made here, and why.
    pub(crate) ways_missing: BTreeMap<Way, String>,
    measured: BTreeMap<(String, Way), Measured>,
}

/// What a cell of the table holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Cell {
    /// The median of all rounds.
    Value(f64),
    /// The measurement failed in at least one round.
    Failed,
    /// The peer is not there.
    Missing,
    /// Nobody asked.
    Nothing,
}

/// What four stalled readers may make of the echo of others: percentile and ratio.
const ISOLATION_RATIOS_MAX: [(&str, f64); 2] = [("p50", 1.1), ("p99", 1.5)];

impl Results {
    /// Adds what one measurement of one round gave.
    pub(crate) fn add(
        &mut self,
        (peer, way): (&str, Way),
        round: usize,
        measurement: &str,
        outcome: Result<Sample, String>,
    ) {
        let measured = self.measured.entry((peer.to_owned(), way)).or_default();
        while measured.rounds.len() < round {
            measured.rounds.push(Sample::default());
        }
        match (outcome, measured.rounds.last_mut()) {
            (Ok(sample), Some(last)) => {
                last.values.extend(sample.values);
                last.distributions.extend(sample.distributions);
            }
            (Ok(_), None) => (),
            (Err(why), _) => {
                let failures = &mut measured.failures;
                failures.entry(measurement.to_owned()).or_insert(why);
            }
        }
    }

    /// Whether a peer was measured in some dialect, with success or without.
    pub(crate) fn has_measured(&self, peer: &str) -> bool {
        self.measured.keys().any(|(name, _)| name == peer)
    }

    /// The dialects that were measured; where there is none, the plain way.
    pub(crate) fn ways(&self) -> Vec<Way> {
        let ways: BTreeSet<Way> = self.measured.keys().map(|(_, way)| *way).collect();
        let dialects: Vec<Way> = ways
            .iter()
            .copied()
            .filter(|way| *way != Way::Tcp)
            .collect();
        if dialects.is_empty() {
            return ways.into_iter().collect();
        }
        dialects
    }

    /// How often the peer that was measured most often was.
    pub(crate) fn rounds(&self) -> usize {
        let rounds = self.measured.values().map(|measured| measured.rounds.len());
        rounds.max().unwrap_or(0)
    }

    /// A peer in a dialect; one without dialects is the same in all.
    fn of(&self, peer: &str, way: Way) -> Option<&Measured> {
        let exactly = self.measured.get(&(peer.to_owned(), way));
        exactly.or_else(|| self.measured.get(&(peer.to_owned(), Way::Tcp)))
    }

    /// Every row that some peer has a number or a failure for.
    pub(crate) fn rows(&self, way: Way) -> Vec<Row> {
        let keys: BTreeSet<&str> = self
            .peers
            .iter()
            .filter_map(|peer| self.of(&peer.name, way))
            .flat_map(|measured| &measured.rounds)
            .flat_map(|round| round.values.keys().map(String::as_str))
            .collect();
        let mut rows: Vec<Row> = keys.into_iter().filter_map(Row::of).collect();
        rows.sort();
        rows
    }

    /// What the table says of a peer.
    pub(crate) fn cell(&self, peer: &str, way: Way, row: &Row) -> Cell {
        let missing = |entry: &Entry| entry.name == peer && entry.state.is_err();
        if self.peers.iter().any(missing) {
            return Cell::Missing;
        }
        let Some(measured) = self.of(peer, way) else {
            return Cell::Nothing;
        };
        if measured.failures.contains_key(row.measurement) {
            return Cell::Failed;
        }
        match median(self.values(peer, way, &row.key)) {
            Some(value) => Cell::Value(value),
            None => Cell::Nothing,
        }
    }

    /// The median, unless the cell says something else.
    pub(crate) fn value(&self, peer: &str, way: Way, key: &str) -> Option<f64> {
        match self.cell(peer, way, &Row::of(key)?) {
            Cell::Value(value) => Some(value),
            Cell::Failed | Cell::Missing | Cell::Nothing => None,
        }
    }

    /// The number of each round.
    pub(crate) fn values(&self, peer: &str, way: Way, key: &str) -> Vec<f64> {
        let rounds = self.of(peer, way).map(|measured| measured.rounds.iter());
        let rounds = rounds.into_iter().flatten();
        rounds
            .filter_map(|round| round.values.get(key).copied())
            .collect()
    }

    /// Half of the distance between the extremes, against the median.
    pub(crate) fn spread(&self, peer: &str, way: Way, key: &str) -> Option<f64> {
        let values = self.values(peer, way, key);
        let middle = median(values.clone()).filter(|middle| *middle != 0.0)?;
        let least = values.iter().copied().min_by(f64::total_cmp)?;
        let most = values.iter().copied().max_by(f64::total_cmp)?;
        Some((most - least) / 2.0 / middle.abs())
    }

    /// Peer, dialect, measurement and reason of everything that failed.
    pub(crate) fn failures(&self) -> Vec<(&str, Way, &str, &str)> {
        let all = self.measured.iter().flat_map(|((peer, way), measured)| {
            let one = measured.failures.iter();
            one.map(|(name, why)| (peer.as_str(), *way, name.as_str(), why.as_str()))
        });
        all.collect()
    }

    /// Rows where our median is worse than upstream's by more than the rounds of either lie apart, and where ours failed.
    pub(crate) fn worse(&self) -> Vec<String> {
        let mut worse = Vec::new();
        for way in self.ways() {
            for row in self.rows(way) {
                let ours = self.cell("adit", way, &row);
                let theirs = self.cell("upstream", way, &row);
                let spreads = ["adit", "upstream"].map(|peer| self.spread(peer, way, &row.key));
                let within = spreads.into_iter().flatten().fold(0.0, f64::max);
                let is_worse = match (theirs, ours) {
                    (_, Cell::Failed) => true,
                    (Cell::Value(theirs), Cell::Value(ours)) => match row.better {
                        Better::Higher => ours < theirs * (1.0 - within),
                        Better::Lower => ours > theirs * (1.0 + within),
                    },
                    _ => false,
                };
                // Kernel memory is the machine's; what else went on there is in it.
                let is_machine = row.key.contains("kernel") || row.key.contains("tcp_buffers");
                if is_worse && !is_machine {
                    worse.push(format!("{} {}", way.name(), row.key));
                }
            }
        }
        worse
    }

    /// Dialects in which stalled readers slow our echo beyond [`ISOLATION_RATIOS_MAX`].
    pub(crate) fn disturbed(&self) -> Vec<String> {
        let mut disturbed = Vec::new();
        for way in self.ways() {
            let name = way.name();
            let failed = self.of("adit", way).map(|ours| &ours.failures);
            if failed.is_some_and(|failures| failures.contains_key("isolation")) {
                disturbed.push(format!("{name} could not be measured"));
            }
            match self.value("adit", way, "isolation_completed") {
                None => continue,
                Some(1.0) => (),
                Some(_) => {
                    disturbed.push(format!("{name} echo did not finish"));
                    continue;
                }
            }
            for (percentile, most) in ISOLATION_RATIOS_MAX {
                let ratio = self.value("adit", way, &format!("isolation_{percentile}_ratio"));
                match ratio {
                    Some(ratio) if ratio <= most => (),
                    Some(ratio) => {
                        disturbed.push(format!("{name} echo {percentile} {ratio:.2} times"));
                    }
                    None => disturbed.push(format!("{name} echo has no {percentile}")),
                }
            }
        }
        disturbed
    }
}

/// The middle value, or the mean of the two in the middle.
pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let upper = *values.get(values.len() / 2)?;
    if values.len() % 2 == 1 {
        return Some(upper);
    }
    values
        .get(values.len() / 2 - 1)
        .map(|lower| (lower + upper) / 2.0)
}

/// A sample of one number, for tests.
#[cfg(test)]
pub(crate) fn sample(key: &str, value: f64) -> Sample {
    Sample {
        values: BTreeMap::from([(key.to_owned(), value)]),
        distributions: BTreeMap::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results(peers: &[&str]) -> Results {
        let entry = |name: &&str| Entry {
            name: (*name).to_owned(),
            state: Ok("1".to_owned()),
        };
        Results {
            peers: peers.iter().map(entry).collect(),
            ..Results::default()
        }
    }

    #[test]
    fn median_of_an_even_count_is_the_mean_of_the_middle() {
        assert_eq!(median(vec![4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!(median(vec![9.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(Vec::new()), None);
    }

    #[test]
    fn failure_in_one_round_leaves_no_number() {
        let mut results = results(&["adit"]);
        let key = "down_1_gbit_s";
        results.add(("adit", Way::Grpc), 1, "bulk", Ok(sample(key, 8.0)));
        results.add(("adit", Way::Grpc), 2, "bulk", Err("it broke".to_owned()));
        let row = Row::of(key).unwrap();
        assert_eq!(results.cell("adit", Way::Grpc, &row), Cell::Failed);
        assert_eq!(
            results.failures(),
            [("adit", Way::Grpc, "bulk", "it broke")]
        );
    }

    #[test]
    fn machines_get_every_round_and_the_reason_of_a_missing_peer() {
        let mut results = results(&["adit"]);
        for (round, value) in [(1, 9.0), (2, 10.0)] {
            let one = Ok(sample("down_1_gbit_s", value));
            results.add(("adit", Way::GrpcGo), round, "bulk", one);
        }
        results.peers.push(Entry {
            name: "wireguard".to_owned(),
            state: Err("the kernel has none".to_owned()),
        });
        let json = results.for_machines();
        let rounds = &json["measured"]["adit"]["grpc-go"]["rounds"];
        assert_eq!(rounds[1]["values"]["down_1_gbit_s"], 10.0);
        assert_eq!(json["peers"][1]["missing"], "the kernel has none");
    }

    #[test]
    fn a_missing_dialect_is_told_with_its_reason_and_is_nobodys_fault() {
        let mut results = results(&["upstream", "adit"]);
        let way = ("adit", Way::HttpConnect);
        results.add(way, 1, "bulk", Ok(sample("down_1_gbit_s", 8.0)));
        let why = "no Go toolchain".to_owned();
        results.ways_missing.insert(Way::GrpcGo, why);
        let json = results.for_machines();
        assert_eq!(json["ways_missing"]["grpc-go"], "no Go toolchain");
        assert_eq!(results.ways(), [Way::HttpConnect]);
        assert!(results.worse().is_empty());
        assert!(results.disturbed().is_empty());
        assert!(results.failures().is_empty());
    }

    #[test]
    fn missing_peer_has_cells_that_say_so() {
        let mut results = results(&["adit"]);
        results.peers.push(Entry {
            name: "haproxy".to_owned(),
            state: Err("not installed".to_owned()),
        });
        let row = Row::of("down_1_gbit_s").unwrap();
        assert_eq!(results.cell("haproxy", Way::Grpc, &row), Cell::Missing);
    }

    #[test]
    fn rows_worse_than_upstream_are_named_and_a_failure_counts() {
        let mut results = results(&["upstream", "adit"]);
        for (peer, gbit, micros) in [("upstream", 2.0, 100.0), ("adit", 1.0, 50.0)] {
            let way = (peer, Way::Grpc);
            results.add(way, 1, "bulk", Ok(sample("down_1_gbit_s", gbit)));
            results.add(way, 1, "echo", Ok(sample("echo_1_p50_us", micros)));
        }
        assert_eq!(results.worse(), ["grpc down_1_gbit_s"]);
        results.add(("adit", Way::Grpc), 1, "echo", Err("broken".to_owned()));
        assert_eq!(
            results.worse(),
            ["grpc down_1_gbit_s", "grpc echo_1_p50_us"]
        );
    }

    #[test]
    fn a_row_that_is_worse_within_its_spread_is_not_named() {
        let mut results = results(&["upstream", "adit"]);
        for (round, ours) in [(1, 90.0), (2, 110.0), (3, 130.0)] {
            for (peer, micros) in [("upstream", 100.0), ("adit", ours)] {
                let sample = sample("echo_1_p50_us", micros);
                results.add((peer, Way::Grpc), round, "echo", Ok(sample));
            }
        }
        assert!(results.worse().is_empty());
        for round in 4..8 {
            let sample = sample("echo_1_p50_us", 130.0);
            results.add(("adit", Way::Grpc), round, "echo", Ok(sample));
        }
        assert_eq!(results.worse(), ["grpc echo_1_p50_us"]);
    }

    #[test]
    fn echo_slowed_by_stalled_readers_is_named() {
        let mut results = results(&["adit"]);
        let way = ("adit", Way::HttpConnect);
        let round = |results: &mut Results, round, p50, p99| {
            for (key, value) in [
                ("isolation_completed", 1.0),
                ("isolation_p50_ratio", p50),
                ("isolation_p99_ratio", p99),
            ] {
                results.add(way, round, "isolation", Ok(sample(key, value)));
            }
        };
        round(&mut results, 1, 1.08, 1.4);
        assert!(results.disturbed().is_empty());
        // Medians are what counts, each against a limit of its own.
        round(&mut results, 2, 1.16, 1.4);
        assert_eq!(results.disturbed(), ["http-connect echo p50 1.12 times"]);
        round(&mut results, 3, 1.0, 9.0);
        round(&mut results, 4, 1.0, 9.0);
        assert_eq!(results.disturbed(), ["http-connect echo p99 5.20 times"]);
        results.add(way, 5, "isolation", Err("broken".to_owned()));
        assert_eq!(results.disturbed(), ["http-connect could not be measured"]);
    }

    #[test]
    fn echo_that_stalls_beside_stalled_readers_is_named_once() {
        let mut results = results(&["adit"]);
        let one = Ok(sample("isolation_completed", 0.0));
        results.add(("adit", Way::GrpcGo), 1, "isolation", one);
        assert_eq!(results.disturbed(), ["grpc-go echo did not finish"]);
    }

    #[test]
    fn spread_is_half_the_range_against_the_median() {
        let mut results = results(&["adit"]);
        for (round, value) in [(1, 9.0), (2, 10.0), (3, 12.0)] {
            let one = Ok(sample("down_1_gbit_s", value));
            results.add(("adit", Way::Grpc), round, "bulk", one);
        }
        let spread = results.spread("adit", Way::Grpc, "down_1_gbit_s");
        assert_eq!(spread, Some(0.15));
    }
}
