//! `cargo xtask perf --instructions`: the cost of the benches without I/O, in instructions, which other load on the machine
//! does not affect.
//!
//! Each operation runs under callgrind N times and 2N times; the difference is the cost of N, without start-up and first-time
//! costs. Counts depend on the compiler and on the processor model, which decides how bytes are copied.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};

use super::host::machine;
use crate::steps::{first_line, output_of};
use crate::workspace::Workspace;

/// Number of operations in the shorter run: with a thousand tunnels, one for each.
const TIMES: u64 = 1_000;
/// The bench's function that calls the operation; instructions outside it are not counted.
const COUNTED: &str = "pure::count::repeat*";
/// Name of the bench.
const BENCH: &str = "pure";
/// Time limit for building the bench.
const BUILD_LIMIT: Duration = Duration::from_secs(20 * 60);
/// Time limit for one run under valgrind, which needs seconds.
const RUN_LIMIT: Duration = Duration::from_secs(120);
/// Percent by which two counts of an operation may differ: hash tables have random seeds, and with some seeds a lookup probes
/// further.
const SAME_WITHIN_PERCENT: u64 = 1;

/// An operation, and its instructions for each count of it.
type Counted = (String, Vec<u64>);

/// Runs the command. With `is_check` every operation is counted twice.
///
/// # Errors
/// A tool is missing or fails, or two counts of an operation differ by more than [`SAME_WITHIN_PERCENT`].
pub(crate) fn run(workspace: &Workspace, is_check: bool) -> anyhow::Result<()> {
    let version = first_line(Command::new("valgrind").arg("--version"))
        .context("valgrind does not run here: install the package `valgrind`")?;
    eprintln!("perf: building the bench");
    let build = "bench --package adit-core --bench pure --no-run";
    let build: Vec<&str> = build.split(' ').collect();
    let programs = workspace.artifacts(&build, BUILD_LIMIT)?;
    let bench = programs
        .into_iter()
        .find(|one| one.target.name == BENCH && one.target.kind == ["bench"])
        .with_context(|| format!("cargo names no program of the bench `{BENCH}`"))?
        .program;
    let names = output_of(Command::new(&bench).arg("--ops"), RUN_LIMIT)?.stdout;
    let rounds = if is_check { 2 } else { 1 };
    let mut all = Vec::new();
    for operation in names.lines() {
        eprintln!("perf: counting {operation}");
        let instructions = (0..rounds)
            .map(|_round| count(&bench, operation))
            .collect::<anyhow::Result<_>>()
            .with_context(|| format!("counting {operation}"))?;
        all.push((operation.to_owned(), instructions));
    }
    ensure!(!all.is_empty(), "the bench names no operations");
    let heading = format!(
        "Instructions of one operation, `cargo xtask perf --instructions`; {}, {}.\n",
        machine(workspace),
        version
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

/// Instructions of one run of the operation.
fn count(bench: &Path, operation: &str) -> anyhow::Result<u64> {
    let of = |times| under_valgrind(bench, operation, times);
    each(of(TIMES)?, of(2 * TIMES)?, TIMES)
}

fn under_valgrind(bench: &Path, operation: &str, times: u64) -> anyhow::Result<u64> {
    let folder = tempfile::tempdir()?;
    let mut valgrind = Command::new("valgrind");
    // The environment must not shift memory addresses, and settings in a home folder must not change what is counted.
    valgrind
        .env_clear()
        .envs(std::env::var_os("PATH").map(|path| ("PATH", path)))
        .current_dir(folder.path())
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(format!("--toggle-collect={COUNTED}"))
        .arg(bench)
        .arg(format!("--op={operation}"))
        .arg(format!("--times={times}"));
    collected(&output_of(&mut valgrind, RUN_LIMIT)?.stderr)
}

/// The count in callgrind's summary.
///
/// # Errors
/// There is no count, more than one, or one of something other than instructions.
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

/// Instructions of one operation, rounded, from counts of N and of 2N operations.
///
/// # Errors
/// The longer run did not take more instructions.
fn each(once: u64, twice: u64, times: u64) -> anyhow::Result<u64> {
    ensure!(
        once < twice,
        "{times} times took {once} instructions, twice as many {twice}: was the operation counted?"
    );
    Ok((twice - once + times / 2) / times)
}

/// The table of all operations.
fn report(heading: &str, all: &[Counted]) -> String {
    let mut text = format!("{heading}\n| operation | instructions |\n| --- | ---: |\n");
    for (operation, instructions) in all {
        let numbers: Vec<String> = instructions.iter().map(u64::to_string).collect();
        writeln!(text, "| {operation} | {} |", numbers.join(", ")).ok();
    }
    text
}

/// Operations whose counts differ too much.
fn unstable(all: &[Counted]) -> Vec<String> {
    let differs = |counts: &[u64]| {
        let (least, most) = (counts.iter().min()?, counts.iter().max()?);
        ((most - least) * 100 > least * SAME_WITHIN_PERCENT).then_some(())
    };
    all.iter()
        .filter(|(_, instructions)| differs(instructions).is_some())
        .map(|(operation, instructions)| format!("{operation} {instructions:?}"))
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
    fn output_needs_exactly_one_count() {
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
    fn per_operation_cost_is_rounded() {
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
    fn counts_further_apart_than_allowed_are_named() {
        let counted = |operation: &str, instructions: &[u64]| -> Counted {
            (operation.to_owned(), instructions.to_vec())
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
