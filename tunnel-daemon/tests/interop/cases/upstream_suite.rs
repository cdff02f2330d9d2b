//! Upstream's own integration suite, unchanged, with the agent as an external program.
//!
//! Its server is always its own, in its own process. It runs in a namespace because it needs what a host may not have:
//! an address that swallows a dial, a name server that says no, and nobody at port 8080.

use std::collections::BTreeMap;
use std::env;
use std::fmt::Write;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, ExitStatus};

use tempfile::TempDir;

use crate::support::combo::{Combo, Maker};
use crate::support::go::{self, Program};
use crate::support::namespace;
use crate::support::process::Process;
use crate::support::wait::secs;

/// Tests that do not pass with our agent, each with the reason. One that passes, or that upstream no longer has, fails
/// the run, so the list says what is true.
const EXCEPTIONS: &[(&str, &str)] = &[];

/// A test that loses a race of its own now and then, with any agent. When it failed in one of these ways, it is run again
/// alone, and counts as passed when one of those runs passes.
struct Race {
    test: &'static str,
    losses: &'static [&'static str],
}

/// One cancel ends the request and the tunnel below it, both in the client's process, and a moment later the target
/// answers. The test knows one of the errors only, and the HTTP client reports what it sees first.
const RACES: &[Race] = &[Race {
    test: "TestProxyHandle_TunnelContextCancelled_GRPC",
    losses: &[
        ": EOF",
        "Expected error when context is cancelled, did not receive error",
    ],
}];

/// An agent answers a scrape before it has set its first gauge, and the suite, which waits for the gauge's value, gives up when
/// there is none yet. Seen with upstream's own agent on a busy machine, in whatever test it is.
const LOST_BY_ANY: &[&str] =
    &["missing konnectivity_network_proxy_agent_open_server_connections metric"];

/// Runs of such a test. It fails in one of six, so nine in a row do not happen.
const RACE_RUNS: u32 = 9;

/// When the suite gives up by itself and shows what hangs. It takes 85 s with any agent, 60 of them in a poll for leaked
/// goroutines that counts one of its own until it gives up.
const SUITE_LIMIT_SECS: u64 = 180;

/// Lines shown of one test that did not pass.
const LINES_SHOWN: usize = 300;

/// Upstream (tunnels): All integration tests of upstream pass with our agent.
fn every_upstream_test_passes(combo: Combo) {
    let dir = TempDir::new().expect("a temporary directory can be made");
    if let Some(why) = namespace::missing(dir.path()) {
        // Not every user may make one.
        let must = env::var_os("CI").is_some() && rustix::process::geteuid().is_root();
        assert!(!must, "no network namespace can be made: {why}");
        go::skip_loudly("upstream_suite", &format!("no network namespace: {why}"));
        return;
    }
    // The suite is given a path and no words before its flags, so the name is what asks for upstream's behaviour.
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

/// The tests it is made of.
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

/// Runs it against this agent to its end: how it ended, and all that it and the agents wrote.
fn run(name: &str, agent: &Path, dir: &Path, flags: &[String]) -> (ExitStatus, String) {
    let mut words = vec![
        go::binary(Program::Suite).display().to_string(),
        format!("-agent-path={}", agent.display()),
        // Marks the lines of the test runner, which shares its output with servers and agents.
        "-test.v=test2json".to_owned(),
        format!("-test.timeout={SUITE_LIMIT_SECS}s"),
    ];
    words.extend_from_slice(flags);
    let (program, args) = namespace::enclosed(&words, dir);
    let status = Process::service(name, &program, &args, dir).wait(secs(SUITE_LIMIT_SECS + 30));
    let log = fs::read(dir.join(format!("{name}.log"))).expect("the log was written");
    (status, String::from_utf8_lossy(&log).into_owned())
}

/// What one test wrote, and whether it passed, in one of its runs; a skipped one did not.
#[derive(Default)]
struct Section<'a> {
    lines: Vec<&'a str>,
    passed: bool,
}

/// Splits the log by test. They run one after the other; those inside a test count as part of it.
fn sections(log: &str) -> BTreeMap<&str, Section<'_>> {
    let mut sections: BTreeMap<&str, Section<'_>> = BTreeMap::new();
    let mut current = "";
    // The mark also stands behind output that did not end its line.
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

/// The tests that failed, were skipped, or have no result at all.
fn not_passed<'a>(tests: &'a [String], log: &str) -> Vec<&'a str> {
    let sections = sections(log);
    let passed = |test: &str| sections.get(test).is_some_and(|section| section.passed);
    tests
        .iter()
        .map(String::as_str)
        .filter(|test| !passed(test))
        .collect()
}

/// Everything that is not as it should be, ready to be shown.
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

/// Complaints about names on a list that no test has.
fn unknown<'a>(tests: &[String], listed: impl Iterator<Item = &'a str>) -> Vec<String> {
    listed
        .filter(|name| !tests.iter().any(|test| test == name))
        .map(|name| format!("{name} is listed, and upstream has no such test"))
        .collect()
}

/// Whether a test failed in one of these ways.
fn lost(log: &str, test: &str, losses: &[&str]) -> bool {
    sections(log).get(test).is_some_and(|section| {
        let known = |line: &&str| losses.iter().any(|loss| line.ends_with(loss));
        section.lines.iter().any(known)
    })
}

/// A log as the suite writes it: one test with one inside, one that fails behind an unfinished line, one cut off.
const LOG: &str = "\x16=== RUN   TestA\n\x16=== RUN   TestA/grpc\nserver up\n\x16--- PASS: TestA (0.10s)\n\
    \x16    --- PASS: TestA/grpc (0.10s)\n\x16=== RUN   TestB\nno newline\x16--- FAIL: TestB (0.10s)\n\
    \x16=== RUN   TestC\n";

fn complaints_of(tests: &[&str], exceptions: &[(&str, &str)]) -> Vec<String> {
    let tests: Vec<String> = tests.iter().map(|&test| test.to_owned()).collect();
    complaints(&tests, LOG, exceptions)
}

#[test]
fn failed_cut_off_and_absent_tests_are_complaints() {
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
fn a_lost_race_counts_as_passed_once_it_is_won() {
    assert!(lost(LOG, "TestB", &["newline"]));
    assert!(!lost(LOG, "TestB", &["server up"]), "another test's line");
    let tests = ["TestA", "TestB", "TestC"].map(str::to_owned);
    assert_eq!(not_passed(&tests, LOG), ["TestB", "TestC"]);
    let again = format!("{LOG}\x16=== RUN   TestB\n\x16--- PASS: TestB (0.10s)\n");
    assert_eq!(not_passed(&tests, &again), ["TestC"]);
}

#[test]
fn the_lists_cannot_rot() {
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
