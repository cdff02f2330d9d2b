//! One turn of one peer: a fresh stack, with a separate run of the load tool for each measurement.

use std::time::{Duration, Instant};

use adit_perf_plan::{Dialect, Plan, Sample, Shape};
use anyhow::{Context as _, ensure};
use xtask_kit::net::http_get;

use super::peer::{Peer, Route};
use super::process::Site;
use super::programs::Programs;
use crate::steps::output_of;

/// Time limit of a measurement beyond its planned duration: the load tool limits itself, and this limits the tool.
const LIMIT: Duration = Duration::from_secs(10 * 60);

/// After failed measurements of a turn have taken this long together, its remaining measurements are skipped: a peer that hangs
/// would take minutes for each, in every round.
const PATIENCE: Duration = Duration::from_secs(45);

/// Key of the server's agent port among a route's addresses; also the name of a measurement that needs it.
pub(crate) const AGENTS: &str = "agents";
/// Name of the other measurement that needs the agent port.
const LINKS: &str = "links";
/// Key of the TokenReview server among the addresses of a route whose agents use tokens.
pub(crate) const REVIEWS: &str = "reviews";
/// Key of a server's metrics port among a route's addresses.
pub(crate) const METRICS: &str = "metrics";

/// Outcome of each measurement, by name. If the stack does not start, all of them fail.
pub(crate) fn measure<'a>(
    programs: &Programs,
    peer: &Peer,
    dialect: Dialect,
    plans: &[(&'a str, Plan)],
    long_path: Option<&Shape>,
) -> Vec<(&'a str, Result<Sample, String>)> {
    let start = || -> anyhow::Result<(Site, Route)> {
        ensure!(
            peer.may_span || long_path.is_none(),
            "{} cannot be measured over a long path",
            peer.name
        );
        let site = Site::new(programs, long_path)?;
        let route = (peer.start)(&site, dialect)?;
        Ok((site, route))
    };
    let started = start();
    with_patience(plans, |name, plan| {
        let began = Instant::now();
        let outcome = match &started {
            Err(error) => return (Err(format!("{error:#}")), Duration::ZERO),
            Ok((_, route)) if [AGENTS, LINKS].contains(&name) && route.agent_port().is_none() => {
                Ok(Sample::default())
            }
            Ok((site, route)) => load(site, route, plan),
        };
        (
            outcome.map_err(|error| format!("{error:#}")),
            began.elapsed(),
        )
    })
}

/// Outcomes of all plans; plans after [`PATIENCE`] are reported as skipped. `one` returns its duration, too.
fn with_patience<'a, P>(
    plans: &[(&'a str, P)],
    mut one: impl FnMut(&'a str, &P) -> (Result<Sample, String>, Duration),
) -> Vec<(&'a str, Result<Sample, String>)> {
    let (mut failed, mut lost) = (Vec::new(), Duration::ZERO);
    let tried = |(name, plan): &(&'a str, P)| {
        if lost >= PATIENCE {
            let (why, seconds) = (failed.join(", "), lost.as_secs());
            let why = format!("not tried: {why} failed before it, after {seconds} s");
            return (*name, Err(why));
        }
        let (outcome, took) = one(name, plan);
        if outcome.is_err() {
            failed.push(*name);
            lost += took;
        }
        (*name, outcome)
    };
    plans.iter().map(tried).collect()
}

/// Runs the load tool once against a started path.
///
/// # Errors
/// The load tool's error, or its time limit, or a failed read of the server's metrics.
pub(crate) fn load(site: &Site, route: &Route, plan: &Plan) -> anyhow::Result<Sample> {
    let mut command = site.command(&route.place, site.load_tool(route.dialect)?);
    command.args([
        "run".to_owned(),
        format!("--way={}", route.dialect.protocol()),
        format!("--targets={}", serde_json::to_string(&route.targets)?),
        format!("--control={}", route.targets["control"]),
        format!("--plan={}", serde_json::to_string(plan)?),
    ]);
    if route.dialect == Dialect::GrpcGoReused {
        command.arg("--reuse");
    }
    if route.dialect == Dialect::GrpcGoTls {
        command.arg(format!("--certs={}", site.at("")));
    }
    if let Some(frontend) = &route.frontend {
        command.arg(format!("--frontend={frontend}"));
    }
    if let Some(port) = route.agent_port() {
        command.arg(format!("--agents={port}"));
        command.arg(format!("--certs={}", site.at("")));
        if route.targets.contains_key(REVIEWS) {
            command.arg("--tokens");
        }
    }
    for (role, id) in &route.processes {
        command.arg(format!("--process={role}={id}"));
    }
    let idle = plan.idle_most().zip(route.targets.get(METRICS));
    let scrape = || {
        let scraped = idle.map(|(_, address)| http_get(address, "/metrics"));
        scraped.transpose()
    };
    let before = scrape()?;
    let printed = output_of(&mut command, LIMIT)?.stdout;
    let mut sample: Sample =
        serde_json::from_str(&printed).context("the load tool prints one JSON object")?;
    if let (Some((count, _)), Some(before), Some(after)) = (idle, before, scrape()?)
        && let Some(percent) = lanes_percent(&before, &after)
    {
        sample.value(format!("idle_{count}_lanes_percent"), percent);
    }
    Ok(sample)
}

/// Percentage of the tunnels opened between two reads of an Adit server's metrics that are on lanes; `None` if none was opened,
/// and of other servers, which lack these metrics.
fn lanes_percent(before: &str, after: &str) -> Option<f64> {
    let opened = |metrics: &str, is_counted: &dyn Fn(&str) -> bool| -> f64 {
        let labelled = |line: &str| {
            let rest = line.strip_prefix("adit_tunnels_opened_total{path=\"")?;
            let (path, count) = rest.split_once("\"} ")?;
            is_counted(path).then(|| count.trim().parse::<f64>().ok())?
        };
        metrics.lines().filter_map(labelled).sum()
    };
    let since =
        |is_counted: &dyn Fn(&str) -> bool| opened(after, is_counted) - opened(before, is_counted);
    let all = since(&|_path| true);
    (all > 0.0).then(|| 100.0 * since(&|path| path != "link") / all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hanging_peer_is_skipped_for_later_measurements() {
        let plans = ["idle", "echo", "paced", "dials", "bulk"].map(|name| (name, ()));
        let mut tried = Vec::new();
        let outcomes = with_patience(&plans, |name, ()| {
            tried.push(name);
            let (outcome, seconds) = match name {
                // Success may take as long as it likes, and quick failures do not add up to much.
                "idle" => (Ok(Sample::default()), 600),
                "echo" => (Err("refused".to_owned()), 1),
                _ => (Err("it hangs".to_owned()), 44),
            };
            (outcome, Duration::from_secs(seconds))
        });
        assert_eq!(tried, ["idle", "echo", "paced"]);
        for (_, outcome) in &outcomes[3..] {
            let why = outcome.as_ref().expect_err("nobody tried");
            assert_eq!(why, "not tried: echo, paced failed before it, after 45 s");
        }
    }

    #[test]
    fn lane_share_counts_all_kinds_of_lanes() {
        let text = |lane, raw, link| {
            format!(
                "adit_tunnels_opened_total{{path=\"lane\"}} {lane}\nadit_tunnels_opened_total{{path=\"link\"}} {link}\n\
                 adit_tunnels_opened_total{{path=\"raw-lane\"}} {raw}\nadit_node_tunnels_opened_total 99\n"
            )
        };
        let (before, after) = (text(10, 5, 7), text(1000, 65, 7 + 150));
        assert_eq!(lanes_percent(&before, &after), Some(87.5));
        assert_eq!(lanes_percent(&after, &after), None);
    }
}
