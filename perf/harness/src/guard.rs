//! `cargo xtask perf --guard`: checks whether this tree is slower than the previous commit, or than a bare relay allows.
//!
//! All binaries run concurrently and are measured in turns within seconds, so that other activity on the machine affects all of
//! them. This tree's binary runs twice: the two runs' difference is noise, and only a larger difference counts.

mod decision;
mod previous;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use adit_perf_plan::{Dialect, Plan};
use anyhow::{Context as _, ensure};
use serde::Deserialize;

pub(super) use self::decision::{Round, Verdict, judge};
use self::previous::Previous;
use super::measurement::load;
use super::peer::{Konnectivity, Peer, Route};
use super::process::{Place, Site};
use super::programs::Programs;
use super::results::Results;
use super::rows::Row;
use crate::workspace::Workspace;

/// Contents of `perf/guard.toml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    #[serde(rename = "ways")]
    dialects: Vec<Dialect>,
    rounds: usize,
    quick_rounds: usize,
    margin: f64,
    load: Plan,
    /// The plan for plaintext lanes.
    clear: Plan,
    relay: BTreeMap<Dialect, BTreeMap<String, f64>>,
}

// The measured programs: the bare relay, this tree twice, the previous commit, and this tree behind a throttle.
const RELAY: &str = "relay";
const CURRENT: &str = "current";
const AGAIN: &str = "again";
const PREVIOUS: &str = "previous";
const PLANTED: &str = "planted";
/// Both runs of this tree: their mean is a better estimate than one run.
const OURS: [&str; 2] = [CURRENT, AGAIN];

/// Suffixes of peer names for the lanes of a stack: TLS, or plaintext, where relay threads splice the bytes of CONNECT clients.
const LANES: [&str; 2] = ["", PLAINTEXT];
const PLAINTEXT: &str = "-plaintext";

