//! `cargo xtask perf --instructions`: what the benches without I/O cost in instructions, which other load on the machine
//! does not change.
//!
//! Each operation runs under callgrind N times and 2N times, and the difference is that of N: neither start nor first
//! times are in it. Counts belong to a compiler and a kind of processor, which decides how bytes are copied.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use serde::Deserialize;

use super::machine::Machine;
use crate::steps::run_command;
use crate::workspace::Workspace;

/// How often an operation runs in the shorter of its two runs: with a thousand tunnels, once for each of them.
const TIMES: u64 = 1_000;
/// The function of the bench that calls the operation. Nothing outside it is counted.
const COUNTED: &str = "pure::count::repeat*";
/// The bench.
const BENCH: &str = "pure";
/// Longest time for building the bench.
const BUILD_LIMIT: Duration = Duration::from_secs(20 * 60);
/// Longest time for one run under valgrind, which takes seconds.
const RUN_LIMIT: Duration = Duration::from_secs(120);
/// Percent by which two counts of one operation may differ: tables have random seeds, and look a little further with some.
const SAME_WITHIN_PERCENT: u64 = 1;

/// Where children write: files, not pipes, so that none waits for us.
struct Output {
    folder: tempfile::TempDir,
}

/// Instructions of one operation, for each time it was asked.
struct Counted {
    operation: String,
    instructions: Vec<u64>,
}

/// Runs the command. With `is_check` all is counted twice.
///
/// # Errors
/// Something is missing or fails, or two counts of one operation differ by more than [`SAME_WITHIN_PERCENT`].
pub(crate) fn run(workspace: &Workspace, is_check: bool) -> anyhow::Result<()> {
    let output = Output::new()?;
    let mut version = Command::new("valgrind");
    let version = output
        .of(version.arg("--version"), RUN_LIMIT)
        .context("valgrind does not run here: install the package `valgrind`")?;
    let bench = build(workspace, &output)?;
    let names = output.of(Command::new(&bench).arg("--ops"), RUN_LIMIT)?;
    let rounds = if is_check { 2 } else { 1 };
    let mut all = Vec::new();
    for operation in names.lines() {
        eprintln!("perf: counting {operation}");
        let instructions = (0..rounds)
            .map(|_round| count(&output, &bench, operation))
            .collect::<anyhow::Result<_>>()
            .with_context(|| format!("counting {operation}"))?;
        all.push(Counted {
            operation: operation.to_owned(),
            instructions,
        });
    }
    ensure!(!all.is_empty(), "the bench names no operations");
    let heading = format!(
        "Instructions of one operation, `cargo xtask perf --instructions`; {}, {}.\n",
        Machine::here(workspace),
        version.trim()
    );
    let table = report(&heading, &all);
    let out = workspace.path("target/perf");
    fs::create_dir_all(&out)?;
    fs::write(out.join("instructions.md"), &table)?;
    print!("{table}");
    eprintln!("written to {}: instructions.md", out.display());
    let unstable = unstable(&all);
    ensure!(
        unstable.is_empty(),
        "counted twice, with more than {SAME_WITHIN_PERCENT} % between: {}",
        unstable.join(", ")
    );
    Ok(())
}

impl Output {
    fn new() -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new().prefix("adit-perf-").tempdir()?;
        Ok(Self { folder })
    }

    /// Runs a command to its end and returns its standard output. Standard error is in the file `err`.
    fn of(&self, command: &mut Command, limit: Duration) -> anyhow::Result<String> {
        let (out, err) = (self.folder.path().join("out"), self.err());
        command
            .stdout(File::create(&out)?)
            .stderr(File::create(&err)?);
        run_command(command, limit).map_err(|error| match last_lines(&err) {
            wrote if wrote.is_empty() => error,
            wrote => error.context(wrote),
        })?;
        fs::read_to_string(&out).context("what a child prints is text")
    }

    fn err(&self) -> PathBuf {
        self.folder.path().join("err")
    }
}

