//! Markdown: each document has one top heading; relative links and their anchors exist; the page of kernels has the rows of the
//! present matrix.

use std::fs;
use std::path::Path;

use anyhow::Context as _;
use pulldown_cmark::{Event, HeadingLevel, Parser, Tag, TagEnd};

use crate::vm;
use crate::workspace::Workspace;

/// Checks all Markdown files.
///
/// # Errors
/// A file cannot be read.
pub(super) fn check(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let mut findings = Vec::new();
    for file in workspace
        .files(".")?
        .iter()
        .filter(|file| file.ends_with(".md"))
    {
        let text = workspace.text(file)?.unwrap_or_default();
        let page = Page::of(&text);
        if page.titles != 1 {
            findings.push(format!(
                "{file}: {} top headings, one is wanted",
                page.titles
            ));
        }
        for (line, target) in page.links {
            if let Some(flaw) = flaw(&workspace.path(file), &target)? {
                findings.push(format!("{file}:{line}: link to `{target}`, {flaw}"));
            }
        }
    }
    findings.extend(kernels(workspace)?);
    Ok(findings)
}

/// The checked parts of a document.
#[derive(Default)]
struct Page {
    /// Number of top headings.
    titles: usize,
    /// GitHub's anchors of its headings.
    anchors: Vec<String>,
    /// Line and target of each link and picture.
    links: Vec<(usize, String)>,
}

impl Page {
    fn of(text: &str) -> Self {
        let mut page = Self::default();
        let mut heading: Option<String> = None;
        for (event, range) in Parser::new(text).into_offset_iter() {
            match event {
                Event::Start(Tag::Heading { level, .. }) => {
                    page.titles += usize::from(level == HeadingLevel::H1);
                    heading = Some(String::new());
                }
                Event::End(TagEnd::Heading(_)) => {
                    page.add_anchor(&slug(&heading.take().unwrap_or_default()));
                }
                Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                    let before = text.get(..range.start).unwrap_or_default();
                    let line = before.matches('\n').count() + 1;
                    page.links.push((line, dest_url.into_string()));
                }
                Event::Text(words) | Event::Code(words) => {
                    if let Some(heading) = &mut heading {
                        heading.push_str(&words);
                    }
                }
                _ => (),
            }
        }
        page
    }

    /// Repeated headings get numbers from the second on.
    fn add_anchor(&mut self, slug: &str) {
        let numbered = (1..).map(|number| format!("{slug}-{number}"));
        let mut names = std::iter::once(slug.to_owned()).chain(numbered);
        let free = names.find(|name| !self.anchors.contains(name));
        self.anchors.extend(free);
    }
}

/// GitHub's anchors of a document's headings.
pub(super) fn anchors(text: &str) -> Vec<String> {
    Page::of(text).anchors
}

/// GitHub's anchor of a heading: lower case, without punctuation, dashes for spaces.
fn slug(heading: &str) -> String {
    let dashed = heading.to_lowercase().replace(' ', "-");
    let is_kept = |c: &char| c.is_alphanumeric() || ['-', '_'].contains(c);
    dashed.chars().filter(is_kept).collect()
}

/// The error in a link of a document, if there is one.
fn flaw(document: &Path, target: &str) -> anyhow::Result<Option<&'static str>> {
    if target.contains("://") || target.starts_with("mailto:") {
        return Ok(None);
    }
    let (place, anchor) = target.split_once('#').unwrap_or((target, ""));
    let page = if place.is_empty() {
        document.to_path_buf()
    } else {
        document.with_file_name(place)
    };
    if !page.exists() {
        return Ok(Some("which is not there"));
    }
    // Anchors in other files mean a line or similar.
    if anchor.is_empty() || page.extension().is_none_or(|ending| ending != "md") {
        return Ok(None);
    }
    let text = fs::read_to_string(&page).with_context(|| format!("read {}", page.display()))?;
    let is_there = Page::of(&text).anchors.iter().any(|known| known == anchor);
    Ok((!is_there).then_some("which is no heading there"))
}

