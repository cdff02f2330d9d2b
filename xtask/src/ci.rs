//! `cargo xtask ci`: what a change must pass (the gate), and with `--nightly` what takes longer.

use std::time::Duration;

use anyhow::ensure;

use crate::steps::{self, Outcome, Steps};
use crate::workspace::Workspace;
use crate::{dist, e2e, monitoring, perf, run_line, script, test, vm};

/// What the gate, and a part of the night, are meant to take on two cores from a fresh clone. A slow host is no failure, but is
/// said.
const GATE_GOAL: Duration = Duration::from_secs(28 * 60);
const NIGHT_GOAL: Duration = Duration::from_secs(90 * 60);

/// How much of it to run.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only what a push should wait for: no integration tests, models or demo.
    #[arg(long, conflicts_with_all = ["nightly", "part"])]
    quick: bool,
    /// What the gate leaves out for its time: all sizes, releases and kernels, miri, fuzzing, other targets, performance.
    #[arg(long)]
    nightly: bool,
    /// One part of the night.
    #[arg(long, requires = "nightly", value_enum)]
    part: Option<Part>,
    /// Leave out a step, by its name; repeatable.
    #[arg(long, value_name = "STEP")]
    skip: Vec<String>,
}

/// Parts of the night, each of which fits into the time of one run of CI.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Part {
    /// Kernels in virtual machines, fuzzing and other targets.
    A,
    /// Tests at full size and without privileges, and performance.
    B,
    /// What lasts.
    C,
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
    /// A line of shell, with the functions of the scripts.
    Shell(&'static str),
    /// Anything else.
    Call(fn(&Workspace) -> anyhow::Result<Outcome>),
}

use Tier::{Gate, Night, OnlyQuick, Quick};
use Work::{Call, Shell, Xtask};

/// The first command of the README, once. It takes seconds; one that hangs is not waited for as long as for a build.
const DEMO: &str = "timeout 5m cargo run --release -- demo --once";
/// Without `--package`, as the demo is run: alone it would have other features of what it uses, and be built twice.
const RELEASE: Work = Shell("cargo build --quiet --release --bin adit");
const FMT: &str = "cargo fmt --all --check && cargo fmt --check --manifest-path ebpf-programs/programs/Cargo.toml";
/// The generator of the protobuf code, which is built for nothing else, and what it makes.
const CODEGEN: &str = "cargo clippy --quiet --all-targets --package codegen -- -D warnings
    bash xtask/scripts/codegen.sh --check";
/// The binary without its cargo features, and with each of them alone.
const FEATURES: &str = "for features in '' demo ebpf; do
    cargo clippy --quiet --package=adit --no-default-features --features=$features --bins -- -D warnings; done";
const UNIT: &str = "cargo test --quiet --package=adit --no-default-features --lib";
/// Documentation, and the examples in it.
const DOC: &str = "RUSTDOCFLAGS='-D warnings' cargo doc --quiet --workspace --no-deps
    cargo test --quiet --workspace --doc";
/// Advisories, licences and sources: it needs its database from the network.
const DENY: &str = "need cargo-deny; cargo deny check";
/// TLS, and what server and agent do with it, on the FIPS module of aws-lc. Its build takes Go and cmake from PATH; ADIT_GO does not
/// reach it.
const FIPS: &str = "need go cmake; cargo test --quiet --features=adit/fips --lib \
    --package=adit-tls --package=adit-agent --package=adit-server --package=adit";
const ISOLATION: &str =
    "perf --quick --rounds=7 --seconds=0.8 --peers=adit --only=isolation --check";
const ACCOUNTING: &str =
    "perf --scenario=account-cgroups --rounds=5 --seconds=0.4 --only=echo,bulk --check";

