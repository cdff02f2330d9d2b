//! `cargo xtask test`: all tests of a tier, of all binaries in one pool, with short output.

mod binaries;
mod nobody;
mod pool;
mod summary;
mod tiers;

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{bail, ensure};

use crate::ebpf;
use crate::script;
use crate::steps::{Outcome, Steps, stdout_of};
use crate::workspace::Workspace;
use binaries::Binary;
use pool::{Job, Settings};
use summary::Report;
use tiers::Tier;

/// Environment variable with which tests run at nightly sizes and durations.
const NIGHTLY: &str = "ADIT_NIGHTLY";
/// Environment variable with the program that tests start, if it is not the one that cargo builds for them.
const PROGRAM: &str = "ADIT_PROGRAM";
/// Environment variables with the seed of property tests, and with their number of cases unless a test sets it.
const SEED: &str = "PROPTEST_RNG_SEED";
const CASES: &str = "PROPTEST_CASES";
/// Modules of loopback tests that count tunnels, or the bytes of a tunnel.
const SCALE: [&str; 3] = ["idle_tunnels", "large_transfers", "opens_and_closes"];
/// Concurrent tests of these modules: each has four busy processes.
const SCALE_AT_ONCE: usize = 2;
/// Modules of loopback tests whose subject is TLS.
const TLS: [&str; 9] = [
    "alpn_fronts",
    "files",
    "grants",
    "ktls_lanes",
    "lanes",
    "leases",
    "pki",
    "plaintext_lanes",
    "revocation",
];
/// Concurrent end-to-end tests: each has its own control plane.
const END_TO_END_AT_ONCE: usize = 2;
/// Environment variable that selects the one older upstream release of interop tests; unset: all releases.
const OLDER: &str = "INTEROP_OLDER";

/// Time limit for a program to print its version.
const VERSION_MAX: Duration = Duration::from_secs(20);

/// What to run.
#[derive(clap::Args, Default)]
pub(crate) struct Args {
    /// Only unit tests: no integration tests.
    #[arg(long)]
    quick: bool,
    /// Everything at full size and length, all releases of upstream, and all of it without privileges, too; sets ADIT_NIGHTLY.
    #[arg(long, conflicts_with = "quick")]
    nightly: bool,
    /// Print a line for every test, not only for those that fail.
    #[arg(long)]
    verbose: bool,
    /// How many tests run at once; four for each processor if not given.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    slots: Option<u16>,
    /// Run only tests whose name contains this text.
    filter: Option<String>,
}

impl Args {
    /// Whether nightly tests are requested, by flag or by environment: tests read the environment only.
    fn is_nightly(&self) -> bool {
        self.nightly || std::env::var_os(NIGHTLY).is_some()
    }

    fn settings(&self) -> Settings {
        let variables = if self.is_nightly() {
            vec![(NIGHTLY, Some("1".into()))]
        } else {
            sizes_of_the_gate()
        };
        Settings {
            slots: self.slots.map_or_else(slots, usize::from),
            prefix: Vec::new(),
            variables,
            verbose: self.verbose,
        }
    }
}

/// Property tests draw the same cases in every run of the gate; nightly runs draw other cases, and more.
fn sizes_of_the_gate() -> Vec<(&'static str, Option<OsString>)> {
    let set = |name, value: &str| (name, Some(value.into()));
    vec![(NIGHTLY, None), set(SEED, "1"), set(CASES, "64")]
}

/// Four test slots per core: most tests wait for sockets and programs. With three, cores idle for a fifth of the time; with
/// more, slow hosts violate time limits of some tests.
fn slots() -> usize {
    4 * std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Runs the tests. Includes the recorded fuzz inputs, which plain tests replay.
///
/// # Errors
/// A test fails or does not build.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> anyhow::Result<()> {
    let which: &[&str] = if args.quick {
        &["--lib", "--bins"]
    } else {
        &[]
    };
    let binaries = binaries::build(workspace, which)?;
    if !args.quick {
        tiers::check(&binaries)?;
    }
    let tier = Tier::of(&workspace.commit(), args.is_nightly());
    let mut settings = args.settings();
    if !tier.nightly && !args.quick {
        let release = tier.older.release;
        println!("of the older releases of upstream, this run has {release}");
        settings.variables.push((OLDER, Some(release.into())));
    }
    if !tier.nightly {
        return tests(&binaries, &tier, args, &settings);
    }
    let mut steps = Steps::new();
    steps.run("tests", || tests(&binaries, &tier, args, &settings));
    match nobody::prefix(workspace) {
        Ok(prefix) => steps.run("without privileges", || {
            settings.prefix = prefix;
            // Privileges do not depend on sizes. Unset `CI`: a skip is no failure. Unset `TMPDIR`: every user may write to the
            // default.
            settings.variables = sizes_of_the_gate();
            settings.variables.extend([("CI", None), ("TMPDIR", None)]);
            tests(&binaries, &tier, args, &settings)
        }),
        Err(why) => steps.run_if_possible("without privileges", || Ok(Outcome::Skipped(why))),
    }
    steps.run_if_possible("ebpf rebuild", || rebuilt(workspace));
    steps.finish()
}

