//! The results of all kernels side by side, for the terminal and for the page in docs.

use std::fmt::Write as _;

use super::console::{Console, EntryResult};
use super::entries::{Entry, Run};
use super::image::console_name;
use super::machine::Accel;

/// Longest text in a cell.
const CELL_CHARS: usize = 160;

/// Results of one kernel.
pub(super) struct Answers {
    /// The requested series.
    pub(super) series: String,
    /// The accelerator that ran it.
    pub(super) accel: Accel,
    /// Its console.
    pub(super) console: Console,
}

/// The text of a cell, or why its run failed.
type Cell = Result<String, String>;

/// The table, and the names of failed rows.
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
            match cell(entry, ran) {
                Ok(cell) => write!(text, " {cell} |").ok(),
                Err(why) => {
                    failed.push(format!("{} on {}", entry.name, answers.series));
                    write!(text, " **{why}** |").ok()
                }
            };
        }
        text.push('\n');
    }
    (text, failed)
}

fn cell(entry: &Entry, ran: Option<&EntryResult>) -> Cell {
    let ran = ran.ok_or("did not run")?;
    match (entry.run, ran.status) {
        (Run::Fact(_), Some(0)) => {
            let last = ran.lines.last().map_or("yes", String::as_str);
            Ok(shortened(last))
        }
        (Run::Fact(_), Some(_)) => Ok("no".to_owned()),
        (Run::Script(_), Some(0)) => Ok("yes".to_owned()),
        (Run::Tests { .. }, Some(0)) => tests(&ran.lines),
        (_, None) => Err("the machine ended in it".to_owned()),
        // Exit codes of `timeout` in the machine.
        (_, Some(124 | 143 | 137)) => Err(format!("not done in {} s", entry.limit_seconds)),
        (_, Some(status)) => Err(format!("failed ({status})")),
    }
}

/// The number of tests that did not skip; an error if no test ran, which would prove nothing.
fn tests(lines: &[String]) -> Cell {
    let passed = lines.iter().find_map(|line| {
        let counts = line.strip_prefix("test result: ok. ")?;
        counts.split_whitespace().next()?.parse::<usize>().ok()
    });
    let passed = passed.filter(|passed| *passed > 0).ok_or("no test ran")?;
    // The test runner counts skipped tests as passed. Each test reports its skip once, possibly after other output on the line.
    let skipped: Vec<&str> = lines
        .iter()
        .flat_map(|line| line.split("SKIPPED ").skip(1))
        .collect();
    let why = || format!("skipped: {}", reasons(&skipped));
    Ok(match passed.saturating_sub(skipped.len()) {
        0 => why(),
        ran if skipped.is_empty() => counted(ran),
        ran => format!("{}; {} {}", counted(ran), skipped.len(), why()),
    })
}

fn counted(tests: usize) -> String {
    match tests {
        1 => "1 test".to_owned(),
        _ => format!("{tests} tests"),
    }
}

/// Reasons from `test: reason`. A single test is named; of several tests each reason is listed once.
fn reasons(skipped: &[&str]) -> String {
    if let [only] = skipped {
        return shortened(only);
    }
    let mut whys = Vec::new();
    for text in skipped {
        let why = text.split_once(": ").map_or(*text, |(_, why)| why).trim();
        if !whys.contains(&why) {
            whys.push(why);
        }
    }
    shortened(&whys.join("; "))
}

/// Text without characters that break a table, cut to a cell's size.
fn shortened(text: &str) -> String {
    let plain = text.replace('|', "/");
    plain.trim().chars().take(CELL_CHARS).collect()
}

/// Sources of a page.
#[derive(Clone)]
pub(super) struct Made {
    /// The commit, and whether the tree was changed since.
    pub(super) commit: String,
    /// SHA-256 of the eBPF object embedded in the programs.
    pub(super) object: String,
}

/// The text of `docs/kernels.md`.
pub(super) fn page(table: &str, left_out: &[String], all: &[Answers], made: &Made) -> String {
    let mut text = String::from(
        "# Kernels\n\nWhat distribution kernels of Debian do with Adit, each booted in a virtual machine of its own. Written by\n\
         `cargo xtask vm --all --write`, never by hand; [CONTRIBUTING](../CONTRIBUTING.md) says how to run it.\n\
         A row of tests gives their number, and a cell says so where something is missing. The floor is 6.1.\n\n",
    );
    let Made { commit, object } = made;
    writeln!(
        text,
        "Made from commit {commit}, with the eBPF object of SHA-256 `{object}`.\n"
    )
    .ok();
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

/// The row titles in the first column of a page's table.
pub(crate) fn titles(page: &str) -> Vec<&str> {
    page.lines()
        .skip_while(|line| !line.starts_with('|'))
        .take_while(|line| line.starts_with('|'))
        // Skip the head and the line below it.
        .skip(2)
        .filter_map(|line| line.strip_prefix("| ")?.split(" |").next())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::entries::ENTRIES;

    fn answers(lines: &[&str]) -> Answers {
        Answers {
            series: "6.1".to_owned(),
            accel: Accel::Tcg,
            console: Console::of(lines.iter().copied()),
        }
    }

    fn entry(name: &str) -> &'static Entry {
        ENTRIES.iter().find(|entry| entry.name == name).unwrap()
    }

    #[test]
    fn missing_feature_is_reported_and_a_failed_test_fails_the_run() {
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
    fn a_cell_counts_the_tests_and_shows_why_others_were_skipped() {
        for (lines, cell) in [
            ("test result: ok. 0 passed; 0 failed", Err("no test ran")),
            ("test a ... ok", Err("no test ran")),
            (
                "test a::b ... SKIPPED ring: forbidden\nok\ntest result: ok. 3 passed; 0 failed",
                Ok("2 tests; 1 skipped: ring: forbidden"),
            ),
            (
                "SKIPPED one: no | here\nSKIPPED two: no | here\nSKIPPED other: no IPv6\ntest result: ok. 4 passed; 0 failed",
                Ok("1 test; 3 skipped: no / here; no IPv6"),
            ),
            (
                "SKIPPED one: no memory\nSKIPPED other: no memory\ntest result: ok. 2 passed; 0 failed",
                Ok("skipped: no memory"),
            ),
        ] {
            let split: Vec<String> = lines.lines().map(str::to_owned).collect();
            let told = tests(&split);
            assert_eq!(told.as_deref().map_err(String::as_str), cell, "{lines}");
        }
    }

    #[test]
    fn page_names_its_commit_and_object_and_shows_each_row() {
        let all = [answers(&["@@hello 6.1.0 #1"])];
        let entries: Vec<&Entry> = ENTRIES.iter().collect();
        let (table, _failed) = render(&entries, &all);
        let made = Made {
            commit: "abc1234 with changes".to_owned(),
            object: "0badc0de".to_owned(),
        };
        let page = page(&table, &[], &all, &made);
        assert!(page.contains("commit abc1234 with changes, "), "{page}");
        assert!(page.contains("SHA-256 `0badc0de`"), "{page}");
        let rows: Vec<&str> = entries.iter().map(|entry| entry.row).collect();
        assert_eq!(titles(&page), rows);
    }
}
