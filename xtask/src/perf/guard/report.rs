//! What a run of the guard says: rows of two variants compared, rows held against the bare relay.

use std::fmt;

use anyhow::Context as _;

use super::decision::{Round, Verdict, judge};
use super::{Class, Lanes, Samples, Settings, Variant};
use crate::perf::results::median;
use crate::perf::rows::{Better, Row};
use crate::perf::scenario::Way;

/// Lines of the report, and what went beyond a limit.
#[derive(Default)]
pub(super) struct Report {
    compared: Vec<(Variant, Variant, Class, Row, Verdict)>,
    relay: Vec<(Way, Row, f64, f64)>,
    beyond: Vec<String>,
}

/// A row of a class, by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Named {
    /// Whose.
    pub(super) class: Class,
    key: String,
}

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.class, self.key)
    }
}

impl Report {
    /// Compares all rows of two variants; returns those where `newer` is worse.
    pub(super) fn against(
        &mut self,
        older: Variant,
        newer: Variant,
        settings: &Settings,
        samples: &Samples,
    ) -> Vec<Named> {
        let mut worse = Vec::new();
        for class in classes(samples) {
            for row in comparable(samples, (Variant::Current, class)) {
                let of = |variant| values(samples, (variant, class), &row.key);
                let (current, again) = (of(Variant::Current), of(Variant::Again));
                // Both runs of ours together are a better estimate of it than one.
                let newer_values = match newer {
                    Variant::Current => together(&current, &again),
                    _ => of(newer),
                };
                let older_values = match older {
                    Variant::Current => together(&current, &again),
                    _ => of(older),
                };
                let rounds: Vec<Round> = current
                    .iter()
                    .zip(&again)
                    .zip(newer_values.iter().zip(&older_values))
                    .map(|((first, second), (newer, older))| Round {
                        noise: (*first, *second),
                        newer: *newer,
                        older: *older,
                    })
                    .collect();
                let Some(verdict) = judge(&rounds, row.better, settings.margin) else {
                    continue;
                };
                if verdict.is_worse() {
                    let key = row.key.clone();
                    worse.push(Named { class, key });
                }
                self.compared.push((older, newer, class, row, verdict));
            }
        }
        worse
    }

    /// Holds ours against the bare relay.
    ///
    /// # Errors
    /// A limit names a row that was not measured: it would guard nothing.
    pub(super) fn against_relay(
        &mut self,
        settings: &Settings,
        samples: &Samples,
    ) -> anyhow::Result<()> {
        for (way, limits) in &settings.relay {
            for (key, limit) in limits {
                let row = Row::of(key).with_context(|| format!("guard.toml: what is {key}?"))?;
                let of = |variant, way| {
                    let lanes = Lanes::Tls;
                    median(values(samples, (variant, Class { way, lanes }), key))
                };
                let ratio = of(Variant::Current, *way)
                    .zip(of(Variant::Relay, Way::Tcp))
                    .map(|(ours, relay)| ours / relay)
                    .with_context(|| {
                        format!("guard.toml: {} {key} was not measured", way.name())
                    })?;
                if is_beyond(row.better, ratio, *limit) {
                    let text = format!("{} {key} is {ratio:.3}, limit {limit}", way.name());
                    self.beyond.push(text);
                }
                self.relay.push((*way, row, ratio, *limit));
            }
        }
        Ok(())
    }

    /// What is beyond its limit against the bare relay.
    pub(super) fn beyond(&self) -> &[String] {
        &self.beyond
    }

    /// Two tables.
    pub(super) fn markdown(&self) -> String {
        let mut text = String::from(
            "\n| newer / older | dialect | measurement | change for the worse | lets pass | verdict |\n\
             | --- | --- | --- | ---: | ---: | --- |\n",
        );
        for (older, newer, class, row, verdict) in &self.compared {
            text.push_str(&format!(
                "| {newer:?} / {older:?} | {class} | {} | {:+.1} % | {:.1} % | {} |\n",
                row.words,
                verdict.change * 100.0,
                verdict.allowed * 100.0,
                if verdict.is_worse() { "WORSE" } else { "ok" }
            ));
        }
        text.push_str("\n| against the bare relay | measurement | ratio | limit |\n| --- | --- | ---: | ---: |\n");
        for (way, row, ratio, limit) in &self.relay {
            text.push_str(&format!(
                "| {} | {} | {ratio:.3} | {limit} |\n",
                way.name(),
                row.words
            ));
        }
        text
    }
}

/// With commas between.
pub(super) fn list<T: fmt::Display>(items: &[T]) -> String {
    let words: Vec<String> = items.iter().map(ToString::to_string).collect();
    words.join(", ")
}

/// Classes in which nothing was noticed.
pub(super) fn unnoticed(samples: &Samples, noticed: &[Named]) -> Vec<Class> {
    let mut classes = classes(samples);
    classes.retain(|class| noticed.iter().all(|row| row.class != *class));
    classes
}

/// Classes in which this tree was measured.
fn classes(samples: &Samples) -> Vec<Class> {
    let ours = samples
        .keys()
        .filter(|(variant, _)| *variant == Variant::Current);
    ours.map(|(_, class)| *class).collect()
}

fn is_beyond(better: Better, ratio: f64, limit: f64) -> bool {
    match better {
        Better::Higher => ratio < limit,
        Better::Lower => ratio > limit,
    }
}

