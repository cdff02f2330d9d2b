//! One turn of one peer: a fresh stack, every measurement by a run of the load tool of its own.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use super::long_path::Shape;
use super::opened::Opened;
use super::peer::{Peer, Route};
use super::process::{Site, output_within};
use super::results::Sample;
use super::scenario::{LoadPlan, Way};

/// Longest time for one measurement beyond what it is told to take: the load tool bounds itself, this bounds the tool.
const LIMIT: Duration = Duration::from_secs(10 * 60);

/// Once failed measurements of a turn have taken so long together, the rest of it is not tried: a peer that hangs would take minutes
/// with each, in every round.
const PATIENCE: Duration = Duration::from_secs(45);

/// Where agents connect, among the addresses of a route; also a measurement that needs it.
pub(crate) const AGENTS: &str = "agents";
/// The other one.
const LINKS: &str = "links";
/// Among the addresses of a route whose agents prove themselves by tokens: who reviews these.
pub(crate) const REVIEWS: &str = "reviews";

/// Where a server tells its metrics, among the addresses of a route.
pub(crate) const METRICS: &str = "metrics";

/// The programs that make load.
#[derive(Clone, Copy)]
pub(crate) struct Tools<'a> {
    /// Ours.
    pub(crate) load: &'a Path,
    /// With the Go client library, if some way needs it.
    pub(crate) go_load: Option<&'a Path>,
}

/// Outcome of each measurement, by name. What could not even start fails them all.
pub(crate) fn measure<'a>(
    tools: Tools<'_>,
    peer: &dyn Peer,
    way: Way,
    plans: &[(&'a str, LoadPlan)],
    long_path: Option<&Shape>,
) -> Vec<(&'a str, Result<Sample, String>)> {
    let site = match long_path {
        Some(shape) => Site::apart(tools.load, shape),
        None => Site::new(tools.load),
    };
    let started = site.and_then(|site| {
        ensure!(
            peer.spans() || long_path.is_none(),
            "{} cannot be measured over a long path",
            peer.name()
        );
        let route = peer.start(&site, way)?;
        Ok((site, route))
    });
    let (site, route) = match started {
        Ok(started) => started,
        Err(error) => {
            let why = format!("{error:#}");
            return plans
                .iter()
                .map(|(name, _)| (*name, Err(why.clone())))
                .collect();
        }
    };
    // Not every path has a port for agents, and the Go load tool has none to connect.
    let has_agents = route.way != Way::GrpcGo && route.targets.contains_key(AGENTS);
    let one = |(name, plan): &(&'a str, LoadPlan)| {
        if [AGENTS, LINKS].contains(name) && !has_agents {
            return (*name, Ok(Sample::default()));
        }
        let outcome = load(tools, &site, &route, plan).map_err(|error| format!("{error:#}"));
        (*name, outcome)
    };
    with_patience(plans, |plan| {
        let started = Instant::now();
        let (name, outcome) = one(plan);
        (name, outcome, started.elapsed())
    })
}

/// Outcomes of all plans; of those behind [`PATIENCE`], that they were not tried. `one` says how long it took.
fn with_patience<'a, P>(
    plans: &[(&'a str, P)],
    mut one: impl FnMut(&(&'a str, P)) -> (&'a str, Result<Sample, String>, Duration),
) -> Vec<(&'a str, Result<Sample, String>)> {
    let mut failed = Vec::new();
    let mut lost = Duration::ZERO;
    let mut outcomes = Vec::with_capacity(plans.len());
    for plan in plans {
        if lost >= PATIENCE {
            let (why, seconds) = (failed.join(", "), lost.as_secs());
            let why = format!("not tried: {why} failed before it, after {seconds} s");
            outcomes.push((plan.0, Err(why)));
            continue;
        }
        let (name, outcome, took) = one(plan);
        if outcome.is_err() {
            failed.push(name);
            lost += took;
        }
        outcomes.push((name, outcome));
    }
    outcomes
}

/// Runs the load tool once against a started path.
///
/// # Errors
/// What it says, that it did not end, or that a server does not tell its metrics.
pub(crate) fn load(
    tools: Tools<'_>,
    site: &Site,
    route: &Route,
    plan: &LoadPlan,
) -> anyhow::Result<Sample> {
    let inside = route.inside();
    let mut command: Command = match route.way {
        Way::GrpcGo => {
            let program = tools.go_load.context("the Go load tool is not built")?;
            site.go_load(inside, program)
        }
        Way::Grpc | Way::HttpConnect | Way::Tcp => site.load(inside),
    };
    let control = route.targets.get("control");
    command.args([
        "run".to_owned(),
        format!("--way={}", route.way.dialect()),
        format!("--targets={}", serde_json::to_string(&route.targets)?),
        format!(
            "--control={}",
            control.context("the targets have a control address")?
        ),
        format!("--plan={}", serde_json::to_string(plan)?),
    ]);
    if let Some(frontend) = &route.frontend {
        command.arg(format!("--frontend={}", frontend.display()));
    }
    if let (Some(port), true) = (route.targets.get(AGENTS), route.way != Way::GrpcGo) {
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
    let before = idle.map(|(_, address)| Opened::at(address)).transpose()?;
    let printed = output_within(command, site, LIMIT)?;
    let mut sample: Sample =
        serde_json::from_str(&printed).context("the load tool prints one JSON object")?;
    if let (Some((count, address)), Some(before)) = (idle, before)
        && let Some(percent) = Opened::at(address)?.lanes_percent(before)
    {
        let key = format!("idle_{count}_lanes_percent");
        sample.values.insert(key, percent);
    }
    Ok(sample)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_hangs_is_not_waited_for_with_each_measurement() {
        let plans = ["idle", "echo", "paced", "dials", "bulk"].map(|name| (name, ()));
        let mut tried = Vec::new();
        let outcomes = with_patience(&plans, |(name, ())| {
            tried.push(*name);
            let (outcome, seconds) = match *name {
                // Success may take as long as it likes, and quick failures do not add up to much.
                "idle" => (Ok(Sample::default()), 600),
                "echo" => (Err("refused".to_owned()), 1),
                _ => (Err("it hangs".to_owned()), 44),
            };
            (*name, outcome, Duration::from_secs(seconds))
        });
        assert_eq!(tried, ["idle", "echo", "paced"]);
        let names: Vec<&str> = outcomes.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, plans.map(|(name, _)| name));
        for (_, outcome) in &outcomes[3..] {
            let why = outcome.as_ref().expect_err("nobody tried");
            assert_eq!(why, "not tried: echo, paced failed before it, after 45 s");
        }
    }
}