/// Dialect and kind of lanes; results are compared within a class.
type Class = (Dialect, &'static str);

/// What all passes share.
struct Guard {
    programs: Programs,
    settings: Settings,
}

/// Runs the command.
///
/// # Errors
/// A regression, a row beyond its limit relative to the relay, or an undetected planted slowdown.
pub(crate) fn run(workspace: &Workspace, is_quick: bool, is_planted: bool) -> anyhow::Result<()> {
    let guard = Guard {
        settings: Settings::read(&workspace.path("perf/guard.toml"))?,
        programs: Programs::new(workspace, None)?,
    };
    // First, since cargo puts both binaries at the same path: this tree's binary must be the one that stays there.
    let previous = Previous::find(&guard.programs);
    let adit = guard.programs.adit()?;
    match &previous {
        Ok(previous) => println!("guard: against commit {}", previous.commit),
        Err(why) => println!(
            "guard: NO COMMIT BEFORE TO COMPARE WITH: {why:#}. Only the bare relay judges this tree."
        ),
    }
    let before = previous.as_ref().ok().map(|one| one.binary.as_path());
    if let Some(before) = before {
        if fs::read(before)? == fs::read(&adit)? {
            println!(
                "guard: THIS TREE'S PROGRAM IS THAT OF THE COMMIT BEFORE, byte for byte: nothing that differs can be seen."
            );
        }
        guard.mixed(before, &adit)?;
    }
    let mut peers = peers(&adit, before, is_planted)?;
    let rounds = if is_quick {
        guard.settings.quick_rounds
    } else {
        guard.settings.rounds
    };
    let first = guard.measure(&peers, rounds)?;
    let (mut report, margin) = (Report::default(), guard.settings.margin);
    let beyond = report.against_relay(&guard.settings.relay, &first)?;
    let mut worse = Vec::new();
    if before.is_some() {
        worse = report.against(&[PREVIOUS], &OURS, &first, margin);
    }
    if !worse.is_empty() {
        let list = list(&worse);
        println!("guard: measuring again, with fresh processes: {list}");
        peers.retain(|peer| {
            let is_asked = |((_, lanes), _): &Named| lanes_of(&peer.name) == *lanes;
            worse.iter().any(is_asked) && !peer.name.starts_with(PLANTED)
        });
        let second = guard.measure(&peers, rounds * 2)?;
        let still = report.against(&[PREVIOUS], &OURS, &second, margin);
        worse.retain(|row| still.contains(row));
    }
    let noticed = if is_planted {
        report.against(&OURS, &[PLANTED], &first, margin)
    } else {
        Vec::new()
    };
    let text = report.markdown();
    fs::write(guard.programs.out.join("guard.md"), &text)?;
    println!("{text}");
    let beyond = beyond.join(", ");
    ensure!(
        beyond.is_empty(),
        "beyond the limit against the bare relay: {beyond}"
    );
    let worse = list(&worse);
    ensure!(worse.is_empty(), "slower than the commit before: {worse}");
    if is_planted {
        let mut unnoticed = classes(&first);
        unnoticed.retain(|class| noticed.iter().all(|(of, _)| of != class));
        let names: Vec<String> = unnoticed.into_iter().map(class_name).collect();
        let names = names.join(", ");
        ensure!(
            names.is_empty(),
            "the planted slowdown of {names} went unnoticed: the guard is blind on this machine"
        );
        let noticed = list(&noticed);
        println!("guard: the planted slowdown was noticed: {noticed}");
    }
    Ok(())
}

/// Prints hash and binary of the previous commit, as an earlier run has built it.
///
/// # Errors
/// There is no previous commit, or no run has built it.
pub(crate) fn print_commit_before(workspace: &Workspace) -> anyhow::Result<()> {
    let Previous { commit, binary } = Previous::meant(workspace)?;
    ensure!(binary.is_file(), "commit {commit} was not built");
    println!("{commit} {}", binary.display());
    Ok(())
}

impl Settings {
    fn read(path: &Path) -> anyhow::Result<Self> {
        let text =
            fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        toml::from_str(&text).with_context(|| format!("in {}", path.display()))
    }
}

/// All measured programs. Plaintext lanes are compared with the previous commit only: the bare relay is the code that moves
/// their bytes, so it cannot judge them.
///
/// # Errors
/// The relay cannot be started under this name.
fn peers(adit: &Path, before: Option<&Path>, is_planted: bool) -> anyhow::Result<Vec<Peer>> {
    let mut ours = vec![(CURRENT, adit), (AGAIN, adit)];
    ours.extend(before.map(|binary| (PREVIOUS, binary)));
    if is_planted {
        ours.push((PLANTED, adit));
    }
    let mut all = vec![Peer::relay(RELAY)?];
    for (name, binary) in ours {
        let peer = Konnectivity::adit(name, name, binary.to_owned());
        if before.is_some() {
            all.push(peer.clone().variant("plaintext")?.into_peer());
        }
        all.push(peer.into_peer());
    }
    Ok(all)
}

impl Guard {
    /// Fleets are updated one process at a time, so the previous commit and this tree must serve each other, on both kinds of
    /// lanes.
    ///
    /// # Errors
    /// A measurement through a mixed pair fails.
    fn mixed(&self, previous: &Path, current: &Path) -> anyhow::Result<()> {
        for (server, agent, name) in [
            (previous, current, "older server, newer agent"),
            (current, previous, "newer server, older agent"),
        ] {
            let [server, agent] =
                [server, agent].map(|binary| Konnectivity::adit("", "", binary.to_owned()));
            let framed = Konnectivity::fleet(name, server, agent);
            let plaintext = framed.clone().variant("plaintext")?;
            for peer in [framed.into_peer(), plaintext.into_peer()] {
                self.pass(&self.settings.load, &[&peer], 1, &mut Results::default())
                    .with_context(|| peer.name.clone())?;
                println!("guard: served each other: {}", peer.name);
            }
        }
        Ok(())
    }

    /// Measures tunnels on both kinds of lanes, one kind after the other.
    fn measure(&self, peers: &[Peer], rounds: usize) -> anyhow::Result<Results> {
        let mut results = Results::default();
        let plans = [&self.settings.load, &self.settings.clear];
        for (lanes, plan) in LANES.into_iter().zip(plans) {
            let alike = peers.iter().filter(|peer| lanes_of(&peer.name) == lanes);
            let alike: Vec<&Peer> = alike.collect();
            // None are alike without a previous commit, or where only the other kind of lanes is measured again.
            if !alike.is_empty() {
                self.pass(plan, &alike, rounds, &mut results)?;
            }
        }
        Ok(results)
    }

    /// Starts a peer in one dialect.
    fn start(&self, peer: &Peer, dialect: Dialect) -> anyhow::Result<(Route, Site)> {
        let site = Site::new(&self.programs, None)?;
        let mut route = (peer.start)(&site, dialect)?;
        if let (true, Some(frontend)) = (peer.name.starts_with(PLANTED), &route.frontend) {
            let slow = site.path("slow.sock");
            let args = [
                "throttle".to_owned(),
                format!("--listen={}", slow.display()),
                format!("--to={frontend}"),
            ];
            let throttle = site.spawn("throttle", &Place::Host, &self.programs.load, &args)?;
            site.wait_for("the throttle", || slow.exists())?;
            route.running.push(throttle);
            route.frontend = Some(site.at("slow.sock"));
        }
        Ok((route, site))
    }

    /// Starts all stacks, measures them in turns, and stops them.
    fn pass(
        &self,
        plan: &Plan,
        peers: &[&Peer],
        rounds: usize,
        results: &mut Results,
    ) -> anyhow::Result<()> {
        let mut stacks = Vec::new();
        for peer in peers {
            for dialect in peer.dialects(&self.settings.dialects) {
                let stack = self.start(peer, dialect);
                let name = || format!("starting {} {}", peer.name, dialect.name());
                stacks.push((dialect, &peer.name, stack.with_context(name)?));
            }
        }
        // Stacks of one dialect are measured directly after each other.
        stacks.sort_by_key(|(dialect, ..)| *dialect);
        for round in 1..=rounds {
            eprintln!("guard: round {round}/{rounds}, {} stacks", stacks.len());
            // One measurement of all stacks before the next one: compared values are measured as close together as possible.
            for (measurement, plan) in &plan.parts() {
                // Each round starts with another stack.
                let from = (round - 1) % stacks.len();
                for stack in stacks.iter().cycle().skip(from).take(stacks.len()) {
                    let (dialect, name, (route, site)) = stack;
                    let sample = load(site, route, plan)
                        .with_context(|| format!("{name} {}, {measurement}", dialect.name()))?;
                    results.add((name, *dialect), round, measurement, Ok(sample));
                }
            }
        }
        Ok(())
    }
}

fn lanes_of(peer: &str) -> &'static str {
    if peer.ends_with(PLAINTEXT) {
        PLAINTEXT
    } else {
        ""
    }
}

