//! The pages of limits and of upstream's behaviour, from rows in the doc comments of the tests that prove them:
//!
//! `/// Limit (times): A CONNECT head | 60 s` at one test, `/// Limit (times): A CONNECT head` at each further one. `Upstream` has
//! no number. A row goes on in the next lines, up to an empty one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context as _, ensure};

use crate::workspace::Workspace;

/// A generated page.
struct Page {
    /// Begins its rows.
    word: &'static str,
    path: &'static str,
    intro: &'static str,
    head: &'static str,
    has_numbers: bool,
    /// By the word in brackets, with the heading.
    sections: &'static [(&'static str, &'static str)],
}

const PAGES: &[Page] = &[
    Page {
        word: "Limit",
        path: "docs/reference/limits.md",
        intro: "# Limits\n\nEach test fails when its limit no longer holds. Some tests set a lower limit than the default shown here.",
        head: "| what | limit | tests |\n| --- | --- | --- |\n",
        has_numbers: true,
        sections: &[
            ("memory", "Memory"),
            ("sizes", "Sizes"),
            ("peers", "Connections, dials and lanes"),
            ("times", "Times"),
            ("isolation", "Isolation and load"),
            ("redirect", "Redirect"),
            ("accounting", "Accounting"),
            ("rights", "Rights"),
            ("operations", "Logs, metrics and administration"),
        ],
    },
    Page {
        word: "Upstream",
        path: "docs/reference/upstream-behaviour.md",
        intro: "# Upstream behaviour\n\nBehaviour of Konnectivity 0.36 that Adit keeps. [Compatibility](../compatibility.md) lists the differences.",
        head: "| behaviour | tests |\n| --- | --- |\n",
        has_numbers: false,
        sections: &[
            ("tunnels", "Tunnels"),
            ("dials", "Dials"),
            ("agents", "Agents and their links"),
            ("choice", "Choice of an agent"),
            ("packets", "Unexpected packets"),
            ("configuration", "Flags, tokens, leases and metrics"),
        ],
    },
];

/// Follows each intro.
const TESTS: &str = "A test is named by its package without `adit-`, or by its folder in `tunnel-daemon/tests`. \
                     This page is written by `cargo xtask docs` from the tests' doc comments.";
/// Parts of a path that are left out of a test's name.
const UNNAMED: &[&str] = &["src", "tests", "cases", "mod", "main", "lib"];

#[derive(Default)]
struct Row {
    number: Option<String>,
    tests: BTreeSet<String>,
    /// File and line of its number, else of its first test.
    place: String,
}

/// By page, section and text.
type Rows = BTreeMap<(usize, usize, String), Row>;

/// Writes the pages.
///
/// # Errors
/// When a row is wrong, or a file cannot be read or written.
pub(super) fn write(workspace: &Workspace) -> anyhow::Result<()> {
    let (rows, findings) = read(workspace)?;
    ensure!(findings.is_empty(), "{}", findings.join("\n"));
    for (index, page) in PAGES.iter().enumerate() {
        let path = workspace.path(page.path);
        std::fs::write(path, text(index, &rows)).with_context(|| format!("write {}", page.path))?;
    }
    Ok(())
}

/// Finds wrong rows and stale pages.
///
/// # Errors
/// When a file cannot be read.
pub(crate) fn check(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let (rows, mut findings) = read(workspace)?;
    for (index, page) in PAGES.iter().enumerate() {
        let has = std::fs::read_to_string(workspace.path(page.path)).unwrap_or_default();
        let wanted = text(index, &rows);
        if has != wanted {
            let same = has.lines().zip(wanted.lines()).take_while(|(a, b)| a == b);
            let line = same.count() + 1;
            findings.push(format!(
                "{}:{line}: stale, run `cargo xtask docs`",
                page.path
            ));
        }
    }
    Ok(findings)
}

