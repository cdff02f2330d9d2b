//! Each Rust source: a module doc, a bounded length, and no loose end without an issue.

use crate::workspace::Workspace;

/// Longest Rust source. Whatever is longer usually does two jobs.
const LINES_MAX: usize = 800;

/// Sources that may be longer: path and reason. Generated files need no entry.
const LONGER: &[(&str, &str)] = &[];

/// Begins what `cargo xtask codegen` writes.
const GENERATED: &str = "//! Made by `cargo xtask codegen`";

/// Marks of unfinished work, spelled so that this file does not contain them.
const MARKS: &[&str] = &[concat!("TO", "DO"), concat!("FIX", "ME")];

/// Endings of the files whose text people write.
const WRITTEN: &[&str] = &[
    ".rs", ".toml", ".md", ".proto", ".sh", ".go", ".yaml", ".yml", ".c", ".h", ".ci/run",
];

/// Checks all sources.
///
/// # Errors
/// When a file cannot be read.
pub(super) fn check(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let mut findings = Vec::new();
    let files = workspace.files(".")?;
    for (file, _reason) in LONGER {
        if !files.iter().any(|one| one == file) {
            findings.push(format!(
                "{file}: listed in LONGER of xtask/src/tidy/sources.rs, but not there"
            ));
        }
    }
    for file in files
        .iter()
        .filter(|file| WRITTEN.iter().any(|ending| file.ends_with(ending)))
    {
        let Some(text) = workspace.text(file)? else {
            findings.push(format!("{file}: not UTF-8"));
            continue;
        };
        if file.ends_with(".rs") {
            findings.extend(check_rust(file, &text));
        }
        findings.extend(loose_ends(file, &text));
    }
    Ok(findings)
}

fn check_rust(file: &str, text: &str) -> Vec<String> {
    let mut findings = Vec::new();
    if !text
        .lines()
        .find(|line| !line.starts_with("#!"))
        .is_some_and(|line| line.starts_with("//!"))
    {
        findings.push(format!(
            "{file}:1: begins without `//!`, which says what the module owns"
        ));
    }
    let lines = text.lines().count();
    let exempt =
        text.starts_with(GENERATED) || LONGER.iter().any(|(longer, _reason)| *longer == file);
    if lines > LINES_MAX && !exempt {
        findings.push(format!(
            "{file}: {lines} lines, more than {LINES_MAX}: split it, or list it with a reason"
        ));
    }
    findings
}

/// Unfinished work must name its issue as `MARK(#12)`.
fn loose_ends(file: &str, text: &str) -> Vec<String> {
    let mut findings = Vec::new();
    for (number, line) in text.lines().enumerate() {
        for mark in MARKS {
            let loose = line.match_indices(mark).any(|(at, _)| {
                let before = line.get(..at).and_then(|text| text.chars().next_back());
                let after = line.get(at + mark.len()..).unwrap_or_default();
                let is_word = |c: char| c.is_alphanumeric() || c == '_';
                !before.is_some_and(is_word)
                    && !after.chars().next().is_some_and(is_word)
                    && !names_issue(after)
            });
            if loose {
                findings.push(format!(
                    "{file}:{}: {mark} without an issue: write {mark}(#number)",
                    number + 1
                ));
            }
        }
    }
    findings
}

fn names_issue(after: &str) -> bool {
    let number = after
        .strip_prefix("(#")
        .and_then(|rest| rest.split_once(')'))
        .map(|(number, _)| number);
    number.is_some_and(|number| !number.is_empty() && number.chars().all(|c| c.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sample;

    #[test]
    fn source_without_module_doc_is_found() {
        assert_eq!(check_rust("a.rs", "use b;\n").len(), 1);
        assert!(check_rust("a.rs", "//! Owns a.\nuse b;\n").is_empty());
    }

    #[test]
    fn long_source_is_found_unless_generated() {
        let long = "\n".repeat(LINES_MAX + 1);
        assert_eq!(check_rust("a.rs", &format!("//! Owns a.{long}")).len(), 1);
        assert!(check_rust("a.rs", &format!("{}{long}", GENERATED)).is_empty());
    }

    #[test]
    fn loose_end_needs_an_issue_number() {
        for mark in MARKS {
            assert_eq!(loose_ends("a.rs", &format!("// {mark}: later")).len(), 1);
            assert_eq!(loose_ends("a.rs", &format!("// {mark}(#): later")).len(), 1);
            assert!(loose_ends("a.rs", &format!("// {mark}(#12): later")).is_empty());
            assert!(loose_ends("a.rs", &format!("// MY{mark}S")).is_empty());
        }
    }

    #[test]
    fn build_products_are_not_looked_at() {
        let (_folder, workspace) = sample(&[("target/a.rs", ""), ("src/a.rs", "//! Owns a.\n")]);
        assert_eq!(check(&workspace).unwrap(), Vec::<String>::new());
    }
}