fn class_name((dialect, lanes): Class) -> String {
    let words = match lanes {
        PLAINTEXT => " on plaintext lanes",
        _ => "",
    };
    format!("{}{words}", dialect.name())
}

/// Classes in which this tree was measured.
fn classes(results: &Results) -> Vec<Class> {
    let dialects = results.dialects().into_iter();
    let all = dialects.flat_map(|dialect| LANES.map(|lanes| (dialect, lanes)));
    let is_measured = |(dialect, lanes): &Class| {
        let name = format!("{CURRENT}{lanes}");
        !results.rows_of(&name, *dialect).is_empty()
    };
    all.filter(is_measured).collect()
}

/// A row of a class.
type Named = (Class, String);

fn list(rows: &[Named]) -> String {
    let words = rows
        .iter()
        .map(|(class, key)| format!("{} {key}", class_name(*class)));
    words.collect::<Vec<_>>().join(", ")
}

/// The tables of a run.
#[derive(Default)]
struct Report {
    compared: String,
    relay: String,
}

impl Report {
    /// Compares all rows of two programs, each measured once or twice; returns the rows in which the newer is worse.
    fn against(
        &mut self,
        older: &[&str],
        newer: &[&str],
        results: &Results,
        margin: f64,
    ) -> Vec<Named> {
        let mut worse = Vec::new();
        for class in classes(results) {
            let (dialect, lanes) = class;
            let named = |peers: &[&str]| -> Vec<String> {
                peers.iter().map(|peer| format!("{peer}{lanes}")).collect()
            };
            for row in results.rows_of(&format!("{CURRENT}{lanes}"), dialect) {
                // Tail latencies vary too much for so short a run.
                if ["p99_us", "p999_us"]
                    .iter()
                    .any(|loose| row.key.contains(loose))
                {
                    continue;
                }
                let peers = [&OURS, older, newer].map(named);
                let Some(verdict) = results.judged(&peers, dialect, &row, margin) else {
                    continue;
                };
                let judgement = if verdict.is_worse() { "WORSE" } else { "ok" };
                writeln!(
                    self.compared,
                    "| {} / {} | {} | {} | {:+.1} % | {:.1} % | {judgement} |",
                    newer[0],
                    older[0],
                    class_name(class),
                    row.words,
                    verdict.change * 100.0,
                    verdict.allowed * 100.0,
                )
                .ok();
                if verdict.is_worse() {
                    worse.push((class, row.key));
                }
            }
        }
        worse
    }

