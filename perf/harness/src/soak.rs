//! `--soak`: mixed load for a long time, which fails on growth of memory, descriptors, tasks or series of server and agent.
//!
//! Every round is the same: tunnels of both dialects, bursts, transfers, stalled readers, idle tunnels, and agents that come and go.
//! What a process needs for a round, it has after a few rounds: what grows from the second quarter to the last one is a leak.

use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use adit_perf_plan::{Dialect, Plan};
use anyhow::{Context as _, bail, ensure};
use xtask_kit::net::{free_port, http_get};

use crate::measurement::{self, AGENTS, METRICS};
use crate::peer::Route;
use crate::process::Site;
use crate::programs::Programs;

/// Shortest soak: fewer rounds than this tell nothing.
const ROUNDS_MIN: usize = 8;
/// The measurements of a round, and what they need.
const MEASUREMENTS: [&str; 8] = [
    "burst",
    "idle",
    "links",
    "echo",
    "dials",
    "bulk",
    "mixed",
    "isolation",
];

/// What a process may not need more of, round after round, and how much more is no growth: medians of lanes, allocators and
/// the kernel's timing differ by that.
const RESOURCES: [(&str, f64, f64); 4] = [
    ("process_resident_memory_bytes", 0.05, 4.0 * 1048576.0),
    ("process_open_fds", 0.05, 16.0),
    ("adit_tasks", 0.05, 16.0),
    // A label may occur for the first time late, such as a rare reason of a failure.
    (SERIES, 0.0, 8.0),
];
/// A server's line of metrics while it has the soak's own agent alone.
const ONE_LINK: &str = "adit_links{peer=\"adit\"} 1";
/// The load's agents have left by then.
const LEFT_WITHIN: Duration = Duration::from_secs(30);
/// How often it is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// The number of series, which no series tells.
const SERIES: &str = "series";

/// A process by its role, with its usage after each round, in the order of [`RESOURCES`].
struct Watched {
    role: &'static str,
    metrics: String,
    usage: Vec<[f64; RESOURCES.len()]>,
}

/// Soaks server and agent of this tree, or another binary.
///
/// # Errors
/// A program does not start, a round fails, tunnels stay open, or usage grows.
pub(crate) fn run(programs: &Programs, lasting: Duration) -> anyhow::Result<()> {
    let adit = programs.adit()?;
    let site = Site::new(programs, None)?;
    let (mut route, mut watched) = start(&site, &adit)?;
    let began = Instant::now();
    let mut rounds = 0;
    while began.elapsed() < lasting || rounds < ROUNDS_MIN {
        rounds += 1;
        for dialect in [Dialect::Grpc, Dialect::HttpConnect] {
            route.dialect = dialect;
            route.frontend = Some(site.at(dialect.name()));
            for (name, plan) in plan().parts() {
                measurement::load(&site, &route, &plan)
                    .with_context(|| format!("round {rounds}: {name} by {}", dialect.name()))?;
                wait_until_alone(&route)?;
            }
        }
        for process in &mut watched {
            process.look(&site)?;
        }
        eprintln!(
            "perf: round {rounds}, {} s: {}",
            began.elapsed().as_secs(),
            watched
                .iter()
                .map(Watched::last)
                .collect::<Vec<_>>()
                .join("; ")
        );
    }
    let grown: Vec<String> = watched.iter().flat_map(Watched::grown).collect();
    ensure!(grown.is_empty(), "grown while soaked: {}", grown.join("; "));
    println!(
        "soaked for {} s, {rounds} rounds: nothing grows",
        began.elapsed().as_secs()
    );
    Ok(())
}

