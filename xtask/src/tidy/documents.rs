//! Markdown: one top heading per document, relative links that lead somewhere.

use std::path::Path;

use crate::workspace::Workspace;

/// Checks all Markdown files.
///
/// # Errors
/// When a file cannot be read.
pub(super) fn check(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let mut findings = Vec::new();
    for file in workspace
        .files(".")?
        .iter()
        .filter(|file| file.ends_with(".md"))
    {
        let text = prose(&workspace.text(file)?.unwrap_or_default());
        let headings = text.lines().filter(|line| line.starts_with("# ")).count();
        if headings != 1 {
            findings.push(format!(
                "{file}: {headings} lines begin with `# `, one is wanted"
            ));
        }
        let folder = workspace
            .path(file)
            .parent()
            .map(Path::to_path_buf)
            .unwrap_or_default();
        for (line, target) in links(&text) {
            let place = target.split('#').next().unwrap_or_default();
            if is_relative(target) && !place.is_empty() && !folder.join(place).exists() {
                findings.push(format!(
                    "{file}:{line}: link to `{target}`, which is not there"
                ));
            }
        }
    }
    Ok(findings)
}

/// What is between backticks in the first column of the first table whose head begins so.
pub(super) fn first_column(text: &str, head: &str) -> Vec<String> {
    let rows = text
        .lines()
        .skip_while(|line| !line.starts_with(head))
        .skip(2)
        .take_while(|line| line.starts_with('|'));
    rows.filter_map(|row| row.split('|').nth(1))
        .flat_map(|cell| cell.split('`').skip(1).step_by(2))
        .map(str::to_owned)
        .collect()
}

/// The text with fenced blocks and inline code blanked; lines keep their numbers.
fn prose(text: &str) -> String {
    let mut fence: Option<&str> = None;
    let mut out = String::with_capacity(text.len());
    for line in text.lines() {
        let mark = ["```", "~~~"]
            .into_iter()
            .find(|mark| line.trim_start().starts_with(mark));
        match (fence, mark) {
            (None, Some(mark)) => fence = Some(mark),
            (Some(open), Some(mark)) if open == mark => fence = None,
            (Some(_), _) => (),
            // Odd parts stand between backticks.
            (None, None) => out.extend(line.split('`').step_by(2)),
        }
        out.push('\n');
    }
    out
}

/// Line and target of each `[text](target)`.
fn links(text: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    for (number, line) in text.lines().enumerate() {
        for part in line.split("](").skip(1) {
            let target = part.split(')').next().unwrap_or_default();
            let target = target.split_whitespace().next().unwrap_or_default();
            found.push((number + 1, target));
        }
    }
    found
}

fn is_relative(target: &str) -> bool {
    !target.contains("://") && !target.starts_with("mailto:") && !target.starts_with('<')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sample;

    #[test]
    fn dead_link_and_second_heading_are_found() {
        let text = "# One\n[a](b.md) [c](../README.md#part) [d](https://example.org)\n# Two\n";
        let (_folder, workspace) = sample(&[("docs/a.md", text), ("README.md", "# R\n")]);
        let findings = check(&workspace).unwrap();
        assert_eq!(
            findings,
            [
                "docs/a.md: 2 lines begin with `# `, one is wanted",
                "docs/a.md:2: link to `b.md`, which is not there"
            ]
        );
    }

    #[test]
    fn code_is_no_prose() {
        let text = "# One\n```sh\n# a comment\n[a](b.md)\n```\nand `[a](b.md)` inline\n";
        let (_folder, workspace) = sample(&[("a.md", text)]);
        assert_eq!(check(&workspace).unwrap(), Vec::<String>::new());
    }
}
