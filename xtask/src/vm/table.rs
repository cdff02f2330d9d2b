//! The answers of all kernels side by side, for the terminal and for the page in docs.

use std::fmt::Write as _;

use super::console::{Console, Ran};
use super::entries::{Entry, Run};
use super::image::console_name;
use super::machine::Accel;

/// Longest text in a cell.
const CELL_CHARS: usize = 160;

/// One kernel's answers.
pub(super) struct Answers {
    /// As asked for.
    pub(super) series: String,
    /// What executed it.
    pub(super) accel: Accel,
    /// What it said.
    pub(super) console: Console,
}

/// A cell, and whether it is a failure of the run.
struct Cell {
    text: String,
    failed: bool,
}

/// The table, and the names of what failed.
pub(super) fn render(entries: &[&Entry], all: &[Answers]) -> (String, Vec<String>) {
    let mut failed = Vec::new();
    let mut text = String::from("| |");
    for answers in all {
        let release = answers.console.hello().split_whitespace().next();
        write!(text, " {} |", release.unwrap_or("?")).ok();
    }
    text.push_str("\n| --- |");
    text.push_str(&" --- |".repeat(all.len()));
    text.push('\n');
    for (at, entry) in entries.iter().enumerate() {
        write!(text, "| {} |", entry.row).ok();
        for answers in all {
            let ran = answers.console.ran(&console_name(at, entry));
            let cell = cell(entry, ran);
            if cell.failed {
                failed.push(format!("{} on {}", entry.name, answers.series));
            }
            write!(text, " {} |", cell.text).ok();
        }
        text.push('\n');
    }
    (text, failed)
}

fn cell(entry: &Entry, ran: Option<&Ran>) -> Cell {
    let Some(ran) = ran else {
        return Cell::failed("did not run");
    };
    match (entry.run, ran.status) {
        (Run::Fact(_), Some(0)) => {
            let last = ran.lines.last().map_or("yes", String::as_str);
            Cell::passed(shortened(last))
        }
        (Run::Fact(_), Some(_)) => Cell::passed("no".to_owned()),
        (Run::Script(_), Some(0)) => Cell::passed("yes".to_owned()),
        (Run::Tests { .. }, Some(0)) => tests(&ran.lines),
        (_, None) => Cell::failed("the machine ended in it"),
        // What `timeout` of the machine says.
        (_, Some(124 | 143 | 137)) => {
            Cell::failed(&format!("not done in {} s", entry.limit_seconds))
        }
        (_, Some(status)) => Cell::failed(&format!("failed ({status})")),
    }
}

/// A test run that passed says how many tests it had; none at all proves nothing.
fn tests(lines: &[String]) -> Cell {
    let passed = lines.iter().find_map(|line| {
        let counts = line.strip_prefix("test result: ok. ")?;
        counts.split_whitespace().next()?.parse::<u32>().ok()
    });
    let skipped = lines.iter().find_map(|line| line.split_once("SKIPPED "));
    match (passed, skipped) {
        (None | Some(0), _) => Cell::failed("no test ran"),
        (Some(_), Some((_, why))) => Cell::passed(format!("skipped: {}", shortened(why))),
        (Some(1), None) => Cell::passed("1 test".to_owned()),
        (Some(count), None) => Cell::passed(format!("{count} tests")),
    }
}

impl Cell {
    fn passed(text: String) -> Self {
        Self {
            text,
            failed: false,
        }
    }

    fn failed(why: &str) -> Self {
        Self {
            text: format!("**{why}**"),
            failed: true,
        }
    }
}

/// Nothing that breaks a table.
fn shortened(text: &str) -> String {
    let plain = text.replace('|', "/");
    plain.trim().chars().take(CELL_CHARS).collect()
}

/// The page `docs/kernels.md`.
pub(super) fn page(table: &str, left_out: &[String], all: &[Answers]) -> String {
    let mut text = String::from(
        "# Kernels\n\nWhat distribution kernels of Debian do with Adit, each booted in a virtual machine of its own. Written by\n\
         `cargo xtask vm --all --write` for the rows it ran, never by hand; [CONTRIBUTING](../CONTRIBUTING.md) says how to run it.\n\
         A row of tests gives their number, and a cell says so where something is missing. The floor is 6.1.\n\n",
    );
    text.push_str(table);
    if !left_out.is_empty() {
        text.push_str("\nSkipped:\n\n");
        for line in left_out {
            writeln!(text, "- {line}").ok();
        }
    }
    text.push_str("\nThe kernels, as they name themselves, and what executed them:\n\n");
    for answers in all {
        let hello = answers.console.hello();
        writeln!(text, "- `{hello}`, {}", answers.accel.name()).ok();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::entries::ENTRIES;

    fn answers(lines: &[&str]) -> Answers {
        let mut console = Console::default();
        for line in lines {
            console.handle_line(line);
        }
        Answers {
            series: "6.1".to_owned(),
            accel: Accel::Tcg,
            console,
        }
    }

    fn entry(name: &str) -> &'static Entry {
        ENTRIES.iter().find(|entry| entry.name == name).unwrap()
    }

    #[test]
    fn missing_feature_is_an_answer_and_a_failed_test_fails_the_run() {
        let all = [answers(&[
            "@@hello 6.1.0 #1",
            "@@begin 00-ktls",
            "@@end 00-ktls 1 1.0 1.1",
            "@@begin 01-epoll-copy",
            "| test result: FAILED. 1 passed; 1 failed",
            "@@end 01-epoll-copy 101 1.0 2.0",
            "@@begin 02-ring-copy",
            "| test result: ok. 12 passed; 0 failed",
            "@@end 02-ring-copy 0 1.0 2.0",
        ])];
        let entries = [
            entry("ktls"),
            entry("epoll-copy"),
            entry("ring-copy"),
            entry("demo"),
        ];
        let (table, failed) = render(&entries, &all);
        assert_eq!(failed, ["epoll-copy on 6.1", "demo on 6.1"]);
        assert!(
            table.contains("| no |") && table.contains("| 12 tests |"),
            "{table}"
        );
    }

    #[test]
    fn tests_that_none_matched_or_that_skip_are_no_success() {
        let lines = |text: &str| vec![text.to_owned()];
        assert!(tests(&lines("test result: ok. 0 passed; 0 failed")).failed);
        let mut skipped = lines("SKIPPED ring: forbidden");
        skipped.extend(lines("test result: ok. 3 passed"));
        assert_eq!(tests(&skipped).text, "skipped: ring: forbidden");
    }
}
