//! Markdown: one top heading per document, relative links that lead somewhere, also to a heading.

use std::fs;
use std::path::Path;

use anyhow::Context as _;

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
        let text = prose(&unfenced(&workspace.text(file)?.unwrap_or_default()));
        let headings = text.lines().filter(|line| line.starts_with("# ")).count();
        if headings != 1 {
            findings.push(format!(
                "{file}: {headings} lines begin with `# `, one is wanted"
            ));
        }
        let path = workspace.path(file);
        for (line, target) in links(&text).filter(|(_, target)| is_relative(target)) {
            if let Some(flaw) = flaw(&path, target)? {
                findings.push(format!("{file}:{line}: link to `{target}`, {flaw}"));
            }
        }
    }
    Ok(findings)
}

/// What is wrong with a link of a document, if anything is.
fn flaw(document: &Path, target: &str) -> anyhow::Result<Option<&'static str>> {
    let (place, anchor) = match target.split_once('#') {
        Some((place, anchor)) => (place, Some(anchor)),
        None => (target, None),
    };
    let page = if place.is_empty() {
        document.to_path_buf()
    } else {
        document.with_file_name(place)
    };
    if !page.exists() {
        return Ok(Some("which is not there"));
    }
    // Of other files an anchor is a line or so.
    let is_document = page.extension().is_some_and(|ending| ending == "md");
    let (Some(anchor), true) = (anchor, is_document) else {
        return Ok(None);
    };
    let text = fs::read_to_string(&page).with_context(|| format!("read {}", page.display()))?;
    let is_there = anchors(&text).iter().any(|known| known == anchor);
    Ok((!is_there).then_some("which is no heading there"))
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

/// The text with fenced blocks blanked; lines keep their numbers.
fn unfenced(text: &str) -> String {
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
            (None, None) => out.push_str(line),
        }
        out.push('\n');
    }
    out
}

/// The text without inline code; lines keep their numbers.
fn prose(unfenced: &str) -> String {
    let mut out = String::with_capacity(unfenced.len());
    for line in unfenced.lines() {
        // Odd parts stand between backticks.
        out.extend(line.split('`').step_by(2));
        out.push('\n');
    }
    out
}

/// What GitHub calls the headings of a document: those of one text have numbers from the second on.
fn anchors(text: &str) -> Vec<String> {
    let mut anchors: Vec<String> = Vec::new();
    for heading in unfenced(text).lines().filter_map(heading) {
        let slug = slug(heading);
        let numbered = (1..).map(|number| format!("{slug}-{number}"));
        let free = std::iter::once(slug.clone())
            .chain(numbered)
            .find(|name| !anchors.contains(name));
        anchors.extend(free);
    }
    anchors
}

/// The text of a line that is a heading.
fn heading(line: &str) -> Option<&str> {
    let text = line.trim_start_matches('#');
    let level = line.len() - text.len();
    let is_heading = (1..=6).contains(&level) && text.starts_with(' ');
    // A heading may be closed as it was opened.
    is_heading.then(|| text.trim().trim_end_matches('#').trim_end())
}

/// Its anchor: lower case, without punctuation, dashes for spaces. Of a link the words count.
fn slug(heading: &str) -> String {
    let mut shown = String::new();
    let mut rest = heading;
    while let Some((before, link)) = rest.split_once("](") {
        shown.push_str(before);
        rest = link.split_once(')').map_or("", |(_target, after)| after);
    }
    shown.push_str(rest);
    let dashed = shown.to_lowercase().replace(' ', "-");
    let is_kept = |c: &char| c.is_alphanumeric() || ['-', '_'].contains(c);
    dashed.chars().filter(is_kept).collect()
}

/// Line and target of each `[text](target)`.
fn links(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().enumerate().flat_map(|(number, line)| {
        line.split("](").skip(1).map(move |part| {
            let target = part.split(')').next().unwrap_or_default();
            let target = target.split_whitespace().next().unwrap_or_default();
            (number + 1, target)
        })
    })
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
        let (_folder, workspace) = sample(&[("docs/a.md", text), ("README.md", "# R\n## Part\n")]);
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

    #[test]
    fn anchors_lead_to_headings_of_the_page_they_are_of() {
        let here = "# One\n## What it is\n[a](#what-it-is) [b](#what) [c](b.md#there)\n";
        let more = "[d](b.md#one) [e](b.md#in-code) [f](b.sh#L1) [g](../a.md) [h](b.md#There)\n";
        let text = format!("{here}{more}");
        let there = "# Two\n### There\n```sh\n# in code\n```\n";
        let (_folder, workspace) = sample(&[
            ("docs/a.md", text.as_str()),
            ("docs/b.md", there),
            ("docs/b.sh", "# Of no document\n"),
        ]);
        assert_eq!(
            check(&workspace).expect("all can be read"),
            [
                "docs/a.md:3: link to `#what`, which is no heading there",
                "docs/a.md:4: link to `b.md#one`, which is no heading there",
                "docs/a.md:4: link to `b.md#in-code`, which is no heading there",
                "docs/a.md:4: link to `../a.md`, which is not there",
                "docs/a.md:4: link to `b.md#There`, which is no heading there",
            ]
        );
    }

    #[test]
    fn anchors_are_those_of_github() {
        for (heading, anchor) in [
            ("What it is", "what-it-is"),
            ("`adit status`", "adit-status"),
            ("Words of `detail`, too", "words-of-detail-too"),
            ("[Unreleased]", "unreleased"),
            ("See [the page](docs/page.md#x) (new)", "see-the-page-new"),
            ("io_uring & splice", "io_uring--splice"),
            ("0005: Kernel TLS 1.3", "0005-kernel-tls-13"),
            ("\u{c4}rger", "\u{e4}rger"),
        ] {
            assert_eq!(slug(heading), anchor, "{heading}");
        }
    }

    #[test]
    fn headings_of_one_text_are_numbered() {
        let text = "# One\n## Two\n## Two ##\n### Two\n~~~\n## Two\n~~~\n#Two\n####### Two\n";
        assert_eq!(anchors(text), ["one", "two", "two-1", "two-2"]);
    }
}
