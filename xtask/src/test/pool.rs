//! Runs each test in a process of its own: most concurrently, tests that measure time alone, each with a time limit.
//!
//! A process per test keeps a test that hangs, aborts or leaks from affecting others, and lets tests of all binaries share one
//! pool.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use procfs::process::all_processes;
use rustix::process::{Pid, Signal, kill_process};
use wait_timeout::ChildExt as _;

use super::binaries::Binary;
use super::summary::{Done, Report, Summary};
use crate::steps::{seconds, text_of};

/// After this time without a result, a line reports the progress.
const PROGRESS: Duration = Duration::from_secs(30);

/// A test to run.
#[derive(Clone, Copy)]
pub(super) struct Job<'a> {
    /// The binary that contains it.
    pub(super) binary: &'a Binary,
    /// Its name in the binary.
    pub(super) test: &'a str,
    /// Time limit; beyond it the test is killed with all processes that it started.
    pub(super) limit: Duration,
    /// The phase in which it runs.
    pub(super) phase: Phase,
    /// Its clients' server reaches agents through another server.
    pub(super) through_peer: bool,
}

/// Phases of a run, in sequence.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Phase {
    /// Builds what other tests need.
    First,
    /// Runs concurrently with other tests.
    Beside,
    /// Measures time, so no other test runs concurrently.
    Alone,
}

