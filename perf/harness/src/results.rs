//! All results, all failures with their reasons, and the checks of `--check`.

use std::collections::{BTreeMap, BTreeSet};

use adit_perf_plan::{Dialect, Sample};
use serde::{Deserialize, Serialize};

use super::guard::{Round, Verdict, judge};
use super::rows::Row;

/// A peer in the report.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Entry {
    /// Name of its column.
    pub(crate) name: String,
    /// Whether it could be measured.
    #[serde(flatten)]
    pub(crate) state: State,
}

/// Whether a peer could be measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    /// Measured; holds the version.
    Version(String),
    /// Not measured, for this reason.
    Missing(String),
}

/// Results of one peer in one dialect.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Measured {
    /// One sample per round.
    rounds: Vec<Sample>,
    /// The first failure of each measurement.
    failures: BTreeMap<String, String>,
}

/// All results of a run.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Results {
    /// All peers, in the order of the columns.
    pub(crate) peers: Vec<Entry>,
    /// Dialects whose load cannot be generated here, and why.
    #[serde(default)]
    pub(crate) ways_missing: BTreeMap<Dialect, String>,
    measured: BTreeMap<String, BTreeMap<Dialect, Measured>>,
}

/// A cell of the table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Cell {
    /// The median of all rounds.
    Value(f64),
    /// The measurement failed in at least one round.
    Failed,
    /// The peer cannot be measured here.
    Missing,
    /// The measurement was not requested.
    Nothing,
}

/// Largest permitted slowdown of an echo beside four stalled readers: percentile and ratio.
const ISOLATION_RATIOS_MAX: [(&str, f64); 2] = [("p50", 1.1), ("p99", 1.5)];
/// A peer without accounting, with it, and without it once more.
const ACCOUNTED: [&str; 3] = ["adit-cgroups", "adit-account-cgroups", "adit-again-cgroups"];
/// Largest permitted cost of accounting for an echo or a transfer, as a share.
const OVERHEAD_MAX: f64 = 0.05;
/// Rows judged for the cost of accounting: no tail latencies.
const COST_KINDS: [&str; 3] = ["echo_", "down_", "up_"];
const COST_METRICS: [&str; 5] = ["per_s", "p50_us", "_cpu_us", "gbit_s", "_cpu_s_per_gib"];
/// Not judged: on one processor an upload of one stream has one of two speeds per round.
const COST_BIMODAL: &str = "up_1_";

impl Results {
    /// Adds the result of one measurement of one round.
    pub(crate) fn add(
        &mut self,
        (peer, dialect): (&str, Dialect),
        round: usize,
        measurement: &str,
        outcome: Result<Sample, String>,
    ) {
        let dialects = self.measured.entry(peer.to_owned()).or_default();
        let measured = dialects.entry(dialect).or_default();
        let rounds = measured.rounds.len().max(round);
        measured.rounds.resize_with(rounds, Sample::default);
        match outcome {
            Ok(sample) => measured.rounds[round - 1].values.extend(sample.values),
            Err(why) => {
                let failures = &mut measured.failures;
                failures.entry(measurement.to_owned()).or_insert(why);
            }
        }
    }

    fn all(&self) -> impl Iterator<Item = (&str, Dialect, &Measured)> {
        self.measured.iter().flat_map(|(peer, dialects)| {
            dialects
                .iter()
                .map(move |(dialect, all)| (peer.as_str(), *dialect, all))
        })
    }

    /// Whether a peer was measured in any dialect, successfully or not.
    pub(crate) fn has_measured(&self, peer: &str) -> bool {
        self.measured.contains_key(peer)
    }

    /// The measured dialects; plain ports are left out if there are others.
    pub(crate) fn dialects(&self) -> Vec<Dialect> {
        let mut dialects: BTreeSet<Dialect> = self.all().map(|(_, dialect, _)| dialect).collect();
        if dialects.len() > 1 {
            dialects.remove(&Dialect::Tcp);
        }
        dialects.into_iter().collect()
    }

