//! `cargo xtask ci`: what a change must pass (the gate), and with `--nightly` what takes longer.

use std::process::Command;
use std::time::Duration;

use anyhow::ensure;

use crate::steps::{self, Outcome, Steps, run_command};
use crate::workspace::Workspace;
use crate::{chart, dist, e2e, fuzz, miri, monitoring, pages, perf, run_line, test, vm};

/// Longest time for a step that builds the workspace.
const BUILD: Duration = Duration::from_secs(20 * 60);
/// What the gate, and a part of the night, are meant to take on two cores from a fresh clone. A slow host is no failure, but is
/// said.
const GATE_GOAL: Duration = Duration::from_secs(28 * 60);
const NIGHT_GOAL: Duration = Duration::from_secs(90 * 60);
/// The first command of the README, once.
const DEMO: &[&str] = &["run", "--release", "--", "demo", "--once"];
/// Longest time that it may take once it is built.
const DEMO_LIMIT: Duration = Duration::from_secs(5 * 60);

/// How much of it to run.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only what a push should wait for: no integration tests, models or demo.
    #[arg(long, conflicts_with_all = ["nightly", "part"])]
    quick: bool,
    /// What the gate leaves out for its time: all sizes, releases and kernels, miri, fuzzing, other targets, performance.
    #[arg(long)]
    nightly: bool,
    /// One half of the night.
    #[arg(long, requires = "nightly", value_enum)]
    part: Option<Part>,
    /// Leave out a step, by its name; repeatable.
    #[arg(long, value_name = "STEP")]
    skip: Vec<String>,
}

/// Halves of the night, each of which fits into the time of one run of CI.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Part {
    /// Kernels in virtual machines, fuzzing and other targets.
    A,
    /// Tests at full size and without privileges, and performance.
    B,
}

/// Where a step belongs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Tier {
    /// `--quick` alone: the gate has it as part of another step.
    OnlyQuick,
    /// The gate, and `--quick`.
    Quick,
    /// The gate.
    Gate,
    /// A part of the night.
    Night(Part),
}

