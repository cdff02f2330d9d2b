//! `cargo xtask perf --guard`: is this tree slower than the commit before it, or than a bare relay allows?
//!
//! All binaries run at once and are measured in turns within seconds, so that what else the machine does hits all of
//! them. Ours runs twice: what the two differ by is noise, and only a difference beyond it counts.

mod decision;
mod previous;

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use serde::Deserialize;

pub(super) use self::decision::{Round, judge};
use self::previous::Previous;
use super::peer::{Konnectivity, Peer, Route};
use super::process::{Place, Site};
use super::programs::Programs;
use super::results::{Sample, median, rows_of};
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
    /// The same with lanes in clear text.
    clear: LoadPlan,
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

/// How the lanes of a stack carry tunnels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Lanes {
    /// In frames and TLS, as they do by default.
    Tls,
    /// In plaintext: bytes of CONNECT clients are spliced by relay threads.
    Plaintext,
}

/// Tunnels that are compared with each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Class {
    way: Way,
    lanes: Lanes,
}

/// A variant that can be started.
struct Contender {
    variant: Variant,
    lanes: Lanes,
    peer: Peer,
}

/// A running variant in one dialect.
struct Stack {
    variant: Variant,
    class: Class,
    route: Route,
    site: Site,
}

/// Samples by variant and class, a sample for each round.
type Samples = BTreeMap<(Variant, Class), Vec<Sample>>;

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
    match &previous {
        Ok(previous) => println!("guard: against commit {}", previous.commit),
        Err(why) => println!(
            "guard: NO COMMIT BEFORE TO COMPARE WITH: {why:#}. Only the bare relay judges this tree."
        ),
    }
    let before = previous.as_ref().ok().map(|one| one.binary.as_path());
    if let Some(before) = before
        && fs::read(before)? == fs::read(&adit)?
    {
        println!(
            "guard: THIS TREE'S PROGRAM IS THAT OF THE COMMIT BEFORE, byte for byte: nothing that differs can be seen."
        );
    }
    let mut contenders = Contender::all(&adit, before, is_planted)?;
    let rounds = if is_quick {
        settings.quick_rounds
    } else {
        settings.rounds
    };
    if let Some(before) = before {
        mixed(&programs, &settings, before, &adit)?;
    }
    let first = measure(&programs, &settings, &contenders, rounds)?;
    let mut report = Report::default();
    report.against_relay(&settings, &first)?;
    let mut worse = Vec::new();
    if before.is_some() {
        worse = report.against(Variant::Previous, Variant::Current, &settings, &first);
    }
    if !worse.is_empty() {
        println!(
            "guard: measuring again, with fresh processes: {}",
            list(&worse)
        );
        contenders.retain(|one| {
            let is_asked = worse.iter().any(|row| row.class.lanes == one.lanes);
            is_asked && one.variant != Variant::Planted
        });
        let second = measure(&programs, &settings, &contenders, rounds * 2)?;
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
        list(&worse)
    );
    if is_planted {
        let blind = unnoticed(&first, &noticed);
        ensure!(
            blind.is_empty(),
            "the planted slowdown of {} went unnoticed: the guard is blind on this machine",
            list(&blind)
        );
        println!(
            "guard: the planted slowdown was noticed: {}",
            list(&noticed)
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
        let [server, agent] =
            [server, agent].map(|binary| Konnectivity::adit(version, binary.to_owned()));
        let mut framed = Konnectivity::fleet("mixed", &server, &agent);
        framed.version = version.to_owned();
        for (lanes, peer) in [
            (Lanes::Tls, framed.clone()),
            (Lanes::Plaintext, framed.plaintext()),
        ] {
            let pair = Contender {
                variant: Variant::Mixed,
                lanes,
                peer: peer.into_peer(),
            };
            let version = &pair.peer.version;
            pass(programs, &settings.ways, &settings.load, &[&pair], 1)
                .with_context(|| version.clone())?;
            println!("guard: served each other: {version}");
        }
    }
    Ok(())
}