/// All rows, and what is wrong with them.
fn read(workspace: &Workspace) -> anyhow::Result<(Rows, Vec<String>)> {
    let (mut rows, mut findings) = (Rows::new(), Vec::new());
    for file in workspace.files(".")? {
        // This package reads rows and has none.
        if !file.ends_with(".rs") || file.starts_with("xtask/") {
            continue;
        }
        let source = workspace.text(&file)?.unwrap_or_default();
        for (line, note, function) in notes(&source) {
            let place = format!("{file}:{line}");
            let test = named(workspace, &file, &function)?;
            let flaw = add(&mut rows, &note, &place, test).err();
            findings.extend(flaw.map(|flaw| format!("{place}: {flaw}")));
        }
    }
    for ((page, _, what), row) in &rows {
        if PAGES[*page].has_numbers && row.number.is_none() {
            let place = &row.place;
            findings.push(format!("{place}: `{what}` has no number: add ` | number`, or repeat another row's words exactly"));
        }
    }
    Ok((rows, findings))
}

/// The rows in the doc comments of a file: their lines, texts, and the paths of the functions below them.
fn notes(source: &str) -> Vec<(usize, String, String)> {
    let (mut found, mut open, mut modules) =
        (Vec::new(), Vec::<(usize, String)>::new(), Vec::new());
    let mut goes_on = false;
    for (index, line) in source.lines().enumerate() {
        let code = line.trim_start();
        let indent = line.len() - code.len();
        if let Some(doc) = code.strip_prefix("///").map(str::trim) {
            if page_of(doc).is_some() {
                open.push((index + 1, doc.to_owned()));
                goes_on = true;
            } else if let (true, false, Some((_, text))) =
                (goes_on, doc.is_empty(), open.last_mut())
            {
                text.extend([" ", doc]);
            } else {
                goes_on = false;
            }
        } else if let Some((_, rest)) = code.split_once("fn ") {
            let name = rest.split(['(', '<']).next().unwrap_or_default();
            let path: Vec<&str> = modules
                .iter()
                .map(|(_, module)| *module)
                .chain([name])
                .collect();
            found.extend(
                open.drain(..)
                    .map(|(line, note)| (line, note, path.join("::"))),
            );
        } else if let Some((_, name)) = code
            .strip_suffix(" {")
            .and_then(|head| head.split_once("mod "))
        {
            modules.push((indent, name));
        } else if code == "}" && modules.last().is_some_and(|(at, _)| *at == indent) {
            modules.pop();
        }
    }
    found
}

/// The page of a row.
fn page_of(doc: &str) -> Option<usize> {
    PAGES.iter().position(|page| {
        let rest = doc.strip_prefix(page.word);
        rest.is_some_and(|rest| rest.starts_with(" (") || rest.starts_with(": "))
    })
}

/// The package of a test, or the folder of its binary, and its path there.
fn named(workspace: &Workspace, file: &str, function: &str) -> anyhow::Result<String> {
    let mut folders = Path::new(file).ancestors().skip(1);
    let folder = folders
        .find(|folder| workspace.root().join(folder).join("Cargo.toml").is_file())
        .with_context(|| format!("{file} is in no package"))?;
    let manifest = std::fs::read_to_string(workspace.root().join(folder).join("Cargo.toml"))?;
    let manifest: toml::Table = manifest.parse()?;
    let package = manifest
        .get("package")
        .and_then(|package| package.get("name")?.as_str());
    let package = package.with_context(|| format!("{} names no package", folder.display()))?;
    let below = Path::new(file).strip_prefix(folder)?.with_extension("");
    let below = below.to_string_lossy();
    let mut parts: Vec<&str> = below.split('/').chain(function.split("::")).collect();
    let binary = (package == "adit" && parts[0] == "tests").then(|| parts.remove(1));
    parts.retain(|part| !UNNAMED.contains(part));
    let package = package.strip_prefix("adit-").unwrap_or(package);
    Ok(format!(
        "{} `{}`",
        binary.unwrap_or(package),
        parts.join("::")
    ))
}

