//! The measurements. Each opens its tunnels, measures for a given time, closes them, and records numbers by name.
//!
//! Every measurement is bounded: a stalled peer fails the measurement, and does not hang the run.

mod agents;
mod bulk;
mod burst;
mod counted;
mod dials;
mod echo;
mod idle;
mod isolation;
mod mixed;
mod paced;

use std::net::SocketAddr;
use std::time::Duration;

use adit_perf_plan::{Plan, Sample};
use anyhow::{Context as _, bail};
use tokio::task::JoinSet;

use crate::agents::AgentPort;
use crate::process::{self, Process};
use crate::way::Dialer;

/// Input that all measurements share.
#[derive(clap::Args)]
pub(crate) struct Load {
    #[command(flatten)]
    pub(crate) dialer: Dialer,
    /// Where the targets tell what arrived, reached without the measured path.
    #[arg(long)]
    pub(crate) control: SocketAddr,
    #[command(flatten)]
    pub(crate) agents: AgentPort,
    /// Process whose memory and CPU time count, as ROLE=PID; any number.
    #[arg(long = "process", value_name = "ROLE=PID")]
    pub(crate) processes: Vec<Process>,
    /// What to measure, as JSON; fields left out keep their defaults.
    #[arg(long, value_parser = crate::from_json::<Plan>, default_value = "{}")]
    pub(crate) plan: Plan,
}

/// Longest time that a measurement needs beyond its durations, for opening and closing: it has up to six rounds of a minute.
const OVERHEAD_LIMIT: Duration = Duration::from_secs(6 * 60);

/// Runs the planned measurements.
///
/// # Errors
/// The first measurement that fails; the error names it.
pub(crate) async fn run(load: &Load) -> anyhow::Result<Sample> {
    let mut sample = Sample::default();
    let limit = OVERHEAD_LIMIT + load.plan.lasting() * 20;
    for name in load.plan.in_order() {
        tokio::time::timeout(limit, one(load, name, &mut sample))
            .await
            .with_context(|| format!("not done within {} s", limit.as_secs()))
            .and_then(|result| result)
            .context(name)?;
    }
    Ok(sample)
}

async fn one(load: &Load, measurement: &str, sample: &mut Sample) -> anyhow::Result<()> {
    match measurement {
        "burst" => burst::measure(load, sample).await,
        "idle" => idle::measure(load, sample).await,
        "agents" => agents::measure(load, sample).await,
        "links" => agents::measure_links(load, sample).await,
        "echo" => echo::measure(load, sample).await,
        "paced" => paced::measure(load, sample).await,
        "dials" => dials::measure(load, sample).await,
        "bulk" => bulk::measure(load, sample).await,
        "mixed" => mixed::measure(load, sample).await,
        "isolation" => isolation::measure(load, sample).await,
        "counted" => counted::measure(load, sample).await,
        unknown => bail!("there is no such measurement as {unknown}"),
    }
}

/// What all tasks return. The first error ends the others.
///
/// # Errors
/// A task has failed.
async fn all<T: 'static, E: Into<anyhow::Error> + 'static>(
    mut tasks: JoinSet<Result<T, E>>,
) -> anyhow::Result<Vec<T>> {
    let mut results = Vec::with_capacity(tasks.len());
    while let Some(result) = tasks.join_next().await {
        results.push(result?.map_err(Into::into)?);
    }
    Ok(results)
}

/// Records how many operations were done a second, and the CPU time of each since `cpu_before`.
///
/// # Errors
/// A measured process has ended.
fn rate(
    load: &Load,
    sample: &mut Sample,
    name: &str,
    (count, took): (usize, Duration),
    cpu_before: f64,
) -> anyhow::Result<()> {
    sample.value(format!("{name}_per_s"), count as f64 / took.as_secs_f64());
    cpu_each(load, sample, name, count, cpu_before)
}

/// Records the CPU time of each of `count` operations since `cpu_before`.
///
/// # Errors
/// As [`rate`].
fn cpu_each(
    load: &Load,
    sample: &mut Sample,
    name: &str,
    count: usize,
    cpu_before: f64,
) -> anyhow::Result<()> {
    if !load.processes.is_empty() && count > 0 {
        let cpu = process::cpu_seconds(&load.processes)? - cpu_before;
        sample.value(format!("{name}_cpu_us"), cpu * 1e6 / count as f64);
    }
    Ok(())
}
