//! The page of all metrics.

use std::any::type_name;
use std::cell::RefCell;
use std::collections::BTreeMap;

use prometheus::core::Collector;

use crate::generated_page::{cell, is_current};
use crate::labels::Label;
use crate::{AgentMetrics, ServerMetrics};

const INTRODUCTION: &str = "\
# Metrics

What a scrape of `/metrics` may show. A family without series is absent until its first. This page is written by `cargo xtask docs` from
what `/metrics` says itself.
";

#[derive(Clone, PartialEq, Eq)]
struct Family {
    kind: &'static str,
    labels: Vec<String>,
    help: String,
}

/// Families by name; values of their label, with what they mean.
#[derive(Default)]
struct Declared {
    families: BTreeMap<String, Family>,
    values: BTreeMap<String, Vec<(&'static str, &'static str)>>,
}

thread_local! {
    static DECLARED: RefCell<Declared> = RefCell::default();
}

/// One was declared.
pub(super) fn family<C: Collector>(collector: &C) {
    let kinds = ["Counter", "Gauge", "Histogram"];
    let kind = kinds
        .into_iter()
        .find(|kind| type_name::<C>().contains(kind));
    DECLARED.with_borrow_mut(|declared| {
        for desc in collector.desc() {
            let family = Family {
                kind: kind.expect("one of the three"),
                labels: desc.variable_labels.clone(),
                help: desc.help.clone(),
            };
            declared.families.insert(desc.fq_name.clone(), family);
        }
    });
}

/// One that has a series for each value.
pub(super) fn values<L: Label>(name: &str) {
    let values = L::ALL.iter().map(|value| (value.as_str(), value.meaning()));
    DECLARED.with_borrow_mut(|declared| declared.values.insert(name.to_owned(), values.collect()));
}

fn declared_by<T>(register: impl FnOnce() -> T) -> Declared {
    DECLARED.take();
    register();
    DECLARED.take()
}

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
