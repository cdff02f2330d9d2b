//! Runs tests, each in a process of its own: many side by side, those that measure time alone, each with a limit.
//!
//! A process for each test means that a test that hangs, aborts or leaks takes no other one along, and that tests of all
//! binaries share one pool.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::io::{Read as _, Seek as _};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::binaries::Binary;
use super::summary::{Done, Report, Summary};
use crate::steps::seconds;

/// Without news for so long, a line says how far the run is.
const PROGRESS: Duration = Duration::from_secs(30);
/// A child is looked at after this time, then less and less often.
const POLL_MIN: Duration = Duration::from_millis(1);
const POLL_MAX: Duration = Duration::from_millis(20);
/// One test to run.
#[derive(Clone, Copy)]
pub(super) struct Job<'a> {
    /// Where it is.
    pub(super) binary: &'a Binary,
    /// Its name there.
    pub(super) test: &'a str,
    /// Longest time; beyond it the test is killed with all processes that it started.
    pub(super) limit: Duration,
    /// What it runs beside.
    pub(super) turn: Turn,
}

/// Phases of a run, one behind the other.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Turn {
    /// Makes what others need.
    First,
    /// Beside others.
    Beside,
    /// Measures time: nothing runs beside it.
    Alone,
}

/// How tests are run.
pub(super) struct Settings {
    /// How many at once.
    pub(super) slots: usize,
    /// A program and its arguments that start each test, such as `setpriv`; empty for none.
    pub(super) prefix: Vec<OsString>,
    /// Variables that are set for each test, or removed.
    pub(super) variables: Vec<(&'static str, Option<OsString>)>,
    /// Print a line for each test.
    pub(super) verbose: bool,
}

impl Job<'_> {
    fn name(&self) -> String {
        format!("{} {}", self.binary.label, self.test)
    }
}

