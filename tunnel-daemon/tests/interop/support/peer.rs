//! Runs of our Go peer program: one-shot clients with a report, and long-running ones.

use std::fmt::Display;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use serde_json::Value;

use super::go::{self, Program, Release};
use super::process::Process;

/// No client subcommand takes longer than this, whatever it waits for.
const CLIENT_LIMIT: Duration = Duration::from_secs(90);

static RUNS: AtomicU32 = AtomicU32::new(0);

/// A subcommand and its flags, not yet started.
pub(crate) struct Peer<'a> {
    program: Program,
    name: String,
    args: Vec<String>,
    dir: &'a Path,
}

/// What a one-shot client printed.
#[derive(Debug)]
pub(crate) struct Report(Value);

/// A one-shot client that runs beside the test.
pub(crate) struct Running {
    process: Process,
}

impl<'a> Peer<'a> {
    /// A subcommand; its log goes to the directory.
    pub(crate) fn new(subcommand: &str, dir: &'a Path) -> Self {
        let name = format!("{subcommand}-{}", RUNS.fetch_add(1, Ordering::Relaxed));
        Self {
            program: Program::Peer,
            name,
            args: vec![subcommand.to_owned()],
            dir,
        }
    }

    /// On the client library of this release in place of the reference's.
    pub(crate) fn on(mut self, release: Release) -> Self {
        self.program = Program::OldPeer(release);
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

    /// Starts a one-shot client beside the test.
    pub(crate) fn begin(self) -> Running {
        Running {
            process: self.start(),
        }
    }

    /// Starts a long-running one.
    pub(crate) fn start(self) -> Process {
        Process::reporter(&self.name, &go::binary(self.program), &self.args, self.dir)
    }
}

impl Running {
    /// The process, for its events, stdin and signals.
    pub(crate) fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// Waits for the end and the report.
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

    /// A field; null when it is not there.
    pub(crate) fn get(&self, name: &str) -> &Value {
        &self.0[name]
    }

    /// A field that is text; empty when it is not there.
    pub(crate) fn text(&self, name: &str) -> &str {
        self.0[name].as_str().unwrap_or_default()
    }

    /// A field that is a number.
    #[track_caller]
    pub(crate) fn number(&self, name: &str) -> f64 {
        self.0[name]
            .as_f64()
            .unwrap_or_else(|| panic!("no number {name} in {}", self.0))
    }

    /// Fails the test unless the error text holds this.
    #[track_caller]
    pub(crate) fn error_has(&self, text: &str) {
        assert!(
            self.text("error").contains(text),
            "{text:?} is not in the error: {}",
            self.0
        );
    }
}
