//! Results of the tests of a run: counted, printed as they arrive, and summed up.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::steps::seconds;

/// Lines shown of a failed test's output, from its end.
const SHOWN_LINES: usize = 200;
/// Number of the slowest tests listed at the end.
const SLOWEST: usize = 10;
/// Prefix of an output line by which a test reports that it skipped something.
const SKIPPED: &str = "SKIPPED ";

/// Result of a run.
#[derive(Debug, Default)]
pub(super) struct Report {
    /// Number of tests that passed and skipped nothing.
    pub(super) passed: usize,
    /// Number of tests that passed, but reported a skip.
    pub(super) skipped: usize,
    /// Names of failed tests.
    pub(super) failed: Vec<String>,
}

/// Result of a test.
pub(super) struct Done {
    /// Full name.
    pub(super) name: String,
    /// Duration.
    pub(super) took: Duration,
    /// `None`: the test passed.
    pub(super) failure: Option<String>,
    /// Standard output and standard error.
    pub(super) output: String,
}

/// Counts results, and prints them as they arrive.
#[derive(Default)]
pub(super) struct Summary {
    all: usize,
    verbose: bool,
    report: Report,
    failures: Vec<String>,
    skips: BTreeMap<String, usize>,
    times: Vec<(Duration, String)>,
}

impl Summary {
    /// Expects `all` tests; `verbose` prints a line for each.
    pub(super) fn new(all: usize, verbose: bool) -> Self {
        Self {
            all,
            verbose,
            ..Self::default()
        }
    }

    /// Adds the result of a test.
    pub(super) fn add(&mut self, done: Done) {
        let skips: Vec<&str> = done
            .output
            .lines()
            .filter(|line| line.starts_with(SKIPPED))
            .collect();
        let word = match (&done.failure, skips.as_slice()) {
            (Some(why), _) => {
                println!("FAILED {} after {}: {why}", done.name, seconds(done.took));
                let hidden = done.output.lines().count().saturating_sub(SHOWN_LINES);
                for line in done.output.lines().skip(hidden) {
                    println!("    {line}");
                }
                let line = format!("{}: {why}", done.name);
                self.failures.push(line);
                self.report.failed.push(done.name.clone());
                "FAILED"
            }
            (None, []) => {
                self.report.passed += 1;
                "ok"
            }
            (None, _) => {
                self.report.skipped += 1;
                "skipped"
            }
        };
        for line in skips {
            *self.skips.entry(line.to_owned()).or_default() += 1;
        }
        if self.verbose {
            println!("{word:7} {:>8} {}", seconds(done.took), done.name);
        }
        self.times.push((done.took, done.name));
    }

    /// Prints the progress of the run.
    pub(super) fn progress(&self) {
        let failed = self.report.failed.len();
        println!(
            "{} of {} tests, {failed} failed",
            self.times.len(),
            self.all
        );
    }

    /// Prints the summary, failed tests last, where people look first.
    pub(super) fn finish(mut self, took: Duration) -> Report {
        self.times.sort_by(|a, b| b.cmp(a));
        println!(
            "\nthe slowest of {} tests, which took {}:",
            self.all,
            seconds(took)
        );
        for (took, name) in self.times.iter().take(SLOWEST) {
            println!("  {:>8}  {name}", seconds(*took));
        }
        for (line, times) in &self.skips {
            match times {
                1 => println!("  {line}"),
                _ => println!("  {line} ({times} times)"),
            }
        }
        let Report {
            passed,
            skipped,
            failed,
        } = &self.report;
        println!(
            "{passed} passed, {} failed, {skipped} skipped",
            failed.len()
        );
        for line in &self.failures {
            println!("FAILED {line}");
        }
        self.report
    }
}