/// A step: its name, where it belongs, and what it does.
struct Step(&'static str, Tier, Work);

/// What a step does.
enum Work {
    /// A command, as typed behind `cargo xtask`.
    Xtask(&'static str),
    /// A command of cargo's.
    Cargo(&'static [&'static str]),
    /// Anything else.
    Call(fn(&Workspace) -> anyhow::Result<Outcome>),
}

use Tier::{Gate, Night, OnlyQuick, Quick};
use Work::{Call, Cargo, Xtask};

/// Without `--package`, as the demo is run: alone it would have other features of what it uses, and be built twice.
const RELEASE: Work = Cargo(&["build", "--quiet", "--release", "--bin", "adit"]);

/// All steps, in the order that fails soonest.
const STEPS: &[Step] = &[
    Step("fmt", Quick, Call(fmt)),
    Step("tidy", Quick, Xtask("tidy")),
    Step("ebpf --check", Quick, Xtask("ebpf --check")),
    Step(
        "clippy",
        Quick,
        Cargo(&["clippy", "--quiet", "--all-targets", "--", "-D", "warnings"]),
    ),
    Step("unit tests", OnlyQuick, Xtask("test --quick")),
    Step("test", Gate, Xtask("test")),
    Step("loom", Gate, Xtask("loom")),
    Step("build --release", Gate, RELEASE),
    Step("demo --once", Gate, Call(demo)),
    Step("vm", Night(Part::A), Call(kernels)),
    // Behind the virtual machines, for which the program was built.
    Step("monitoring", Night(Part::A), Call(monitoring::run)),
    Step("codegen --check", Night(Part::A), Call(generated)),
    Step(
        "clippy without features",
        Night(Part::A),
        Call(feature_sets),
    ),
    Step(
        "unit tests without features",
        Night(Part::A),
        Cargo(&[
            "test",
            "--quiet",
            "--package=adit",
            "--no-default-features",
            "--lib",
        ]),
    ),
    Step("doc", Night(Part::A), Call(doc)),
    Step("miri", Night(Part::A), Call(miri)),
    Step("fuzz", Night(Part::A), Call(fuzz)),
    Step("check for aarch64", Night(Part::A), Call(aarch64)),
    Step("static", Night(Part::A), Xtask("static")),
    Step("dist", Night(Part::A), Call(dist::night)),
    // With the package that the step before made.
    Step("pages", Night(Part::A), Call(pages::run)),
    Step("fips", Night(Part::A), Call(fips)),
    Step("deny", Night(Part::A), Call(deny)),
    Step("chart", Night(Part::A), Call(charted)),
    Step("test --nightly", Night(Part::B), Xtask("test --nightly")),
    Step("test at scale", Night(Part::B), Call(at_scale)),
    Step("e2e", Night(Part::B), Call(e2e::run)),
    Step("isolation", Night(Part::B), Call(isolation)),
    Step("overhead of accounting", Night(Part::B), Call(accounting)),
    Step(
        "perf guard",
        Night(Part::B),
        Xtask("perf --guard --quick --planted"),
    ),
    // Behind the guard, which has built the commit before.
    Step(
        "interop with the commit before",
        Night(Part::B),
        Call(beside),
    ),
];

/// Runs the steps and sums them up. All run, even after a failure.
///
/// # Errors
/// When one of them failed, or `--skip` names none.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> anyhow::Result<()> {
    for name in &args.skip {
        let names: Vec<&str> = STEPS.iter().map(|Step(name, ..)| *name).collect();
        ensure!(
            names.contains(&name.as_str()),
            "no step is named {name:?}; there are: {}",
            names.join(", ")
        );
    }
    let mut steps = Steps::new();
    for Step(name, tier, work) in STEPS {
        if !args.asks_for(*tier) || args.skip.iter().any(|skipped| skipped == name) {
            continue;
        }
        steps.run_if_possible(name, || work.run(workspace));
    }
    let goal = if args.nightly { NIGHT_GOAL } else { GATE_GOAL };
    if steps.elapsed() > goal {
        let minutes = goal.as_secs() / 60;
        println!("ci: SLOW: this took longer than the {minutes} minutes it is meant to take");
    }
    steps.finish()
}

impl Args {
    fn asks_for(&self, tier: Tier) -> bool {
        match tier {
            OnlyQuick => self.quick,
            Quick => !self.nightly,
            Gate => !self.nightly && !self.quick,
            Night(part) => self.nightly && self.part.is_none_or(|only| only == part),
        }
    }
}

impl Work {
    fn run(&self, workspace: &Workspace) -> anyhow::Result<Outcome> {
        match self {
            Xtask(line) => run_line(workspace, line)?,
            Cargo(args) => run_command(&mut workspace.cargo(args), BUILD)?,
            Call(work) => return work(workspace),
        }
        Ok(Outcome::Done)
    }
}

fn fmt(workspace: &Workspace) -> anyhow::Result<Outcome> {
    Cargo(&["fmt", "--all", "--check"]).run(workspace)?;
    // A workspace of its own.
    let manifest = "ebpf-programs/programs/Cargo.toml";
    let mut programs = workspace.cargo(&["fmt", "--check", "--manifest-path", manifest]);
    run_command(&mut programs, BUILD).map(|()| Outcome::Done)
}

/// The demo takes seconds; one that hangs is not waited for as long as for a build.
fn demo(workspace: &Workspace) -> anyhow::Result<Outcome> {
    run_command(&mut workspace.cargo(DEMO), DEMO_LIMIT).map(|()| Outcome::Done)
}

/// The binary without its cargo features, and with each of them alone.
fn feature_sets(workspace: &Workspace) -> anyhow::Result<Outcome> {
    for features in ["--features=", "--features=demo", "--features=ebpf"] {
        let mut clippy = workspace.cargo(&["clippy", "--quiet", "--package=adit"]);
        clippy.args(["--no-default-features", features, "--bins"]);
        run_command(clippy.args(["--", "-D", "warnings"]), BUILD)?;
    }
    Ok(Outcome::Done)
}