/// Waits until the load's own agents have left: a dial that reaches one of them just then is lost with it.
fn wait_until_alone(route: &Route) -> anyhow::Result<()> {
    let server = route.targets.get(METRICS).context("a server")?;
    let until = Instant::now() + LEFT_WITHIN;
    while Instant::now() < until {
        let metrics = http_get(server, "/metrics")?;
        if metrics.lines().any(|line| line == ONE_LINK) {
            return Ok(());
        }
        sleep(LOOK_EVERY);
    }
    bail!(
        "agents of the load are still linked after {} s",
        LEFT_WITHIN.as_secs()
    )
}

/// The load of a round.
fn plan() -> Plan {
    Plan {
        measurements: MEASUREMENTS.map(str::to_owned).to_vec(),
        seconds: 0.4,
        streams: vec![1, 8],
        connections: vec![16],
        burst_connections: 64,
        dialers: vec![8],
        idle: vec![200],
        agents: vec![20],
        ..Plan::default()
    }
}

/// Starts a server with a frontend of each dialect, an agent, and targets.
fn start(site: &Site, adit: &Path) -> anyhow::Result<(Route, [Watched; 2])> {
    let mut route = Route::to_far(site)?;
    let server = vec![
        "server".to_owned(),
        format!("--frontend=grpc=unix:{}", site.at(Dialect::Grpc.name())),
        format!(
            "--frontend=http-connect=unix:{}",
            site.at(Dialect::HttpConnect.name())
        ),
        format!("--admin-port={}", free_port()?),
        "--admin-socket=off".to_owned(),
        "--log-level=warn".to_owned(),
    ];
    let agent = vec![
        "agent".to_owned(),
        "--allow-target=127.0.0.0/8".to_owned(),
        format!("--admin-server-port={}", free_port()?),
        "--admin-socket=off".to_owned(),
        "--log-level=warn".to_owned(),
    ];
    let places = [site.near.clone(), site.far.clone()];
    let [agents, health, agent_health] =
        route.start_pair(site, [adit, adit], &places, [server, agent])?;
    let address = |port: u16| format!("127.0.0.1:{port}");
    route.targets.insert(AGENTS.to_owned(), address(agents));
    route.targets.insert(METRICS.to_owned(), address(health));
    site.wait_until_ready(health)?;
    let watched = [("server", health), ("agent", agent_health)].map(|(role, port)| Watched {
        role,
        metrics: address(port),
        usage: Vec::new(),
    });
    Ok((route, watched))
}

impl Watched {
    /// Waits until all tunnels are closed, and notes the usage.
    fn look(&mut self, site: &Site) -> anyhow::Result<()> {
        let scrape = || http_get(&self.metrics, "/metrics");
        site.wait_for("the end of all tunnels", || {
            scrape().is_ok_and(|text| open_tunnels(&text) == 0.0)
        })?;
        let usage = usage(&scrape()?);
        self.usage
            .push(usage.with_context(|| format!("{}: a metric is missing", self.role))?);
        Ok(())
    }

    /// The last usage, for people who wait.
    fn last(&self) -> String {
        let last = self.usage.last().copied().unwrap_or_default();
        let named = RESOURCES.iter().zip(last);
        let words: Vec<String> = named
            .map(|((name, ..), now)| format!("{name} {now}"))
            .collect();
        format!("{} {}", self.role, words.join(", "))
    }

    /// What has grown.
    fn grown(&self) -> Vec<String> {
        let one = |(at, (name, share, slack)): (usize, &(&str, f64, f64))| {
            let values: Vec<f64> = self
                .usage
                .iter()
                .filter_map(|usage| usage.get(at))
                .copied()
                .collect();
            let (before, after) = quarters(&values)?;
            let is_growth = after > before * (1.0 + share) + slack;
            is_growth.then(|| format!("{} {name} from {before} to {after}", self.role))
        };
        RESOURCES.iter().enumerate().filter_map(one).collect()
    }
}

/// Medians of the second and the last quarter.
fn quarters(values: &[f64]) -> Option<(f64, f64)> {
    let quarter = values.len() / 4;
    let median = |values: &[f64]| {
        let mut values = values.to_vec();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied()
    };
    let second = values.get(quarter..2 * quarter)?;
    let last = values.get(values.len() - quarter..)?;
    Some((median(second)?, median(last)?))
}

