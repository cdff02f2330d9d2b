//! `cargo xtask monitoring`: the alerts pass their tests, and every query of alerts and dashboard finds its series in a Prometheus
//! that scrapes servers and agents. Where Go is installed, the dashboard is read by Grafana's schema.

mod fleet;
mod load;
mod prometheus;
pub(crate) mod queries;

use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use crate::script;
use crate::steps::{Outcome, lacking, run_command, seconds};
use crate::workspace::Workspace;
use fleet::Fleet;
use load::Load;
use prometheus::Prometheus;
use queries::{Query, selectors};

/// Where dashboard and alerts are.
pub(crate) const FOLDER: &str = "deploy/monitoring";
/// The rules, and their tests.
pub(crate) const ALERTS: &str = "alerts.yaml";
pub(crate) const ALERTS_TEST: &str = "alerts_test.yaml";
/// The dashboard.
pub(crate) const DASHBOARD: &str = "dashboard.json";

/// The stand-in for the Kubernetes API: an example of `adit-kube`. The fleet counts leases at it.
const KUBERNETES: &str = "kubernetes_api";

/// Longest time to build a program.
const BUILD: Duration = Duration::from_secs(20 * 60);
/// Longest time for `promtool`.
const PROMTOOL: Duration = Duration::from_secs(20);
/// Until every query has its series, from the start of the first process.
const PATIENCE: Duration = Duration::from_secs(120);
/// Between two attempts.
const PAUSE: Duration = Duration::from_secs(2);

/// What public rules ask of upstream's server, here of the one with upstream's command line. KKP has a rule on each of these
/// metrics, and an alert below two agents.
const UPSTREAM: &[&str] = &[
    r#"konnectivity_network_proxy_server_ready_backend_connections{job="konnectivity-server"} == 2"#,
    r#"sum(rate(konnectivity_network_proxy_server_dial_failure_count{job="konnectivity-server"}[15s])) by (reason) > 0"#,
    r#"sum(konnectivity_network_proxy_server_full_receive_channels{job="konnectivity-server"})"#,
];

/// Tests the rules, then runs all queries.
///
/// # Errors
/// A rule or its test is wrong, or a query fails or finds nothing.
pub(crate) fn run(workspace: &Workspace) -> anyhow::Result<Outcome> {
    if let Some(why) = lacking(&["promtool", "prometheus"]) {
        return Ok(Outcome::Skipped(format!(
            "{why}: Debian's package `prometheus` has both"
        )));
    }
    let folder = workspace.path(FOLDER);
    for (what, file) in [("check", ALERTS), ("test", ALERTS_TEST)] {
        let mut promtool = Command::new("promtool");
        promtool.current_dir(&folder).args([what, "rules", file]);
        run_command(&mut promtool, PROMTOOL)?;
    }
    let mut grafana = script::command(workspace, "grafana");
    match script::outcome(grafana.arg(folder.join(DASHBOARD))).context(DASHBOARD)? {
        Outcome::Done => println!("monitoring: the dashboard passes Grafana's schema"),
        Outcome::Skipped(why) => {
            println!("monitoring: SKIPPED the dashboard by Grafana's schema: {why}");
        }
    }
    let program = build(workspace, "adit", &["--bin", "adit"])?;
    let kubernetes = build(workspace, KUBERNETES, &["--example", KUBERNETES])?;

    let started = Instant::now();
    let scratch = tempfile::tempdir()?;
    let mut fleet = Fleet::start(&program, &kubernetes, scratch.path())?;
    let load = Load::start(&fleet.frontends)?;
    let alerts = folder.join(ALERTS);
    let prometheus = Prometheus::start(scratch.path(), &alerts, &fleet.jobs)?;
    let dashboard = workspace
        .text(&format!("{FOLDER}/{DASHBOARD}"))?
        .context("the dashboard is text")?;
    let mut left = queries::of_dashboard(&dashboard)?;
    let on_dashboard = left.len();
    // The rules as Prometheus has read them.
    left.extend(prometheus.rules(started + PATIENCE)?);
    let rules = left.len() - on_dashboard;
    let upstream = UPSTREAM.iter().map(|expression| Query {
        place: "a public rule on upstream's metrics".to_owned(),
        expression: (*expression).to_owned(),
        must_match: true,
    });
    left.extend(upstream);
    let missing = settle(&prometheus, left, started + PATIENCE)?;
    fleet.check()?;
    load.check()?;
    for text in &missing {
        println!("  {text}");
    }
    ensure!(missing.is_empty(), "{} queries, see above", missing.len());
    let firing = prometheus.firing()?;
    ensure!(
        firing.is_empty(),
        "alerts of a sound fleet: {}",
        firing.join(", ")
    );
    println!(
        "monitoring: {on_dashboard} queries of the dashboard and {rules} alerts in {}",
        seconds(started.elapsed())
    );
    Ok(Outcome::Done)
}

/// Builds a program by its name.
fn build(workspace: &Workspace, name: &str, which: &[&str]) -> anyhow::Result<PathBuf> {
    let artifacts = workspace.artifacts(&[&["build", "--quiet"], which].concat(), BUILD)?;
    let program = artifacts.into_iter().find(|it| it.target.name == name);
    let program = program.with_context(|| format!("cargo names no program `{name}`"))?;
    Ok(program.program)
}

/// Runs queries until each has found its series, and returns what is wrong with the others at the end of the time.
///
/// # Errors
/// Prometheus does not answer, or refuses a query.
fn settle(
    prometheus: &Prometheus,
    mut left: Vec<Query>,
    until: Instant,
) -> anyhow::Result<Vec<String>> {
    loop {
        let mut missing = Vec::new();
        let mut next = Vec::new();
        for query in left {
            if let Some(what) = unmatched(prometheus, &query)? {
                missing.push(format!("{}: no series: {what}", query.place));
                next.push(query);
            }
        }
        if next.is_empty() || Instant::now() > until {
            return Ok(missing);
        }
        left = next;
        thread::sleep(PAUSE);
    }
}

/// The part of a query that finds nothing: the whole of it, or a selector of an alert, which itself finds nothing in a sound
/// fleet.
fn unmatched(prometheus: &Prometheus, query: &Query) -> anyhow::Result<Option<String>> {
    let count = prometheus
        .count(&query.expression)
        .with_context(|| query.place.clone())?;
    if query.must_match {
        return Ok((count == 0).then(|| query.expression.clone()));
    }
    let selectors = selectors(&query.expression);
    if selectors.is_empty() {
        bail!("{}: no metric in `{}`", query.place, query.expression);
    }
    for selector in selectors {
        if prometheus.count(&selector)? == 0 {
            return Ok(Some(selector));
        }
    }
    Ok(None)
}
