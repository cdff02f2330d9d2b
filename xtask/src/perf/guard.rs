//! `cargo xtask perf --guard`: is this tree slower than the commit before it, or than a bare relay allows?
//!
//! All binaries run at once and are measured in turns within seconds, so that what else the machine does hits all of
//! them. Ours runs twice: what the two differ by is noise, and only a difference beyond it counts.

mod decision;
mod previous;
mod report;

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use serde::Deserialize;

pub(super) use self::decision::{Round, judge};
use self::previous::Previous;
use self::report::{Report, list, unnoticed};
use super::peer::{Konnectivity, Peer, Plain, Route};
use super::process::Site;
use super::programs::Programs;
use super::results::Sample;
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
    /// In clear text: bytes of CONNECT clients are spliced by relay threads.
    Clear,
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
    peer: Box<dyn Peer>,
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
        report.beyond().is_empty(),
        "beyond the limit against the bare relay: {}",
        report.beyond().join(", ")
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
        let framed = Konnectivity::mixed(version, server.to_owned(), agent.to_owned());
        for (lanes, peer) in [
            (Lanes::Tls, framed.clone()),
            (Lanes::Clear, framed.in_clear()),
        ] {
            let version = peer.version();
            let pair = Contender {
                variant: Variant::Mixed,
                lanes,
                peer: Box::new(peer),
            };
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
        (Lanes::Clear, &settings.clear),
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
            Lanes::Clear => f.write_str(" on clear lanes"),
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
            peer: Box::new(Plain::relay("relay")?),
        }];
        for (variant, binary) in ours {
            let peer = Konnectivity::adit("guarded", binary.to_owned());
            if before.is_some() {
                all.push(Self {
                    variant,
                    lanes: Lanes::Clear,
                    peer: Box::new(peer.clone().in_clear()),
                });
            }
            all.push(Self {
                variant,
                lanes: Lanes::Tls,
                peer: Box::new(peer),
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
        let site = Site::new(programs.load())?;
        let mut route = peer.start(&site, way)?;
        if let (Variant::Planted, Some(frontend)) = (variant, &route.frontend) {
            let slow = site.path("slow.sock");
            let throttle = site.throttle(&slow, frontend)?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::rows::Row;

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
        assert!(settings.ways.contains(&Way::HttpConnect), "for clear lanes");
    }

    #[test]
    fn lanes_in_clear_text_are_measured_beside_a_commit_before_only() {
        let of = |before, is_planted| -> Vec<(Lanes, Variant)> {
            let all = Contender::all(Path::new("new"), before, is_planted).unwrap();
            let mut all: Vec<_> = all.iter().map(|one| (one.lanes, one.variant)).collect();
            all.sort();
            all
        };
        let alone = [Variant::Relay, Variant::Current, Variant::Again];
        assert_eq!(of(None, false), alone.map(|variant| (Lanes::Tls, variant)));
        let all = of(Some(Path::new("old")), true);
        let clear = all.iter().filter(|(lanes, _)| *lanes == Lanes::Clear);
        let clear: Vec<Variant> = clear.map(|(_, variant)| *variant).collect();
        let ours = [
            Variant::Current,
            Variant::Again,
            Variant::Previous,
            Variant::Planted,
        ];
        assert_eq!(clear, ours);
        assert_eq!(all.len(), 1 + 2 * ours.len());
    }
}