/// Texts in backticks in the first column of the tables whose heads begin with `head`.
pub(super) fn first_column(text: &str, head: &str) -> Vec<String> {
    let mut is_inside = false;
    let rows = text.lines().filter(|line| {
        let is_head = line.starts_with(head);
        is_inside = is_head || is_inside && line.starts_with('|');
        is_inside && !is_head
    });
    rows.filter_map(|row| row.split(" | ").next())
        .flat_map(|cell| cell.split('`').skip(1).step_by(2))
        .map(str::to_owned)
        .collect()
}

/// Reports a page of kernels that was written before the matrix changed.
fn kernels(workspace: &Workspace) -> anyhow::Result<Option<String>> {
    if !workspace.path(vm::PAGE).exists() {
        return Ok(None);
    }
    let (page, rows) = (workspace.text(vm::PAGE)?.unwrap_or_default(), vm::rows());
    let titles = vm::titles(&page);
    let odd: Vec<&str> = rows
        .iter()
        .filter(|row| !titles.contains(row))
        .chain(titles.iter().filter(|title| !rows.contains(title)))
        .copied()
        .collect();
    Ok((titles != rows).then(|| {
        format!(
            "{}: not the rows of the matrix in their order: run `cargo xtask vm --all --write`; in one of both: {}",
            vm::PAGE,
            odd.join(", ")
        )
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sample;

    #[test]
    fn dead_links_and_a_second_top_heading_are_found_but_not_in_code() {
        let text = "# One\n## What it is\n[a](b.md#there) [b](#what-it-is) [c](b.sh#L1) [d](https://example.org)\n\
                    ```sh\n# a comment\n[a](x.md)\n```\nand `[a](x.md)` inline\n\
                    [e](x.md)\n[f](#what)\n[g](b.md#in-code)\n\n# Two\n";
        let there = "# Two\n### There\n```sh\n# in code\n```\n";
        let (_folder, workspace) =
            sample(&[("docs/a.md", text), ("docs/b.md", there), ("docs/b.sh", "")]);
        assert_eq!(
            check(&workspace).unwrap(),
            [
                "docs/a.md: 2 top headings, one is wanted",
                "docs/a.md:9: link to `x.md`, which is not there",
                "docs/a.md:10: link to `#what`, which is no heading there",
                "docs/a.md:11: link to `b.md#in-code`, which is no heading there",
            ]
        );
    }

    #[test]
    fn anchors_are_those_of_github() {
        let text = "## Words of `detail`, too\n## [Unreleased]\n## See [the page](docs/page.md#x) (new)\n\
                    ## io_uring & splice\n## 0005: Kernel TLS 1.3\n## Two\n## Two ##\n";
        let anchors = [
            "words-of-detail-too",
            "unreleased",
            "see-the-page-new",
            "io_uring--splice",
            "0005-kernel-tls-13",
            "two",
            "two-1",
        ];
        assert_eq!(Page::of(text).anchors, anchors);
    }

    #[test]
    fn an_outdated_kernel_page_is_found() {
        let found = |rows: &[&str]| {
            let rows: String = rows
                .iter()
                .map(|row| format!("| {row} | 3 tests |\n"))
                .collect();
            let page = format!("# Kernels\n\n| | 6.1 |\n| --- | --- |\n{rows}");
            let (_folder, workspace) = sample(&[(vm::PAGE, page.as_str())]);
            kernels(&workspace).unwrap()
        };
        let mut rows = vm::rows();
        assert_eq!(found(&rows), None);
        rows.swap(0, 1);
        assert!(found(&rows).is_some());
        rows.swap(0, 1);
        let left_out = rows.pop().unwrap();
        assert!(found(&rows).unwrap().contains(left_out));
    }
}
