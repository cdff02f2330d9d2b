//! `cargo xtask ci`: what a change must pass (the gate), and with `--nightly` what takes longer.

use std::process::Command;
use std::time::Duration;

use anyhow::ensure;

use crate::steps::{self, Ran, Steps, run_command};
use crate::workspace::Workspace;
use crate::{codegen, e2e, ebpf, fuzz, loom, miri, perf, static_binary, test, tidy, vm};

/// Longest time for a step that builds the workspace.
const BUILD: Duration = Duration::from_secs(20 * 60);
/// What the gate, and a part of the night, are meant to take on two cores from a fresh clone. A slow host is no failure, but is
/// said.
const GATE_GOAL: Duration = Duration::from_secs(28 * 60);
const NIGHT_GOAL: Duration = Duration::from_secs(90 * 60);
/// Longest time for the demo, once built.
const DEMO: Duration = Duration::from_secs(5 * 60);
/// The first command of the README.
const DEMO_COMMAND: [&str; 4] = ["run", "--release", "--", "demo"];
/// Time for each fuzz target at night.
const FUZZ_SECONDS: u64 = 30;

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
struct Step(&'static str, Tier, fn(&Workspace) -> anyhow::Result<Ran>);

/// All steps, in the order that fails soonest.
const STEPS: &[Step] = &[
    Step("fmt", Tier::Quick, fmt),
    Step("tidy", Tier::Quick, |workspace| all(tidy::run(workspace))),
    Step("ebpf --check", Tier::Quick, |workspace| {
        all(ebpf::run(workspace, &ebpf::Args::only_check()))
    }),
    Step("clippy", Tier::Quick, |workspace| clippy(workspace, &[])),
    Step("unit tests", Tier::OnlyQuick, |workspace| {
        all(test::run(workspace, &test::Args::for_push()))
    }),
    Step("test", Tier::Gate, |workspace| {
        all(test::run(workspace, &test::Args::default()))
    }),
    Step("loom", Tier::Gate, |workspace| all(loom::run(workspace))),
    Step("build --release", Tier::Gate, build_release),
    Step("demo --once", Tier::Gate, demo),
    Step("vm", Tier::Night(Part::A), kernels),
    Step("codegen --check", Tier::Night(Part::A), generated),
    Step("doc", Tier::Night(Part::A), doc),
    Step(
        "miri",
        Tier::Night(Part::A),
        |workspace| match miri::availability() {
            Ok(()) => all(miri::run(workspace)),
            Err(why) => Ok(Ran::Nothing(why)),
        },
    ),
    Step(
        "fuzz",
        Tier::Night(Part::A),
        |workspace| match fuzz::availability(workspace) {
            Ok(()) => all(fuzz::run(workspace, &fuzz::Args::all_for(FUZZ_SECONDS))),
            Err(why) => Ok(Ran::Nothing(why)),
        },
    ),
    Step("check for aarch64", Tier::Night(Part::A), aarch64),
    Step("static", Tier::Night(Part::A), |workspace| {
        all(static_binary::run(workspace))
    }),
    Step("deny", Tier::Night(Part::A), deny),
    Step("test --nightly", Tier::Night(Part::B), |workspace| {
        all(test::run(workspace, &test::Args::for_night()))
    }),
    Step("test at scale", Tier::Night(Part::B), |workspace| {
        build_release(workspace)?;
        all(test::at_scale(workspace))
    }),
    Step("e2e", Tier::Night(Part::B), e2e::run),
    Step("isolation", Tier::Night(Part::B), isolation),
    Step("overhead of accounting", Tier::Night(Part::B), accounting),
    Step("perf guard", Tier::Night(Part::B), |workspace| {
        all(perf::run(
            workspace,
            &perf::Args::parse("--guard --quick --planted")?,
        ))
    }),
    // Behind the guard, which has built the commit before.
    Step(
        "interop with the commit before",
        Tier::Night(Part::B),
        |workspace| {
            let (commit, binary) = perf::commit_before(workspace)?;
            println!("the commit before: {commit}");
            all(test::beside(workspace, &binary))
        },
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
        steps.run_if_possible(name, || work(workspace));
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
            Tier::OnlyQuick => self.quick,
            Tier::Quick => !self.nightly,
            Tier::Gate => !self.nightly && !self.quick,
            Tier::Night(part) => self.nightly && self.part.is_none_or(|only| only == part),
        }
    }
}

/// What ran, ran whole.
fn all(outcome: anyhow::Result<()>) -> anyhow::Result<Ran> {
    outcome.map(|()| Ran::All)
}

fn cargo(workspace: &Workspace, args: &[&str], limit: Duration) -> anyhow::Result<Ran> {
    all(run_command(&mut workspace.cargo(args), limit))
}