/// All steps, in the order that fails soonest.
const STEPS: &[Step] = &[
    Step("fmt", Quick, Shell(FMT)),
    Step("tidy", Quick, Xtask("tidy")),
    Step(
        "names --check",
        Quick,
        Shell("bash xtask/scripts/names.sh --check"),
    ),
    Step(
        "workflows --pins",
        Quick,
        Shell("bash xtask/scripts/workflows.sh --pins"),
    ),
    Step("ebpf --check", Quick, Xtask("ebpf --check")),
    Step(
        "clippy",
        Quick,
        Shell("cargo clippy --quiet --all-targets -- -D warnings"),
    ),
    Step("unit tests", OnlyQuick, Xtask("test --quick")),
    Step("test", Gate, Xtask("test")),
    Step("loom", Gate, Xtask("loom")),
    Step("build --release", Gate, RELEASE),
    Step("demo --once", Gate, Shell(DEMO)),
    Step("vm", Night(Part::A), Call(kernels)),
    // Behind the virtual machines, for which the program was built.
    Step("monitoring", Night(Part::A), Call(monitoring::run)),
    Step("codegen --check", Night(Part::A), Shell(CODEGEN)),
    Step("clippy without features", Night(Part::A), Shell(FEATURES)),
    Step("unit tests without features", Night(Part::A), Shell(UNIT)),
    Step("doc", Night(Part::A), Shell(DOC)),
    Step("miri", Night(Part::A), Xtask("miri")),
    Step("fuzz", Night(Part::A), Xtask("fuzz --seconds=30")),
    Step(
        "check for aarch64",
        Night(Part::A),
        Shell("bash xtask/scripts/aarch64.sh"),
    ),
    Step("static", Night(Part::A), Xtask("static")),
    Step("dist", Night(Part::A), Call(dist::night)),
    // With the package that the step before made.
    Step("pages", Night(Part::A), Xtask("pages")),
    Step("fips", Night(Part::A), Call(fips)),
    Step("deny", Night(Part::A), Shell(DENY)),
    Step("chart", Night(Part::A), Xtask("chart --check")),
    Step("workflows", Night(Part::A), Xtask("workflows")),
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
    Step("soak", Night(Part::C), Xtask("perf --soak")),
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
            Xtask(line) => run_line(workspace, line),
            Shell(line) => script::line(workspace, line),
            Call(work) => work(workspace),
        }
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

/// Boots all kernels. A laptop may lack what that takes; CI installs it, but may be unable to fetch a kernel.
fn kernels(workspace: &Workspace) -> anyhow::Result<Outcome> {
    // `.ci/run` has said why it could not be installed.
    if let Err(why) = vm::availability() {
        return Ok(Outcome::Skipped(why));
    }
    match vm::fetched(workspace) {
        Ok(()) => run_line(workspace, "vm --all"),
        Err(error) => Ok(Outcome::Skipped(format!(
            "no kernel could be fetched: {error:#}"
        ))),
    }
}

/// Whether stalled readers leave others alone, in the dialects whose load can be made here.
fn isolation(workspace: &Workspace) -> anyhow::Result<Outcome> {
    if let Err(why) = steps::go() {
        println!("isolation of grpc-go: SKIPPED: {why}");
    }
    run_line(workspace, ISOLATION)
}

/// Whether accounting costs an echo or a transfer more than it may, where the kernel lets it be measured.
fn accounting(workspace: &Workspace) -> anyhow::Result<Outcome> {
    match perf::why_not_accounted(workspace)? {
        Some(why) => Ok(Outcome::Skipped(why)),
        None => run_line(workspace, ACCOUNTING),
    }
}

fn fips(workspace: &Workspace) -> anyhow::Result<Outcome> {
    let outcome = script::line(workspace, FIPS)?;
    if let Outcome::Done = outcome {
        test::fips(workspace, "--features=adit/fips")?;
    }
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_demo_is_run_as_the_readme_says() {
        let readme = Workspace::here().unwrap().text("README.md").unwrap();
        let command = DEMO.replace("timeout 5m ", "\n").replace("--once", "");
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
    fn each_step_is_in_the_gate_or_in_one_part_of_the_night() {
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
        let parts = [Part::A, Part::B, Part::C].map(|part| of(args(false, true, Some(part))));
        assert_eq!(parts.concat(), night);
        let workflow = Workspace::here()
            .unwrap()
            .text(".github/workflows/gate.yml")
            .unwrap();
        assert!(workflow.unwrap().contains("part: [a, b, c]\n"));
        assert_eq!(gate.len() + night.len() + 1, STEPS.len());
        assert!(gate.iter().all(|name| !night.contains(name)));
        let quick = of(args(true, false, None));
        assert!(quick.contains(&"clippy") && quick.contains(&"unit tests"));
        assert!(!quick.contains(&"test") && !gate.contains(&"unit tests"));
    }
}
