//! Samples of all rounds, and the table made of their medians.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::stack::{Maker, Mode};

/// What one run of the load tool printed: measurement by name.
pub(crate) type Sample = BTreeMap<String, f64>;

/// All samples.
#[derive(Default)]
pub(crate) struct Results {
    samples: BTreeMap<(Mode, Maker), Vec<Sample>>,
}

/// Which way a number should go.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Better {
    Higher,
    Lower,
}

/// What four stalled readers may make of the echo p99 of others.
const ISOLATION_RATIO_MAX: f64 = 1.5;

/// Key in a sample, words for people, and direction.
const ROWS: [(&str, &str, Better); 19] = [
    (
        "down_1_gbit_s",
        "download, 1 stream, Gbit/s",
        Better::Higher,
    ),
    (
        "down_8_gbit_s",
        "download, 8 streams, Gbit/s",
        Better::Higher,
    ),
    ("up_1_gbit_s", "upload, 1 stream, Gbit/s", Better::Higher),
    ("up_8_gbit_s", "upload, 8 streams, Gbit/s", Better::Higher),
    ("echo_1_p50_us", "echo p50, 1 connection, us", Better::Lower),
    ("echo_1_p99_us", "echo p99, 1 connection, us", Better::Lower),
    (
        "echo_16_p50_us",
        "echo p50, 16 connections, us",
        Better::Lower,
    ),
    (
        "echo_16_p99_us",
        "echo p99, 16 connections, us",
        Better::Lower,
    ),
    (
        "dials_per_s",
        "dial, echo, close with 8 workers, 1/s",
        Better::Higher,
    ),
    (
        "idle_kib",
        "idle connection, server and agent, KiB",
        Better::Lower,
    ),
    (
        "idle_server_kib",
        "idle connection, server, KiB",
        Better::Lower,
    ),
    (
        "idle_agent_kib",
        "idle connection, agent, KiB",
        Better::Lower,
    ),
    (
        "down_1_cpu_s_per_gib",
        "download, 1 stream, CPU s/GiB",
        Better::Lower,
    ),
    (
        "down_8_cpu_s_per_gib",
        "download, 8 streams, CPU s/GiB",
        Better::Lower,
    ),
    (
        "up_1_cpu_s_per_gib",
        "upload, 1 stream, CPU s/GiB",
        Better::Lower,
    ),
    (
        "up_8_cpu_s_per_gib",
        "upload, 8 streams, CPU s/GiB",
        Better::Lower,
    ),
    (
        "isolation_completed",
        "echo beside 4 stalled readers goes on (1 = yes)",
        Better::Higher,
    ),
    (
        "isolation_p50_ratio",
        "echo p50 beside 4 stalled readers / without",
        Better::Lower,
    ),
    (
        "isolation_p99_ratio",
        "echo p99 beside 4 stalled readers / without",
        Better::Lower,
    ),
];

impl Results {
    /// Adds one round's sample.
    pub(crate) fn add(&mut self, maker: Maker, mode: Mode, sample: Sample) {
        self.samples.entry((mode, maker)).or_default().push(sample);
    }

    /// The table for people: a section per mode, a row per measurement that was taken.
    pub(crate) fn markdown(&self, heading: &str) -> String {
        let mut text = heading.to_owned();
        for mode in [Mode::Grpc, Mode::HttpConnect] {
            if !self.samples.keys().any(|(sampled, _)| *sampled == mode) {
                continue;
            }
            write!(
                text,
                "\n### {}\n\n| measurement | upstream | adit | adit / upstream | better |\n",
                mode.flag()
            )
            .ok();
            text.push_str("| --- | ---: | ---: | ---: | --- |\n");
            for (key, words, better) in ROWS {
                let (upstream, adit) = (
                    self.median(mode, Maker::Upstream, key),
                    self.median(mode, Maker::Adit, key),
                );
                if upstream.is_none() && adit.is_none() {
                    continue;
                }
                let ratio = upstream
                    .zip(adit)
                    .filter(|(theirs, _)| *theirs != 0.0)
                    .map(|(theirs, ours)| ours / theirs);
                let arrow = if better == Better::Higher {
                    "higher"
                } else {
                    "lower"
                };
                writeln!(
                    text,
                    "| {words} | {} | {} | {} | {arrow} |",
                    show(upstream),
                    show(adit),
                    show(ratio)
                )
                .ok();
            }
        }
        text
    }

    /// Everything, for machines: mode, maker, rounds.
    pub(crate) fn json(&self) -> anyhow::Result<String> {
        let mut all: BTreeMap<&str, BTreeMap<&str, &Vec<Sample>>> = BTreeMap::new();
        for ((mode, maker), samples) in &self.samples {
            all.entry(mode.flag())
                .or_default()
                .insert(maker.name(), samples);
        }
        Ok(serde_json::to_string_pretty(&all)?)
    }

    /// Rows where our median is worse than upstream's.
    pub(crate) fn worse(&self) -> Vec<String> {
        let mut worse = Vec::new();
        for mode in [Mode::Grpc, Mode::HttpConnect] {
            for (key, _, better) in ROWS {
                let pair = self.median(mode, Maker::Upstream, key).zip(self.median(
                    mode,
                    Maker::Adit,
                    key,
                ));
                let is_worse = pair.is_some_and(|(theirs, ours)| match better {
                    Better::Higher => ours < theirs,
                    Better::Lower => ours > theirs,
                });
                if is_worse {
                    worse.push(format!("{} {key}", mode.flag()));
                }
            }
        }
        worse
    }

    /// Modes in which stalled readers slow our echo beyond [`ISOLATION_RATIO_MAX`].
    pub(crate) fn disturbed(&self) -> Vec<String> {
        let mut disturbed = Vec::new();
        for mode in [Mode::Grpc, Mode::HttpConnect] {
            let ours = |key| self.median(mode, Maker::Adit, key);
            match (ours("isolation_completed"), ours("isolation_p99_ratio")) {
                (None, _) => (),
                (Some(1.0), Some(ratio)) if ratio <= ISOLATION_RATIO_MAX => (),
                (Some(1.0), Some(ratio)) => {
                    disturbed.push(format!("{} echo p99 {ratio:.2} times", mode.flag()));
                }
                (Some(_), _) => disturbed.push(format!("{} echo did not finish", mode.flag())),
            }
        }
        disturbed
    }

    fn median(&self, mode: Mode, maker: Maker, key: &str) -> Option<f64> {
        let samples = self.samples.get(&(mode, maker))?;
        let mut values: Vec<f64> = samples
            .iter()
            .filter_map(|sample| sample.get(key).copied())
            .collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied()
    }
}

fn show(value: Option<f64>) -> String {
    match value {
        None => "-".to_owned(),
        Some(value) if value.abs() >= 100.0 => format!("{value:.0}"),
        Some(value) => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_shows_the_ratio_of_medians_and_worse_rows_are_named() {
        let mut results = Results::default();
        for (maker, rounds) in [
            (Maker::Upstream, [1.0, 9.0, 2.0]),
            (Maker::Adit, [8.0, 1.0, 7.0]),
        ] {
            for gbit in rounds {
                let sample = Sample::from([
                    ("down_1_gbit_s".to_owned(), gbit),
                    ("echo_1_p50_us".to_owned(), gbit),
                ]);
                results.add(maker, Mode::Grpc, sample);
            }
        }
        let table = results.markdown("heading\n");
        assert!(
            table.contains("| download, 1 stream, Gbit/s | 2.00 | 7.00 | 3.50 | higher |"),
            "{table}"
        );
        assert_eq!(results.worse(), ["grpc echo_1_p50_us"]);
    }
}
