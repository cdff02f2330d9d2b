//! `cargo xtask perf`: compares peers under the same load, in one run.
//!
//! Server, agent, target and load tool are separate processes. The peers take turns round by round, so that other activity on
//! the machine affects all of them. Absolute numbers depend on the machine; compare ratios.

mod guard;
mod host;
mod instructions;
mod long_path;
mod markdown;
mod measurement;
mod peer;
mod plot;
mod process;
mod programs;
mod results;
mod rows;
mod scenario;
mod soak;
mod syscalls;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use adit_perf_plan::Dialect;
use anyhow::{Context as _, ensure};
use clap::Parser;
use xtask_kit::{steps, workspace};

use host::Confined;
use peer::Peer;
use programs::Programs;
use results::{Entry, Results, State};
use scenario::Scenario;

use crate::steps::go;
use crate::workspace::Workspace;

/// Measure against other peers in one run; writes a table, JSON and pictures to target/perf (`--quick`: the short form).
#[derive(Debug, Parser)]
#[command(name = "cargo xtask perf", bin_name = "cargo xtask perf")]
struct Args {
    /// Scenario file, or the name of one in perf/scenarios.
    #[arg(long, default_value = "full")]
    scenario: String,
    /// The scenario `quick`: under 3 minutes.
    #[arg(long, conflicts_with = "scenario")]
    quick: bool,
    /// Rounds in place of the scenario's.
    #[arg(long)]
    rounds: Option<usize>,
    /// Seconds of each timed measurement in place of the scenario's.
    #[arg(long)]
    seconds: Option<f64>,
    /// Processors for everything that is measured, in place of the scenario's: the last so many of this machine.
    #[arg(long)]
    processors: Option<usize>,
    /// Peers in place of the scenario's, with commas between.
    #[arg(long, alias = "makers", value_delimiter = ',')]
    peers: Vec<String>,
    /// Dialects in place of the scenario's, with commas between.
    #[arg(long = "ways", alias = "modes", value_delimiter = ',')]
    dialects: Vec<Dialect>,
    /// Only these measurements, with commas between.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// A binary of ours to measure in place of this tree's release build.
    #[arg(long)]
    adit: Option<PathBuf>,
    /// Fail where ours is worse than upstream, where stalled readers slow the echo of others, or where accounting makes an echo or a
    /// transfer dearer; with --instructions, where counting again gives something else.
    #[arg(long)]
    check: bool,
    /// Compare this tree with the commit before and with a bare relay, and fail on a regression; nothing else is run.
    #[arg(long)]
    guard: bool,
    /// With --guard: also measure ours slowed down on purpose, and fail if that goes unnoticed.
    #[arg(long, requires = "guard")]
    planted: bool,
    /// Count the instructions of packets, frames, sessions and the choice of an agent under valgrind; nothing else is run.
    #[arg(long, conflicts_with_all = ["guard", "scenario", "quick", "rounds", "seconds", "processors", "peers", "dialects", "only", "adit"])]
    instructions: bool,
    /// Count the system calls of server and agent for an echo, a dial and a MiB under strace; nothing else is run.
    #[arg(long, conflicts_with_all = ["guard", "instructions", "scenario", "quick", "rounds", "seconds", "processors", "peers", "dialects", "only", "check"])]
    syscalls: bool,
    /// Load server and agent in many ways for this time, and fail on growth of memory, descriptors, tasks or series; nothing else is
    /// run.
    #[arg(long, value_name = "DURATION", num_args = 0..=1, require_equals = true, default_missing_value = "20m", value_parser = soak::lasting,
          conflicts_with_all = ["guard", "instructions", "syscalls", "scenario", "quick", "rounds", "seconds", "processors", "peers", "dialects", "only", "check"])]
    soak: Option<Duration>,
    /// Draw the pictures of a `perf.json` anew, beside it; nothing is measured.
    #[arg(long, value_name = "FILE", exclusive = true)]
    draw: Option<PathBuf>,
    /// For `cargo xtask ci`: print the commit before and its binary, as `--guard` has built it.
    #[arg(long, hide = true, exclusive = true)]
    commit_before: bool,
    /// For `cargo xtask ci`: print why the cost of accounting cannot be measured here, if so.
    #[arg(long, hide = true, exclusive = true)]
    why_not_accounted: bool,
}