/// Measures tunnels on lanes of either kind, one kind after the other.
fn measure(
    programs: &Programs,
    settings: &Settings,
    contenders: &[Contender],
    rounds: usize,
) -> anyhow::Result<Samples> {
    let mut samples = Samples::new();
    for (lanes, plan) in [
        (Lanes::Tls, &settings.load),
        (Lanes::Plaintext, &settings.clear),
    ] {
        let alike: Vec<&Contender> = contenders.iter().filter(|one| one.lanes == lanes).collect();
        if !alike.is_empty() {
            samples.append(&mut pass(programs, &settings.ways, plan, &alike, rounds)?);
        }
    }
    Ok(samples)
}

/// Starts everything, measures in turns, ends everything.
fn pass(
    programs: &Programs,
    ways: &[Way],
    plan: &LoadPlan,
    contenders: &[&Contender],
    rounds: usize,
) -> anyhow::Result<Samples> {
    let mut stacks = Vec::new();
    for contender in contenders {
        for way in contender.peer.ways(ways) {
            let stack = Stack::start(programs, contender, way)
                .with_context(|| format!("starting {:?} {}", contender.variant, way.name()))?;
            stacks.push(stack);
        }
    }
    // Those of one dialect take their turns one after the other.
    stacks.sort_by_key(|stack| (stack.class, stack.variant));
    let tools = Tools {
        load: programs.load(),
        go_load: None,
    };
    let parts = plan.parts();
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
                    format!("{:?} {}, {measurement}", stack.variant, stack.class)
                })?;
                let rounds = samples.entry((stack.variant, stack.class)).or_default();
                rounds.resize_with(round + 1, Sample::default);
                if let Some(sample) = rounds.last_mut() {
                    sample.values.extend(part.values);
                }
            }
        }
    }
    Ok(samples)
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.way.name())?;
        match self.lanes {
            Lanes::Tls => Ok(()),
            Lanes::Plaintext => f.write_str(" on clear lanes"),
        }
    }
}

impl Contender {
    /// Everything that is measured. Lanes in clear text only beside a commit before: the bare relay is the relay that
    /// moves their bytes, so it cannot judge it.
    ///
    /// # Errors
    /// There is no such relay.
    fn all(adit: &Path, before: Option<&Path>, is_planted: bool) -> anyhow::Result<Vec<Self>> {
        let mut ours = vec![(Variant::Current, adit), (Variant::Again, adit)];
        ours.extend(before.map(|binary| (Variant::Previous, binary)));
        if is_planted {
            ours.push((Variant::Planted, adit));
        }
        let mut all = vec![Self {
            variant: Variant::Relay,
            lanes: Lanes::Tls,
            peer: Peer::relay("relay")?,
        }];
        for (variant, binary) in ours {
            let peer = Konnectivity::adit("guarded", binary.to_owned());
            if before.is_some() {
                all.push(Self {
                    variant,
                    lanes: Lanes::Plaintext,
                    peer: peer.clone().plaintext().into_peer(),
                });
            }
            all.push(Self {
                variant,
                lanes: Lanes::Tls,
                peer: peer.into_peer(),
            });
        }
        Ok(all)
    }
}

impl Stack {
    fn start(programs: &Programs, contender: &Contender, way: Way) -> anyhow::Result<Self> {
        let Contender {
            variant,
            lanes,
            peer,
        } = contender;
        let site = Site::new(programs.load(), None)?;
        let mut route = peer.start(&site, way)?;
        if let (Variant::Planted, Some(frontend)) = (variant, &route.frontend) {
            let slow = site.path("slow.sock");
            let args = [
                "throttle".to_owned(),
                format!("--listen={}", slow.display()),
                format!("--to={}", frontend.display()),
            ];
            let throttle = site.spawn("throttle", &Place::Host, programs.load(), &args)?;
            site.wait_for("the throttle", || slow.exists())?;
            route.running.push(throttle);
            route.frontend = Some(slow);
        }
        let class = Class { way, lanes: *lanes };
        Ok(Self {
            variant: *variant,
            class,
            route,
            site,
        })
    }
}

/// A row of a class.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Named {
    class: Class,
    key: String,
}

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.class, self.key)
    }
}

