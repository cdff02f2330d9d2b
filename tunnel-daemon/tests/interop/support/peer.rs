//! Runs of our Go peer program: one-shot clients with a report, and long-running programs.

use std::fmt::Display;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use serde_json::Value;

use super::go::{self, Program, Release};
use super::process::Process;

/// Time limit of each client subcommand.
const CLIENT_LIMIT: Duration = Duration::from_secs(90);

static RUNS: AtomicU32 = AtomicU32::new(0);

/// A subcommand with its flags, before the start.
pub(crate) struct Peer<'a> {
    program: Program,
    name: String,
    args: Vec<String>,
    dir: &'a Path,
}

/// The report of a one-shot client.
#[derive(Debug)]
pub(crate) struct Report(Value);

/// A one-shot client that runs concurrently with the test.
pub(crate) struct Running {
    process: Process,
}

impl<'a> Peer<'a> {
    /// Prepares a subcommand; its log goes to the directory.
    pub(crate) fn new(subcommand: &str, dir: &'a Path) -> Self {
        let name = format!("{subcommand}-{}", RUNS.fetch_add(1, Ordering::Relaxed));
        Self {
            program: Program::Peer,
            name,
            args: vec![subcommand.to_owned()],
            dir,
        }
    }

    /// Uses the client library of this release.
    pub(crate) fn on(mut self, release: Release) -> Self {
        self.program = Program::OtherPeer(release);
        self
    }

    /// Adds `--name=value`.
    pub(crate) fn flag(mut self, name: &str, value: impl Display) -> Self {
        self.args.push(format!("--{name}={value}"));
        self
    }

    /// Runs a one-shot client to its end.
    pub(crate) fn run(self) -> Report {
        self.begin().report()
    }

    /// Starts a one-shot client.
    pub(crate) fn begin(self) -> Running {
        Running {
            process: self.start(),
        }
    }

    /// Starts a long-running program.
    pub(crate) fn start(self) -> Process {
        Process::reporter(&self.name, &go::binary(self.program), &self.args, self.dir)
    }
}

impl Running {
    /// The process, for its events, stdin and signals.
    pub(crate) fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// Waits for the end, and returns the report.
    pub(crate) fn report(mut self) -> Report {
        self.process.wait(CLIENT_LIMIT);
        let last = self.process.last_event();
        Report(last.expect("a client prints a report before it ends"))
    }
}

impl Report {
    /// The report of a client that must have succeeded.
    #[track_caller]
    pub(crate) fn good(self) -> Self {
        assert_eq!(self.0["ok"], true, "the client failed: {}", self.0);
        self
    }

    /// The report of a client that must have failed.
    #[track_caller]
    pub(crate) fn bad(self) -> Self {
        assert_eq!(self.0["ok"], false, "the client succeeded: {}", self.0);
        self
    }

    /// A field; null if it is missing.
    pub(crate) fn get(&self, name: &str) -> &Value {
        &self.0[name]
    }

    /// A text field; empty if it is missing.
    pub(crate) fn text(&self, name: &str) -> &str {
        self.0[name].as_str().unwrap_or_default()
    }

    /// A numeric field.
    #[track_caller]
    pub(crate) fn number(&self, name: &str) -> f64 {
        self.0[name]
            .as_f64()
            .unwrap_or_else(|| panic!("no number {name} in {}", self.0))
    }

    /// Fails the test unless the error contains `text`.
    #[track_caller]
    pub(crate) fn error_has(&self, text: &str) {
        assert!(
            self.text("error").contains(text),
            "{text:?} is not in the error: {}",
            self.0
        );
    }
}
