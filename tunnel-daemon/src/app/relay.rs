//! The relay of sockets in clear text: which engine, why, and whether there is anything for it to do.

use std::sync::Arc;
use std::time::Duration;

use adit_relay::{Choice, probe};

use super::privileges::give_up_here;
use crate::config::plan::{DataPathPlan, LaneSecurity};
use crate::hub::PipeRelay;
use crate::net::tasks::Tasks;
use crate::telemetry::AditMetrics;

/// Finds the engine and says so in log and metrics. Relay threads run where lanes may be in clear text; there is nothing
/// for them to move elsewhere.
///
/// # Errors
/// An engine was asked for by name and is impossible here, or a thread could not be started.
pub(super) fn start(
    plan: &DataPathPlan,
    tunnels_max: usize,
    silence_max: Duration,
    metrics: &AditMetrics,
    services: &Tasks,
) -> anyhow::Result<(Choice, Option<Arc<PipeRelay>>)> {
    let choice = probe(plan.relay_engine)?;
    metrics.relay_engine(choice.engine.into());
    let used = plan.lane_security == LaneSecurity::Plaintext && plan.lanes_max > 0;
    tracing::info!(
        engine = choice.engine.name(),
        reason = choice.reason,
        used,
        "relay engine"
    );
    if !used {
        return Ok((choice, None));
    }
    tracing::warn!(
        "lanes go on in clear text once both ends know each other: whoever is on the path reads and changes what tunnels carry"
    );
    metrics.insecure_flag("lane-security=plaintext");
    let relay = PipeRelay::start(
        choice.clone(),
        tunnels_max,
        silence_max,
        metrics.clone(),
        give_up_here,
    )?;
    let watched = Arc::clone(&relay);
    services.spawn_always("relay-watch", async move { watched.watch().await });
    Ok((choice, Some(relay)))
}

/// A line for `/readyz?verbose`.
pub(super) fn detail(choice: &Choice) -> String {
    format!(
        "[+]relay-engine {}: {}\n",
        choice.engine.name(),
        choice.reason
    )
}