impl Args {
    /// The scenario, with the values that the command line replaces.
    fn scenario(&self, workspace: &Workspace) -> anyhow::Result<Scenario> {
        let name = if self.quick { "quick" } else { &self.scenario };
        let own = workspace.path(&format!("perf/scenarios/{name}.toml"));
        let path = if own.is_file() { own } else { name.into() };
        let mut scenario = Scenario::read(&path)?;
        scenario.rounds = self.rounds.unwrap_or(scenario.rounds);
        scenario.load.seconds = self.seconds.unwrap_or(scenario.load.seconds);
        scenario.processors = self.processors.or(scenario.processors);
        if !self.peers.is_empty() {
            scenario.peers.clone_from(&self.peers);
        }
        if !self.dialects.is_empty() {
            scenario.dialects.clone_from(&self.dialects);
        }
        if !self.only.is_empty() {
            scenario.load.measurements.clone_from(&self.only);
        }
        scenario.check()?;
        Ok(scenario)
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    match Workspace::here().and_then(|workspace| run(&workspace, &args)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the command.
///
/// # Errors
/// Nothing could be measured, or a requested check fails.
fn run(workspace: &Workspace, args: &Args) -> anyhow::Result<()> {
    if let Some(file) = &args.draw {
        return draw_again(file);
    }
    if args.commit_before {
        return guard::print_commit_before(workspace);
    }
    if args.why_not_accounted {
        print!(
            "{}",
            host::why_not_accounted(workspace)?.unwrap_or_default()
        );
        return Ok(());
    }
    if args.guard {
        return guard::run(workspace, args.quick, args.planted);
    }
    if args.instructions {
        return instructions::run(workspace, args.check);
    }
    if args.syscalls {
        return syscalls::run(workspace, args.adit.clone());
    }
    if let Some(lasting) = args.soak {
        return soak::run(&Programs::new(workspace, args.adit.clone())?, lasting);
    }
    let mut scenario = args.scenario(workspace)?;
    let programs = Programs::new(workspace, args.adit.clone())?;
    if args.check && scenario.dialects.iter().any(|dialect| dialect.is_go()) && go().is_ok() {
        // A missing dialect fails no check. Where Go is installed, the Go load tool must therefore build.
        programs.build_go_load()?;
    }
    let mut results = measure(&programs, &scenario)?;
    let doubtful = [results.disturbed(), results.costly()].concat();
    if args.check && !doubtful.is_empty() {
        // On a shared host a first result may be noise: only the longer measurement counts.
        let doubtful = doubtful.join(", ");
        eprintln!("perf: once more, with twice the rounds: {doubtful}");
        scenario.rounds *= 2;
        results = measure(&programs, &scenario)?;
    }
    if args.check {
        check(&results)?;
    }
    Ok(())
}

/// Measures a scenario, and writes its table, numbers and charts.
fn measure(programs: &Programs, scenario: &Scenario) -> anyhow::Result<Results> {
    let out = &programs.out;
    let (results, took) = compare(programs, scenario)?;
    let machine = host::machine(&programs.workspace);
    let shared = match scenario.processors {
        None => "this machine".to_owned(),
        Some(1) => "one processor of this machine".to_owned(),
        Some(some) => format!("{some} processors of this machine"),
    };
    let heading = format!(
        "{}\n\n`cargo xtask perf`, rounds: {}, of {} s a measurement, medians; {machine}; {took} s in all. \
         Server, agent, target and load share {shared}. Spread is half of the distance between the extremes of \
         the rounds, of the peer with the widest, named from 100 % on: a difference within it is none.\n",
        scenario.title, scenario.rounds, scenario.load.seconds
    );
    let table = markdown::report(&results, &heading);
    fs::write(out.join("perf.md"), &table)?;
    let mut report = serde_json::to_value(&results)?;
    report["title"] = scenario.title.as_str().into();
    report["machine"] = machine.into();
    report["seconds"] = took.into();
    report["processors"] = scenario.processors.into();
    let json = serde_json::to_string_pretty(&report)?;
    fs::write(out.join("perf.json"), json)?;
    println!("{table}");
    forget_pictures(out)?;
    let pictures = plot::draw(&results, out)?;
    eprintln!(
        "written to {}: perf.md, perf.json and {} pictures",
        out.display(),
        pictures.len()
    );
    Ok(results)
}

/// Draws the charts of a results file, in the same folder.
fn draw_again(file: &Path) -> anyhow::Result<()> {
    let text = fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
    let results: Results = serde_json::from_str(&text)
        .with_context(|| format!("{} is no perf.json of a run", file.display()))?;
    let folder = file.parent().unwrap_or_else(|| Path::new(""));
    for picture in plot::draw(&results, folder)? {
        println!("{}", picture.display());
    }
    Ok(())
}

/// Removes charts of an earlier run, which may have had other peers and dialects.
fn forget_pictures(folder: &Path) -> anyhow::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|ending| ending == "svg") {
            fs::remove_file(&path).with_context(|| format!("removing {}", path.display()))?;
        }
    }
    Ok(())
}

