//! Pages that promise something name the test that shows it: each such test is there.

use crate::workspace::Workspace;

/// Pages whose claims name tests, as `module::name_of_the_test`.
const PAGES: &[&str] = &["docs/threat-model.md", "docs/specification.md"];
/// A page of whose last table each row must name a test.
const PROVEN: &str = "docs/threat-model.md";
/// The table, by its head.
const PROVEN_TABLE: &str = "| threat |";

/// Checks the pages.
///
/// # Errors
/// When a file cannot be read.
pub(super) fn check(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let mut sources = Vec::new();
    for file in workspace.files(".")? {
        if file.ends_with(".rs") {
            let text = workspace.text(&file)?.unwrap_or_default();
            sources.push((file, text));
        }
    }
    let mut findings = Vec::new();
    for page in PAGES.iter().filter(|page| workspace.path(page).exists()) {
        let text = workspace.text(page)?.unwrap_or_default();
        for (number, line) in text.lines().enumerate() {
            for name in names(line).filter(|name| !is_there(name, &sources)) {
                findings.push(format!("{page}:{}: no test is named `{name}`", number + 1));
            }
        }
        if *page == PROVEN {
            findings.extend(unproven(page, &text));
        }
    }
    Ok(findings)
}

/// Words in backticks that name a test: a path whose last part is a sentence.
fn names(line: &str) -> impl Iterator<Item = &str> {
    let quoted = line.split('`').skip(1).step_by(2);
    quoted.filter(|word| {
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_' || c == ':';
        let last = word.rsplit("::").next().unwrap_or_default();
        word.contains("::") && word.chars().all(plain) && last.matches('_').count() >= 2
    })
}

/// Whether a source of that module has such a function. A module is a file, a folder or written in the file.
fn is_there(name: &str, sources: &[(String, String)]) -> bool {
    let mut parts = name.rsplit("::");
    let function = format!("fn {}(", parts.next().unwrap_or_default());
    let module = parts.next().unwrap_or_default();
    let inline = format!("mod {module}");
    sources.iter().any(|(file, text)| {
        let here = file.split(['/', '.']).any(|part| part == module) || text.contains(&inline);
        here && text.contains(&function)
    })
}

/// Rows of the table that name no test.
fn unproven(page: &str, text: &str) -> Vec<String> {
    let table = text
        .lines()
        .enumerate()
        .skip_while(|(_, line)| !line.starts_with(PROVEN_TABLE))
        .skip(2)
        .take_while(|(_, line)| line.starts_with('|'));
    table
        .filter(|(_, line)| names(line).next().is_none())
        .map(|(number, _)| format!("{page}:{}: a defence without its test", number + 1))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sample;

    #[test]
    fn claims_without_a_test_and_tests_that_are_not_there_are_found() {
        let page = "# T\n\n| threat | defence | test |\n| --- | --- | --- |\n\
                    | a | b | core `one::a_test_that_is_there` |\n| c | d | `one::a_test_that_is_not` |\n| e | f `a::b` | |\n";
        let (_folder, workspace) = sample(&[
            ("docs/threat-model.md", page),
            ("core/tests/one.rs", "//! T\nfn a_test_that_is_there() {}\n"),
            ("core/tests/two.rs", "//! T\nfn a_test_that_is_not() {}\n"),
        ]);
        assert_eq!(
            check(&workspace).unwrap(),
            [
                "docs/threat-model.md:6: no test is named `one::a_test_that_is_not`",
                "docs/threat-model.md:7: a defence without its test"
            ]
        );
    }
}
