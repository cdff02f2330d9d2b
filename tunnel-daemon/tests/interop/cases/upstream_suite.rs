//! Upstream's own integration suite, unchanged, with the agent as an external program.
//!
//! The suite starts its own server, in its own process. It runs in a network namespace with an address that drops dials, a
//! name server that rejects all names, and a free port 8080.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, ExitStatus};

use tempfile::TempDir;

use crate::support::combo::{Combo, Maker};
use crate::support::go::{self, Program};
use crate::support::process::Process;
use crate::support::wait::secs;
use crate::support::{namespace, skip};

/// Tests that do not pass with our agent, each with the reason. A listed test that passes, or that upstream no longer has,
/// fails the run.
const EXCEPTIONS: &[(&str, &str)] = &[];

/// A test with a race of its own, which fails sometimes with any agent. If its output ends in one of these ways, it is
/// repeated alone. It counts as passed when one repetition passes.
struct Race {
    test: &'static str,
    losses: &'static [&'static str],
}

/// One cancellation ends the request and the tunnel below it in the client's process, and then the target answers. The test
/// expects only one of the errors, and the HTTP client reports the first.
const RACES: &[Race] = &[Race {
    test: "TestProxyHandle_TunnelContextCancelled_GRPC",
    losses: &[
        ": EOF",
        "Expected error when context is cancelled, did not receive error",
    ],
}];

/// An agent may answer a scrape before it has set its first gauge. The suite then gives up instead of waiting, in any test,
/// and also with upstream's own agent on a busy machine.
const LOST_BY_ANY: &[&str] =
    &["missing konnectivity_network_proxy_agent_open_server_connections metric"];

/// Repetitions of such a test. It fails about one time in six, so nine failures in a row are very unlikely.
const RACE_RUNS: u32 = 9;

/// Time after which the suite aborts and shows what hangs. It takes about 85 s with any agent. 60 s of that are a check for
/// leaked goroutines that counts its own goroutine.
const SUITE_LIMIT_SECS: u64 = 180;

/// Log lines shown for each failed test.
const LINES_SHOWN: usize = 300;

/// Upstream (tunnels): All integration tests of upstream pass with our agent.
fn every_upstream_test_passes(combo: Combo) {
    let dir = TempDir::new().expect("a temporary directory can be made");
    if let Some(why) = namespace::missing(dir.path()) {
        // An unprivileged user may lack the right to create a namespace.
        skip::skip_unprivileged(
            "upstream_suite",
            format_args!("no network namespace: {why}"),
        );
        return;
    }
    // The suite takes a path without arguments, so the program's name selects compat mode.
    let agent = dir.path().join("proxy-agent");
    symlink(combo.agent.agent().0, &agent).expect("a link can be made");
    let tests = names();
    assert!(!tests.is_empty(), "the suite has tests");

    let (status, mut log) = run("suite", &agent, dir.path(), &[]);
    let failed = not_passed(&tests, &log);
    assert!(
        status.success() || !failed.is_empty(),
        "all tests passed, but the suite ended with {status}"
    );
    let again: Vec<&str> = failed
        .into_iter()
        .filter(|test| {
            let mut known = RACES.iter().filter(|race| race.test == *test);
            known.any(|race| lost(&log, test, race.losses)) || lost(&log, test, LOST_BY_ANY)
        })
        .collect();
    let mut runs = String::new();
    for (n, test) in again.into_iter().enumerate() {
        let only = [
            format!("-test.run=^{test}$"),
            format!("-test.count={RACE_RUNS}"),
        ];
        runs += &run(&format!("race{n}"), &agent, dir.path(), &only).1;
    }
    log += &runs;
    let exceptions = match combo.agent {
        Maker::Adit | Maker::AditLink | Maker::AditPrevious => EXCEPTIONS,
        Maker::Upstream(_) => &[],
    };
    let mut complaints = complaints(&tests, &log, exceptions);
    let listed = exceptions.iter().map(|(test, _)| *test);
    complaints.extend(unknown(
        &tests,
        listed.chain(RACES.iter().map(|race| race.test)),
    ));
    assert!(
        complaints.is_empty(),
        "{} complaints about {} upstream tests:\n{}",
        complaints.len(),
        tests.len(),
        complaints.join("\n")
    );
}
rows!(every_upstream_test_passes: go_go go_adit);

/// Names of the suite's tests.
fn names() -> Vec<String> {
    let output = Command::new(go::binary(Program::Suite))
        .args(["-test.list", "^Test"])
        .output()
        .expect("the suite runs");
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines()
        .filter(|line| line.starts_with("Test"))
        .map(str::to_owned)
        .collect()
}

/// Runs the suite against this agent. Returns its exit status, and the output of suite and agents.
fn run(name: &str, agent: &Path, dir: &Path, flags: &[String]) -> (ExitStatus, String) {
    let mut words = vec![
        go::binary(Program::Suite).display().to_string(),
        format!("-agent-path={}", agent.display()),
        // Marks lines of the test runner, which shares its output with servers and agents.
        "-test.v=test2json".to_owned(),
        format!("-test.timeout={SUITE_LIMIT_SECS}s"),
    ];
    words.extend_from_slice(flags);
    let (program, args) = namespace::enclosed(&words, dir);
    let status = Process::service(name, &program, &args, dir).wait(secs(SUITE_LIMIT_SECS + 30));
    let log = fs::read(dir.join(format!("{name}.log"))).expect("the log was written");
    (status, String::from_utf8_lossy(&log).into_owned())
}

