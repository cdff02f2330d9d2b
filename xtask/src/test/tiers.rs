//! The tests of each tier, their time limits, and which of them run alone.

use std::time::Duration;

use anyhow::ensure;

use super::binaries::Binary;
use super::pool::{Job, Phase};

/// Default time limit of a test.
const LIMIT: Duration = Duration::from_secs(60);
/// Factor on all time limits of nightly runs, whose tests count further.
const NIGHTLY_FACTOR: u32 = 15;

/// Builds the Go programs of interop tests. That takes minutes from scratch, so no test's own time includes it.
const FIRST: Pattern = Pattern("adit::interop", "built::programs_are_built");

/// Time limit of tests that wait for a long time. They start first, so that other tests run meanwhile.
const LONG: Duration = Duration::from_secs(120);

/// Tests with a limit of their own.
const LIMITS: &[(Pattern, Duration)] = &[
    (FIRST, Duration::from_secs(15 * 60)),
    (Pattern("adit::interop", "isolation::slow_reader_"), LONG),
    (Pattern("adit::interop", "goaway::"), LONG),
    (Pattern("adit::kernel", "account_times::"), LONG),
    (
        Pattern("adit::loopback", "paused_tunnels::a_thousand_"),
        LONG,
    ),
    (Pattern("adit::loopback", "descriptors::an_agent_"), LONG),
    (Pattern("adit::loopback", "memory_limits::"), LONG),
    (Pattern("adit::loopback", "memory_promises::"), LONG),
    (Pattern("adit::ops", "top::the_terminal_is_put_back_"), LONG),
];

/// Tests that judge durations: they run at night only, and alone.
const TIMED: &[Pattern] = &[
    Pattern("adit::interop", "isolation::four_stalled_clients_"),
    Pattern("adit::interop", "isolation::stalled_target_"),
    Pattern("adit::interop", "lag::"),
    Pattern("adit::loopback", "isolation::stalled_readers_"),
    Pattern("adit::loopback", "memory_limits::an_echo_beside_"),
];

/// Tests that run at night only.
const AT_NIGHT: &[Pattern] = &[
    // Upstream's programs with each other: the control for the interop tests of Adit.
    Pattern("adit::interop", "::go_go"),
    // Needs a program of another commit, which only nightly runs have.
    Pattern("adit::interop", "aditprevious"),
    // Needs a real control plane: `cargo xtask e2e`.
    Pattern("adit::e2e", ""),
    // Needs all older releases.
    Pattern("adit::interop", "an_older_client_that_gives_up"),
    // These tests wait for timeouts of half a minute and more.
    Pattern(
        "adit::loopback",
        "gone_behind_bytes::a_client_that_breaks_off_",
    ),
    Pattern(
        "adit::loopback",
        "gone_behind_bytes::a_target_that_breaks_off_",
    ),
    Pattern(
        "adit::loopback",
        "lane_faults::tunnels_without_a_link_live_",
    ),
    Pattern("adit::loopback", "slow_readers::"),
    // Thousands of tunnels, or a second and third time what the gate has once.
    Pattern("adit::loopback", "memory_promises::a_thousand_"),
    Pattern("adit::loopback", "memory_promises::four_thousand_"),
    Pattern(
        "adit::loopback",
        "memory_promises::clients_that_all_send_on_links_",
    ),
    Pattern("adit::loopback", "memory_promises::grpc_clients_"),
    Pattern("adit::loopback", "memory_promises::node_clients_"),
    Pattern(
        "adit::loopback",
        "memory_promises::targets_that_all_send_kill_nobody_in_64_mebibytes_without_lanes",
    ),
    // Servers and agents share a process, whose peers hear late beside other tests that a server leaves.
    Pattern("adit::loopback", "rolling_updates::"),
    // Upstream's own tests: they mostly sleep.
    Pattern("adit::interop", "upstream_suite::every_"),
];

/// Modules of loopback tests whose subject is what clients see. All their tests run a second time, with a server that has no agents
/// and asks another one.
pub(super) const THROUGH_PEER: [&str; 5] =
    ["curl", "hostile_clients", "http_proxy", "socks5", "tunnels"];

/// An older release of upstream.
#[derive(Clone, Copy)]
pub(super) struct Older {
    /// Version of the release.
    pub(super) release: &'static str,
    /// Its name in rows of interop tests, and in names of tests.
    row: &'static str,
    test: &'static str,
}

/// The gate takes one of these, a nightly run all.
const OLDER: [Older; 2] = [
    Older {
        release: "v0.34.0",
        row: "go034",
        test: "v0_34_0",
    },
    Older {
        release: "v0.30.3",
        row: "go0303",
        test: "v0_30_3",
    },
];

/// Matches tests of a binary whose names contain a text.
struct Pattern(&'static str, &'static str);

impl Pattern {
    fn fits(&self, binary: &str, test: &str) -> bool {
        binary == self.0 && test.contains(self.1)
    }
}

/// Selects the tests to run.
pub(super) struct Tier {
    /// All tests at full size.
    pub(super) nightly: bool,
    /// The older upstream release that the gate takes.
    pub(super) older: Older,
}

impl Tier {
    /// The tier of a commit. Its hash selects the older release, so that a run can be repeated. Words after the hash, such as
    /// "with changes", do not count.
    pub(super) fn of(commit: &str, nightly: bool) -> Self {
        let hash = commit.split(' ').next().unwrap_or_default();
        let sum: usize = hash.bytes().map(usize::from).sum();
        Self {
            nightly,
            older: OLDER[sum % OLDER.len()],
        }
    }

