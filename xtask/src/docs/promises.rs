//! The pages of limits and of upstream's behaviour, from rows in the doc comments of the tests that prove them:
//!
//! `/// Limit (times): A CONNECT head | 60 s` at one test, `/// Limit (times): A CONNECT head` at each further test of it. An
//! `Upstream` row has no number. A row continues on the next lines, up to an empty one.

mod rows;

use std::collections::BTreeSet;

use anyhow::{Context as _, ensure};

use self::rows::{Rows, read};
use crate::workspace::Workspace;

/// A generated page.
struct Page {
    /// Word that begins the page's rows.
    word: &'static str,
    path: &'static str,
    head: &'static str,
    columns: &'static str,
    has_numbers: bool,
    sections: &'static [&'static str],
}

const PAGES: &[Page] = &[
    Page {
        word: "Limit",
        path: "docs/reference/limits.md",
        head: "# Limits\n\nThe tests of a row fail when its limit no longer holds. Some of them set a lower limit than the default shown here.",
        columns: "| what | limit | tests |\n| --- | --- | --- |\n",
        has_numbers: true,
        sections: &[
            "memory",
            "sizes",
            "peers",
            "times",
            "isolation",
            "redirect",
            "accounting",
            "rights",
            "operations",
        ],
    },
    Page {
        word: "Upstream",
        path: "docs/reference/upstream-behaviour.md",
        head: "# Upstream behaviour\n\nWhat peers of Konnectivity 0.36 rely on. [Compatibility](../compatibility.md) lists the differences.",
        columns: "| behaviour | tests |\n| --- | --- |\n",
        has_numbers: false,
        sections: &[
            "tunnels",
            "dials",
            "agents",
            "choice",
            "packets",
            "configuration",
        ],
    },
];
/// Text after each head.
const ABOUT: &str = "\nA test is named by its package without `adit-`, or by its folder in `tunnel-daemon/tests`.\n\
                     This page is written by `cargo xtask docs` from the doc comments of the tests.\n";

/// Writes the pages.
///
/// # Errors
/// A row is invalid, or a file cannot be read or written.
pub(super) fn write(workspace: &Workspace) -> anyhow::Result<()> {
    let (rows, findings) = read(workspace)?;
    ensure!(findings.is_empty(), "{}", findings.join("\n"));
    for (index, page) in PAGES.iter().enumerate() {
        let path = workspace.path(page.path);
        std::fs::write(path, text(index, &rows)).with_context(|| format!("write {}", page.path))?;
    }
    Ok(())
}

/// Reports invalid rows and stale pages.
///
/// # Errors
/// A file cannot be read.
pub(crate) fn check(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let (rows, mut findings) = read(workspace)?;
    for (index, Page { path, .. }) in PAGES.iter().enumerate() {
        let has = std::fs::read_to_string(workspace.path(path)).unwrap_or_default();
        let wanted = text(index, &rows);
        if has != wanted {
            let same = has.lines().zip(wanted.lines()).take_while(|(a, b)| a == b);
            findings.push(format!(
                "{path}:{}: stale, run `cargo xtask docs`",
                same.count() + 1
            ));
        }
    }
    Ok(findings)
}

/// The text of a page.
fn text(index: usize, rows: &Rows) -> String {
    let page = &PAGES[index];
    let mut out = format!("{}\n{ABOUT}", page.head);
    for (at, section) in page.sections.iter().enumerate() {
        let (first, rest) = section.split_at(1);
        out += &format!("\n## {}{rest}\n\n{}", first.to_uppercase(), page.columns);
        for ((_, _, what), row) in rows.iter().filter(|(key, _)| (key.0, key.1) == (index, at)) {
            let number = row
                .numbers
                .first()
                .map(|(number, _)| format!(" {number} |"));
            let quoted = |tests: &BTreeSet<String>| {
                let tests: Vec<String> = tests.iter().map(|test| format!("`{test}`")).collect();
                tests.join(", ")
            };
            let tests: Vec<String> = row
                .tests
                .iter()
                .map(|(of, tests)| format!("{of} {}", quoted(tests)))
                .collect();
            out += &format!(
                "| {what} |{} {} |\n",
                number.unwrap_or_default(),
                tests.join("; ")
            );
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sample;

    #[test]
    fn a_page_is_stale_until_it_is_written() {
        let (_folder, workspace) = sample(&[("docs/reference/limits.md", "# Limits\n")]);
        let findings = check(&workspace).unwrap();
        assert_eq!(
            findings[0],
            "docs/reference/limits.md:2: stale, run `cargo xtask docs`"
        );
        assert_eq!(findings.len(), 2);
        write(&workspace).unwrap();
        assert_eq!(check(&workspace).unwrap(), Vec::<String>::new());
    }
}