/// Takes a row in, or says what is wrong with it.
fn add(rows: &mut Rows, note: &str, place: &str, test: String) -> Result<(), String> {
    let index = page_of(note).unwrap_or_default();
    let Page {
        word,
        sections,
        has_numbers,
        ..
    } = &PAGES[index];
    let parts = note[word.len()..]
        .strip_prefix(" (")
        .and_then(|rest| rest.split_once("): "));
    let parts = parts.and_then(|(word, text)| {
        Some((sections.iter().position(|(known, _)| *known == word)?, text))
    });
    let Some((section, text)) = parts else {
        let known: Vec<&str> = sections.iter().map(|(word, _)| *word).collect();
        return Err(format!(
            "no known section: write `{word} (section): ` with one of {}",
            known.join(", ")
        ));
    };
    let (what, number) = text
        .split_once(" | ")
        .map_or((text, None), |(what, number)| (what, Some(number)));
    let row = rows.entry((index, section, what.to_owned())).or_default();
    row.tests.insert(test);
    match (number, &row.number) {
        (Some(_), _) if !has_numbers => {
            return Err(format!("`{word}` has no numbers: remove what follows `|`"));
        }
        (Some(_), Some(_)) => {
            return Err(format!(
                "a second number, the first is at {}: keep one",
                row.place
            ));
        }
        (Some(number), None) => {
            row.number = Some(number.to_owned());
            place.clone_into(&mut row.place);
        }
        (None, None) if row.place.is_empty() => place.clone_into(&mut row.place),
        (None, _) => (),
    }
    Ok(())
}

/// The text of a page.
fn text(index: usize, rows: &Rows) -> String {
    let page = &PAGES[index];
    let mut out = format!("{} {TESTS}\n", page.intro);
    for (section, (_, title)) in page.sections.iter().enumerate() {
        let here = rows
            .iter()
            .filter(|((of, at, _), _)| (*of, *at) == (index, section))
            .peekable();
        out += &format!("\n## {title}\n\n{}", page.head);
        for ((_, _, what), row) in here {
            let number = row.number.iter().map(|number| format!(" {number} |"));
            let tests: Vec<&str> = row.tests.iter().map(String::as_str).collect();
            out += &format!(
                "| {what} |{} {} |\n",
                number.collect::<String>(),
                tests.join(", ")
            );
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sample;

    const NUMBERS: &str = "tunnel-daemon/tests/loopback/cases/numbers.rs";

    /// The findings, and the rows of the first page, once it is written.
    fn made(source: &str, other: &str) -> (Vec<String>, Vec<String>) {
        let (_folder, workspace) = sample(&[
            ("tunnel-daemon/Cargo.toml", "[package]\nname = \"adit\"\n"),
            (
                "tunnel-daemon/net/Cargo.toml",
                "[package]\nname = \"adit-net\"\n",
            ),
            (NUMBERS, source),
            ("tunnel-daemon/net/src/grpc/mod.rs", other),
        ]);
        let (rows, findings) = read(&workspace).unwrap();
        let page = text(0, &rows);
        let rows = page.lines().filter(|line| {
            line.starts_with("| ") && !line.contains("| tests |") && !line.contains("---")
        });
        (findings, rows.map(str::to_owned).collect())
    }

    #[test]
    fn tests_of_one_row_are_merged_and_named_by_their_place() {
        let (findings, rows) = made(
            "/// Why.\n///\n/// Limit (times): A CONNECT head\n#[test]\nfn is_cut() {}\n",
            "mod tests {\n    mod deep {\n        /// Limit (times): A CONNECT\n        /// head | 60 s,\n        /// then cut\n        ///\n\
             /// More.\n        async fn ends() {}\n    }\n\n    /// Limit (sizes): B | 1 KiB\n    fn b() {}\n}\n",
        );
        assert_eq!(findings, Vec::<String>::new());
        assert_eq!(
            rows,
            [
                "| B | 1 KiB | net `grpc::b` |",
                "| A CONNECT head | 60 s, then cut | loopback `numbers::is_cut`, net `grpc::deep::ends` |"
            ]
        );
    }

    #[test]
    fn wrong_rows_are_found_where_they_are() {
        for (source, wanted) in [
            (
                "/// Limit (times): A\nfn a() {}\n",
                "1: `A` has no number: add",
            ),
            (
                "/// Limit (times): A | 1\n/// Limit (times): A | 2\nfn a() {}\n",
                "2: a second number, the first is at",
            ),
            (
                "/// Limit (time): A | 1\nfn a() {}\n",
                "1: no known section: write `Limit (section): ` with one of memory,",
            ),
            ("/// Limit: A | 1\nfn a() {}\n", "1: no known section"),
            (
                "/// Upstream (dials): A | 1\nfn a() {}\n",
                "1: `Upstream` has no numbers",
            ),
        ] {
            let (findings, _) = made(source, "");
            assert_eq!(findings.len(), 1, "{findings:?}");
            assert!(
                findings[0].starts_with(&format!("{NUMBERS}:{wanted}")),
                "{findings:?}"
            );
        }
    }

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
