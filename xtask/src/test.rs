//! `cargo xtask test`: every test of the workspace, with output short enough to read.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};

use crate::ebpf;
use crate::steps::{self, Steps};
use crate::workspace::Workspace;

/// Longest time for all tiers; the slowest builds and interop programs included.
const LIMIT: Duration = Duration::from_secs(40 * 60);
/// At night, when some tests count further and last longer.
const NIGHTLY_LIMIT: Duration = Duration::from_secs(120 * 60);

/// Tests that find it in their environment run at the sizes and lengths of the night.
const NIGHTLY: &str = "ADIT_NIGHTLY";

/// Tests find the program to start in it, where they want another one than cargo builds for them.
const PROGRAM: &str = "ADIT_PROGRAM";
/// Loopback tests that count tunnels, or bytes of one, by their modules.
const SCALE: [&str; 3] = ["idle_tunnels", "large_transfers", "opens_and_closes"];
/// How many of these run at once: each has four busy processes.
const SCALE_AT_ONCE: &str = "--test-threads=2";

/// How many tests of a binary run at once, for the test runner.
const THREADS: &str = "RUST_TEST_THREADS";

/// Runs a program as a user who owns nothing and has no capability.
const AS_NOBODY: [&str; 6] = [
    "setpriv",
    "--reuid=65534",
    "--regid=65534",
    "--clear-groups",
    "--inh-caps=-all",
    "--bounding-set=-all",
];
/// Tests that say what they skip without privileges, and others that are soon over.
const FOR_NOBODY: [&str; 13] = [
    "--lib",
    "--test",
    "kernel",
    "--test",
    "ops",
    "--test",
    "demo",
    "--test",
    "allocations",
    "--test",
    "corpus",
    "--test",
    "roles",
];
/// Take a while and ask the system for next to nothing, so they run at night. Who runs the tests has built what interop starts.
const AT_NIGHT: [&str; 4] = ["--test", "sim", "--test", "interop"];
/// The loopback tiers of relay and daemon.
const LOOPBACK_FOR_NOBODY: [&str; 2] = ["--test", "loopback"];
/// Leaves out the daemon's, whose tests are all in that module: it takes minutes, so the whole of it runs at night. And what of the
/// relay's counts bytes and offsets, which nobody's rights change.
const ONLY_THE_RELAYS: [&str; 7] = [
    "--",
    "--skip",
    "cases::",
    "--skip",
    "a_gibibyte_is",
    "--skip",
    "switch_to_splice",
];
/// What CI runs of the daemon's: modules whose tests ask who they are or skip what this host lacks.
const ASKING: [&str; 10] = [
    "admin",
    "bad_input",
    "curl",
    "demo_colours",
    "ktls_lanes",
    "lane_faults",
    "least_privilege",
    "node_namespaces",
    "relay_engine",
    "srv",
];

/// What to run.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only unit tests: no integration tests, no doc tests.
    #[arg(long)]
    quick: bool,
    /// Run at full size and length the tests that are cut to CI's time, and the whole loopback tier, interop and the simulation
    /// without privileges, too; sets ADIT_NIGHTLY.
    #[arg(long, conflicts_with = "quick")]
    nightly: bool,
    /// Print a line for every test, not only for those that fail.
    #[arg(long)]
    verbose: bool,
    /// Run only tests whose name contains this text.
    filter: Option<String>,
}

impl Args {
    /// As CI runs it.
    pub(crate) fn for_ci(quick: bool) -> Self {
        Self {
            quick,
            nightly: false,
            verbose: false,
            filter: None,
        }
    }

    /// Whether it was asked for, in whatever way: tests look at the environment alone.
    fn is_nightly(&self) -> bool {
        self.nightly || std::env::var_os(NIGHTLY).is_some()
    }

    fn limit(&self) -> Duration {
        if self.is_nightly() {
            NIGHTLY_LIMIT
        } else {
            LIMIT
        }
    }
}