/// The end of what a child wrote, for an error.
fn last_lines(path: &Path) -> String {
    let text = fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    let last = lines.get(lines.len().saturating_sub(8)..);
    last.unwrap_or_default().join(" / ")
}

/// Builds the bench.
fn build(workspace: &Workspace, output: &Output) -> anyhow::Result<PathBuf> {
    eprintln!("perf: building the bench");
    let mut cargo = workspace.cargo(&["bench", "--package", "adit-core", "--bench", BENCH]);
    cargo.args(["--no-run", "--message-format=json-render-diagnostics"]);
    let messages = output.of(&mut cargo, BUILD_LIMIT)?;
    executable(&messages)
}

/// A line of cargo's messages, as far as it matters here.
#[derive(Deserialize)]
struct Message {
    reason: String,
    target: Option<Target>,
    executable: Option<PathBuf>,
}

/// What a message is about.
#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

/// The program of the bench, from cargo's messages.
///
/// # Errors
/// They name none.
fn executable(messages: &str) -> anyhow::Result<PathBuf> {
    let is_bench = |target: &Target| target.name == BENCH && target.kind == ["bench"];
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Message>(line).ok())
        .filter(|message| message.reason == "compiler-artifact")
        .filter(|message| message.target.as_ref().is_some_and(is_bench))
        .find_map(|message| message.executable)
        .with_context(|| format!("cargo names no program of the bench `{BENCH}`"))
}

/// Instructions of one time.
fn count(output: &Output, bench: &Path, operation: &str) -> anyhow::Result<u64> {
    let of = |times| under_valgrind(output, bench, operation, times);
    each(of(TIMES)?, of(2 * TIMES)?, TIMES)
}

fn under_valgrind(
    output: &Output,
    bench: &Path,
    operation: &str,
    times: u64,
) -> anyhow::Result<u64> {
    let mut valgrind = Command::new("valgrind");
    // What the environment holds must not move memory, nor may settings of a home folder count something else.
    valgrind
        .env_clear()
        .envs(std::env::var_os("PATH").map(|path| (OsStr::new("PATH"), path)))
        .current_dir(output.folder.path())
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(format!("--toggle-collect={COUNTED}"))
        .arg(bench)
        .arg(format!("--op={operation}"))
        .arg(format!("--times={times}"));
    output.of(&mut valgrind, RUN_LIMIT)?;
    let text = fs::read(output.err()).context("what valgrind wrote")?;
    collected(&String::from_utf8_lossy(&text))
}

/// The count in what callgrind writes at its end.
///
/// # Errors
/// There is none, more than one, or one of something else than instructions.
fn collected(text: &str) -> anyhow::Result<u64> {
    let values = |label: &str| -> Vec<String> {
        text.lines()
            .filter_map(|line| line.strip_prefix("==")?.split_once("== "))
            .filter_map(|(_process, rest)| rest.split_once(':'))
            .filter(|(name, _value)| name.trim() == label)
            .map(|(_name, value)| value.trim().to_owned())
            .collect()
    };
    let events = values("Events");
    ensure!(
        events == ["Ir"],
        "callgrind counted {events:?}, not instructions"
    );
    let counts = values("Collected");
    let [count] = counts.as_slice() else {
        bail!("callgrind wrote {} counts, not one", counts.len());
    };
    count
        .parse()
        .with_context(|| format!("callgrind counted `{count}`"))
}

/// Instructions of one time, rounded, of counts of N times and of twice as many.
///
/// # Errors
/// Twice as many did not take more.
fn each(once: u64, twice: u64, times: u64) -> anyhow::Result<u64> {
    ensure!(
        once < twice,
        "{times} times took {once} instructions, twice as many {twice}: was the operation counted?"
    );
    Ok((twice - once + times / 2) / times)
}