/// Documentation, and the examples in it.
fn doc(workspace: &Workspace) -> anyhow::Result<Outcome> {
    let mut doc = workspace.cargo(&["doc", "--quiet", "--workspace", "--no-deps"]);
    run_command(doc.env("RUSTDOCFLAGS", "-D warnings"), BUILD)?;
    Cargo(&["test", "--quiet", "--workspace", "--doc"]).run(workspace)
}

/// The generator of the protobuf code, which is built for nothing else, and what it makes.
fn generated(workspace: &Workspace) -> anyhow::Result<Outcome> {
    let args = &[
        "clippy",
        "--quiet",
        "--all-targets",
        "--package",
        "codegen",
        "--",
        "-D",
        "warnings",
    ];
    Cargo(args).run(workspace)?;
    Xtask("codegen --check").run(workspace)
}

/// The Helm chart, and what is made from it.
fn charted(workspace: &Workspace) -> anyhow::Result<Outcome> {
    chart::run(workspace, chart::Args { check: true })
}

fn miri(workspace: &Workspace) -> anyhow::Result<Outcome> {
    match miri::availability() {
        Ok(()) => Xtask("miri").run(workspace),
        Err(why) => Ok(Outcome::Skipped(why)),
    }
}

fn fuzz(workspace: &Workspace) -> anyhow::Result<Outcome> {
    match fuzz::availability(workspace) {
        Ok(()) => Xtask("fuzz --seconds=30").run(workspace),
        Err(why) => Ok(Outcome::Skipped(why)),
    }
}

fn at_scale(workspace: &Workspace) -> anyhow::Result<Outcome> {
    RELEASE.run(workspace)?;
    test::at_scale(workspace).map(|()| Outcome::Done)
}

fn beside(workspace: &Workspace) -> anyhow::Result<Outcome> {
    let (commit, binary) = perf::commit_before(workspace)?;
    println!("the commit before: {commit}");
    test::beside(workspace, &binary).map(|()| Outcome::Done)
}

/// Whether the program compiles for the other processor of data centres, where rustup has or can fetch its library and there
/// is a C compiler for its cryptography.
fn aarch64(workspace: &Workspace) -> anyhow::Result<Outcome> {
    const TARGET: &str = "aarch64-unknown-linux-gnu";
    let mut add = Command::new("rustup");
    add.args(["--quiet", "target", "add", TARGET]);
    if let Err(error) = run_command(&mut add, steps::MINUTES_5) {
        return Ok(Outcome::Skipped(format!(
            "no library of {TARGET}: {error:#}"
        )));
    }
    let mut check = workspace.cargo(&["check", "--quiet", "--target", TARGET]);
    for package in ["adit-core", "adit-relay", "adit-ebpf-abi"] {
        check.args(["--package", package]);
    }
    let mut compiler = Command::new("aarch64-linux-gnu-gcc");
    if steps::first_line(compiler.arg("--version")).is_some() {
        check.args(["--package", "adit"]);
    } else {
        println!("check for aarch64: SKIPPED for adit itself: no aarch64-linux-gnu-gcc");
    }
    run_command(&mut check, BUILD).map(|()| Outcome::Done)
}

/// Boots all kernels. A laptop may lack what that takes; CI installs it, but may be unable to fetch a kernel.
fn kernels(workspace: &Workspace) -> anyhow::Result<Outcome> {
    // `.ci/run` has said why it could not be installed.
    if let Err(why) = vm::availability() {
        return Ok(Outcome::Skipped(why));
    }
    match vm::fetched(workspace) {
        Ok(()) => Xtask("vm --all").run(workspace),
        Err(error) => Ok(Outcome::Skipped(format!(
            "no kernel could be fetched: {error:#}"
        ))),
    }
}

/// Whether stalled readers leave others alone, in the dialects whose load can be made here.
fn isolation(workspace: &Workspace) -> anyhow::Result<Outcome> {
    if let Err(why) = steps::go_toolchain() {
        println!("isolation of grpc-go: SKIPPED: {why}");
    }
    Xtask("perf --quick --rounds=7 --seconds=0.8 --peers=adit --only=isolation --check")
        .run(workspace)
}