    /// The largest number of rounds of any peer.
    pub(crate) fn rounds(&self) -> usize {
        let rounds = self.all().map(|(_, _, measured)| measured.rounds.len());
        rounds.max().unwrap_or(0)
    }

    /// Results of a peer in a dialect; a peer of plain ports has the same results in all dialects.
    fn of(&self, peer: &str, dialect: Dialect) -> Option<&Measured> {
        let dialects = self.measured.get(peer)?;
        dialects
            .get(&dialect)
            .or_else(|| dialects.get(&Dialect::Tcp))
    }

    /// Every row in which some peer has a number or a failure.
    pub(crate) fn rows(&self, dialect: Dialect) -> Vec<Row> {
        let peers = self.peers.iter();
        let measured = peers.filter_map(|peer| self.of(&peer.name, dialect));
        rows_of(measured.flat_map(|measured| &measured.rounds))
    }

    /// Every row in which a peer has a number in exactly this dialect.
    pub(crate) fn rows_of(&self, peer: &str, dialect: Dialect) -> Vec<Row> {
        let measured = self
            .measured
            .get(peer)
            .and_then(|dialects| dialects.get(&dialect));
        rows_of(measured.into_iter().flat_map(|measured| &measured.rounds))
    }

    /// The table's cell of a peer and row.
    pub(crate) fn cell(&self, peer: &str, dialect: Dialect, row: &Row) -> Cell {
        let is_missing =
            |entry: &Entry| entry.name == peer && matches!(entry.state, State::Missing(_));
        if self.peers.iter().any(is_missing) {
            return Cell::Missing;
        }
        let Some(measured) = self.of(peer, dialect) else {
            return Cell::Nothing;
        };
        if measured.failures.contains_key(row.measurement) {
            return Cell::Failed;
        }
        median(self.values(peer, dialect, &row.key)).map_or(Cell::Nothing, Cell::Value)
    }

    /// The median, if the cell holds a value.
    pub(crate) fn value(&self, peer: &str, dialect: Dialect, key: &str) -> Option<f64> {
        match self.cell(peer, dialect, &Row::of(key)?) {
            Cell::Value(value) => Some(value),
            Cell::Failed | Cell::Missing | Cell::Nothing => None,
        }
    }

    /// The value of each round.
    pub(crate) fn values(&self, peer: &str, dialect: Dialect, key: &str) -> Vec<f64> {
        let rounds = self
            .of(peer, dialect)
            .into_iter()
            .flat_map(|all| &all.rounds);
        rounds
            .filter_map(|round| round.values.get(key).copied())
            .collect()
    }

    /// Half of the range of all rounds, relative to the median.
    pub(crate) fn spread(&self, peer: &str, dialect: Dialect, key: &str) -> Option<f64> {
        let values = self.values(peer, dialect, key);
        let middle = median(values.clone()).filter(|middle| *middle != 0.0)?;
        let least = values.iter().copied().min_by(f64::total_cmp)?;
        let most = values.iter().copied().max_by(f64::total_cmp)?;
        Some((most - least) / 2.0 / middle.abs())
    }

    /// Peer, dialect, measurement and reason of every failure.
    pub(crate) fn failures(&self) -> Vec<(&str, Dialect, &str, &str)> {
        let all = self.all().flat_map(|(peer, dialect, measured)| {
            let one = measured.failures.iter();
            one.map(move |(name, why)| (peer, dialect, name.as_str(), why.as_str()))
        });
        all.collect()
    }