/// Runs the tests of a tier that the arguments select.
fn tests(binaries: &[Binary], tier: &Tier, args: &Args, settings: &Settings) -> anyhow::Result<()> {
    let jobs = tier.jobs(binaries, args.filter.as_deref());
    if let (true, Some(filter)) = (jobs.is_empty(), &args.filter) {
        bail!("no test of this tier has {filter:?} in its name; `--nightly` has all");
    }
    verdict(&pool::run(&jobs, settings)?)
}

/// Turns failed tests into an error that names them.
fn verdict(report: &Report) -> anyhow::Result<()> {
    let failed = &report.failed;
    ensure!(failed.is_empty(), "failed: {}", failed.join(", "));
    Ok(())
}

/// Builds the eBPF object from its sources and loads it into the running kernel: other compiler versions give other objects.
fn rebuilt(workspace: &Workspace) -> anyhow::Result<Outcome> {
    let built = script::outcome(script::command(workspace, "ebpf").arg("fresh"))?;
    if let Outcome::Done = built {
        let object = (
            "ADIT_EBPF_OBJECT",
            Some(ebpf::fresh_object(workspace).into()),
        );
        chosen(
            workspace,
            &["--test=kernel"],
            &["freshly_built"],
            |settings| settings.variables.push(object),
        )?;
    }
    Ok(built)
}

/// Runs interop tests with an `adit` of another commit: the rest of their tier needs no such binary.
///
/// # Errors
/// A test fails.
pub(crate) fn beside(workspace: &Workspace, previous: &Path) -> anyhow::Result<()> {
    let previous = ("ADIT_PREVIOUS", Some(previous.into()));
    chosen(
        workspace,
        &["--test=interop"],
        &["aditprevious"],
        |settings| settings.variables.push(previous),
    )
}

/// Runs tests with a real control plane, whose programs are in `programs`.
///
/// # Errors
/// A test fails.
pub(crate) fn end_to_end(workspace: &Workspace, programs: &Path) -> anyhow::Result<()> {
    let programs = ("ADIT_E2E_PROGRAMS", Some(programs.into()));
    chosen(workspace, &["--test=e2e"], &[""], |settings| {
        settings.slots = END_TO_END_AT_ONCE;
        settings.variables.push(programs);
    })
}

/// Runs tests that count tunnels or bytes at full size. They need the speed of the existing release build.
///
/// # Errors
/// A test fails, or the release build is missing.
pub(crate) fn at_scale(workspace: &Workspace) -> anyhow::Result<()> {
    let program = workspace.target().join("release/adit");
    ensure!(
        program.is_file(),
        "{} is not there: `cargo build --release --bin adit` makes it",
        program.display()
    );
    let modules = SCALE.map(|module| format!("cases::{module}::"));
    let modules: Vec<&str> = modules.iter().map(String::as_str).collect();
    chosen(workspace, &["--test=loopback"], &modules, |settings| {
        settings.slots = SCALE_AT_ONCE;
        settings.variables.push((PROGRAM, Some(program.into())));
    })
}

/// Runs loopback tests of TLS with the FIPS build of its cryptography, at the sizes of the gate.
///
/// # Errors
/// A test fails.
pub(crate) fn fips(workspace: &Workspace, features: &str) -> anyhow::Result<()> {
    let modules = TLS.map(|module| format!("cases::{module}::"));
    let modules: Vec<&str> = modules.iter().map(String::as_str).collect();
    let which = ["--package=adit", features, "--test=loopback"];
    chosen(workspace, &which, &modules, |settings| {
        settings.variables = sizes_of_the_gate();
        settings.variables.push((PROGRAM, None));
    })?;
    let program = workspace.target().join("debug/adit");
    let mut version = Command::new(&program);
    let version = stdout_of(version.args(["version", "--output=json"]), VERSION_MAX)?;
    let version: serde_json::Value = serde_json::from_str(&version)?;
    ensure!(
        version["fips"] == true,
        "the tests ran without FIPS: {} says {version}",
        program.display()
    );
    Ok(())
}

/// Runs nightly tests whose names contain one of the texts, in the binaries that `which` selects, with adjusted settings.
fn chosen(
    workspace: &Workspace,
    which: &[&str],
    texts: &[&str],
    change: impl FnOnce(&mut Settings),
) -> anyhow::Result<()> {
    let binaries = binaries::build(workspace, which)?;
    let tier = Tier::of(&workspace.commit(), true);
    let jobs: Vec<Job<'_>> = texts
        .iter()
        .flat_map(|text| tier.jobs(&binaries, Some(text)))
        .collect();
    ensure!(!jobs.is_empty(), "no test of {which:?} is named {texts:?}");
    let night = Args {
        nightly: true,
        ..Args::default()
    };
    let mut settings = night.settings();
    change(&mut settings);
    verdict(&pool::run(&jobs, &settings)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nightly_takes_a_filter_and_excludes_quick() {
        use clap::Parser as _;

        let parsed = |flags: &[&str]| {
            let line = [&["xtask", "test"][..], flags].concat();
            crate::Cli::try_parse_from(line).is_ok()
        };
        assert!(parsed(&["--nightly", "relay"]));
        assert!(!parsed(&["--nightly", "--quick"]));
    }

    #[test]
    fn selected_test_modules_exist() {
        let workspace = Workspace::here().unwrap();
        for module in SCALE.into_iter().chain(TLS).chain(tiers::THROUGH_PEER) {
            let file = format!("tunnel-daemon/tests/loopback/cases/{module}.rs");
            assert!(workspace.path(&file).is_file(), "{file}");
        }
    }
}
