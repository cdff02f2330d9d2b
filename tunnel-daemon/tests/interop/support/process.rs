//! Child processes that end with their test, and whose logs are shown when it fails.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::wait;

/// Log lines shown for each process of a failed test.
const LOG_LINES_SHOWN: usize = 40;

/// A running program; dropping it kills it.
pub(crate) struct Process {
    name: String,
    child: Child,
    log: PathBuf,
    stdin: Option<ChildStdin>,
    events: Arc<Events>,
}

/// JSON objects that a program wrote to stdout, in order.
#[derive(Default)]
struct Events {
    seen: Mutex<Seen>,
    changed: Condvar,
}

#[derive(Default)]
struct Seen {
    lines: Vec<Value>,
    ended: bool,
}

impl Process {
    /// Starts a program; its stdout and stderr go to a log file in the directory.
    pub(crate) fn service(name: &str, program: &Path, args: &[String], dir: &Path) -> Self {
        let log = dir.join(format!("{name}.log"));
        let file = File::options()
            .create(true)
            .append(true)
            .open(&log)
            .expect("the log file opens");
        let copy = file.try_clone().expect("the log file can be shared");
        Self::start(
            name,
            program,
            args,
            log,
            Stdio::from(copy),
            Stdio::from(file),
        )
    }

    /// Starts a program that reports JSON objects on stdout; its stderr goes to a log file in the directory.
    pub(crate) fn reporter(name: &str, program: &Path, args: &[String], dir: &Path) -> Self {
        let log = dir.join(format!("{name}.log"));
        let file = File::options()
            .create(true)
            .append(true)
            .open(&log)
            .expect("the log file opens");
        Self::start(name, program, args, log, Stdio::piped(), Stdio::from(file))
    }

    fn start(
        name: &str,
        program: &Path,
        args: &[String],
        log: PathBuf,
        stdout: Stdio,
        stderr: Stdio,
    ) -> Self {
        let mut child = Command::new(program)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(stdout)
            .stderr(stderr)
            .spawn()
            .unwrap_or_else(|error| panic!("starting {name} ({}): {error}", program.display()));
        let events = Arc::new(Events::default());
        if let Some(stdout) = child.stdout.take() {
            let events = Arc::clone(&events);
            thread::spawn(move || events.collect(BufReader::new(stdout)));
        }
        let stdin = child.stdin.take();
        Self {
            name: name.to_owned(),
            child,
            log,
            stdin,
            events,
        }
    }

    /// Process id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal.
    pub(crate) fn signal(&self, signal: Signal) {
        let raw = i32::try_from(self.child.id()).expect("process ids fit");
        let pid = Pid::from_raw(raw).expect("a child's id is positive");
        kill_process(pid, signal)
            .unwrap_or_else(|error| panic!("signalling {}: {error}", self.name));
    }

    /// Kills it by SIGKILL, and reaps it.
    pub(crate) fn kill(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }

    /// Writes a line to its stdin.
    pub(crate) fn line(&mut self, text: &str) {
        let stdin = self.stdin.as_mut().expect("stdin is still open");
        writeln!(stdin, "{text}")
            .unwrap_or_else(|error| panic!("writing to {}: {error}", self.name));
    }

    /// Waits for its exit. After the limit it kills the process and fails the test.
    pub(crate) fn wait(&mut self, limit: Duration) -> ExitStatus {
        match wait::poll(limit, || {
            self.child.try_wait().expect("the child can be waited for")
        }) {
            Some(status) => status,
            None => {
                self.kill();
                panic!("{} did not end within {limit:?}", self.name);
            }
        }
    }

    pub(crate) fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// All events so far.
    pub(crate) fn events(&self) -> Vec<Value> {
        self.events
            .seen
            .lock()
            .expect("no reader of events panics")
            .lines
            .clone()
    }

    /// Waits for the first event, from the beginning on, for which `fits` holds.
    pub(crate) fn event(
        &self,
        what: &str,
        limit: Duration,
        fits: impl Fn(&Value) -> bool,
    ) -> Value {
        let end = Instant::now() + limit;
        let mut seen = self.events.seen.lock().expect("no reader of events panics");
        loop {
            if let Some(found) = seen.lines.iter().find(|line| fits(line)) {
                return found.clone();
            }
            let left = end.saturating_duration_since(Instant::now());
            if seen.ended || left.is_zero() {
                // Releases the lock first, because the failure report reads the events, too.
                let lines = seen.lines.clone();
                drop(seen);
                panic!("{}: no event {what} within {limit:?}: {lines:?}", self.name);
            }
            seen = self
                .events
                .changed
                .wait_timeout(seen, left)
                .expect("no reader of events panics")
                .0;
        }
    }

    /// As [`Process::event`], selected by the field `event`.
    pub(crate) fn named_event(&self, name: &str, limit: Duration) -> Value {
        self.event(name, limit, |line| line["event"] == name)
    }

    /// The last event; waits until the program has closed its stdout.
    pub(crate) fn last_event(&self) -> Option<Value> {
        let mut seen = self.events.seen.lock().expect("no reader of events panics");
        while !seen.ended {
            seen = self
                .events
                .changed
                .wait(seen)
                .expect("no reader of events panics");
        }
        seen.lines.last().cloned()
    }

    fn show_log(&self) {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        let from = lines.len().saturating_sub(LOG_LINES_SHOWN);
        eprintln!(
            "--- {} (process {}), last lines of its log",
            self.name,
            self.id()
        );
        for line in &lines[from..] {
            eprintln!("    {line}");
        }
        for event in self.events() {
            eprintln!("    event {event}");
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        if thread::panicking() {
            self.show_log();
        }
    }
}

impl Events {
    fn collect(&self, reader: impl BufRead) {
        for line in reader.lines().map_while(Result::ok) {
            if let Ok(value) = serde_json::from_str(&line) {
                self.seen
                    .lock()
                    .expect("no reader of events panics")
                    .lines
                    .push(value);
                self.changed.notify_all();
            }
        }
        self.seen.lock().expect("no reader of events panics").ended = true;
        self.changed.notify_all();
    }
}
