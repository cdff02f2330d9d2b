//! The page of all metrics.

use super::declared::{Declared, Family, declared_by};
use crate::generated_page::{cell, is_current};
use crate::{AgentMetrics, ServerMetrics};

const INTRODUCTION: &str = "\
# Metrics

What a scrape of `/metrics` may show. A family without series is absent until its first. This page is written by `cargo xtask docs` from
what `/metrics` says itself.
";

fn row(name: &str, family: &Family, values: Option<&Vec<(&str, &str)>>) -> String {
    let labels: Vec<String> = family
        .labels
        .iter()
        .map(|label| format!("`{label}`"))
        .collect();
    let labels = if labels.is_empty() {
        "\u{2013}".to_owned()
    } else {
        labels.join(", ")
    };
    let mut text = format!(
        "| `{name}` | {} | {labels} | {}",
        family.kind.to_lowercase(),
        cell(&family.help).trim_end_matches('.')
    );
    let values: Vec<String> = values
        .into_iter()
        .flatten()
        .map(|(value, meaning)| format!("`{value}`: {}", cell(meaning).trim_end_matches('.')))
        .collect();
    if !values.is_empty() {
        text.push_str(&format!(". {}", values.join("; ")));
    }
    text.push_str(" |\n");
    text
}

fn table(title: &str, all: &Declared, is_in: impl Fn(&str) -> bool) -> String {
    let mut text = format!(
        "\n## {title}\n\n| metric | type | labels | meaning |\n| --- | --- | --- | --- |\n"
    );
    for (name, family) in all.families.iter().filter(|(name, _)| is_in(name)) {
        text.push_str(&row(name, family, all.values.get(name)));
    }
    text
}

#[test]
fn page_of_metrics_is_current() {
    let server = declared_by(|| ServerMetrics::new(&["default"]));
    let agent = declared_by(AgentMetrics::new);
    let is_ours = |name: &str| name.starts_with("adit_");
    let is_shared =
        |name: &str| agent.families.contains_key(name) && server.families.contains_key(name);
    let tables = [
        table("Of both", &server, |name| is_ours(name) && is_shared(name)),
        table("Of the server", &server, |name| {
            is_ours(name) && !is_shared(name)
        }),
        table("Of the agent", &agent, |name| {
            is_ours(name) && !is_shared(name)
        }),
        table("Upstream's, of the server", &server, |name| !is_ours(name)),
        table("Upstream's, of the agent", &agent, |name| !is_ours(name)),
    ];
    is_current("metrics.md", &format!("{INTRODUCTION}{}", tables.concat()));
}
