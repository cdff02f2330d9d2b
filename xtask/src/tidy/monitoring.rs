//! Alerts and dashboard: the reference has each metric they use, each alert has tests and a section in troubleshooting, and
//! panels are complete.

use crate::monitoring::queries::{self, names};
use crate::monitoring::{ALERTS, ALERTS_TEST, DASHBOARD, FOLDER};
use crate::tidy::documents::{anchors, first_column};
use crate::workspace::Workspace;

const REFERENCE: &str = "docs/reference/metrics.md";
const RUNBOOKS: &str = "docs/operate/troubleshooting.md";
/// Beginning of the heads of the reference's tables.
const TABLE: &str = "| metric | type |";
/// Suffixes of a histogram's series.
const SUFFIXES: &[&str] = &["_bucket", "_count", "_sum"];
/// Prefix of metrics that every process has.
const OF_PROCESSES: &str = "process_";
const SEVERITIES: &[&str] = &["critical", "warning", "info"];

/// Checks the files of the folder.
///
/// # Errors
/// A file cannot be read.
pub(super) fn check(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    if !workspace.path(FOLDER).exists() {
        return Ok(Vec::new());
    }
    let text = |path: &str| anyhow::Ok(workspace.text(path)?.unwrap_or_default());
    let reference = text(REFERENCE)?;
    let known = first_column(&reference, TABLE);
    let is_known = |name: &str| {
        let is_there = |name: &str| known.iter().any(|one| one == name);
        let family = SUFFIXES.iter().find_map(|suffix| name.strip_suffix(suffix));
        is_there(name) || family.is_some_and(is_there) || name.starts_with(OF_PROCESSES)
    };
    let mut findings = Vec::new();
    for file in workspace.files(FOLDER)? {
        if ![".json", ".yaml"]
            .iter()
            .any(|ending| file.ends_with(ending))
        {
            continue;
        }
        for (number, line) in (1..).zip(text(&file)?.lines()) {
            for (_, name) in names(line).filter(|(_, name)| !is_known(name)) {
                findings.push(format!("{file}:{number}: `{name}` is not in {REFERENCE}"));
            }
        }
    }
    let file = |name: &str| format!("{FOLDER}/{name}");
    let tests = text(&file(ALERTS_TEST))?;
    let sections = anchors(&text(RUNBOOKS)?);
    for flaw in flaws(&text(&file(ALERTS))?, &tests, &sections) {
        findings.push(format!("{FOLDER}/{ALERTS}: {flaw}"));
    }
    if let Err(error) = queries::of_dashboard(&text(&file(DASHBOARD))?) {
        findings.push(format!("{FOLDER}/{DASHBOARD}: {error:#}"));
    }
    Ok(findings)
}

/// What each alert lacks; `sections` are anchors of the runbooks.
fn flaws(rules: &str, tests: &str, sections: &[String]) -> Vec<String> {
    let mut flaws = Vec::new();
    for rule in rules.split("- alert:").skip(1) {
        let name = rule.lines().next().unwrap_or_default().trim();
        let value = |key: &str| {
            let mut lines = rule.lines().map(str::trim);
            lines.find_map(|line| line.strip_prefix(key)?.strip_prefix(':').map(str::trim))
        };
        for key in ["summary", "description"] {
            if value(key).is_none_or(str::is_empty) {
                flaws.push(format!("{name} has no {key}"));
            }
        }
        if value("severity").is_none_or(|severity| !SEVERITIES.contains(&severity)) {
            flaws.push(format!(
                "{name} has none of the severities {}",
                SEVERITIES.join(", ")
            ));
        }
        let anchor = name.to_lowercase();
        if value("runbook_url") != Some(&format!("{RUNBOOKS}#{anchor}")) {
            flaws.push(format!("{name} has no runbook_url {RUNBOOKS}#{anchor}"));
        }
        if !sections.contains(&anchor) {
            flaws.push(format!("{name} has no section in {RUNBOOKS}"));
        }
        let of_alert = format!("alertname=\"{name}\", alertstate=\"firing\"");
        // Three series: silent, firing, and the firing alert's.
        if tests.matches(&of_alert).count() < 3 {
            flaws.push(format!(
                "{name} is not tested in {ALERTS_TEST}, silent and firing"
            ));
        }
    }
    flaws
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sample;

    const RULE: &str = "groups:\n- rules:\n  - alert: AditA\n    expr: adit_a_total > 0\n    labels:\n      severity: info\n    annotations:\n\
        \x20     summary: S\n      description: D.\n      runbook_url: docs/operate/troubleshooting.md#adita\n";

    fn found(rules: &str, expression: &str, runbooks: &str) -> Vec<String> {
        let source = r#""datasource":{"uid":"${datasource}"}"#;
        let dashboard = format!(
            r#"{{"panels":[{{"title":"T","description":"D.",{source},"fieldConfig":{{"defaults":{{"unit":"s"}}}},"targets":[{{{source},"expr":"{expression}"}}]}}]}}"#
        );
        let reference = "# M\n\n| metric | type |\n| --- | --- |\n| `adit_a_total` | counter |\n\n| metric | type |\n| --- | --- |\n\
                         | `adit_b_seconds` | histogram |\n";
        let tests = "alertname=\"AditA\", alertstate=\"firing\"\n".repeat(3);
        let (_folder, workspace) = sample(&[
            ("deploy/monitoring/alerts.yaml", rules),
            ("deploy/monitoring/alerts_test.yaml", &tests),
            ("deploy/monitoring/dashboard.json", &dashboard),
            (REFERENCE, reference),
            (RUNBOOKS, runbooks),
        ]);
        check(&workspace).unwrap()
    }

    #[test]
    fn an_unknown_metric_is_found() {
        let good = "adit_b_seconds_bucket + process_open_fds + adit_a_total";
        assert_eq!(found(RULE, good, "# T\n## AditA\n"), [""; 0]);
        for bad in ["adit_c", "adit_c_bucket", "konnectivity_network_proxy_x"] {
            let wrong =
                format!("deploy/monitoring/dashboard.json:1: `{bad}` is not in {REFERENCE}");
            assert_eq!(found(RULE, bad, "# T\n## AditA\n"), [wrong]);
        }
    }

    #[test]
    fn an_alert_without_test_section_or_text_is_found() {
        let runbooks = "# T\n## AditA\n";
        for (part, without) in [
            ("AditA", "AditB"),
            ("severity: info", "severity: page"),
            ("summary: S", ""),
            ("description: D.", "description:"),
            ("#adita", "#aditb"),
        ] {
            let findings = found(&RULE.replace(part, without), "adit_a_total", runbooks);
            assert!(!findings.is_empty(), "{part}");
        }
        assert_eq!(
            found(RULE, "adit_a_total", "# T\n"),
            [
                "deploy/monitoring/alerts.yaml: AditA has no section in docs/operate/troubleshooting.md"
            ]
        );
    }
}