    /// Compares this tree with the bare relay; returns the rows beyond their limits.
    ///
    /// # Errors
    /// A limit names an unmeasured row, and so would guard nothing.
    fn against_relay(
        &mut self,
        limits: &BTreeMap<Dialect, BTreeMap<String, f64>>,
        results: &Results,
    ) -> anyhow::Result<Vec<String>> {
        let mut beyond = Vec::new();
        for (dialect, limits) in limits {
            for (key, limit) in limits {
                let name = dialect.name();
                let row = Row::of(key).with_context(|| format!("guard.toml: what is {key}?"))?;
                let ours = results.value(CURRENT, *dialect, key);
                let ratio = ours
                    .zip(results.value(RELAY, Dialect::Tcp, key))
                    .map(|(ours, relay)| ours / relay)
                    .with_context(|| format!("guard.toml: {name} {key} was not measured"))?;
                if row.better.is_worse(ratio, *limit, 0.0) {
                    beyond.push(format!("{name} {key} is {ratio:.3}, limit {limit}"));
                }
                writeln!(
                    self.relay,
                    "| {name} | {} | {ratio:.3} | {limit} |",
                    row.words
                )
                .ok();
            }
        }
        Ok(beyond)
    }

    fn markdown(&self) -> String {
        let Self { compared, relay } = self;
        format!(
            "\n| newer / older | dialect | measurement | change for the worse | lets pass | verdict |\n\
             | --- | --- | --- | ---: | ---: | --- |\n{compared}\n\
             | against the bare relay | measurement | ratio | limit |\n| --- | --- | ---: | ---: |\n{relay}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::sample;

    const WAY: Dialect = Dialect::HttpConnect;

    #[test]
    fn repository_settings_are_valid() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guard.toml");
        let settings = Settings::read(&path).unwrap();
        for (dialect, limits) in &settings.relay {
            assert!(settings.dialects.contains(dialect), "{dialect:?}");
            for key in limits.keys() {
                assert!(Row::of(key).is_some(), "{key}");
            }
        }
        for plan in [&settings.load, &settings.clear] {
            assert_eq!(plan.parts().len(), plan.measurements.len(), "{plan:?}");
        }
        assert!(settings.dialects.contains(&WAY), "for plaintext lanes");
    }

    #[test]
    fn plaintext_lanes_are_measured_only_with_an_older_commit() {
        let names = |before, is_planted| -> Vec<String> {
            let peers = peers(Path::new("new"), before, is_planted).unwrap();
            peers.into_iter().map(|peer| peer.name).collect()
        };
        assert_eq!(names(None, false), [RELAY, CURRENT, AGAIN]);
        let all = names(Some(Path::new("old")), true);
        let plaintext = all.iter().filter(|name| lanes_of(name) == PLAINTEXT);
        assert_eq!((all.len(), plaintext.count()), (9, 4));
    }

    /// Rounds of a download on a machine that gets faster from one to the next, for all alike.
    fn results(factors: &[(&str, Dialect, f64)]) -> Results {
        let mut results = Results::default();
        for (peer, dialect, factor) in factors {
            for (round, pace) in (1..).zip([10.0, 11.0, 12.0, 13.0, 14.0]) {
                let one = Ok(sample(&[("down_8_gbit_s", factor * pace)]));
                results.add((peer, *dialect), round, "bulk", one);
            }
        }
        results
    }

    #[test]
    fn slower_tree_is_named_in_each_class_and_the_same_tree_is_not() {
        let results = results(&[
            ("current", WAY, 1.00),
            ("again", WAY, 1.01),
            ("previous", WAY, 1.00),
            ("planted", WAY, 0.70),
            ("current-plaintext", WAY, 1.00),
            ("again-plaintext", WAY, 1.01),
            ("previous-plaintext", WAY, 1.40),
        ]);
        let mut report = Report::default();
        let worse = report.against(&[PREVIOUS], &OURS, &results, 0.05);
        assert_eq!(
            list(&worse),
            "http-connect on plaintext lanes down_8_gbit_s"
        );
        let noticed = report.against(&OURS, &[PLANTED], &results, 0.05);
        assert_eq!(list(&noticed), "http-connect down_8_gbit_s");
        assert_eq!(classes(&results).len(), 2);
        let table = report.markdown();
        let row = "| current / previous | http-connect on plaintext lanes | download, 8 streams, Gbit/s | +";
        assert!(table.contains(row), "{table}");
    }

    #[test]
    fn relay_limit_is_enforced_and_must_be_measurable() {
        let measured = results(&[
            (RELAY, Dialect::Tcp, 10.0),
            (CURRENT, WAY, 1.0),
            ("current-plaintext", WAY, 9.0),
        ]);
        let beyond = |limit, results| {
            let limits = [(WAY, [("down_8_gbit_s".to_owned(), limit)].into())].into();
            Report::default().against_relay(&limits, results)
        };
        assert!(beyond(0.05, &measured).unwrap().is_empty());
        assert_eq!(beyond(0.5, &measured).unwrap().len(), 1);
        assert!(beyond(0.5, &Results::default()).is_err());
    }
}