/// Measures all peers in turns. Also returns the duration in seconds, without builds.
fn compare(programs: &Programs, scenario: &Scenario) -> anyhow::Result<(Results, u64)> {
    let mut results = Results::default();
    let mut peers = Vec::new();
    for name in &scenario.peers {
        let state = match peer::find(name, programs) {
            Ok(peer) => {
                let version = peer.version.clone();
                peers.push(peer);
                State::Version(version)
            }
            Err(why) => {
                eprintln!("perf: {name} is missing: {why:#}");
                State::Missing(format!("{why:#}"))
            }
        };
        let name = name.clone();
        results.peers.push(Entry { name, state });
    }
    let mut runs: Vec<(&Peer, Dialect)> = Vec::new();
    for peer in &peers {
        let dialects = peer.dialects(&scenario.dialects);
        runs.extend(dialects.into_iter().map(|dialect| (peer, dialect)));
    }
    go_load(&mut runs, &mut results, || programs.build_go_load());
    ensure!(!runs.is_empty(), "no peer can be measured here");
    // After the builds, which use all processors.
    let _confined = scenario.processors.map(Confined::to).transpose()?;
    let begin = Instant::now();
    let all = scenario.rounds * runs.len();
    let mut done = 0;
    let (parts, path) = (scenario.load.parts(), scenario.path.as_ref());
    for round in 1..=scenario.rounds {
        // Each round starts with another peer, so that no peer always follows the same one.
        let from = (round - 1) % runs.len();
        for (peer, dialect) in runs.iter().cycle().skip(from).take(runs.len()) {
            eprintln!(
                "perf: round {round}/{}, {} {} ({done} of {all} done, {} s)",
                scenario.rounds,
                peer.name,
                dialect.name(),
                begin.elapsed().as_secs()
            );
            for (measurement, outcome) in
                measurement::measure(programs, peer, *dialect, &parts, path)
            {
                if let Err(why) = &outcome {
                    eprintln!("perf: {} {measurement} failed: {why}", peer.name);
                }
                results.add((&peer.name, *dialect), round, measurement, outcome);
            }
            done += 1;
        }
    }
    Ok((results, begin.elapsed().as_secs()))
}

/// Builds the Go load tool, if a run needs it. If it cannot be built, its runs are removed and the report gives the reason.
fn go_load<P>(
    runs: &mut Vec<(P, Dialect)>,
    results: &mut Results,
    build: impl FnOnce() -> anyhow::Result<()>,
) {
    let go: BTreeSet<Dialect> = runs
        .iter()
        .map(|(_, dialect)| *dialect)
        .filter(|dialect| dialect.is_go())
        .collect();
    if go.is_empty() {
        return;
    }
    if let Err(error) = build() {
        let why = format!("{error:#}");
        runs.retain(|(_, dialect)| !dialect.is_go());
        for dialect in go {
            eprintln!("perf: {} is missing: {why}", dialect.name());
            results.ways_missing.insert(dialect, why.clone());
        }
    }
}

