//! One turn of one peer: a fresh stack, with a separate run of the load tool for each measurement.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use super::long_path::Shape;
use super::peer::{Peer, Route, http_get};
use super::process::Site;
use super::results::Sample;
use super::scenario::{Dialect, LoadPlan};
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
const REVIEWS: &str = "reviews";
/// Key of a server's metrics port among a route's addresses.
pub(crate) const METRICS: &str = "metrics";

/// The load generators.
#[derive(Clone, Copy)]
pub(crate) struct Tools<'a> {
    /// `adit-load`.
    pub(crate) load: &'a Path,
    /// The load tool with the Go client library, if a dialect needs it.
    pub(crate) go_load: Option<&'a Path>,
}

/// Outcome of each measurement, by name. If the stack does not start, all of them fail.
pub(crate) fn measure<'a>(
    tools: Tools<'_>,
    peer: &Peer,
    dialect: Dialect,
    plans: &[(&'a str, LoadPlan)],
    long_path: Option<&Shape>,
) -> Vec<(&'a str, Result<Sample, String>)> {
    let start = || -> anyhow::Result<(Site, Route)> {
        ensure!(
            peer.may_span || long_path.is_none(),
            "{} cannot be measured over a long path",
            peer.name
        );
        let site = Site::new(tools.load, long_path)?;
        let route = peer.start(&site, dialect)?;
        Ok((site, route))
    };
    let (site, route) = match start() {
        Ok(started) => started,
        Err(error) => {
            let failed = |(name, _): &(&'a str, LoadPlan)| (*name, Err(format!("{error:#}")));
            return plans.iter().map(failed).collect();
        }
    };
    // Not every path has an agent port, and the Go load tool has no agents to connect.
    let has_agents = route.dialect != Dialect::GrpcGo && route.targets.contains_key(AGENTS);
    with_patience(plans, |name, plan| {
        if [AGENTS, LINKS].contains(&name) && !has_agents {
            return (Ok(Sample::default()), Duration::ZERO);
        }
        let started = Instant::now();
        let outcome = load(tools, &site, &route, plan).map_err(|error| format!("{error:#}"));
        (outcome, started.elapsed())
    })
}

/// Outcomes of all plans; plans after [`PATIENCE`] are reported as skipped. `one` returns its duration, too.
fn with_patience<'a, P>(
    plans: &[(&'a str, P)],
    mut one: impl FnMut(&'a str, &P) -> (Result<Sample, String>, Duration),
) -> Vec<(&'a str, Result<Sample, String>)> {
    let (mut failed, mut lost) = (Vec::new(), Duration::ZERO);
    let mut outcomes = Vec::with_capacity(plans.len());
    for (name, plan) in plans {
        if lost >= PATIENCE {
            let (why, seconds) = (failed.join(", "), lost.as_secs());
            let why = format!("not tried: {why} failed before it, after {seconds} s");
            outcomes.push((*name, Err(why)));
            continue;
        }
        let (outcome, took) = one(name, plan);
        if outcome.is_err() {
            failed.push(*name);
            lost += took;
        }
        outcomes.push((*name, outcome));
    }
    outcomes
}

/// Runs the load tool once against a started path.
///
/// # Errors
/// The load tool's error, or its time limit, or a failed read of the server's metrics.
pub(crate) fn load(
    tools: Tools<'_>,
    site: &Site,
    route: &Route,
    plan: &LoadPlan,
) -> anyhow::Result<Sample> {
    let is_go = route.dialect == Dialect::GrpcGo;
    let tool = if is_go {
        tools.go_load.context("the Go load tool is not built")?
    } else {
        tools.load
    };
    let control = route.targets.get("control");
    let mut command = site.command(&route.place, tool);
    command.args([
        "run".to_owned(),
        format!("--way={}", route.dialect.protocol()),
        format!("--targets={}", serde_json::to_string(&route.targets)?),
        format!(
            "--control={}",
            control.context("the targets have a control address")?
        ),
        format!("--plan={}", plan.to_json()?),
    ]);
    if let Some(frontend) = &route.frontend {
        command.arg(format!("--frontend={}", frontend.display()));
    }
    if let (Some(port), false) = (route.targets.get(AGENTS), is_go) {
        command.arg(format!("--agents={port}"));
        command.arg(format!("--certs={}", site.at("")));
        if route.targets.contains_key(REVIEWS) {
            command.arg("--tokens");
        }
    }
    for (role, id) in &route.processes {
        command.arg(format!("--process={role}={id}"));
    }
    let opened = |address: &String| Ok(Opened::read(&http_get(address, "/metrics")?));
    let idle = plan.idle_most().zip(route.targets.get(METRICS));
    let before: Option<anyhow::Result<_>> = idle.map(|(_, address)| opened(address));
    let before = before.transpose()?;
    let printed = output_of(&mut command, LIMIT)?.stdout;
    let mut sample: Sample =
        serde_json::from_str(&printed).context("the load tool prints one JSON object")?;
    if let Some(((count, address), before)) = idle.zip(before)
        && let Some(percent) = opened(address)?.lanes_percent(before)
    {
        let key = format!("idle_{count}_lanes_percent");
        sample.values.insert(key, percent);
    }
    Ok(sample)
}

/// Tunnels that an Adit server has opened so far, from its metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Opened {
    on_lanes: f64,
    all: f64,
}

impl Opened {
    /// Other servers lack these metrics: zero.
    fn read(metrics: &str) -> Self {
        let mut opened = Self::default();
        for line in metrics.lines() {
            let labelled = line.strip_prefix("adit_tunnels_opened_total{path=\"");
            let Some((path, count)) = labelled.and_then(|rest| rest.split_once("\"} ")) else {
                continue;
            };
            let count: f64 = count.trim().parse().unwrap_or_default();
            opened.all += count;
            if path != "link" {
                opened.on_lanes += count;
            }
        }
        opened
    }

    /// Percentage of the tunnels opened since `before` that are on lanes; `None` if none was opened.
    fn lanes_percent(self, before: Self) -> Option<f64> {
        let all = self.all - before.all;
        (all > 0.0).then(|| 100.0 * (self.on_lanes - before.on_lanes) / all)
    }
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
        let before = Opened::read(&text(10, 5, 7));
        let after = Opened::read(&text(1000, 65, 7 + 150));
        assert_eq!(after.lanes_percent(before), Some(87.5));
        assert_eq!(after.lanes_percent(after), None);
    }
}