/// Rows that are compared: tails and whole-machine numbers are too loose to judge by in so short a time.
fn comparable(samples: &Samples, key: (Variant, Class)) -> Vec<Row> {
    let keys = samples.get(&key).and_then(|samples| samples.first());
    let keys = keys.into_iter().flat_map(|sample| sample.values.keys());
    let mut rows: Vec<Row> = keys
        .filter(|key| !["p99_us", "p999_us"].iter().any(|tail| key.ends_with(tail)))
        .filter(|key| !key.contains("machine"))
        .filter_map(|key| Row::of(key))
        .collect();
    rows.sort();
    rows
}

fn values(samples: &Samples, key: (Variant, Class), row: &str) -> Vec<f64> {
    let samples = samples.get(&key).into_iter().flatten();
    samples
        .filter_map(|sample| sample.values.get(row).copied())
        .collect()
}

/// The geometric mean of two runs, round by round.
fn together(first: &[f64], second: &[f64]) -> Vec<f64> {
    let pairs = first.iter().zip(second);
    pairs
        .map(|(first, second)| (first * second).sqrt())
        .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::perf::results::Sample;

    fn class(way: Way, lanes: Lanes) -> Class {
        Class { way, lanes }
    }

    /// Rounds of a download on a machine that gets faster from one to the next, for all alike.
    fn samples(factors: &[(Variant, Class, f64)]) -> Samples {
        let mut samples = Samples::new();
        for round in 0..5 {
            for (variant, class, factor) in factors {
                let gbit = factor * (10.0 + f64::from(round));
                let sample = Sample {
                    values: BTreeMap::from([("down_8_gbit_s".to_owned(), gbit)]),
                    distributions: BTreeMap::new(),
                };
                samples.entry((*variant, *class)).or_default().push(sample);
            }
        }
        samples
    }

    fn settings(limit: f64) -> Settings {
        let text = format!(
            "ways = ['grpc']\nrounds = 1\nquick_rounds = 1\nmargin = 0.05\n\
             load = {{ measurements = ['bulk'], seconds = 1 }}\n\
             clear = {{ measurements = ['bulk'], seconds = 1 }}\n[relay.grpc]\ndown_8_gbit_s = {limit}\n"
        );
        toml::from_str(&text).unwrap()
    }

    #[test]
    fn slower_tree_is_named_and_the_same_tree_is_not() {
        let grpc = class(Way::Grpc, Lanes::Tls);
        let samples = samples(&[
            (Variant::Current, grpc, 1.00),
            (Variant::Again, grpc, 1.01),
            (Variant::Previous, grpc, 1.00),
            (Variant::Planted, grpc, 0.70),
        ]);
        let mut report = Report::default();
        let of = |report: &mut Report, older, newer| {
            report.against(older, newer, &settings(0.5), &samples)
        };
        assert!(of(&mut report, Variant::Previous, Variant::Current).is_empty());
        let noticed = of(&mut report, Variant::Current, Variant::Planted);
        assert_eq!(list(&noticed), "grpc down_8_gbit_s");
        assert!(report.markdown().contains("WORSE"));
    }

    #[test]
    fn lanes_in_clear_text_are_judged_by_themselves() {
        let framed = class(Way::HttpConnect, Lanes::Tls);
        let clear = class(Way::HttpConnect, Lanes::Clear);
        let mut measured = Vec::new();
        for class in [framed, clear] {
            measured.push((Variant::Current, class, 1.00));
            measured.push((Variant::Again, class, 1.01));
            measured.push((Variant::Planted, class, 0.70));
        }
        measured.push((Variant::Previous, framed, 1.00));
        measured.push((Variant::Previous, clear, 1.40));
        let samples = samples(&measured);
        let mut report = Report::default();
        let mut of = |older, newer| report.against(older, newer, &settings(0.5), &samples);
        let worse = of(Variant::Previous, Variant::Current);
        assert_eq!(list(&worse), "http-connect on clear lanes down_8_gbit_s");
        let mut noticed = of(Variant::Current, Variant::Planted);
        assert!(unnoticed(&samples, &noticed).is_empty());
        noticed.retain(|row| row.class == framed);
        assert_eq!(unnoticed(&samples, &noticed), [clear]);
        noticed.clear();
        assert_eq!(unnoticed(&samples, &noticed), [framed, clear]);
        let table = report.markdown();
        assert!(
            table.contains("| Current / Previous | http-connect on clear lanes | download, 8 streams, Gbit/s | +"),
            "{table}"
        );
    }

    #[test]
    fn limit_against_the_relay_is_held_and_must_be_measurable() {
        let samples = samples(&[
            (Variant::Relay, class(Way::Tcp, Lanes::Tls), 10.0),
            (Variant::Current, class(Way::Grpc, Lanes::Tls), 1.0),
            // Not what the limit is for.
            (Variant::Current, class(Way::Grpc, Lanes::Clear), 9.0),
        ]);
        let mut report = Report::default();
        report.against_relay(&settings(0.05), &samples).unwrap();
        assert!(report.beyond().is_empty());
        report.against_relay(&settings(0.5), &samples).unwrap();
        assert_eq!(report.beyond().len(), 1, "{:?}", report.beyond());
        let nothing = Samples::new();
        assert!(report.against_relay(&settings(0.5), &nothing).is_err());
    }
}
