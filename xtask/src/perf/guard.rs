//! `cargo xtask perf --guard`: is this tree slower than the commit before it, or than a bare relay allows?
//!
//! All binaries run at once and are measured in turns within seconds, so that what else the machine does hits all of
//! them. Ours runs twice: what the two differ by is noise, and only a difference beyond it counts.

mod decision;
mod previous;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use serde::Deserialize;

use self::decision::{Round, Verdict, judge};
use self::previous::Previous;
use super::peer::{Konnectivity, Peer, Plain, Route};
use super::process::Site;
use super::programs::Programs;
use super::results::{Sample, median};
use super::rows::{Better, Row};
use super::scenario::{LoadPlan, Way};
use super::turn::{Tools, load};
use crate::workspace::Workspace;

/// `perf/guard.toml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    ways: Vec<Way>,
    rounds: usize,
    quick_rounds: usize,
    margin: f64,
    load: LoadPlan,
    relay: BTreeMap<Way, BTreeMap<String, f64>>,
}

/// Who is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Variant {
    /// The bare relay.
    Relay,
    /// This tree.
    Current,
    /// This tree once more, for the noise.
    Again,
    /// The commit before.
    Previous,
    /// This tree behind a throttle.
    Planted,
    /// One end of this tree, one of the commit before.
    Mixed,
}

/// A running variant in one dialect.
struct Stack {
    variant: Variant,
    way: Way,
    route: Route,
    site: Site,
}

/// Samples of a pass, by variant and dialect, a sample for each round.
type Samples = BTreeMap<(Variant, Way), Vec<Sample>>;

/// Runs the command.
///
/// # Errors
/// A regression, a row beyond its limit against the relay, or a planted slowdown that went unnoticed.
pub(crate) fn run(workspace: &Workspace, is_quick: bool, is_planted: bool) -> anyhow::Result<()> {
    let settings = Settings::read(&workspace.path("perf/guard.toml"))?;
    let programs = Programs::new(workspace, None)?;
    // First, since cargo leaves both binaries in one place: ours must be the one that stays there.
    let previous = Previous::find(&programs);
    let adit = programs.adit()?;
    let mut peers: Vec<(Variant, Box<dyn Peer>)> = vec![
        (Variant::Relay, Box::new(Plain::relay("relay")?)),
        (
            Variant::Current,
            Box::new(Konnectivity::adit("guarded", adit.clone())),
        ),
        (
            Variant::Again,
            Box::new(Konnectivity::adit("guarded", adit.clone())),
        ),
    ];
    match &previous {
        Ok(previous) => {
            println!("guard: against commit {}", previous.commit);
            let binary = previous.binary.clone();
            peers.push((
                Variant::Previous,
                Box::new(Konnectivity::adit("guarded", binary)),
            ));
        }
        Err(why) => println!(
            "guard: NO COMMIT BEFORE TO COMPARE WITH: {why:#}. Only the bare relay judges this tree."
        ),
    }
    if is_planted {
        peers.push((
            Variant::Planted,
            Box::new(Konnectivity::adit("guarded", adit.clone())),
        ));
    }
    let rounds = if is_quick {
        settings.quick_rounds
    } else {
        settings.rounds
    };
    if let Ok(previous) = &previous {
        mixed(&programs, &settings, &previous.binary, &adit)?;
    }
    let first = pass(&programs, &settings, &peers, rounds)?;
    let mut report = Report::default();
    report.against_relay(&settings, &first)?;
    let mut worse = Vec::new();
    if previous.is_ok() {
        worse = report.against(Variant::Previous, Variant::Current, &settings, &first);
    }
    if !worse.is_empty() {
        println!(
            "guard: measuring again, with fresh processes: {}",
            worse.join(", ")
        );
        peers.retain(|(variant, _)| *variant != Variant::Planted);
        let second = pass(&programs, &settings, &peers, rounds * 2)?;
        let still = report.against(Variant::Previous, Variant::Current, &settings, &second);
        worse.retain(|row| still.contains(row));
    }
    let noticed = if is_planted {
        report.against(Variant::Current, Variant::Planted, &settings, &first)
    } else {
        Vec::new()
    };
    let text = report.markdown();
    fs::write(programs.out.join("guard.md"), &text)?;
    println!("{text}");
    ensure!(
        report.beyond.is_empty(),
        "beyond the limit against the bare relay: {}",
        report.beyond.join(", ")
    );
    ensure!(
        worse.is_empty(),
        "slower than the commit before: {}",
        worse.join(", ")
    );
    if is_planted {
        for way in &settings.ways {
            ensure!(
                noticed.iter().any(|row| row.starts_with(way.name())),
                "the planted slowdown of {} went unnoticed: the guard is blind on this machine",
                way.name()
            );
        }
        println!(
            "guard: the planted slowdown was noticed: {}",
            noticed.join(", ")
        );
    }
    Ok(())
}