/// The checks of `--check`.
fn check(results: &Results) -> anyhow::Result<()> {
    ensure!(
        results.has_measured("adit") || results.has_accounted(),
        "--check judges adit, or one peer that is accounted for beside two that are not; neither was measured"
    );
    for (what, found) in [
        ("worse than upstream", results.worse()),
        ("beside stalled readers", results.disturbed()),
        ("dearer by accounting", results.costly()),
    ] {
        ensure!(found.is_empty(), "{what}: {}", found.join(", "));
    }
    Ok(())
}

/// Samples and results for tests.
#[cfg(test)]
mod samples {
    use super::*;
    use adit_perf_plan::Sample;

    /// A sample of these numbers.
    pub(crate) fn sample(values: &[(&str, f64)]) -> Sample {
        let values = values.iter().map(|(key, value)| ((*key).into(), *value));
        let values = values.collect();
        Sample { values }
    }

    /// Results of these peers, with nothing measured yet.
    pub(crate) fn results(peers: &[&str]) -> Results {
        let entry = |name: &&str| Entry {
            name: (*name).to_owned(),
            state: State::Version("1".to_owned()),
        };
        let mut results = Results::default();
        results.peers.extend(peers.iter().map(entry));
        results
    }

    /// A peer that is missing for this reason.
    pub(crate) fn missing(name: &str, why: &str) -> Entry {
        Entry {
            name: name.to_owned(),
            state: State::Missing(why.to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> anyhow::Result<Args> {
        let words = std::iter::once("perf").chain(line.split_whitespace());
        Ok(Args::try_parse_from(words)?)
    }

    fn scenario(line: &str) -> anyhow::Result<Scenario> {
        parsed(line)?.scenario(&Workspace::here()?)
    }

    #[test]
    fn command_line_overrides_the_scenario() {
        let asked = "--quick --rounds=5 --makers=adit --only=isolation --processors=2";
        let scenario = scenario(asked).unwrap();
        assert_eq!((scenario.rounds, scenario.processors), (5, Some(2)));
        assert_eq!(scenario.peers, ["adit"]);
        assert_eq!(scenario.load.measurements, ["isolation"]);
    }

    #[test]
    fn unknown_measurement_is_refused_with_the_known_ones() {
        let error = format!("{:#}", scenario("--quick --only=echos").unwrap_err());
        assert!(
            error.contains("echos") && error.contains("echo,"),
            "{error}"
        );
        assert!(scenario("--quick --processors=0").is_err());
    }

    #[test]
    fn modes_without_a_scenario_refuse_scenario_flags() {
        for (line, is_right) in [
            ("--instructions --check", true),
            ("--instructions --rounds=5", false),
            ("--syscalls --adit=adit", true),
            ("--syscalls --peers=adit", false),
            ("--draw=perf.json", true),
            ("--draw=perf.json --check", false),
            ("--planted", false),
        ] {
            assert_eq!(parsed(line).is_ok(), is_right, "{line}");
        }
    }

    /// `cargo xtask` only passes them on.
    #[test]
    fn command_lines_of_ci_are_valid() {
        let source = include_str!("../../../xtask/src/ci.rs");
        let lines = source.split('"').filter(|text| text.starts_with("perf --"));
        let lines: Vec<&str> = lines
            .filter_map(|line| line.strip_prefix("perf "))
            .collect();
        assert_eq!(lines.len(), 4, "{lines:?}");
        for line in lines {
            assert!(scenario(line).is_ok(), "{line}");
        }
    }

    #[test]
    fn without_go_only_its_dialect_is_missing() {
        let mut results = Results::default();
        let mut runs = vec![("direct", Dialect::Tcp), ("adit", Dialect::GrpcGo)];
        go_load(&mut runs, &mut results, || anyhow::bail!("no Go"));
        assert_eq!(runs, [("direct", Dialect::Tcp)]);
        assert_eq!(results.ways_missing[&Dialect::GrpcGo], "no Go");
        go_load(&mut runs, &mut results, || panic!("it is not needed"));
    }

    #[test]
    fn check_without_adit_results_is_an_error() {
        assert!(check(&Results::default()).is_err());
    }
}
