//! The queries of the dashboard, and the selectors of a query.

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

/// What Grafana puts in for its variables, here.
const VARIABLES: &[(&str, &str)] = &[
    ("$__rate_interval", "15s"),
    ("$cluster", ".*"),
    ("$job", ".*"),
    ("$instance", ".*"),
    ("$budget", "67108864"),
];
/// How names of metrics begin.
const PREFIXES: &[&str] = &["adit_", "konnectivity_network_proxy_", "process_"];

/// A query, and where it stands.
#[derive(Debug)]
pub(crate) struct Query {
    pub(crate) place: String,
    pub(crate) expression: String,
    /// Whether the query as a whole finds series. An alert finds none in a sound fleet, but its selectors do.
    pub(crate) must_match: bool,
}

/// The queries of a dashboard, with values for its variables.
///
/// # Errors
/// It is no dashboard, a panel lacks what a reader needs, or a variable is not known here.
pub(crate) fn of_dashboard(text: &str) -> anyhow::Result<Vec<Query>> {
    let dashboard: Value = serde_json::from_str(text).context("the dashboard is JSON")?;
    let panels = dashboard["panels"].as_array();
    let panels = panels.context("a dashboard has panels")?;
    let mut queries = Vec::new();
    let is_collapsed = |panel: &&Value| {
        panel["panels"]
            .as_array()
            .is_some_and(|inner| !inner.is_empty())
    };
    if let Some(row) = panels.iter().find(is_collapsed) {
        bail!(
            "row {} is collapsed, so its panels would not be checked: expand it",
            row["title"]
        );
    }
    for panel in panels.iter().filter(|panel| panel["type"] != "row") {
        let title = panel["title"].as_str().unwrap_or_default();
        let place = format!("panel `{title}`");
        ensure!(!title.is_empty(), "a panel has no title");
        for (what, value) in [
            ("description", &panel["description"]),
            ("unit", &panel["fieldConfig"]["defaults"]["unit"]),
        ] {
            let is_there = value.as_str().is_some_and(|text| !text.is_empty());
            ensure!(is_there, "{place} has no {what}");
        }
        let targets = panel["targets"].as_array();
        let targets = targets.with_context(|| format!("{place} has no queries"))?;
        for target in targets {
            for source in [&panel["datasource"]["uid"], &target["datasource"]["uid"]] {
                ensure!(
                    source == "${datasource}",
                    "{place} does not ask the data source of the variable"
                );
            }
            let expression = target["expr"].as_str().unwrap_or_default();
            let expression = substituted(expression);
            ensure!(
                !expression.contains('$'),
                "{place} has an unknown variable: {expression}"
            );
            queries.push(Query {
                place: place.clone(),
                expression,
                must_match: true,
            });
        }
    }
    ensure!(!queries.is_empty(), "the dashboard has no queries");
    Ok(queries)
}

fn substituted(expression: &str) -> String {
    let mut text = expression.to_owned();
    for (variable, value) in VARIABLES {
        text = text.replace(variable, value);
    }
    text
}

/// The selectors of a query: names of metrics, each with its labels.
pub(crate) fn selectors(expression: &str) -> Vec<String> {
    names(expression)
        .map(|(at, name)| {
            let rest = expression.get(at + name.len()..).unwrap_or_default();
            let labels = rest.strip_prefix('{').map_or(0, closing_brace);
            let end = at + name.len() + labels;
            expression.get(at..end).unwrap_or(name).to_owned()
        })
        .collect()
}

/// Length of labels up to their closing brace, both braces included. Braces in quotes do not count.
fn closing_brace(labels: &str) -> usize {
    let mut is_quoted = false;
    let end = labels.char_indices().find(|(_, c)| {
        is_quoted ^= *c == '"';
        *c == '}' && !is_quoted
    });
    end.map_or(0, |(at, _)| at + 2)
}

/// Words of a text that are names of metrics, each with its place.
pub(crate) fn names(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut at = 0;
    let words = text.split(move |c| !is_part(c)).map(move |word| {
        let start = at;
        // What stands between two words is one byte, or the first byte of a character of several.
        at += word.len()
            + text
                .get(start + word.len()..)
                .and_then(|rest| rest.chars().next())
                .map_or(0, char::len_utf8);
        (start, word)
    });
    words.filter(|(_, word)| PREFIXES.iter().any(|prefix| word.starts_with(prefix)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selectors_keep_their_labels() {
        let expression = "sum by (le) (rate(adit_a_bucket{x=~\"a{1}|}\", y=\"b\"}[5m])) / adit_b > 1 and on (é) process_c{}";
        let expected = [
            "adit_a_bucket{x=~\"a{1}|}\", y=\"b\"}",
            "adit_b",
            "process_c{}",
        ];
        assert_eq!(selectors(expression), expected);
    }

    #[test]
    fn incomplete_panels_are_refused() {
        let source = r#""datasource":{"uid":"${datasource}"}"#;
        let whole = format!(
            r#"{{"panels":[{{"type":"row"}},{{"type":"stat","title":"T","description":"D.",{source},
            "fieldConfig":{{"defaults":{{"unit":"s"}}}},
            "targets":[{{{source},"expr":"rate(adit_a{{job=~\"$job\"}}[$__rate_interval])"}}]}}]}}"#
        );
        let queries = of_dashboard(&whole).unwrap();
        assert_eq!(queries.len(), 1);
        assert_eq!(queries[0].expression, "rate(adit_a{job=~\".*\"}[15s])");
        for (part, without) in [
            ("\"title\":\"T\"", "\"title\":\"\""),
            ("\"description\":\"D.\",", ""),
            ("\"unit\":\"s\"", ""),
            ("${datasource}", "mine"),
            ("$job", "$host"),
        ] {
            assert!(
                of_dashboard(&whole.replacen(part, without, 1)).is_err(),
                "{part}"
            );
        }
    }
}