/// Settings of a run.
pub(super) struct Settings {
    /// Number of concurrent tests.
    pub(super) slots: usize,
    /// A program with arguments that starts each test, such as `setpriv`; may be empty.
    pub(super) prefix: Vec<OsString>,
    /// Environment variables that are set for each test, or removed.
    pub(super) variables: Vec<(&'static str, Option<OsString>)>,
    /// Print a line for each test.
    pub(super) verbose: bool,
}

/// Runs the jobs phase by phase, longest time limit first. Prints failed tests with their output, and a summary.
///
/// # Errors
/// A process cannot be started or watched. A failed test is not an error.
pub(super) fn run(jobs: &[Job<'_>], settings: &Settings) -> anyhow::Result<Report> {
    let started = Instant::now();
    let mut summary = Summary::new(jobs.len(), settings.verbose);
    for (phase, slots) in [
        (Phase::First, 1),
        (Phase::Beside, settings.slots),
        (Phase::Alone, 1),
    ] {
        let of_phase = jobs.iter().filter(|job| job.phase == phase);
        let mut of_phase: Vec<Job<'_>> = of_phase.copied().collect();
        // A stable sort: jobs with the same limit keep their order.
        of_phase.sort_by_key(|job| std::cmp::Reverse(job.limit));
        side_by_side(of_phase, slots, settings, &mut summary)?;
    }
    Ok(summary.finish(started.elapsed()))
}

fn side_by_side(
    jobs: Vec<Job<'_>>,
    slots: usize,
    settings: &Settings,
    summary: &mut Summary,
) -> anyhow::Result<()> {
    let slots = slots.min(jobs.len());
    let queue = Mutex::new(VecDeque::from(jobs));
    let (sender, results) = channel();
    std::thread::scope(|scope| {
        for _slot in 0..slots {
            let (sender, queue) = (sender.clone(), &queue);
            scope.spawn(move || {
                // Release the lock before the job runs.
                let next = || queue.lock().ok().and_then(|mut jobs| jobs.pop_front());
                while let Some(job) = next() {
                    if sender.send(run_one(&job, settings)).is_err() {
                        return;
                    }
                }
            });
        }
        // The receiving loop ends when the last thread drops its sender.
        drop(sender);
        let mut outcome = Ok(());
        loop {
            match results.recv_timeout(PROGRESS) {
                Ok(Ok(done)) => summary.add(done),
                Ok(Err(error)) => outcome = Err(error),
                Err(RecvTimeoutError::Timeout) => summary.progress(),
                Err(RecvTimeoutError::Disconnected) => return outcome,
            }
        }
    })
}

fn command(job: &Job<'_>, settings: &Settings) -> Command {
    let program = job.binary.path.clone().into_os_string();
    let mut words = settings.prefix.iter().chain([&program]);
    let mut command = Command::new(words.next().unwrap_or(&program));
    command
        .args(words)
        .args([job.test, "--exact", "--nocapture", "--test-threads=1"])
        .current_dir(&job.binary.folder)
        // The default socket is one for the whole host.
        .env("ADIT_ADMIN_SOCKET", "off")
        .stdin(Stdio::null());
    if job.through_peer {
        command.env("ADIT_THROUGH_PEER", "1");
    }
    for (name, value) in &settings.variables {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
}

fn run_one(job: &Job<'_>, settings: &Settings) -> anyhow::Result<Done> {
    let way = if job.through_peer {
        " through a peer"
    } else {
        ""
    };
    let name = format!("{} {}{way}", job.binary.label, job.test);
    // A file, not a pipe: a process that outlives the test may keep it open.
    let mut file = tempfile::tempfile().context("a file for the output of a test")?;
    let mut command = command(job, settings);
    command.stdout(file.try_clone()?).stderr(file.try_clone()?);
    let started = Instant::now();
    let mut child = command.spawn().with_context(|| format!("start {name}"))?;
    let status = child.wait_timeout(job.limit)?;
    if status.is_none() {
        for process in descendants(child.id())? {
            // The process may have ended meanwhile.
            kill_process(process, Signal::KILL).ok();
        }
        child.kill()?;
        child.wait()?;
    }
    let took = started.elapsed();
    let output = text_of(&mut file)?;
    let failure = match status {
        None => Some(format!("killed at its limit of {}", seconds(job.limit))),
        Some(status) => failure(status, &output),
    };
    Ok(Done {
        name,
        took,
        failure,
        output,
    })
}

/// Why a test that ended by itself failed. A test that did not run is a failure, too: its name matched no test.
fn failure(status: ExitStatus, output: &str) -> Option<String> {
    if !status.success() {
        return Some(status.to_string());
    }
    let ran = output.contains("test result: ok. 1 passed;");
    (!ran).then(|| "the test did not run".to_owned())
}

/// All descendants of a process. A parent comes before its children.
fn descendants(ancestor: u32) -> anyhow::Result<Vec<Pid>> {
    let processes = all_processes()?.flatten();
    let stats: Vec<_> = processes.flat_map(|process| process.stat()).collect();
    let (mut found, mut next) = (Vec::new(), vec![i32::try_from(ancestor)?]);
    while let Some(parent) = next.pop() {
        let children = stats.iter().filter(|stat| stat.ppid == parent);
        let children: Vec<i32> = children.map(|stat| stat.pid).collect();
        found.extend(children.iter().filter_map(|pid| Pid::from_raw(*pid)));
        next.extend(children);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::*;

    /// A test binary that is a script, which gets the name of the test as its first argument.
    fn script(folder: &Path, text: &str) -> Binary {
        use std::os::unix::fs::PermissionsExt as _;

        let path = folder.join("script");
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        Binary {
            label: "script".to_owned(),
            path,
            folder: folder.to_path_buf(),
            tests: Vec::new(),
        }
    }

    fn settings() -> Settings {
        Settings {
            slots: 4,
            prefix: Vec::new(),
            variables: vec![("KIND", Some("pool".into())), ("CI", None)],
            verbose: false,
        }
    }

    const OK: &str = "echo 'test result: ok. 1 passed; 0 failed'";

    fn report(text: &str, tests: &[(&'static str, Phase)], limit: Duration) -> Report {
        let folder = tempfile::tempdir().unwrap();
        let binary = script(folder.path(), text);
        let jobs: Vec<Job<'_>> = tests
            .iter()
            .map(|(test, phase)| Job {
                binary: &binary,
                test,
                limit,
                phase: *phase,
                through_peer: false,
            })
            .collect();
        run(&jobs, &settings()).unwrap()
    }

    #[test]
    fn passed_failed_skipped_and_missing_tests_are_reported() {
        let text = format!(
            "case $1 in bad) exit 101;; none) exit 0;; skip) echo 'SKIPPED skip: no reason';; esac\n\
             test \"$KIND\" = pool -a -z \"$CI\" && {OK}"
        );
        let tests = ["good", "bad", "skip", "none"].map(|test| (test, Phase::Beside));
        let report = report(&text, &tests, Duration::from_secs(60));
        assert_eq!((report.passed, report.skipped), (1, 1));
        let mut failed = report.failed;
        failed.sort();
        assert_eq!(failed, ["script bad", "script none"]);
    }

    #[test]
    fn a_test_beyond_its_limit_is_killed_with_its_children() {
        let folder = tempfile::tempdir().unwrap();
        let told = folder.path().join("child");
        // The child starts its own session, so no process group contains both processes.
        let text = format!("setsid sleep 600 & echo $! > {}; wait", told.display());
        let report = report(
            &text,
            &[("hangs", Phase::Beside)],
            Duration::from_millis(500),
        );
        assert_eq!(report.failed, ["script hangs"]);
        let child = std::fs::read_to_string(&told).unwrap();
        let left = PathBuf::from(format!("/proc/{}/stat", child.trim()));
        // The process is gone, or a zombie that its new parent has not reaped. A killed process may need a moment to
        // exit.
        let (end, mut state) = (Instant::now() + Duration::from_secs(30), String::new());
        while Instant::now() < end {
            state = std::fs::read_to_string(&left).unwrap_or_default();
            if state.is_empty() || state.contains(") Z ") {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("{state}");
    }

    #[test]
    fn tests_that_run_alone_do_not_overlap() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().display();
        // `mkdir` fails if the folder exists, that is, if another such test is running.
        let text = format!(
            "case $1 in a*) mkdir {place}/busy || exit 1; sleep 0.1; rmdir {place}/busy || exit 1;; esac\n{OK}"
        );
        let tests = [
            ("a1", Phase::Alone),
            ("b", Phase::Beside),
            ("a2", Phase::Alone),
            ("a3", Phase::Alone),
        ];
        let report = report(&text, &tests, Duration::from_secs(60));
        assert_eq!((report.passed, report.failed.len()), (4, 0));
    }
}
