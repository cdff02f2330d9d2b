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
mod links;
mod mixed;
mod paced;

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context as _;

use crate::agents::AgentPort;
use crate::outcome::Outcome;
use crate::plan::{Measurement, Plan};
use crate::process::Process;
use crate::way::Dialer;

/// Input that all measurements share.
pub(crate) struct Load<'a> {
    /// The plan of measurements.
    pub(crate) plan: &'a Plan,
    /// Dials through the measured path.
    pub(crate) dialer: Dialer,
    /// Address at which targets report received bytes.
    pub(crate) control: SocketAddr,
    /// The server's agent port, if this path has one.
    pub(crate) agents: Option<AgentPort>,
    /// The measured processes: server and agent, or their substitutes.
    pub(crate) processes: Vec<Process>,
}

/// Longest time that a measurement needs beyond its duration, for opening and closing.
const OVERHEAD_LIMIT: Duration = Duration::from_secs(60);

/// Runs the planned measurements.
///
/// # Errors
/// The first measurement that fails; the error names it.
pub(crate) async fn run(load: Load<'_>) -> anyhow::Result<Outcome> {
    let plan = load.plan;
    let mut outcome = Outcome::default();
    for measurement in plan.in_order() {
        let limit = OVERHEAD_LIMIT * rounds(plan, measurement) + plan.lasting() * 20;
        tokio::time::timeout(limit, one(&load, measurement, &mut outcome))
            .await
            .with_context(|| format!("not done within {} s", limit.as_secs()))
            .and_then(|result| result)
            .with_context(|| format!("{measurement:?}").to_lowercase())?;
    }
    Ok(outcome)
}

async fn one(
    load: &Load<'_>,
    measurement: Measurement,
    outcome: &mut Outcome,
) -> anyhow::Result<()> {
    match measurement {
        Measurement::Burst => burst::measure(load, outcome).await,
        Measurement::Idle => idle::measure(load, outcome).await,
        Measurement::Agents => agents::measure(load, outcome).await,
        Measurement::Links => links::measure(load, outcome).await,
        Measurement::Echo => echo::measure(load, outcome).await,
        Measurement::Paced => paced::measure(load, outcome).await,
        Measurement::Dials => dials::measure(load, outcome).await,
        Measurement::Bulk => bulk::measure(load, outcome).await,
        Measurement::Mixed => mixed::measure(load, outcome).await,
        Measurement::Isolation => isolation::measure(load, outcome).await,
        Measurement::Counted => counted::measure(load, outcome).await,
    }
}

/// Number of rounds of a measurement, each of which opens and closes tunnels.
fn rounds(plan: &Plan, measurement: Measurement) -> u32 {
    let count = match measurement {
        Measurement::Idle => plan.idle.len(),
        Measurement::Agents | Measurement::Links => plan.agents.len(),
        Measurement::Echo => plan.connections.len(),
        Measurement::Paced => plan.rates.len(),
        Measurement::Dials => plan.dialers.len(),
        Measurement::Bulk => 2 * plan.streams.len(),
        Measurement::Burst => 2,
        Measurement::Mixed | Measurement::Isolation | Measurement::Counted => 1,
    };
    u32::try_from(count.clamp(1, 100)).unwrap_or(100)
}