/// Runs the jobs turn by turn, those that may take longest first. Prints what failed, with its output, and a summary.
///
/// # Errors
/// When a process cannot be started or watched. A failed test is no error.
pub(super) fn run(jobs: &[Job<'_>], settings: &Settings) -> anyhow::Result<Report> {
    let started = Instant::now();
    let mut summary = Summary::new(jobs.len(), settings.verbose);
    for (turn, slots) in [
        (Turn::First, 1),
        (Turn::Beside, settings.slots),
        (Turn::Alone, 1),
    ] {
        let of_turn = jobs.iter().filter(|job| job.turn == turn);
        let mut of_turn: Vec<Job<'_>> = of_turn.copied().collect();
        // The order among those of one limit stays.
        of_turn.sort_by_key(|job| std::cmp::Reverse(job.limit));
        side_by_side(of_turn, slots, settings, &mut summary)?;
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
            scope.spawn(move || work(queue, settings, &sender));
        }
        // Of theirs alone: the loop ends when the last of them does.
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

/// Takes jobs until none is left.
fn work(
    queue: &Mutex<VecDeque<Job<'_>>>,
    settings: &Settings,
    results: &Sender<anyhow::Result<Done>>,
) {
    loop {
        // A statement of its own: the lock must not be held while the job runs.
        let job = queue.lock().ok().and_then(|mut jobs| jobs.pop_front());
        let Some(job) = job else { return };
        if results.send(run_one(&job, settings)).is_err() {
            return;
        }
    }
}

fn command(job: &Job<'_>, settings: &Settings) -> Command {
    let mut words = settings.prefix.iter();
    let mut command = match words.next() {
        Some(program) => Command::new(program),
        None => Command::new(&job.binary.path),
    };
    if !settings.prefix.is_empty() {
        command.args(words).arg(&job.binary.path);
    }
    command
        .args([job.test, "--exact", "--nocapture", "--test-threads=1"])
        .current_dir(&job.binary.folder)
        .stdin(Stdio::null());
    for (name, value) in &settings.variables {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
}

fn run_one(job: &Job<'_>, settings: &Settings) -> anyhow::Result<Done> {
    let name = job.name();
    // A file, not a pipe: a process that outlives the test may keep it open.
    let mut output = tempfile::tempfile().context("a file for the output of a test")?;
    let mut command = command(job, settings);
    command
        .stdout(output.try_clone()?)
        .stderr(output.try_clone()?);
    let started = Instant::now();
    let mut child = command.spawn().with_context(|| format!("start {name}"))?;
    let (mut pause, mut cpu) = (POLL_MIN, Duration::ZERO);
    let status = loop {
        if has_ended(child.id()) {
            cpu = cpu_time(child.id());
            break Some(child.wait()?);
        }
        if started.elapsed() >= job.limit {
            for process in descendants(child.id()) {
                kill(process);
            }
            child.kill()?;
            child.wait()?;
            break None;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(POLL_MAX);
    };
    let took = started.elapsed();
    let mut bytes = Vec::new();
    output.rewind()?;
    output.read_to_end(&mut bytes)?;
    let output = String::from_utf8_lossy(&bytes).into_owned();
    let failure = match status {
        None => Some(format!("killed at its limit of {}", seconds(job.limit))),
        Some(status) => failure(status, &output),
    };
    Ok(Done {
        name,
        took,
        cpu,
        failure,
        output,
    })
}

/// Whether a child has ended. It is left for `wait`, so that the kernel still knows its times.
fn has_ended(process: u32) -> bool {
    use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

    let Some(process) = i32::try_from(process).ok().and_then(Pid::from_raw) else {
        return true;
    };
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
    !matches!(waitid(WaitId::Pid(process), options), Ok(None))
}

/// Processor time of a process and of its children that it waited for, by `/proc`: hundredths of a second.
fn cpu_time(process: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let Some((_name, rest)) = stat.rsplit_once(')') else {
        return Duration::ZERO;
    };
    let ticks = rest.split_whitespace().skip(11).take(4);
    let ticks: u64 = ticks.filter_map(|ticks| ticks.parse::<u64>().ok()).sum();
    Duration::from_millis(10 * ticks)
}

/// Why a test that ended by itself failed. One that did not run is a failure, too: its name fits nothing.
fn failure(status: ExitStatus, output: &str) -> Option<String> {
    if !status.success() {
        return Some(status.to_string());
    }
    let ran = output.contains("test result: ok. 1 passed;");
    (!ran).then(|| "the test did not run".to_owned())
}

/// Processes that a process started, and those that these started, by `/proc`. A parent comes before its children.
fn descendants(ancestor: u32) -> Vec<u32> {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    for entry in entries {
        let Some(process) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        if let Some(parent) = parent(&stat) {
            children.entry(parent).or_default().push(process);
        }
    }
    let (mut found, mut next) = (Vec::new(), vec![ancestor]);
    while let Some(process) = next.pop() {
        let below = children.remove(&process).unwrap_or_default();
        found.extend(&below);
        next.extend(below);
    }
    found
}

/// The parent in a `/proc/PID/stat`. The name before it, in parentheses, may hold anything.
fn parent(stat: &str) -> Option<u32> {
    let (_name, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(1)?.parse().ok()
}

fn kill(process: u32) {
    let number = i32::try_from(process).ok();
    if let Some(process) = number.and_then(rustix::process::Pid::from_raw) {
        let _gone = rustix::process::kill_process(process, rustix::process::Signal::KILL);
    }
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

    fn report(text: &str, tests: &[(&'static str, Turn)], limit: Duration) -> Report {
        let folder = tempfile::tempdir().unwrap();
        let binary = script(folder.path(), text);
        let jobs: Vec<Job<'_>> = tests
            .iter()
            .map(|(test, turn)| Job {
                binary: &binary,
                test,
                limit,
                turn: *turn,
            })
            .collect();
        run(&jobs, &settings()).unwrap()
    }

    #[test]
    fn passed_failed_skipped_and_missing_tests_are_told_apart() {
        let text = format!(
            "case $1 in bad) exit 101;; none) exit 0;; skip) echo 'SKIPPED skip: no reason';; esac\n\
             test \"$KIND\" = pool -a -z \"$CI\" && {OK}"
        );
        let tests = ["good", "bad", "skip", "none"].map(|test| (test, Turn::Beside));
        let report = report(&text, &tests, Duration::from_secs(60));
        assert_eq!((report.passed, report.skipped), (1, 1));
        let mut failed = report.failed;
        failed.sort();
        assert_eq!(failed, ["script bad", "script none"]);
    }

    #[test]
    fn a_test_beyond_its_limit_is_killed_with_what_it_started() {
        let folder = tempfile::tempdir().unwrap();
        let told = folder.path().join("child");
        // In a session of its own: no process group has both.
        let text = format!("setsid sleep 600 & echo $! > {}; wait", told.display());
        let report = report(
            &text,
            &[("hangs", Turn::Beside)],
            Duration::from_millis(500),
        );
        assert_eq!(report.failed, ["script hangs"]);
        let child = std::fs::read_to_string(&told).unwrap();
        let left = PathBuf::from(format!("/proc/{}/stat", child.trim()));
        // Gone, or a zombie that its new parent has not asked for. Who is killed may be busy dying for a moment.
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
    fn nothing_runs_beside_a_test_that_runs_alone() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().display();
        // `mkdir` fails where the folder is there: another one is running.
        let text = format!(
            "case $1 in a*) mkdir {place}/busy || exit 1; sleep 0.1; rmdir {place}/busy || exit 1;; esac\n{OK}"
        );
        let tests = [
            ("a1", Turn::Alone),
            ("b", Turn::Beside),
            ("a2", Turn::Alone),
            ("a3", Turn::Alone),
        ];
        let report = report(&text, &tests, Duration::from_secs(60));
        assert_eq!((report.passed, report.failed.len()), (4, 0));
    }

    #[test]
    fn parent_of_a_process_with_any_name() {
        assert_eq!(parent("12 (a) b) S 7 1 2"), Some(7));
        assert_eq!(parent("12 (cat"), None);
    }
}