    /// Rows in which `adit` failed, or its median is worse than upstream's by more than the spread of either.
    pub(crate) fn worse(&self) -> Vec<String> {
        let mut worse = Vec::new();
        for dialect in self.dialects() {
            for row in self.rows(dialect) {
                let [ours, theirs] =
                    ["adit", "upstream"].map(|peer| self.cell(peer, dialect, &row));
                let spreads = ["adit", "upstream"].map(|peer| self.spread(peer, dialect, &row.key));
                let within = spreads.into_iter().flatten().fold(0.0, f64::max);
                let is_worse = match (theirs, ours) {
                    (_, Cell::Failed) => true,
                    (Cell::Value(theirs), Cell::Value(ours)) => {
                        row.better.is_worse(ours, theirs, within)
                    }
                    _ => false,
                };
                // Kernel memory is a whole-machine number, and includes other activity.
                let is_machine = row.key.contains("kernel");
                if is_worse && !is_machine {
                    worse.push(format!("{} {}", dialect.name(), row.key));
                }
            }
        }
        worse
    }

    /// Dialects in which stalled readers slow the echo of `adit` beyond [`ISOLATION_RATIOS_MAX`].
    pub(crate) fn disturbed(&self) -> Vec<String> {
        let mut disturbed = Vec::new();
        for dialect in self.dialects() {
            let (name, value) = (dialect.name(), |key: &str| self.value("adit", dialect, key));
            let ours = self.of("adit", dialect);
            if ours.is_some_and(|ours| ours.failures.contains_key("isolation")) {
                disturbed.push(format!("{name} could not be measured"));
            }
            match value("isolation_completed") {
                None => continue,
                Some(1.0) => (),
                Some(_) => {
                    disturbed.push(format!("{name} echo did not finish"));
                    continue;
                }
            }
            for (percentile, most) in ISOLATION_RATIOS_MAX {
                match value(&format!("isolation_{percentile}_ratio")) {
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

    /// Whether a peer was measured with accounting, and twice without.
    pub(crate) fn has_accounted(&self) -> bool {
        ACCOUNTED.iter().all(|peer| self.has_measured(peer))
    }

    /// Rows of echoes and transfers in which accounting costs more than [`OVERHEAD_MAX`] and more than noise, with the cost;
    /// rows that could not be measured; and dialects without a measured row.
    pub(crate) fn costly(&self) -> Vec<String> {
        if !self.has_accounted() {
            return Vec::new();
        }
        let mut failed = self.failures();
        failed.retain(|(peer, ..)| ACCOUNTED.contains(peer));
        let name = |(peer, dialect, measurement, _why): (&str, Dialect, &str, &str)| {
            let dialect = dialect.name();
            format!("{dialect} {measurement} of {peer} could not be measured")
        };
        let mut costly: Vec<String> = failed.into_iter().map(name).collect();
        for dialect in self.dialects() {
            let mut rows = self.rows(dialect);
            rows.retain(|row| is_judged_for_cost(&row.key));
            if rows.is_empty() {
                costly.push(format!("{} has no echo and no transfer", dialect.name()));
            }
            let costs = rows.iter().filter_map(|row| self.cost_beyond(dialect, row));
            costly.extend(costs);
        }
        costly
    }

    /// `None`: the cost is permitted, or the measurement failed, which is reported elsewhere.
    fn cost_beyond(&self, dialect: Dialect, row: &Row) -> Option<String> {
        let cells = ACCOUNTED.map(|peer| self.cell(peer, dialect, row));
        if cells.contains(&Cell::Failed) {
            return None;
        }
        let name = format!("{} {}", dialect.name(), row.key);
        let [without, with, again] = ACCOUNTED.map(str::to_owned);
        let equal = vec![without, again];
        let peers = [equal.clone(), equal, vec![with]];
        let Some(verdict) = self.judged(&peers, dialect, row, OVERHEAD_MAX) else {
            return Some(format!("{name} could not be measured"));
        };
        let named = || format!("{name} {:.2} times", 1.0 + verdict.change);
        verdict.is_worse().then(named)
    }

    /// Judges a row of a newer program against an older one. `peers`: two equal peers, whose difference is noise; peers of the
    /// older program; peers of the newer. Several peers of a program count by their geometric mean per round.
    pub(crate) fn judged(
        &self,
        peers: &[Vec<String>; 3],
        dialect: Dialect,
        row: &Row,
        margin: f64,
    ) -> Option<Verdict> {
        let [equal, older, newer] = peers.each_ref().map(|peers| -> Vec<Vec<f64>> {
            let values = |peer: &String| self.values(peer, dialect, &row.key);
            peers.iter().map(values).collect()
        });
        let count = [&equal, &older, &newer]
            .into_iter()
            .flatten()
            .map(Vec::len)
            .min()?;
        let mean = |peers: &[Vec<f64>], round: usize| {
            let product: f64 = peers
                .iter()
                .filter_map(|values| values.get(round))
                .product();
            product.powf(1.0 / peers.len() as f64)
        };
        let rounds: Vec<Round> = (0..count)
            .map(|round| Round {
                noise: (mean(&equal[..1], round), mean(&equal[1..], round)),
                newer: mean(&newer, round),
                older: mean(&older, round),
            })
            .collect();
        judge(&rounds, row.better, margin)
    }
}

fn is_judged_for_cost(key: &str) -> bool {
    COST_KINDS.iter().any(|kind| key.starts_with(kind))
        && COST_METRICS.iter().any(|metric| key.ends_with(metric))
        && !key.starts_with(COST_BIMODAL)
}

/// The rows in which the samples have numbers, in order.
fn rows_of<'a>(rounds: impl IntoIterator<Item = &'a Sample>) -> Vec<Row> {
    let keys = rounds.into_iter().flat_map(|round| round.values.keys());
    let keys: BTreeSet<&String> = keys.collect();
    let mut rows: Vec<Row> = keys.into_iter().filter_map(|key| Row::of(key)).collect();
    rows.sort();
    rows
}

/// The middle value, or the mean of the two middle values.
pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let upper = *values.get(values.len() / 2)?;
    let lower = *values.get((values.len() - 1) / 2)?;
    Some(f64::midpoint(lower, upper))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::{missing, results, sample};

    const GBIT: &str = "down_8_gbit_s";
    const P50: &str = "echo_1_p50_us";

    fn added(results: &mut Results, peer: &str, measurement: &str, key: &str, rounds: &[f64]) {
        for (round, value) in (1..).zip(rounds) {
            let one = Ok(sample(&[(key, *value)]));
            results.add((peer, Dialect::HttpConnect), round, measurement, one);
        }
    }

    #[test]
    fn median_of_an_even_count_is_the_mean_of_the_middle() {
        assert_eq!(median(vec![4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!(median(vec![9.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(Vec::new()), None);
    }

    #[test]
    fn results_round_trip_through_json() {
        let mut results = results(&["adit"]);
        results.peers.push(missing("rathole", "no cargo"));
        added(&mut results, "adit", "bulk", GBIT, &[7.5, 8.0]);
        results.add(
            ("adit", Dialect::Tcp),
            1,
            "echo",
            Err("it hangs".to_owned()),
        );
        let why = "no Go toolchain".to_owned();
        results.ways_missing.insert(Dialect::GrpcGo, why);
        let json = serde_json::to_value(&results).unwrap();
        let rounds = &json["measured"]["adit"]["http-connect"]["rounds"];
        assert_eq!(rounds[1]["values"][GBIT], 8.0);
        assert_eq!(json["peers"][0]["version"], "1");
        assert_eq!(json["peers"][1]["missing"], "no cargo");
        assert_eq!(json["ways_missing"]["grpc-go"], "no Go toolchain");
        let read: Results = serde_json::from_value(json.clone()).unwrap();
        assert_eq!(serde_json::to_value(&read).unwrap(), json);
        assert!(serde_json::from_str::<Results>("{}").is_err());
    }

    #[test]
    fn a_failed_round_fails_its_cell_and_a_missing_peer_is_marked() {
        let mut results = results(&["adit"]);
        results.peers.push(missing("haproxy", "not installed"));
        added(&mut results, "adit", "bulk", GBIT, &[8.0]);
        let dialect = ("adit", Dialect::HttpConnect);
        results.add(dialect, 2, "bulk", Err("it broke".to_owned()));
        let row = Row::of(GBIT).unwrap();
        let cell = |peer| results.cell(peer, Dialect::HttpConnect, &row);
        assert_eq!(cell("adit"), Cell::Failed);
        assert_eq!(cell("haproxy"), Cell::Missing);
        assert_eq!(results.failures().len(), 1);
    }

    #[test]
    fn rows_worse_than_upstream_beyond_their_spread_are_named_and_a_failure_counts() {
        let mut results = results(&["upstream", "adit"]);
        added(&mut results, "upstream", "bulk", GBIT, &[2.0; 3]);
        added(&mut results, "adit", "bulk", GBIT, &[1.0; 3]);
        added(&mut results, "upstream", "echo", P50, &[100.0; 3]);
        added(&mut results, "adit", "echo", P50, &[90.0, 110.0, 130.0]);
        assert_eq!(results.worse(), ["http-connect down_8_gbit_s"]);
        let dialect = ("adit", Dialect::HttpConnect);
        results.add(dialect, 1, "echo", Err("broken".to_owned()));
        assert_eq!(results.worse().len(), 2);
    }

    #[test]
    fn echo_slowed_by_stalled_readers_is_named() {
        let told = |completed, p50, p99| {
            let mut results = results(&["adit"]);
            let values = [
                ("isolation_completed", completed),
                ("isolation_p50_ratio", p50),
                ("isolation_p99_ratio", p99),
            ];
            let dialect = ("adit", Dialect::HttpConnect);
            results.add(dialect, 1, "isolation", Ok(sample(&values)));
            results.disturbed()
        };
        assert!(told(1.0, 1.08, 1.4).is_empty());
        assert_eq!(told(1.0, 1.2, 1.4), ["http-connect echo p50 1.20 times"]);
        assert_eq!(told(0.0, 1.0, 1.0), ["http-connect echo did not finish"]);
    }

    /// Results of accounting that costs `times` as much, where equal programs differ by `noise` at most.
    fn accounted(key: &str, times: f64, noise: f64) -> Results {
        let peers = ACCOUNTED;
        let mut results = results(&peers);
        let again = [1.0, -0.5, 0.2, -1.0, 0.6].map(|swing| 40.0 * (1.0 + noise * swing));
        added(&mut results, peers[0], "echo", key, &[40.0; 5]);
        added(&mut results, peers[1], "echo", key, &[40.0 * times; 5]);
        added(&mut results, peers[2], "echo", key, &again);
        results
    }

    #[test]
    fn accounting_that_costs_more_than_a_twentieth_and_than_noise_is_named() {
        for (key, times, noise, is_named) in [
            (P50, 1.04, 0.0, false),
            (P50, 1.07, 0.0, true),
            (P50, 1.1, 0.2, false),
            (GBIT, 0.96, 0.0, false),
            (GBIT, 0.9, 0.0, true),
        ] {
            let costly = accounted(key, times, noise).costly();
            assert_eq!(
                costly.len(),
                usize::from(is_named),
                "{key} {times}: {costly:?}"
            );
        }
        // Tails, dials and what has two speeds are not judged.
        for key in ["echo_1_p99_us", "dials_8_per_s", "up_1_gbit_s"] {
            let costly = accounted(key, 3.0, 0.0).costly();
            assert_eq!(costly, ["http-connect has no echo and no transfer"]);
        }
        let mut failed = accounted(P50, 1.0, 0.0);
        let dialect = (ACCOUNTED[1], Dialect::HttpConnect);
        failed.add(dialect, 5, "echo", Err("broken".to_owned()));
        assert_eq!(failed.costly().len(), 1);
        assert!(!results(&["adit"]).has_accounted());
    }
}