/// The tables of a run, and what went beyond a limit against the bare relay.
#[derive(Default)]
struct Report {
    compared: String,
    relay: String,
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
    ) -> Vec<Named> {
        let mut worse = Vec::new();
        for class in classes(samples) {
            for row in comparable(samples, class) {
                let values = |variant| values(samples, (variant, class), &row.key);
                let (current, again) = (values(Variant::Current), values(Variant::Again));
                let of = |variant| match variant {
                    // Both runs of ours together, by their geometric mean, are a better estimate of it than one.
                    Variant::Current => {
                        let pairs = current.iter().zip(&again);
                        pairs
                            .map(|(first, second)| (first * second).sqrt())
                            .collect()
                    }
                    other => values(other),
                };
                let rounds: Vec<Round> = current
                    .iter()
                    .zip(&again)
                    .zip(of(newer).into_iter().zip(of(older)))
                    .map(|((first, second), (newer, older))| Round {
                        noise: (*first, *second),
                        newer,
                        older,
                    })
                    .collect();
                let Some(verdict) = judge(&rounds, row.better, settings.margin) else {
                    continue;
                };
                self.compared.push_str(&format!(
                    "| {newer:?} / {older:?} | {class} | {} | {:+.1} % | {:.1} % | {} |\n",
                    row.words,
                    verdict.change * 100.0,
                    verdict.allowed * 100.0,
                    if verdict.is_worse() { "WORSE" } else { "ok" }
                ));
                if verdict.is_worse() {
                    let key = row.key;
                    worse.push(Named { class, key });
                }
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
                let (lanes, name) = (Lanes::Tls, way.name());
                let row = Row::of(key).with_context(|| format!("guard.toml: what is {key}?"))?;
                let of =
                    |variant, way| median(values(samples, (variant, Class { way, lanes }), key));
                let ratio = of(Variant::Current, *way)
                    .zip(of(Variant::Relay, Way::Tcp))
                    .map(|(ours, relay)| ours / relay)
                    .with_context(|| format!("guard.toml: {name} {key} was not measured"))?;
                let is_beyond = match row.better {
                    Better::Higher => ratio < *limit,
                    Better::Lower => ratio > *limit,
                };
                if is_beyond {
                    self.beyond
                        .push(format!("{name} {key} is {ratio:.3}, limit {limit}"));
                }
                let line = format!("| {name} | {} | {ratio:.3} | {limit} |\n", row.words);
                self.relay.push_str(&line);
            }
        }
        Ok(())
    }

    /// Two tables.
    fn markdown(&self) -> String {
        let Self {
            compared, relay, ..
        } = self;
        format!(
            "\n| newer / older | dialect | measurement | change for the worse | lets pass | verdict |\n\
             | --- | --- | --- | ---: | ---: | --- |\n{compared}\n\
             | against the bare relay | measurement | ratio | limit |\n| --- | --- | ---: | ---: |\n{relay}"
        )
    }
}

/// With commas between.
fn list<T: fmt::Display>(items: &[T]) -> String {
    let words: Vec<String> = items.iter().map(ToString::to_string).collect();
    words.join(", ")
}