/// The commit before as an earlier run has built it: its name and its binary.
///
/// # Errors
/// There is none, or no run has built it.
pub(crate) fn commit_before(workspace: &Workspace) -> anyhow::Result<(String, PathBuf)> {
    let Previous { commit, binary } = Previous::built(workspace)?;
    Ok((commit, binary))
}

impl Settings {
    fn read(path: &Path) -> anyhow::Result<Self> {
        let text =
            fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        toml::from_str(&text).with_context(|| format!("in {}", path.display()))
    }
}

/// Fleets are updated one process at a time: the commit before and this tree serve each other, framed and in clear text.
///
/// # Errors
/// A measurement through a mixed pair fails.
fn mixed(
    programs: &Programs,
    settings: &Settings,
    previous: &Path,
    current: &Path,
) -> anyhow::Result<()> {
    for (server, agent, version) in [
        (previous, current, "older server, newer agent"),
        (current, previous, "newer server, older agent"),
    ] {
        let framed = Konnectivity::mixed(version, server.to_owned(), agent.to_owned());
        for peer in [framed.clone(), framed.in_clear()] {
            let peers: [(Variant, Box<dyn Peer>); 1] = [(Variant::Mixed, Box::new(peer.clone()))];
            pass(programs, settings, &peers, 1).with_context(|| peer.version())?;
            println!("guard: served each other: {}", peer.version());
        }
    }
    Ok(())
}

/// Starts everything, measures in turns, ends everything.
fn pass(
    programs: &Programs,
    settings: &Settings,
    peers: &[(Variant, Box<dyn Peer>)],
    rounds: usize,
) -> anyhow::Result<Samples> {
    let mut stacks = Vec::new();
    for (variant, peer) in peers {
        for way in peer.ways(&settings.ways) {
            let stack = Stack::start(programs, *variant, peer.as_ref(), way)
                .with_context(|| format!("starting {variant:?} {}", way.name()))?;
            stacks.push(stack);
        }
    }
    // Those of one dialect take their turns one after the other.
    stacks.sort_by_key(|stack| (stack.way, stack.variant));
    let tools = Tools {
        load: programs.load(),
        go_load: None,
    };
    let parts = settings.load.parts();
    let mut samples = Samples::new();
    for round in 0..rounds {
        eprintln!(
            "guard: round {}/{rounds}, {} stacks",
            round + 1,
            stacks.len()
        );
        // One measurement of all before the next: what is compared lies as close together as can be.
        for (measurement, plan) in &parts {
            for at in 0..stacks.len() {
                let Some(stack) = stacks.get((at + round) % stacks.len()) else {
                    continue;
                };
                let part = load(tools, &stack.site, &stack.route, plan).with_context(|| {
                    format!("{:?} {}, {measurement}", stack.variant, stack.way.name())
                })?;
                let rounds = samples.entry((stack.variant, stack.way)).or_default();
                rounds.resize_with(round + 1, Sample::default);
                if let Some(sample) = rounds.last_mut() {
                    sample.values.extend(part.values);
                }
            }
        }
    }
    Ok(samples)
}

impl Stack {
    fn start(
        programs: &Programs,
        variant: Variant,
        peer: &dyn Peer,
        way: Way,
    ) -> anyhow::Result<Self> {
        let site = Site::new(programs.load())?;
        let mut route = peer.start(&site, way)?;
        if let (Variant::Planted, Some(frontend)) = (variant, &route.frontend) {
            let slow = site.path("slow.sock");
            let throttle = site.throttle(&slow, frontend)?;
            route.running.push(throttle);
            route.frontend = Some(slow);
        }
        Ok(Self {
            variant,
            way,
            route,
            site,
        })
    }
}

/// Lines of the report, and what went beyond a limit.
#[derive(Default)]
struct Report {
    compared: Vec<(Variant, Variant, Way, Row, Verdict)>,
    relay: Vec<(Way, Row, f64, f64)>,
    beyond: Vec<String>,
}