/// Output of one run of a test, and whether it passed. A skipped test did not pass.
#[derive(Default)]
struct Section<'a> {
    lines: Vec<&'a str>,
    passed: bool,
}

/// Splits the log by test. Tests run one after another, and subtests belong to their test.
fn sections(log: &str) -> BTreeMap<&str, Section<'_>> {
    let mut sections: BTreeMap<&str, Section<'_>> = BTreeMap::new();
    let mut current = "";
    // The mark may also follow output that did not end its line.
    for line in log.split(['\n', '\x16']).filter(|line| !line.is_empty()) {
        if let Some(name) = line.strip_prefix("=== RUN   ") {
            current = name.split('/').next().unwrap_or(name);
        }
        let section = sections.entry(current).or_default();
        section.lines.push(line);
        if let Some(name) = line.strip_prefix("--- PASS: ") {
            section.passed |= name.split(' ').next() == Some(current);
        }
    }
    sections
}

/// Tests that failed, were skipped, or have no result.
fn not_passed<'a>(tests: &'a [String], log: &str) -> Vec<&'a str> {
    let sections = sections(log);
    let passed = |test: &str| sections.get(test).is_some_and(|section| section.passed);
    tests
        .iter()
        .map(String::as_str)
        .filter(|test| !passed(test))
        .collect()
}

/// All deviations from the expected results, as text.
fn complaints(tests: &[String], log: &str, exceptions: &[(&str, &str)]) -> Vec<String> {
    let sections = sections(log);
    let mut complaints = Vec::new();
    for test in tests {
        let section = sections.get(test.as_str());
        let passed = section.is_some_and(|section| section.passed);
        let exception = exceptions.iter().find(|(name, _)| name == test);
        match (passed, exception) {
            (true, None) | (false, Some(_)) => {}
            (true, Some((name, reason))) => {
                complaints.push(format!("{name} passes; it is listed because: {reason}"));
            }
            (false, None) => {
                let mut text = format!("{test} did not pass");
                for line in section.iter().flat_map(|it| &it.lines).take(LINES_SHOWN) {
                    write!(text, "\n    {line}").expect("text can grow");
                }
                complaints.push(text);
            }
        }
    }
    complaints
}

/// Complaints about listed names that the suite does not have.
fn unknown<'a>(tests: &[String], listed: impl Iterator<Item = &'a str>) -> Vec<String> {
    listed
        .filter(|name| !tests.iter().any(|test| test == name))
        .map(|name| format!("{name} is listed, and upstream has no such test"))
        .collect()
}

/// Whether a test's output has a line that ends with one of `losses`.
fn lost(log: &str, test: &str, losses: &[&str]) -> bool {
    sections(log).get(test).is_some_and(|section| {
        let known = |line: &&str| losses.iter().any(|loss| line.ends_with(loss));
        section.lines.iter().any(known)
    })
}

/// A log as the suite writes it: a test with a subtest, a failure after an unfinished line, and a test without result.
const LOG: &str = "\x16=== RUN   TestA\n\x16=== RUN   TestA/grpc\nserver up\n\x16--- PASS: TestA (0.10s)\n\
    \x16    --- PASS: TestA/grpc (0.10s)\n\x16=== RUN   TestB\nno newline\x16--- FAIL: TestB (0.10s)\n\
    \x16=== RUN   TestC\n";

fn complaints_of(tests: &[&str], exceptions: &[(&str, &str)]) -> Vec<String> {
    let tests: Vec<String> = tests.iter().map(|&test| test.to_owned()).collect();
    complaints(&tests, LOG, exceptions)
}

#[test]
fn failed_truncated_and_missing_tests_are_reported() {
    assert!(complaints_of(&["TestA"], &[]).is_empty());
    assert_eq!(
        complaints_of(&["TestA", "TestB", "TestC", "TestD"], &[]),
        [
            "TestB did not pass\n    === RUN   TestB\n    no newline\n    --- FAIL: TestB (0.10s)",
            "TestC did not pass\n    === RUN   TestC",
            "TestD did not pass",
        ]
    );
}

#[test]
fn a_flaky_test_counts_as_passed_after_a_successful_retry() {
    assert!(lost(LOG, "TestB", &["newline"]));
    assert!(!lost(LOG, "TestB", &["server up"]), "another test's line");
    let tests = ["TestA", "TestB", "TestC"].map(str::to_owned);
    assert_eq!(not_passed(&tests, LOG), ["TestB", "TestC"]);
    let again = format!("{LOG}\x16=== RUN   TestB\n\x16--- PASS: TestB (0.10s)\n");
    assert_eq!(not_passed(&tests, &again), ["TestC"]);
}

#[test]
fn stale_list_entries_are_reported() {
    assert!(complaints_of(&["TestA", "TestB"], &[("TestB", "why")]).is_empty());
    assert_eq!(
        complaints_of(&["TestA"], &[("TestA", "why")]),
        ["TestA passes; it is listed because: why"]
    );
    assert_eq!(
        unknown(&["TestA".to_owned()], ["TestA", "TestZ"].into_iter()),
        ["TestZ is listed, and upstream has no such test"]
    );
}