    /// Jobs for the tests of this tier whose full name contains the filter, and for the tests that build their programs.
    pub(super) fn jobs<'a>(&self, binaries: &'a [Binary], filter: Option<&str>) -> Vec<Job<'a>> {
        let mut jobs = Vec::new();
        for binary in binaries {
            let before = jobs.len();
            for test in &binary.tests {
                let is_asked = filter.is_none_or(|text| {
                    test.contains(text) || format!("{} {test}", binary.label).contains(text)
                });
                if is_asked && self.has(&binary.label, test) {
                    let job = self.job(binary, test);
                    jobs.push(job);
                    if runs_through_peer(&binary.label, test) {
                        jobs.push(Job {
                            through_peer: true,
                            ..job
                        });
                    }
                }
            }
            let first = binary
                .tests
                .iter()
                .find(|test| FIRST.fits(&binary.label, test));
            let is_there = |test: &String| jobs[before..].iter().any(|job| job.test == test);
            if let Some(first) = first.filter(|first| jobs.len() > before && !is_there(first)) {
                jobs.push(self.job(binary, first));
            }
        }
        jobs
    }

    fn job<'a>(&self, binary: &'a Binary, test: &'a str) -> Job<'a> {
        let fits = |pattern: &Pattern| pattern.fits(&binary.label, test);
        let own = LIMITS.iter().find(|(pattern, _limit)| fits(pattern));
        let limit = own.map_or(LIMIT, |(_pattern, limit)| *limit);
        Job {
            binary,
            test,
            limit: if self.nightly {
                limit * NIGHTLY_FACTOR
            } else {
                limit
            },
            phase: if fits(&FIRST) {
                Phase::First
            } else if TIMED.iter().any(fits) {
                Phase::Alone
            } else {
                Phase::Beside
            },
            through_peer: false,
        }
    }

    fn has(&self, binary: &str, test: &str) -> bool {
        let mut of_night = AT_NIGHT.iter().chain(TIMED);
        let is_at_night = of_night.any(|pattern| pattern.fits(binary, test));
        let of_another = || {
            let mut others = OLDER
                .iter()
                .filter(|older| older.release != self.older.release);
            binary == "adit::interop"
                && others.any(|older| test.contains(older.row) || test.contains(older.test))
        };
        self.nightly || !(is_at_night || of_another())
    }
}

fn runs_through_peer(binary: &str, test: &str) -> bool {
    let mut path = test.split("::");
    binary == "adit::loopback"
        && path.next() == Some("cases")
        && path.next().is_some_and(|it| THROUGH_PEER.contains(&it))
}

/// Finds patterns that match no test, which would otherwise have no effect unnoticed.
///
/// # Errors
/// Names such patterns.
pub(super) fn check(binaries: &[Binary]) -> anyhow::Result<()> {
    let limits = LIMITS.iter().map(|(pattern, _limit)| pattern);
    let all = limits.chain(TIMED).chain(AT_NIGHT);
    let fits_none = |pattern: &&Pattern| {
        let mut tests = binaries.iter().flat_map(|binary| {
            binary
                .tests
                .iter()
                .map(move |test| (binary.label.as_str(), test))
        });
        !tests.any(|(binary, test)| pattern.fits(binary, test))
    };
    let stale: Vec<String> = all
        .filter(fits_none)
        .map(|Pattern(binary, text)| format!("{binary} {text}"))
        .collect();
    ensure!(
        stale.is_empty(),
        "no test fits what xtask/src/test/tiers.rs names: {}",
        stale.join(", ")
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn interop() -> Vec<Binary> {
        let tests = [
            "support::built::programs_are_built",
            "cases::a::adit_go",
            "cases::a::go_go",
            "cases::a::adit_go034",
            "cases::a::adit_go0303",
            "cases::lag::b::adit_go",
        ];
        vec![Binary {
            label: "adit::interop".to_owned(),
            path: PathBuf::new(),
            folder: PathBuf::new(),
            tests: tests.map(str::to_owned).to_vec(),
        }]
    }

    fn names(tier: &Tier, filter: Option<&str>) -> Vec<String> {
        let binaries = interop();
        let jobs = tier.jobs(&binaries, filter);
        jobs.iter().map(|job| job.test.to_owned()).collect()
    }

    #[test]
    fn the_gate_has_one_older_release_and_the_night_has_all_tests() {
        let gate = Tier::of("abc1234", false);
        let has = names(&gate, None);
        let older = has.iter().filter(|name| name.contains("_go03"));
        assert_eq!((has.len(), older.count()), (3, 1), "{has:?}");
        let changed = Tier::of("abc1234 with changes", false);
        assert_eq!(names(&changed, None), has);
        let night = Tier::of("abc1234", true);
        assert_eq!(names(&night, None).len(), 6);
    }

    #[test]
    fn tests_of_clients_run_a_second_time() {
        let tests = ["cases::tunnels::a", "cases::tunnels_of_nodes::b"];
        let binaries = vec![Binary {
            label: "adit::loopback".to_owned(),
            path: PathBuf::new(),
            folder: PathBuf::new(),
            tests: tests.map(str::to_owned).to_vec(),
        }];
        let jobs = Tier::of("abc1234", false).jobs(&binaries, None);
        let jobs: Vec<_> = jobs
            .iter()
            .map(|job| (job.test, job.through_peer))
            .collect();
        let expected = [(tests[0], false), (tests[0], true), (tests[1], false)];
        assert_eq!(jobs, expected);
    }

    #[test]
    fn programs_are_built_before_any_filtered_test() {
        let binaries = interop();
        let jobs = Tier::of("abc1234", true).jobs(&binaries, Some("lag::"));
        let phases: Vec<Phase> = jobs.iter().map(|job| job.phase).collect();
        assert_eq!(phases, [Phase::Alone, Phase::First]);
        let none = Tier::of("abc1234", true).jobs(&binaries, Some("no such"));
        assert!(none.is_empty());
    }
}