/// Classes in which nothing was noticed.
fn unnoticed(samples: &Samples, noticed: &[Named]) -> Vec<Class> {
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

/// Rows that are compared: tails and whole-machine numbers are too loose to judge by in so short a time.
fn comparable(samples: &Samples, class: Class) -> Vec<Row> {
    let ours = samples.get(&(Variant::Current, class));
    let mut rows = rows_of(ours.into_iter().flatten().take(1));
    let is_loose =
        |key: &str| key.ends_with("p99_us") || key.ends_with("p999_us") || key.contains("machine");
    rows.retain(|row| !is_loose(&row.key));
    rows
}

fn values(samples: &Samples, key: (Variant, Class), row: &str) -> Vec<f64> {
    let samples = samples.get(&key).into_iter().flatten();
    samples
        .filter_map(|sample| sample.values.get(row).copied())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::results::samples::sample;

    #[test]
    fn settings_of_the_repository_name_what_exists() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../perf/guard.toml");
        let settings = Settings::read(&path).unwrap();
        for (way, limits) in &settings.relay {
            assert!(settings.ways.contains(way), "{way:?}");
            for key in limits.keys() {
                assert!(Row::of(key).is_some(), "{key}");
            }
        }
        for plan in [&settings.load, &settings.clear] {
            assert_eq!(plan.parts().len(), plan.measurements.len(), "{plan:?}");
        }
        assert!(
            settings.ways.contains(&Way::HttpConnect),
            "for plaintext lanes"
        );
    }

    #[test]
    fn plaintext_lanes_are_measured_beside_a_commit_before_only() {
        let plaintext = |before, is_planted| {
            let mut all = Contender::all(Path::new("new"), before, is_planted).unwrap();
            let count = all.len();
            all.retain(|one| one.lanes == Lanes::Plaintext);
            (count, all.len())
        };
        assert_eq!(plaintext(None, false), (3, 0));
        assert_eq!(plaintext(Some(Path::new("old")), true), (9, 4));
    }

    const TLS: Class = Class {
        way: Way::HttpConnect,
        lanes: Lanes::Tls,
    };
    const PLAINTEXT: Class = Class {
        lanes: Lanes::Plaintext,
        ..TLS
    };

    /// Rounds of a download on a machine that gets faster from one to the next, for all alike.
    fn samples(factors: &[(Variant, Class, f64)]) -> Samples {
        let mut samples = Samples::new();
        for (variant, class, factor) in factors {
            let rounds = (0..5).map(|round| factor * (10.0 + f64::from(round)));
            let rounds = rounds.map(|gbit| sample(&[("down_8_gbit_s", gbit)]));
            samples.insert((*variant, *class), rounds.collect());
        }
        samples
    }

    fn settings(limit: f64) -> Settings {
        let text = format!(
            "ways = ['http-connect']\nrounds = 1\nquick_rounds = 1\nmargin = 0.05\n\
             load = {{ measurements = ['bulk'], seconds = 1 }}\n\
             clear = {{ measurements = ['bulk'], seconds = 1 }}\n[relay.http-connect]\ndown_8_gbit_s = {limit}\n"
        );
        toml::from_str(&text).unwrap()
    }

    #[test]
    fn slower_tree_is_named_in_each_class_and_the_same_tree_is_not() {
        let mut measured = vec![
            (Variant::Previous, TLS, 1.00),
            (Variant::Previous, PLAINTEXT, 1.40),
        ];
        for class in [TLS, PLAINTEXT] {
            measured.push((Variant::Current, class, 1.00));
            measured.push((Variant::Again, class, 1.01));
            measured.push((Variant::Planted, class, 0.70));
        }
        let samples = samples(&measured);
        let mut report = Report::default();
        let mut of = |older, newer| report.against(older, newer, &settings(0.5), &samples);
        let worse = of(Variant::Previous, Variant::Current);
        assert_eq!(list(&worse), "http-connect on clear lanes down_8_gbit_s");
        let mut noticed = of(Variant::Current, Variant::Planted);
        assert!(unnoticed(&samples, &noticed).is_empty());
        noticed.retain(|row| row.class == TLS);
        assert_eq!(unnoticed(&samples, &noticed), [PLAINTEXT]);
        let table = report.markdown();
        assert!(
            table.contains("| Current / Previous | http-connect on clear lanes | download, 8 streams, Gbit/s | +"),
            "{table}"
        );
    }

    #[test]
    fn limit_against_the_relay_is_held_and_must_be_measurable() {
        let relay = Class {
            way: Way::Tcp,
            ..TLS
        };
        let samples = samples(&[
            (Variant::Relay, relay, 10.0),
            (Variant::Current, TLS, 1.0),
            // Not what the limit is for.
            (Variant::Current, PLAINTEXT, 9.0),
        ]);
        let mut report = Report::default();
        report.against_relay(&settings(0.05), &samples).unwrap();
        assert!(report.beyond.is_empty());
        report.against_relay(&settings(0.5), &samples).unwrap();
        assert_eq!(report.beyond.len(), 1, "{:?}", report.beyond);
        let nothing = Samples::new();
        assert!(report.against_relay(&settings(0.5), &nothing).is_err());
    }
}