/// Runs the tests. Recorded fuzz inputs are replayed by plain tests, so they are part of it.
///
/// # Errors
/// When a test fails or does not build.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> anyhow::Result<()> {
    let mut steps = Steps::new();
    if args.quick {
        steps.run("unit tests", || {
            cargo_test(workspace, &["--lib", "--bins"], args)
        });
    } else {
        // With doc tests, which would build much once more if they ran alone.
        steps.run("tests", || cargo_test(workspace, &[], args));
        match nobody(workspace) {
            Ok(()) => all_unprivileged(workspace, &mut steps, args),
            Err(why) => steps.skip("without privileges", &why),
        }
        match ebpf::for_tests(workspace) {
            Ok(toolchain) => steps.run("ebpf rebuild", || rebuilt(workspace, &toolchain)),
            Err(why) => steps.skip("ebpf rebuild", &why),
        }
    }
    steps.finish()
}

/// Interop rows with our binary of another commit: the rest of that tier has run without it.
///
/// # Errors
/// When one of them fails.
pub(crate) fn beside(workspace: &Workspace, previous: &Path) -> anyhow::Result<()> {
    let mut args = Args::for_ci(false);
    args.filter = Some("aditprevious".to_owned());
    let mut command = workspace.cargo(&["test", "--workspace", "--no-fail-fast"]);
    command.env("ADIT_PREVIOUS", previous);
    run_tests(command, &["--test", "interop"], &args)
}

/// Tests that count tunnels or bytes, at full size, with a program that is fast enough for it: the release build that is there.
///
/// # Errors
/// When one of them fails, or the program is not there.
pub(crate) fn at_scale(workspace: &Workspace) -> anyhow::Result<()> {
    let program = workspace.target().join("release/adit");
    ensure!(
        program.is_file(),
        "{} is not there: `cargo build --release --bin adit` makes it",
        program.display()
    );
    let mut command = workspace.cargo(&["test", "--workspace", "--no-fail-fast"]);
    command.env(NIGHTLY, "1").env(PROGRAM, program);
    let modules = SCALE.map(|module| format!("cases::{module}::"));
    let mut which = vec!["--test", "loopback", "--", SCALE_AT_ONCE];
    which.extend(modules.iter().map(String::as_str));
    run_tests(command, &which, &Args::for_ci(false))
}

/// Builds the eBPF object from its sources and loads it into the running kernel: compilers of other versions give other
/// objects.
fn rebuilt(workspace: &Workspace, toolchain: &str) -> anyhow::Result<()> {
    let object = ebpf::build(workspace, toolchain)?;
    let mut command = workspace.cargo(&["test", "--quiet", "--workspace", "--test", "kernel"]);
    command.args(["freshly_built", "--", "--nocapture"]);
    steps::run_command(command.env("ADIT_EBPF_OBJECT", object), LIMIT)
}