impl Report {
    /// Compares all rows of two variants; returns those where `newer` is worse.
    fn against(
        &mut self,
        older: Variant,
        newer: Variant,
        settings: &Settings,
        samples: &Samples,
    ) -> Vec<String> {
        let mut worse = Vec::new();
        for way in &settings.ways {
            for row in comparable(samples, (Variant::Current, *way)) {
                let of = |variant| values(samples, (variant, *way), &row.key);
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
                    worse.push(format!("{} {}", way.name(), row.key));
                }
                self.compared.push((older, newer, *way, row, verdict));
            }
        }
        worse
    }

    /// Holds ours against the bare relay.
    ///
    /// # Errors
    /// A limit names a row that was not measured: it would guard nothing.
    fn against_relay(&mut self, settings: &Settings, samples: &Samples) -> anyhow::Result<()> {
        for (way, limits) in &settings.relay {
            for (key, limit) in limits {
                let row = Row::of(key).with_context(|| format!("guard.toml: what is {key}?"))?;
                let of = |variant, way| median(values(samples, (variant, way), key));
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

    fn markdown(&self) -> String {
        let mut text = String::from(
            "\n| newer / older | dialect | measurement | change for the worse | lets pass | verdict |\n\
             | --- | --- | --- | ---: | ---: | --- |\n",
        );
        for (older, newer, way, row, verdict) in &self.compared {
            text.push_str(&format!(
                "| {newer:?} / {older:?} | {} | {} | {:+.1} % | {:.1} % | {} |\n",
                way.name(),
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

fn is_beyond(better: Better, ratio: f64, limit: f64) -> bool {
    match better {
        Better::Higher => ratio < limit,
        Better::Lower => ratio > limit,
    }
}

/// Rows that are compared: tails and whole-machine numbers are too loose to judge by in so short a time.
fn comparable(samples: &Samples, key: (Variant, Way)) -> Vec<Row> {
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

fn values(samples: &Samples, key: (Variant, Way), row: &str) -> Vec<f64> {
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
    use super::*;

    #[test]
    fn settings_of_the_repository_name_rows_that_exist() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../perf/guard.toml");
        let settings = Settings::read(&path).unwrap();
        for (way, limits) in &settings.relay {
            assert!(settings.ways.contains(way), "{way:?}");
            for key in limits.keys() {
                assert!(Row::of(key).is_some(), "{key}");
            }
        }
    }

    fn samples(factors: &[(Variant, f64)]) -> Samples {
        let mut samples = Samples::new();
        for round in 0..5 {
            for (variant, factor) in factors {
                let way = match variant {
                    Variant::Relay => Way::Tcp,
                    _ => Way::Grpc,
                };
                // The machine gets faster from round to round, for all alike.
                let gbit = factor * (10.0 + f64::from(round));
                let sample = Sample {
                    values: BTreeMap::from([("down_8_gbit_s".to_owned(), gbit)]),
                    distributions: BTreeMap::new(),
                };
                samples.entry((*variant, way)).or_default().push(sample);
            }
        }
        samples
    }

    fn settings(limit: f64) -> Settings {
        let text = format!(
            "ways = ['grpc']\nrounds = 1\nquick_rounds = 1\nmargin = 0.05\n\
             load = {{ measurements = ['bulk'], seconds = 1 }}\n[relay.grpc]\ndown_8_gbit_s = {limit}\n"
        );
        toml::from_str(&text).unwrap()
    }

    #[test]
    fn slower_tree_is_named_and_the_same_tree_is_not() {
        let measured = [
            (Variant::Current, 1.00),
            (Variant::Again, 1.01),
            (Variant::Previous, 1.00),
            (Variant::Planted, 0.70),
        ];
        let samples = samples(&measured);
        let mut report = Report::default();
        let of = |report: &mut Report, older, newer| {
            report.against(older, newer, &settings(0.5), &samples)
        };
        assert!(of(&mut report, Variant::Previous, Variant::Current).is_empty());
        let noticed = of(&mut report, Variant::Current, Variant::Planted);
        assert_eq!(noticed, ["grpc down_8_gbit_s"]);
        assert!(report.markdown().contains("WORSE"));
    }

    #[test]
    fn limit_against_the_relay_is_held_and_must_be_measurable() {
        let samples = samples(&[(Variant::Relay, 10.0), (Variant::Current, 1.0)]);
        let mut report = Report::default();
        report.against_relay(&settings(0.05), &samples).unwrap();
        assert!(report.beyond.is_empty());
        report.against_relay(&settings(0.5), &samples).unwrap();
        assert_eq!(report.beyond.len(), 1, "{:?}", report.beyond);
        let nothing = Samples::new();
        assert!(report.against_relay(&settings(0.5), &nothing).is_err());
    }
}