/// The table.
fn report(heading: &str, all: &[Counted]) -> String {
    let mut text = format!("{heading}\n| operation | instructions |\n| --- | ---: |\n");
    for counted in all {
        let numbers: Vec<String> = counted.instructions.iter().map(u64::to_string).collect();
        let numbers = numbers.join(", ");
        writeln!(text, "| {} | {numbers} |", counted.operation).ok();
    }
    text
}

/// Operations whose counts differ too much.
fn unstable(all: &[Counted]) -> Vec<String> {
    let differs = |counts: &[u64]| {
        let (least, most) = (counts.iter().min(), counts.iter().max());
        let (least, most) = (least.copied().unwrap_or(0), most.copied().unwrap_or(0));
        (most - least) * 100 > least * SAME_WITHIN_PERCENT
    };
    all.iter()
        .filter(|counted| differs(&counted.instructions))
        .map(|counted| format!("{} {:?}", counted.operation, counted.instructions))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITTEN: &str = "\
==7== Callgrind, a call-graph generating cache profiler
==7== Command: ./pure --op=frame/encode/header --times=1000
==7== For interactive control, run 'callgrind_control -h'.
==7==
==7== Events    : Ir
==7== Collected : 25017
==7==
==7== I   refs:      25,017
";

    #[test]
    fn count_is_read_from_between_other_lines() {
        assert_eq!(collected(WRITTEN).unwrap(), 25_017);
    }

    #[test]
    fn what_holds_no_single_count_is_refused() {
        let cut = WRITTEN.split("==7== Collected").next().unwrap();
        for (text, why) in [
            ("", "counted []"),
            ("\0== : ==\n==:\n====\n== Events", "counted []"),
            (cut, "0 counts"),
            (&WRITTEN.repeat(2), "not instructions"),
            (&format!("{WRITTEN}==8== Collected : 1\n"), "2 counts"),
            (&WRITTEN.replace(": 25017", ": 25017 9"), "`25017 9`"),
            (&WRITTEN.replace("25017", "-1"), "`-1`"),
            (
                &WRITTEN.replace("25017", "99999999999999999999"),
                "`99999999999999999999`",
            ),
            (&WRITTEN.replace(": Ir", ": Ir Dr"), "not instructions"),
        ] {
            let error = format!("{:#}", collected(text).unwrap_err());
            assert!(error.contains(why), "{error}, of {text:?}");
        }
    }

    #[test]
    fn one_time_is_the_rounded_difference() {
        assert_eq!(each(5_400, 15_899, 1_000).unwrap(), 10);
        assert_eq!(each(5_400, 15_900, 1_000).unwrap(), 11);
    }

    #[test]
    fn nothing_counted_is_an_error() {
        let error = each(0, 0, 1_000).unwrap_err().to_string();
        assert!(error.contains("was the operation counted"), "{error}");
        assert!(each(9, 8, 1).is_err());
    }

    #[test]
    fn program_of_the_bench_is_found_among_messages() {
        let messages = r#"
not json
{"reason":"compiler-artifact","target":{"name":"adit_core","kind":["lib"]},"executable":null}
{"reason":"compiler-artifact","target":{"name":"pure","kind":["test"]},"executable":"/other"}
{"reason":"compiler-artifact","target":{"name":"pure","kind":["bench"]},"executable":"/deps/pure-1"}
{"reason":"build-finished","success":true}
"#;
        assert_eq!(executable(messages).unwrap(), Path::new("/deps/pure-1"));
        assert!(executable("").is_err());
    }

    #[test]
    fn counts_further_apart_than_allowed_are_named() {
        let counted = |operation: &str, instructions: &[u64]| Counted {
            operation: operation.to_owned(),
            instructions: instructions.to_vec(),
        };
        let all = [
            counted("same", &[1_000, 1_010]),
            counted("other", &[1_000, 1_011]),
            counted("single", &[7]),
        ];
        assert_eq!(unstable(&all), ["other [1000, 1011]"]);
        let table = report("heading\n", &all);
        assert!(
            table.starts_with("heading\n\n| operation |") && table.ends_with("| single | 7 |\n"),
            "{table}"
        );
    }
}