/// Whether accounting costs an echo or a transfer more than it may, where the kernel lets it be measured.
fn accounting(workspace: &Workspace) -> anyhow::Result<Outcome> {
    if let Some(why) = perf::why_not_accounted(workspace)? {
        return Ok(Outcome::Skipped(why));
    }
    let line = "perf --scenario=account-cgroups --rounds=5 --seconds=0.4 --only=echo,bulk --check";
    Xtask(line).run(workspace)
}

/// Checks advisories, licences and sources where `cargo-deny` is installed: it needs its database from the network.
fn deny(workspace: &Workspace) -> anyhow::Result<Outcome> {
    if steps::first_line(Command::new("cargo-deny").arg("--version")).is_none() {
        return Ok(Outcome::Skipped("cargo-deny is not installed".to_owned()));
    }
    Cargo(&["deny", "check"]).run(workspace)
}

/// TLS, and what server and agent do with it, on the FIPS module of aws-lc, whose build needs Go and cmake.
fn fips(workspace: &Workspace) -> anyhow::Result<Outcome> {
    // The build of aws-lc takes both from PATH; ADIT_GO does not reach it.
    for (program, version) in [("go", "version"), ("cmake", "--version")] {
        if steps::first_line(Command::new(program).arg(version)).is_none() {
            return Ok(Outcome::Skipped(format!("{program} is not installed")));
        }
    }
    const FEATURES: &str = "--features=adit/fips";
    let args = &[
        "test",
        "--quiet",
        "--package=adit-tls",
        "--package=adit-agent",
        "--package=adit-server",
        "--package=adit",
        FEATURES,
        "--lib",
    ];
    Cargo(args).run(workspace)?;
    test::fips(workspace, FEATURES).map(|()| Outcome::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_demo_is_run_as_the_readme_says() {
        let readme = Workspace::here().unwrap().text("README.md").unwrap();
        let command = format!("\ncargo {}", DEMO.join(" "));
        let command = command.replace("--once", "");
        assert!(readme.unwrap().contains(&command), "{command}");
    }

    /// `.ci/run` runs the tests by the command that the README names, and leaves them out of the rest.
    #[test]
    fn the_tests_are_run_as_the_readme_says() {
        let workspace = Workspace::here().unwrap();
        for file in ["README.md", ".ci/run"] {
            let text = workspace.text(file).unwrap().unwrap();
            let is_run = |line: &str| line.trim().starts_with("cargo xtask test ");
            assert!(text.lines().any(is_run), "{file}");
        }
        assert!(
            STEPS
                .iter()
                .any(|Step(name, tier, _)| *name == "test" && *tier == Gate)
        );
    }

    #[test]
    fn step_commands_are_parsable() {
        use clap::Parser as _;

        for Step(name, _, work) in STEPS {
            if let Xtask(line) = work {
                let words = std::iter::once("xtask").chain(line.split_whitespace());
                assert!(crate::Cli::try_parse_from(words).is_ok(), "{name}: {line}");
            }
        }
    }

    #[test]
    fn each_step_is_in_the_gate_or_in_one_half_of_the_night() {
        let of = |args: Args| -> Vec<&str> {
            let asked = STEPS.iter().filter(|Step(_, tier, _)| args.asks_for(*tier));
            asked.map(|Step(name, ..)| *name).collect()
        };
        let args = |quick, nightly, part| Args {
            quick,
            nightly,
            part,
            skip: Vec::new(),
        };
        let (gate, night) = (of(args(false, false, None)), of(args(false, true, None)));
        let halves = [Part::A, Part::B].map(|part| of(args(false, true, Some(part))));
        assert_eq!(halves.concat(), night);
        assert_eq!(gate.len() + night.len() + 1, STEPS.len());
        assert!(gate.iter().all(|name| !night.contains(name)));
        let quick = of(args(true, false, None));
        assert!(quick.contains(&"clippy") && quick.contains(&"unit tests"));
        assert!(!quick.contains(&"test") && !gate.contains(&"unit tests"));
    }
}
