//! Runs named steps one after the other, each with a deadline and its duration, and sums them up.

use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

/// Limit for tools that only read and fetch.
pub(crate) const MINUTES_5: Duration = Duration::from_secs(5 * 60);
/// How often a running child is looked at.
const POLL: Duration = Duration::from_millis(100);

/// What became of one step.
enum Outcome {
    Passed,
    Skipped(String),
    Failed(String),
}

/// What became of a step that did not fail.
pub(crate) enum Ran {
    /// It did what it is there for.
    All,
    /// Why it cannot run here.
    Nothing(String),
}

impl Ran {
    /// For a step that was asked for by name.
    ///
    /// # Errors
    /// It cannot run here.
    pub(crate) fn expect_all(self) -> anyhow::Result<()> {
        match self {
            Self::All => Ok(()),
            Self::Nothing(why) => bail!("this cannot run here: {why}"),
        }
    }
}

/// The steps of one run, in order. A failed step does not stop the next ones, so that one run shows all.
pub(crate) struct Steps {
    done: Vec<(String, Duration, Outcome)>,
    started: Instant,
}

impl Steps {
    /// Starts the clock.
    pub(crate) fn new() -> Self {
        Self {
            done: Vec::new(),
            started: Instant::now(),
        }
    }

    /// Runs `work` as a step.
    pub(crate) fn run(&mut self, name: &str, work: impl FnOnce() -> anyhow::Result<()>) {
        self.run_if_possible(name, || work().map(|()| Ran::All));
    }

    /// Runs `work` as a step, which may find out that it cannot run here.
    pub(crate) fn run_if_possible(
        &mut self,
        name: &str,
        work: impl FnOnce() -> anyhow::Result<Ran>,
    ) {
        println!("==> {name}");
        let started = Instant::now();
        let outcome = match work() {
            Ok(Ran::All) => Outcome::Passed,
            Ok(Ran::Nothing(why)) => Outcome::Skipped(why),
            Err(error) => Outcome::Failed(format!("{error:#}")),
        };
        let took = started.elapsed();
        match &outcome {
            Outcome::Failed(why) => println!("<== {name}: FAILED after {}: {why}", seconds(took)),
            Outcome::Skipped(why) => println!("<== {name}: SKIPPED: {why}"),
            Outcome::Passed => println!("<== {name}: ok in {}", seconds(took)),
        }
        self.done.push((name.to_owned(), took, outcome));
    }

    /// Notes, loudly, a step that cannot run here.
    pub(crate) fn skip(&mut self, name: &str, why: &str) {
        println!("<== {name}: SKIPPED: {why}");
        self.done.push((
            name.to_owned(),
            Duration::ZERO,
            Outcome::Skipped(why.to_owned()),
        ));
    }

    /// Since the first of them.
    pub(crate) fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Prints one line per step, those that failed first.
    ///
    /// # Errors
    /// When a step failed; the error names all that did.
    pub(crate) fn finish(mut self) -> anyhow::Result<()> {
        println!("\nSummary ({} in all)", seconds(self.started.elapsed()));
        let mut failed = Vec::new();
        self.done
            .sort_by_key(|(_name, _took, outcome)| !matches!(outcome, Outcome::Failed(_)));
        for (name, took, outcome) in &self.done {
            let took = seconds(*took);
            match outcome {
                Outcome::Passed => println!("  ok       {took:>8}  {name}"),
                Outcome::Skipped(why) => println!("  skipped  {:>8}  {name}: {why}", "-"),
                Outcome::Failed(why) => {
                    println!("  FAILED   {took:>8}  {name}: {why}");
                    failed.push(name.as_str());
                }
            }
        }
        if failed.is_empty() {
            return Ok(());
        }
        bail!(
            "{} of {} steps failed: {}",
            failed.len(),
            self.done.len(),
            failed.join(", ")
        )
    }
}

/// Runs a command to its end, without standard input, in a process group of its own when nobody sits at
/// the terminal, so that a run past its deadline takes its children along.
///
/// # Errors
/// When it cannot start, ends with another code than 0, or runs longer than `limit`.
pub(crate) fn run_command(command: &mut Command, limit: Duration) -> anyhow::Result<()> {
    let grouped = in_ci();
    let mut child = spawn(command, grouped)?;
    wait(&mut child, command, limit, grouped)
}

/// Starts a command without standard input; see [`run_command`].
///
/// # Errors
/// When the program is missing or cannot be run.
pub(crate) fn spawn(command: &mut Command, grouped: bool) -> anyhow::Result<Child> {
    command.stdin(Stdio::null());
    if grouped {
        command.process_group(0);
    }
    command
        .spawn()
        .with_context(|| format!("start {}", shown(command)))
}

/// Waits for a child until `limit`, then kills it.
///
/// # Errors
/// When it ends with another code than 0 or had to be killed.
pub(crate) fn wait(
    child: &mut Child,
    command: &Command,
    limit: Duration,
    grouped: bool,
) -> anyhow::Result<()> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            if status.success() {
                return Ok(());
            }
            bail!("`{}` ended with {status}", shown(command));
        }
        if Instant::now() >= deadline {
            if grouped {
                // The negative number names the whole group; a group already gone is fine.
                let group = format!("-{}", child.id());
                let _ended = Command::new("kill").args(["-KILL", "--", &group]).status();
            }
            let _gone = child.kill();
            let _status = child.wait();
            bail!(
                "`{}` was still running after {}",
                shown(command),
                seconds(limit)
            );
        }
        std::thread::sleep(POLL);
    }
}

/// Whether a machine runs us: skips that are fine on a laptop are errors there.
pub(crate) fn in_ci() -> bool {
    std::env::var_os("CI")
        .is_some_and(|value| !value.is_empty() && value != "false" && value != "0")
}

/// A duration as people read it.
pub(crate) fn seconds(duration: Duration) -> String {
    format!("{:.1} s", duration.as_secs_f64())
}

fn shown(command: &Command) -> String {
    let program = command.get_program().to_string_lossy();
    let program = program.rsplit('/').next().unwrap_or_default().to_owned();
    let args = command
        .get_args()
        .map(|arg| arg.to_string_lossy().into_owned());
    std::iter::once(program)
        .chain(args)
        .collect::<Vec<_>>()
        .join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_past_its_deadline_is_killed_and_named() {
        let error =
            run_command(Command::new("sleep").arg("600"), Duration::from_millis(10)).unwrap_err();
        assert!(error.to_string().contains("sleep 600"), "{error}");
    }

    #[test]
    fn failing_command_gives_its_code() {
        let error = run_command(&mut Command::new("false"), Duration::from_secs(60)).unwrap_err();
        assert!(error.to_string().contains("exit status: 1"), "{error}");
    }

    #[test]
    fn one_failed_step_fails_the_run_and_the_next_still_runs() {
        let mut steps = Steps::new();
        let mut later = false;
        steps.run("first", || bail!("broken"));
        steps.run("second", || {
            later = true;
            Ok(())
        });
        let error = steps.finish().unwrap_err().to_string();
        assert!(
            later && error.contains("first") && !error.contains("second"),
            "{error}"
        );
    }
}