fn fmt(workspace: &Workspace) -> anyhow::Result<Ran> {
    cargo(workspace, &["fmt", "--all", "--check"], BUILD)?;
    // A workspace of its own.
    let manifest = "ebpf-programs/programs/Cargo.toml";
    cargo(
        workspace,
        &["fmt", "--manifest-path", manifest, "--check"],
        BUILD,
    )
}

fn clippy(workspace: &Workspace, packages: &[&str]) -> anyhow::Result<Ran> {
    let mut command = workspace.cargo(&["clippy", "--quiet", "--all-targets"]);
    command.args(packages).args(["--", "-D", "warnings"]);
    all(run_command(&mut command, BUILD))
}

/// Without `--package`, as the demo is run: alone it would have other features of what it uses, and be built twice.
fn build_release(workspace: &Workspace) -> anyhow::Result<Ran> {
    cargo(
        workspace,
        &["build", "--quiet", "--release", "--bin", "adit"],
        BUILD,
    )
}

fn demo(workspace: &Workspace) -> anyhow::Result<Ran> {
    cargo(workspace, &[&DEMO_COMMAND[..], &["--once"]].concat(), DEMO)
}

/// Documentation, and the examples in it.
fn doc(workspace: &Workspace) -> anyhow::Result<Ran> {
    let mut doc = workspace.cargo(&["doc", "--quiet", "--workspace", "--no-deps"]);
    run_command(doc.env("RUSTDOCFLAGS", "-D warnings"), BUILD)?;
    cargo(
        workspace,
        &["test", "--quiet", "--workspace", "--doc"],
        BUILD,
    )
}

/// The generator of the protobuf code, which is built for nothing else, and what it makes.
fn generated(workspace: &Workspace) -> anyhow::Result<Ran> {
    clippy(workspace, &["--package", "codegen"])?;
    all(codegen::run(workspace, &codegen::Args { check: true }))
}

/// Whether the program compiles for the other processor of data centres, where rustup has or can fetch its library and there
/// is a C compiler for its cryptography.
fn aarch64(workspace: &Workspace) -> anyhow::Result<Ran> {
    const TARGET: &str = "aarch64-unknown-linux-gnu";
    let mut add = Command::new("rustup");
    add.args(["--quiet", "target", "add", TARGET]);
    if let Err(error) = run_command(&mut add, steps::MINUTES_5) {
        return Ok(Ran::Nothing(format!("no library of {TARGET}: {error:#}")));
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
    all(run_command(&mut check, BUILD))
}

/// Boots all kernels. A laptop may lack what that takes; CI installs it, but may be unable to fetch a kernel.
fn kernels(workspace: &Workspace) -> anyhow::Result<Ran> {
    // `.ci/run` has said why it could not be installed.
    if let Err(why) = vm::availability() {
        return Ok(Ran::Nothing(why));
    }
    match vm::fetched(workspace) {
        Ok(()) => all(vm::run(workspace, &vm::Args::for_night())),
        Err(error) => Ok(Ran::Nothing(format!(
            "no kernel could be fetched: {error:#}"
        ))),
    }
}

/// Whether stalled readers leave others alone, in the dialects whose load can be made here.
fn isolation(workspace: &Workspace) -> anyhow::Result<Ran> {
    if let Err(why) = perf::go_toolchain() {
        println!("isolation of grpc-go: SKIPPED: {why}");
    }
    let line = "--quick --rounds=7 --seconds=0.8 --peers=adit --only=isolation --check";
    all(perf::run(workspace, &perf::Args::parse(line)?))
}

/// Whether accounting costs an echo or a transfer more than it may, where the kernel lets it be measured.
fn accounting(workspace: &Workspace) -> anyhow::Result<Ran> {
    if let Some(why) = perf::why_not_accounted(workspace)? {
        return Ok(Ran::Nothing(why));
    }
    let line = "--scenario=account-cgroups --rounds=5 --seconds=0.4 --only=echo,bulk --check";
    all(perf::run(workspace, &perf::Args::parse(line)?))
}

/// Checks advisories, licences and sources where `cargo-deny` is installed: it needs its database from the network.
fn deny(workspace: &Workspace) -> anyhow::Result<Ran> {
    if steps::first_line(Command::new("cargo-deny").arg("--version")).is_none() {
        return Ok(Ran::Nothing("cargo-deny is not installed".to_owned()));
    }
    cargo(workspace, &["deny", "check"], steps::MINUTES_5)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_demo_is_run_as_the_readme_says() {
        let readme = Workspace::here().unwrap().text("README.md").unwrap();
        let command = format!("\ncargo {} ", DEMO_COMMAND.join(" "));
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
                .any(|Step(name, tier, _)| *name == "test" && *tier == Tier::Gate)
        );
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
