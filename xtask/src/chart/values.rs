//! The values of the chart: their table in its README, and whether the schema has the same ones.
//!
//! `values.yaml` is read line by line, because its comments are what the table says.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use crate::workspace::Workspace;

/// The page with the table.
pub(super) const README: &str = "deploy/chart/README.md";
const VALUES: &str = "deploy/chart/values.yaml";
const SCHEMA: &str = "deploy/chart/values.schema.json";
/// What stands around the tables.
const BEGIN: &str = "<!-- values: begin -->\n";
const END: &str = "<!-- values: end -->\n";
/// Spaces of a level.
const INDENT: usize = 2;

/// A value with its comment, or the head of a section.
#[derive(Debug, PartialEq, Eq)]
enum Item {
    Section(String),
    Value {
        path: String,
        default: String,
        about: String,
    },
}

/// The README with the tables of today.
///
/// # Errors
/// A value has no comment, or the page no place for the tables.
pub(super) fn readme(workspace: &Workspace) -> anyhow::Result<String> {
    let page = workspace.text(README)?.context("README.md is text")?;
    let place = page.split_once(BEGIN).and_then(|(before, rest)| {
        let (_old, after) = rest.split_once(END)?;
        Some((before, after))
    });
    let (before, after) = place.with_context(|| format!("{README} has no place for the tables"))?;
    let tables = tables(&items(&text(workspace)?)?);
    Ok(format!("{before}{BEGIN}{tables}{END}{after}"))
}

/// Whether the schema has a property for each value, and no other one. Helm looks at the first half itself, of values that are given.
///
/// # Errors
/// Properties or values that the other file does not have.
pub(super) fn matches_schema(workspace: &Workspace) -> anyhow::Result<()> {
    let schema = workspace.text(SCHEMA)?.unwrap_or_default();
    let schema: Value = serde_json::from_str(&schema).context(SCHEMA)?;
    let values: BTreeSet<String> = items(&text(workspace)?)?
        .into_iter()
        .filter_map(|item| match item {
            Item::Value { path, .. } => Some(path),
            Item::Section(_) => None,
        })
        .collect();
    let mut properties = BTreeSet::new();
    collect(&schema, &schema, "", &values, &mut properties);
    // Helm gives it to each chart.
    properties.remove("global");
    let odd: Vec<&String> = properties.symmetric_difference(&values).collect();
    ensure!(
        odd.is_empty(),
        "in one of {VALUES} and {SCHEMA} only: {odd:?}"
    );
    Ok(())
}

fn text(workspace: &Workspace) -> anyhow::Result<String> {
    workspace.text(VALUES)?.context("values.yaml is text")
}

/// Paths of the properties, down to what `values.yaml` has as one value.
fn collect(
    root: &Value,
    node: &Value,
    path: &str,
    values: &BTreeSet<String>,
    found: &mut BTreeSet<String>,
) {
    let name = node.get("$ref").and_then(Value::as_str);
    let shared = name.and_then(|name| root.pointer(name.trim_start_matches('#')));
    let properties = shared.unwrap_or(node).get("properties");
    match properties.and_then(Value::as_object) {
        Some(properties) if !values.contains(path) => {
            for (key, property) in properties {
                let below = match path {
                    "" => key.clone(),
                    above => format!("{above}.{key}"),
                };
                collect(root, property, &below, values, found);
            }
        }
        _ => {
            found.insert(path.to_owned());
        }
    }
}

fn items(text: &str) -> anyhow::Result<Vec<Item>> {
    let mut items = Vec::new();
    let mut parents: Vec<&str> = Vec::new();
    let mut about: Option<&str> = None;
    for (number, line) in (1..).zip(text.lines()) {
        let trimmed = line.trim_start();
        if let Some(title) = line.strip_prefix("## ") {
            items.push(Item::Section(title.to_owned()));
            about = None;
        } else if let Some(comment) = trimmed.strip_prefix("# ") {
            about = Some(comment);
        } else if trimmed.is_empty() {
            about = None;
        } else {
            let level = (line.len() - trimmed.len()) / INDENT;
            let Some((key, default)) = trimmed.split_once(':') else {
                bail!("{VALUES}:{number}: write a value on the line of its key");
            };
            ensure!(level <= parents.len(), "{VALUES}:{number}: indentation");
            parents.truncate(level);
            parents.push(key);
            let comment = about.take();
            if default.is_empty() {
                continue;
            }
            let Some(about) = comment else {
                bail!("{VALUES}:{number}: {key} has no comment");
            };
            items.push(Item::Value {
                path: parents.join("."),
                default: default.trim().to_owned(),
                about: about.to_owned(),
            });
        }
    }
    Ok(items)
}

fn tables(items: &[Item]) -> String {
    let mut text = String::new();
    for item in items {
        let written = match item {
            Item::Section(title) => writeln!(
                text,
                "\n### {title}\n\n| value | default | meaning |\n| --- | --- | --- |"
            ),
            Item::Value {
                path,
                default,
                about,
            } => {
                let about = about.replace('|', "\\|");
                writeln!(text, "| `{path}` | `{default}` | {about} |")
            }
        };
        written.expect("a string takes it");
    }
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_their_path_their_default_and_their_comment() {
        let text = "# Top.\n\n## General\n\na:\n  # Of b.\n  b: []\n# Of c.\nc: {d: 1}\n";
        let value = |path: &str, default: &str, about: &str| Item::Value {
            path: path.to_owned(),
            default: default.to_owned(),
            about: about.to_owned(),
        };
        let expected = vec![
            Item::Section("General".to_owned()),
            value("a.b", "[]", "Of b."),
            value("c", "{d: 1}", "Of c."),
        ];
        assert_eq!(items(text).unwrap(), expected);
        assert!(tables(&expected).contains("| `c` | `{d: 1}` | Of c. |"));
    }

    #[test]
    fn a_value_without_a_comment_is_named() {
        let error = items("# Of a.\na: 1\nb: 2\n").unwrap_err().to_string();
        assert!(error.contains(":3: b has no comment"), "{error}");
    }
}
