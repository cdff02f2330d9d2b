//! Reads the rows of generated pages from the doc comments of all sources.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::Context as _;

use super::PAGES;
use crate::workspace::Workspace;

/// Path components that a test's name omits.
const UNNAMED: &[&str] = &["src", "tests", "cases", "mod", "main", "lib"];

#[derive(Default)]
pub(super) struct Row {
    /// The row's number with its source; only an invalid row has several.
    pub(super) numbers: Vec<(String, String)>,
    places: Vec<String>,
    /// Names of tests by package.
    pub(super) tests: BTreeMap<String, BTreeSet<String>>,
}

/// Rows by page, section and text.
pub(super) type Rows = BTreeMap<(usize, usize, String), Row>;

/// All rows, and the errors found in them.
///
/// # Errors
/// A file cannot be read.
pub(super) fn read(workspace: &Workspace) -> anyhow::Result<(Rows, Vec<String>)> {
    let (mut rows, mut findings) = (Rows::new(), Vec::new());
    for file in workspace.files(".")? {
        // This package reads rows and contains none.
        if !file.ends_with(".rs") || file.starts_with("xtask/") {
            continue;
        }
        for (line, note, function) in notes(&workspace.text(&file)?.unwrap_or_default()) {
            let place = format!("{file}:{line}");
            let Some((key, number)) = parse(&note) else {
                let page = &PAGES[page_of(&note).unwrap_or_default()];
                let (word, known) = (page.word, page.sections.join(", "));
                findings.push(format!(
                    "{place}: unknown section, write `{word} (section): ` with one of {known}"
                ));
                continue;
            };
            let (package, path) = named(workspace, &file, &function)?;
            let row = rows.entry(key).or_default();
            row.tests.entry(package).or_default().insert(path);
            row.numbers
                .extend(number.map(|number| (number, place.clone())));
            row.places.push(place);
        }
    }
    for ((page, _, what), row) in &rows {
        findings.extend(match (PAGES[*page].has_numbers, row.numbers.as_slice()) {
            (true, [_]) | (false, []) => None,
            (true, []) => Some(format!(
                "{}: `{what}` has no number: add ` | number`, or repeat another row's words exactly",
                row.places[0]
            )),
            (true, [(_, first), (_, place), ..]) => {
                Some(format!("{place}: `{what}` has its number at {first}: keep one of both"))
            }
            (false, [(_, place), ..]) => Some(format!("{place}: no number is wanted here: remove what follows `|`")),
        });
    }
    Ok((rows, findings))
}

/// The rows in the doc comments of a file: line, text, and path of the function below.
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

/// The page to which a doc line's row belongs.
fn page_of(doc: &str) -> Option<usize> {
    PAGES.iter().position(|page| {
        let rest = doc.strip_prefix(page.word);
        rest.is_some_and(|rest| rest.starts_with(" (") || rest.starts_with(": "))
    })
}

/// Page, section, text and number of a row.
fn parse(note: &str) -> Option<((usize, usize, String), Option<String>)> {
    let page = page_of(note)?;
    let (section, text) = note.split_once(" (")?.1.split_once("): ")?;
    let section = PAGES[page]
        .sections
        .iter()
        .position(|known| *known == section)?;
    let (what, number) = text.split_once(" | ").unzip();
    Some((
        (page, section, what.unwrap_or(text).to_owned()),
        number.map(str::to_owned),
    ))
}

/// The package of a test, or the folder of its binary, and its path within.
fn named(workspace: &Workspace, file: &str, function: &str) -> anyhow::Result<(String, String)> {
    let manifest = |folder: &&Path| workspace.root().join(folder).join("Cargo.toml");
    let mut folders = Path::new(file).ancestors().skip(1);
    let folder = folders.find(|folder| manifest(folder).is_file());
    let folder = folder.with_context(|| format!("{file} is in no package"))?;
    let text = std::fs::read_to_string(manifest(&folder))?;
    let package = text
        .lines()
        .find_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"'));
    let package = package.with_context(|| format!("{} names no package", folder.display()))?;
    let below = Path::new(file).strip_prefix(folder)?.with_extension("");
    let below = below.to_string_lossy();
    let mut parts: Vec<&str> = below.split('/').chain(function.split("::")).collect();
    let binary = (package == "adit" && parts[0] == "tests").then(|| parts.remove(1));
    parts.retain(|part| !UNNAMED.contains(part));
    let package = package.strip_prefix("adit-").unwrap_or(package);
    Ok((binary.unwrap_or(package).to_owned(), parts.join("::")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sample;

    const NUMBERS: &str = "tunnel-daemon/tests/loopback/cases/numbers.rs";

    /// The findings and the first page of a test binary of the daemon and a source of another package.
    fn made(test: &str, source: &str) -> (Vec<String>, String) {
        let (_folder, workspace) = sample(&[
            ("tunnel-daemon/Cargo.toml", "name = \"adit\"\n"),
            ("tunnel-daemon/net/Cargo.toml", "name = \"adit-net\"\n"),
            ("tunnel-daemon/net/src/grpc/mod.rs", source),
            (NUMBERS, test),
        ]);
        let (rows, findings) = read(&workspace).unwrap();
        (findings, super::super::text(0, &rows))
    }

    #[test]
    fn tests_of_one_row_are_merged_and_named_by_their_place() {
        let test = "/// Why.\n///\n/// Limit (times): A head\n#[test]\nfn is_cut() {}\n";
        let source = "mod tests {\n    mod deep {\n        /// Limit (times): A\n        /// head | 60 s,\n        /// then cut\n\
                      ///\n/// More.\n        async fn ends() {}\n    }\n    /// Limit (sizes): B | 1 KiB\n    fn b() {}\n}\n";
        let (findings, page) = made(test, source);
        assert_eq!(findings, Vec::<String>::new());
        for row in [
            "\n| B | 1 KiB | net `grpc::b` |\n",
            "\n| A head | 60 s, then cut | loopback `numbers::is_cut`; net `grpc::deep::ends` |\n",
        ] {
            assert!(page.contains(row), "{page}");
        }
    }

    #[test]
    fn invalid_rows_are_reported_with_their_line() {
        let twice = "/// Limit (times): A | 1\n/// Limit (times): A | 2";
        for (row, wanted) in [
            ("/// Limit (times): A", "1: `A` has no number: add"),
            (twice, "2: `A` has its number at"),
            (
                "/// Limit (time): A | 1",
                "1: unknown section, write `Limit",
            ),
            ("/// Limit: A | 1", "1: unknown section"),
            ("/// Upstream (dials): A | 1", "1: no number is wanted"),
        ] {
            let (findings, _) = made(&format!("{row}\nfn a() {{}}\n"), "");
            let wanted = format!("{NUMBERS}:{wanted}");
            assert_eq!(findings.len(), 1, "{findings:?}");
            assert!(findings[0].starts_with(&wanted), "{findings:?}");
        }
    }
}