/// Whether tests can run as a user who owns nothing.
fn nobody(workspace: &Workspace) -> Result<(), String> {
    let [setpriv, rights @ ..] = AS_NOBODY;
    let mut probe = Command::new(setpriv);
    probe.args(rights).args(["test", "-r"]);
    let probed = probe.arg(workspace.root().join("Cargo.toml")).output();
    match probed {
        Err(error) => Err(format!("setpriv cannot be run: {error}")),
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(format!(
            "only root can become nobody, and nobody has to read the checkout: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        )),
    }
}

/// What runs once more as nobody, step by step.
fn all_unprivileged(workspace: &Workspace, steps: &mut Steps, args: &Args) {
    let mut which = FOR_NOBODY.to_vec();
    let mut loopback = LOOPBACK_FOR_NOBODY.to_vec();
    if args.is_nightly() {
        which.extend(AT_NIGHT);
    } else {
        loopback.extend(ONLY_THE_RELAYS);
    }
    steps.run("without privileges", || {
        unprivileged(workspace, &which, args)
    });
    steps.run("loopback without privileges", || {
        unprivileged(workspace, &loopback, args)
    });
    // The night has had them. And names add up: with a filter more would run than what it asks for.
    if args.is_nightly() || args.filter.is_some() {
        return;
    }
    let modules = ASKING.map(|module| format!("cases::{module}::"));
    let mut asking = [&LOOPBACK_FOR_NOBODY[..], &["--"]].concat();
    asking.extend(modules.iter().map(String::as_str));
    steps.run("daemon's loopback without privileges", || {
        unprivileged(workspace, &asking, args)
    });
}

/// Tests once more, without privileges: what they lack is said, and nothing else fails.
fn unprivileged(workspace: &Workspace, which: &[&str], args: &Args) -> anyhow::Result<()> {
    let mut command = workspace.cargo(&["test", "--workspace", "--no-fail-fast"]);
    let target = format!("{}_UNKNOWN_LINUX_GNU", std::env::consts::ARCH);
    let runner = format!("CARGO_TARGET_{}_RUNNER", target.to_uppercase());
    command.env(runner, AS_NOBODY.join(" "));
    // A skip is no failure here, and temporary files go where everybody may write.
    command.env_remove("CI").env_remove("TMPDIR");
    run_tests(command, which, args)
}

/// Three for each processor: most tests wait for sockets and programs. With two the longest tier leaves the processors idle for more
/// than half of its time; more would have slow hosts miss what some tests expect of them.
fn threads() -> usize {
    3 * std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Runs `cargo test` and passes its output on, without the lines of tests that passed.
fn cargo_test(workspace: &Workspace, which: &[&str], args: &Args) -> anyhow::Result<()> {
    let command = workspace.cargo(&["test", "--workspace", "--no-fail-fast"]);
    run_tests(command, which, args)
}

fn run_tests(mut command: Command, which: &[&str], args: &Args) -> anyhow::Result<()> {
    command.args(which);
    if std::env::var_os(THREADS).is_none() {
        command.env(THREADS, threads().to_string());
    }
    if args.nightly {
        command.env(NIGHTLY, "1");
    }
    if let Some(filter) = &args.filter {
        command.args(["--", filter]);
    }
    command.stdout(Stdio::piped());
    let grouped = steps::in_ci();
    let mut child = steps::spawn(&mut command, grouped)?;
    let output = child.stdout.take().context("the child's output is piped")?;
    let verbose = args.verbose;
    let reader = std::thread::spawn(move || pass_on(output, verbose, std::io::stdout()));
    let outcome = steps::wait(&mut child, &command, args.limit(), grouped);
    let totals = reader
        .join()
        .ok()
        .context("the output reader ended early")??;
    println!(
        "{} passed, {} failed, {} ignored",
        totals.passed, totals.failed, totals.ignored
    );
    outcome
}

#[derive(Default, PartialEq, Eq, Debug)]
struct Totals {
    passed: u64,
    failed: u64,
    ignored: u64,
}

impl Totals {
    /// Adds up a `test result: ok. 3 passed; 0 failed; 1 ignored; ...` line.
    fn add(&mut self, line: &str) {
        let words: Vec<&str> = line.split_whitespace().collect();
        for pair in words.windows(2) {
            let [number, what] = pair else { continue };
            let Ok(number) = number.parse::<u64>() else {
                continue;
            };
            match what.trim_end_matches(';') {
                "passed" => self.passed += number,
                "failed" => self.failed += number,
                "ignored" => self.ignored += number,
                _ => (),
            }
        }
    }
}

fn pass_on(
    output: impl std::io::Read,
    verbose: bool,
    mut out: impl std::io::Write,
) -> anyhow::Result<Totals> {
    let mut totals = Totals::default();
    let mut lines = BufReader::new(output);
    let mut line = Vec::new();
    while lines.read_until(b'\n', &mut line)? > 0 {
        let text = String::from_utf8_lossy(&line);
        if text.starts_with("test result:") {
            totals.add(&text);
        }
        if verbose || !is_noise(&text) {
            out.write_all(text.as_bytes())?;
            out.flush()?;
        }
        line.clear();
    }
    Ok(totals)
}

fn is_noise(line: &str) -> bool {
    let line = line.trim_end();
    line.is_empty() || (line.starts_with("test ") && line.ends_with("... ok"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// The daemon's loopback tests: a file or a folder for each module.
    const CASES: &str = "tunnel-daemon/tests/loopback/cases";
    /// Modules that ask, too, and run without privileges at night only.
    const ASKING_AT_NIGHT: [(&str, &str); 7] = [
        ("differential", "as relay_engine: a ring; many tunnels"),
        ("idle_tunnels", "as relay_engine: a ring; many tunnels"),
        ("killed", "as relay_engine: a ring; many loads"),
        ("large_transfers", "as relay_engine: a ring; many bytes"),
        ("opens_and_closes", "as relay_engine: a ring; many tunnels"),
        ("plaintext_lanes", "as relay_engine: a ring; many limits"),
        ("slow_readers", "as relay_engine: a ring; long minutes"),
    ];

    /// Whether tests with this source may skip something, or look at who they are.
    fn asks(source: &str) -> bool {
        // Iterators skip, too.
        let source = source.replace(".skip(", "");
        let words = [
            " skip(",
            "::skip(",
            "skip_unprivileged(",
            "is_possible(",
            "geteuid",
            "SKIPPED ",
        ];
        words.iter().any(|word| source.contains(word))
    }

    #[test]
    fn what_asks_for_privileges_runs_without_them_or_says_why_at_night_only() {
        assert!(asks("        skip(test, \"no curl\");") && !asks("line.split(' ').skip(2)"));
        let workspace = Workspace::here().unwrap();
        let mut found = BTreeMap::new();
        for file in workspace.files(CASES).unwrap() {
            let source = workspace.text(&file).unwrap().unwrap();
            let below = file.strip_prefix(CASES).unwrap().trim_start_matches('/');
            let module = below.split(['/', '.']).next().unwrap();
            if asks(&source) {
                found.insert(module.to_owned(), file);
            }
        }
        let at_night = ASKING_AT_NIGHT.map(|(module, _reason)| module);
        for (module, file) in &found {
            let lists = [&ASKING[..], &at_night[..]];
            let listed = lists.iter().filter(|list| list.contains(&module.as_str()));
            assert_eq!(
                listed.count(),
                1,
                "{file} asks for privileges: `{module}` belongs to either ASKING or, with a reason, ASKING_AT_NIGHT"
            );
        }
        // A name that fits nothing runs nothing, without a word.
        for module in ASKING.into_iter().chain(at_night) {
            assert!(found.contains_key(module), "{module} asks for nothing");
        }
    }

    #[test]
    fn a_night_is_asked_for_by_name_and_is_never_quick() {
        use clap::Parser as _;

        let parsed = |flags: &[&str]| {
            let line = [&["xtask", "test"][..], flags].concat();
            crate::Cli::try_parse_from(line).is_ok()
        };
        assert!(parsed(&["--nightly", "relay"]));
        assert!(!parsed(&["--nightly", "--quick"]));
        let mut args = Args::for_ci(false);
        args.nightly = true;
        assert_eq!((args.is_nightly(), args.limit()), (true, NIGHTLY_LIMIT));
    }

    #[test]
    fn tests_that_count_tunnels_and_bytes_are_there() {
        let workspace = Workspace::here().unwrap();
        for module in SCALE {
            let file = format!("tunnel-daemon/tests/loopback/cases/{module}.rs");
            assert!(workspace.path(&file).is_file(), "{file}");
        }
    }

    #[test]
    fn totals_add_up_over_binaries() {
        let output = "test a ... ok\ntest result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.1s\n\
                      test result: FAILED. 2 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out\n";
        let mut shown = Vec::new();
        let totals = pass_on(output.as_bytes(), false, &mut shown).unwrap();
        assert_eq!(
            totals,
            Totals {
                passed: 5,
                failed: 1,
                ignored: 1
            }
        );
        assert_eq!(String::from_utf8(shown).unwrap().lines().count(), 2);
    }

    #[test]
    fn only_passed_tests_are_noise() {
        assert!(is_noise("test wire::packet ... ok\n"));
        assert!(!is_noise("test wire::packet ... FAILED\n"));
        assert!(!is_noise("test interop::go ... ignored, no Go toolchain\n"));
        assert!(!is_noise("test result: ok. 3 passed; 0 failed\n"));
        assert!(!is_noise(
            "test wire::packet has been running for over 60 seconds\n"
        ));
    }
}
