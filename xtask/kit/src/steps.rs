//! Runs commands with a deadline, and named steps in sequence with a summary at the end.

use std::fs::File;
use std::io::{Read as _, Seek as _};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use wait_timeout::ChildExt as _;

/// Time limit of tools that only read and fetch.
pub const MINUTES_5: Duration = Duration::from_secs(5 * 60);
/// Lines of a failed command's output that its error shows.
const ERROR_LINES: usize = 8;

/// Characters of a long command line that errors show.
const SHOWN_CHARS: usize = 160;

/// Outcome of a step that has not failed.
pub enum Outcome {
    /// The step has run.
    Done,
    /// The step cannot run here, for this reason.
    Skipped(String),
}

impl Outcome {
    /// Turns a skip into an error, for a step that was requested by name.
    ///
    /// # Errors
    /// The step cannot run here.
    pub fn expect_done(self) -> anyhow::Result<()> {
        match self {
            Self::Done => Ok(()),
            Self::Skipped(why) => bail!("this cannot run here: {why}"),
        }
    }
}

/// The steps of a run, in order. After a failed step the next ones still run, so that one run shows all failures.
pub struct Steps {
    done: Vec<(String, Duration, anyhow::Result<Outcome>)>,
    started: Instant,
}

#[expect(
    clippy::new_without_default,
    reason = "a clock that starts is no default"
)]
impl Steps {
    /// Starts the clock.
    pub fn new() -> Self {
        Self {
            done: Vec::new(),
            started: Instant::now(),
        }
    }

    /// Runs `work` as a step.
    pub fn run(&mut self, name: &str, work: impl FnOnce() -> anyhow::Result<()>) {
        self.run_if_possible(name, || work().map(|()| Outcome::Done));
    }

    /// Runs `work` as a step, which may report that it cannot run here.
    pub fn run_if_possible(&mut self, name: &str, work: impl FnOnce() -> anyhow::Result<Outcome>) {
        println!("==> {name}");
        let started = Instant::now();
        let outcome = work();
        let took = started.elapsed();
        match &outcome {
            Ok(Outcome::Done) => println!("<== {name}: ok in {}", seconds(took)),
            Ok(Outcome::Skipped(why)) => println!("<== {name}: SKIPPED: {why}"),
            Err(why) => println!("<== {name}: FAILED after {}: {why:#}", seconds(took)),
        }
        self.done.push((name.to_owned(), took, outcome));
    }

    /// Time since the run started.
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Prints one line per step, failed steps first.
    ///
    /// # Errors
    /// A step has failed; the error names all failed steps.
    pub fn finish(mut self) -> anyhow::Result<()> {
        println!("\nSummary ({} in all)", seconds(self.elapsed()));
        self.done.sort_by_key(|(_, _, outcome)| outcome.is_ok());
        let mut failed = Vec::new();
        for (name, took, outcome) in &self.done {
            let took = seconds(*took);
            match outcome {
                Ok(Outcome::Done) => println!("  ok       {took:>8}  {name}"),
                Ok(Outcome::Skipped(why)) => println!("  skipped  {:>8}  {name}: {why}", "-"),
                Err(why) => {
                    println!("  FAILED   {took:>8}  {name}: {why:#}");
                    failed.push(name.as_str());
                }
            }
        }
        ensure!(
            failed.is_empty(),
            "{} of {} steps failed: {}",
            failed.len(),
            self.done.len(),
            failed.join(", ")
        );
        Ok(())
    }
}

/// A child process that is killed on drop.
pub struct Running(Child);

impl Running {
    pub fn of(child: Child) -> Self {
        Self(child)
    }

    pub fn id(&self) -> u32 {
        self.0.id()
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// The child is gone.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let id = i32::try_from(self.id()).ok().and_then(Pid::from_raw);
        Ok(kill_process(id.context("a process has an id")?, signal)?)
    }