/// The samples of a scrape: lines that are no comments.
fn samples(text: &str) -> impl Iterator<Item = (&str, f64)> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| {
        let (name, value) = line.rsplit_once(' ')?;
        Some((name, value.parse().ok()?))
    })
}

/// Tunnels that were opened and are not closed.
fn open_tunnels(text: &str) -> f64 {
    let sum = |family: &str| -> f64 {
        let series = samples(text).filter(|(name, _)| name.starts_with(family));
        series.map(|(_, value)| value).sum()
    };
    sum("adit_tunnels_opened_total{") - sum("adit_tunnels_closed_total{")
}

fn usage(text: &str) -> Option<[f64; RESOURCES.len()]> {
    let mut usage = [0.0; RESOURCES.len()];
    for (value, (name, ..)) in usage.iter_mut().zip(RESOURCES) {
        *value = match name {
            SERIES => samples(text).count() as f64,
            name => samples(text).find(|(found, _)| *found == name)?.1,
        };
    }
    Some(usage)
}

/// A number and a unit: `90s`, `20m` or `2h`.
pub(crate) fn lasting(text: &str) -> Result<Duration, String> {
    let wrong = || "write a number and a unit, such as 90s, 20m or 2h".to_owned();
    let (number, unit) = text
        .split_at_checked(text.len().saturating_sub(1))
        .ok_or_else(wrong)?;
    let seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        _ => return Err(wrong()),
    };
    let number: u32 = number.parse().map_err(|_error| wrong())?;
    Ok(Duration::from_secs(seconds) * number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watched(usage: Vec<[f64; 4]>) -> Watched {
        Watched {
            role: "server",
            metrics: String::new(),
            usage,
        }
    }

    const MIB: f64 = 1048576.0;

    #[test]
    fn a_leak_is_found_and_a_plateau_behind_a_start_is_none() {
        let steady = (0..40).map(|round| {
            let start = f64::from(round.min(5));
            [
                60.0 * MIB + start * 9.0 * MIB,
                200.0 + start + f64::from(round % 3),
                90.0,
                300.0,
            ]
        });
        let steady: Vec<[f64; 4]> = steady.collect();
        assert_eq!(watched(steady.clone()).grown(), [""; 0]);
        for (at, each, name) in [
            (0, 0.5 * MIB, "process_resident_memory_bytes"),
            (1, 2.0, "process_open_fds"),
            (2, 2.0, "adit_tasks"),
            (3, 1.0, "series"),
        ] {
            let mut leaking = steady.clone();
            for (round, usage) in leaking.iter_mut().enumerate() {
                usage[at] += each * round as f64;
            }
            let grown = watched(leaking).grown();
            assert_eq!(grown.len(), 1, "{grown:?}");
            assert!(
                grown[0].starts_with(&format!("server {name} from ")),
                "{grown:?}"
            );
        }
    }

    #[test]
    fn a_scrape_without_one_of_the_metrics_is_no_usage() {
        let text = "# HELP a b\nprocess_resident_memory_bytes 1e6\nprocess_open_fds 9\nadit_tasks 4\na{b=\"c d\"} 1\n";
        assert_eq!(usage(text), Some([1e6, 9.0, 4.0, 4.0]));
        assert_eq!(usage(&text.replace("adit_tasks", "tasks")), None);
    }

    #[test]
    fn a_time_has_a_number_and_a_unit() {
        assert_eq!(lasting("20m"), Ok(Duration::from_secs(1200)));
        assert_eq!(lasting("2h"), Ok(Duration::from_secs(7200)));
        for wrong in ["", "m", "20", "20 m", "-1m", "5d", "1€"] {
            assert!(lasting(wrong).is_err(), "{wrong}");
        }
    }
}
