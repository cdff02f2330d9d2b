//! The package diagram in docs/architecture.md, generated from the manifests. A package shows its direct uses, except those it
//! also reaches through another package.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, ensure};
use toml::Table;

use crate::workspace::Workspace;

const PAGE: &str = "docs/architecture.md";
const BEGIN: &str = "<!-- packages -->\n";
const END: &str = "<!-- /packages -->\n";
/// Folders of the product's packages.
const PRODUCT: &[&str] = &["tunnel-daemon", "ebpf-programs/abi"];

type Uses = BTreeMap<String, BTreeSet<String>>;

/// Writes the diagram into its page.
///
/// # Errors
/// A manifest or the page cannot be read, or the page cannot be written.
pub(super) fn write(workspace: &Workspace) -> anyhow::Result<()> {
    let (_has, wanted) = pages(workspace)?;
    std::fs::write(workspace.path(PAGE), wanted).with_context(|| format!("write {PAGE}"))
}

/// Reports a diagram that differs from the manifests.
///
/// # Errors
/// A manifest or the page cannot be read.
pub(crate) fn check(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let (has, wanted) = pages(workspace)?;
    let stale = (has != wanted)
        .then(|| format!("{PAGE}: the drawing of packages is stale, run `cargo xtask docs`"));
    Ok(stale.into_iter().collect())
}

/// The page's present text and its wanted text.
fn pages(workspace: &Workspace) -> anyhow::Result<(String, String)> {
    let has = workspace.text(PAGE)?.unwrap_or_default();
    let (before, rest) = has
        .split_once(BEGIN)
        .with_context(|| format!("{PAGE} has no line `{}`", BEGIN.trim_end()))?;
    let (_old, after) = rest
        .split_once(END)
        .with_context(|| format!("{PAGE} has no line `{}`", END.trim_end()))?;
    let drawing = drawing(&uses(workspace)?);
    let wanted = format!("{before}{BEGIN}```text\n{drawing}```\n{END}{after}");
    Ok((has, wanted))
}

/// Packages of the product that each package uses, from its manifest.
fn uses(workspace: &Workspace) -> anyhow::Result<Uses> {
    let mut all = Uses::new();
    let top: Table = toml::from_str(&workspace.text("Cargo.toml")?.unwrap_or_default())?;
    let members = top.get("workspace").and_then(|table| table.get("members"));
    for folder in members
        .and_then(|list| list.as_array())
        .context("Cargo.toml names no members")?
    {
        let folder = folder.as_str().unwrap_or_default();
        let is_product = PRODUCT.iter().any(|product| folder.starts_with(product));
        if !is_product || folder.contains("/tests/") {
            continue;
        }
        let file = format!("{folder}/Cargo.toml");
        let manifest: Table = toml::from_str(&workspace.text(&file)?.unwrap_or_default())
            .with_context(|| file.clone())?;
        let name = manifest
            .get("package")
            .and_then(|package| package.get("name"));
        let name = name.and_then(|name| name.as_str()).unwrap_or_default();
        ensure!(!name.is_empty(), "{file} names no package");
        let used = manifest
            .get("dependencies")
            .and_then(|used| used.as_table());
        let used = used.into_iter().flat_map(Table::keys);
        let used = used.filter(|used| used.starts_with("adit-")).cloned();
        all.insert(name.to_owned(), used.collect());
    }
    Ok(all)
}

/// One line per package; packages come before the packages they use.
fn drawing(uses: &Uses) -> String {
    let mut left: BTreeSet<&str> = uses.keys().map(String::as_str).collect();
    let mut out = String::new();
    while !left.is_empty() {
        let is_used = |name: &str| {
            let mut others = left.iter().filter_map(|other| uses.get(*other));
            others.any(|used| used.contains(name))
        };
        let row: Vec<&str> = left.iter().copied().filter(|name| !is_used(name)).collect();
        for name in &row {
            left.remove(name);
            let direct = direct(uses, name);
            let arrow = if direct.is_empty() { "" } else { "──► " };
            let line = format!("{:<10} {arrow}{}", short(name), direct.join(", "));
            out += line.trim_end();
            out.push('\n');
        }
        if row.is_empty() {
            break; // Only a cycle leads here, and cargo refuses cycles.
        }
    }
    out
}

/// Packages that `name` uses, except those it also reaches through another package.
fn direct<'a>(uses: &'a Uses, name: &str) -> Vec<&'a str> {
    let used = || uses.get(name).into_iter().flatten();
    let through = |one: &String| used().any(|other| other != one && reaches(uses, other, one));
    used()
        .filter(|one| !through(one))
        .map(|one| short(one))
        .collect()
}

fn reaches(uses: &Uses, from: &str, to: &str) -> bool {
    let used = uses.get(from).into_iter().flatten();
    used.into_iter()
        .any(|next| next == to || reaches(uses, next, to))
}

fn short(name: &str) -> &str {
    name.strip_prefix("adit-").unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transitive_dependencies_have_no_arrow() {
        let uses: Uses = [
            ("adit", &["adit-net", "adit-core"][..]),
            ("adit-net", &["adit-core"]),
            ("adit-core", &[]),
        ]
        .map(|(name, used)| {
            let used = used.iter().map(|used| (*used).to_owned());
            (name.to_owned(), used.collect())
        })
        .into();
        let text = drawing(&uses);
        assert_eq!(text, "adit       ──► net\nnet        ──► core\ncore\n");
    }

    #[test]
    fn a_stale_drawing_is_found_and_written() {
        let page = format!("# A\n{BEGIN}old\n{END}rest\n");
        let (_folder, workspace) = crate::tidy::sample(&[
            ("Cargo.toml", "[workspace]\nmembers = [\"tunnel-daemon\"]\n"),
            ("tunnel-daemon/Cargo.toml", "[package]\nname = \"adit\"\n"),
            (PAGE, &page),
        ]);
        assert_eq!(check(&workspace).unwrap().len(), 1);
        write(&workspace).unwrap();
        assert_eq!(check(&workspace).unwrap(), Vec::<String>::new());
        let text = workspace.text(PAGE).unwrap().unwrap();
        assert!(
            text.contains("```text\nadit\n```") && text.ends_with("rest\n"),
            "{text}"
        );
    }
}