    /// The child's exit status; `None` if it still runs after `limit`.
    ///
    /// # Errors
    /// The system reports no status.
    pub fn ends_within(&mut self, limit: Duration) -> anyhow::Result<Option<ExitStatus>> {
        Ok(self.0.wait_timeout(limit)?)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // An error means that the child has already ended.
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Runs a command to its end, without standard input. In CI, where no terminal signals its children, it gets its own process
/// group, so that a deadline kills its children, too.
///
/// # Errors
/// The command cannot start, exits with a code other than 0, or exceeds `limit`.
pub fn run_command(command: &mut Command, limit: Duration) -> anyhow::Result<()> {
    let status = status_of(command, limit)?;
    ensure!(status.success(), "`{}` ended with {status}", shown(command));
    Ok(())
}

/// Runs a command like [`run_command`], and returns how it exits.
///
/// # Errors
/// The command cannot start, or exceeds `limit`.
pub fn status_of(command: &mut Command, limit: Duration) -> anyhow::Result<ExitStatus> {
    let is_grouped = in_ci();
    command.stdin(Stdio::null());
    if is_grouped {
        command.process_group(0);
    }
    let mut child = command
        .spawn()
        .with_context(|| format!("start {}", shown(command)))?;
    let Some(status) = child.wait_timeout(limit)? else {
        let id = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        if let (true, Some(group)) = (is_grouped, id) {
            // The group may have ended already.
            kill_process_group(group, Signal::KILL).ok();
        }
        child.kill().ok();
        child.wait().ok();
        let command = shown(command);
        bail!("`{command}` was still running after {}", seconds(limit));
    };
    Ok(status)
}

/// Captured output of a command.
pub struct Output {
    pub stdout: String,
    pub stderr: String,
}

/// Runs a command like [`run_command`] and captures its output.
///
/// # Errors
/// Like [`run_command`], with the end of the command's standard error.
pub fn output_of(command: &mut Command, limit: Duration) -> anyhow::Result<Output> {
    // Files, not pipes: a full pipe would block the command, since nothing reads while it runs.
    let mut err = tempfile::tempfile()?;
    command.stderr(err.try_clone()?);
    let stdout = stdout_of(command, limit);
    let stderr = text_of(&mut err)?;
    let stdout = stdout.with_context(|| {
        let lines: Vec<&str> = stderr.lines().collect();
        let from = lines.len().saturating_sub(ERROR_LINES);
        lines.get(from..).unwrap_or_default().join(" / ")
    })?;
    Ok(Output { stdout, stderr })
}

/// Runs a command like [`run_command`] and captures only its standard output.
///
/// # Errors
/// Like [`run_command`].
pub fn stdout_of(command: &mut Command, limit: Duration) -> anyhow::Result<String> {
    let mut out = tempfile::tempfile()?;
    run_command(command.stdout(out.try_clone()?), limit)?;
    text_of(&mut out)
}

/// The text of a file that a command has written.
///
/// # Errors
/// It cannot be read.
pub fn text_of(file: &mut File) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// A command of the Go toolchain: `ADIT_GO`, or `go` from `PATH`.
///
/// # Errors
/// Go does not run; the error says what to install.
pub fn go() -> anyhow::Result<Command> {
    let go = std::env::var_os("ADIT_GO").unwrap_or_else(|| "go".into());
    ensure!(
        first_line(Command::new(&go).arg("version")).is_some(),
        "no Go toolchain, `{} version` fails: install Go 1.26 or newer, or name it in ADIT_GO",
        go.display()
    );
    Ok(Command::new(go))
}

/// The first line of a command's output, such as its version, if it is installed and succeeds.
pub fn first_line(command: &mut Command) -> Option<String> {
    let output = command.stdin(Stdio::null()).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().next().unwrap_or_default().trim().to_owned();
    output.status.success().then_some(line)
}

/// The path of an installed program.
pub fn installed(program: &str) -> Option<PathBuf> {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    // Distributions put administration programs into folders that may not be in PATH.
    let folders = std::env::split_paths(&paths).chain(["/usr/sbin".into(), "/sbin".into()]);
    let mut paths = folders.map(|folder: PathBuf| folder.join(program));
    paths.find(|path| path.is_file())
}

/// Which of these programs are not installed, if any.
pub fn lacking(programs: &[&str]) -> Option<String> {
    let mut lacking = programs.to_vec();
    lacking.retain(|program| installed(program).is_none());
    (!lacking.is_empty()).then(|| format!("not installed: {}", lacking.join(", ")))
}

/// Whether this is a CI run: skips that are fine on a laptop are errors there.
pub fn in_ci() -> bool {
    std::env::var_os("CI")
        .is_some_and(|value| !value.is_empty() && value != "false" && value != "0")
}

/// A duration in seconds, for people.
pub fn seconds(duration: Duration) -> String {
    format!("{:.1} s", duration.as_secs_f64())
}

/// A command line for people, cut to a reasonable length.
pub fn shown(command: &Command) -> String {
    let program = command.get_program().to_string_lossy();
    let mut text = program.rsplit('/').next().unwrap_or_default().to_owned();
    for arg in command.get_args() {
        text.push(' ');
        text.push_str(&arg.to_string_lossy());
    }
    if text.chars().count() > SHOWN_CHARS {
        text = text
            .chars()
            .take(SHOWN_CHARS)
            .chain("...".chars())
            .collect();
    }
    text
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
    fn failing_command_reports_its_exit_code_and_output() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo why >&2; exit 3"]);
        let error = output_of(&mut command, MINUTES_5).err().unwrap();
        let text = format!("{error:#}");
        assert!(
            text.contains("exit status: 3") && text.contains("why"),
            "{text}"
        );
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
