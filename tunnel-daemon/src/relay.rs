//! The relay of sockets: its engine, the reason for it, and whether it has work. It serves raw lanes: in clear text or on
//! kernel TLS.

use std::sync::Arc;
use std::time::Duration;

use adit_core::session::ProcessBudget;
use adit_relay::{Choice, probe, probe_kernel_tls};
use anyhow::Context as _;

use adit_config::plan::{DataPathPlan, LaneSecurity};
use adit_host::privileges::give_up_here;
use adit_net::tasks::Tasks;
use adit_telemetry::AditMetrics;
use adit_tunnel::RawLaneRelay;

/// The relay as started on this host.
pub(super) struct Started {
    pub(super) engine: Choice,
    /// `None` if there is nothing to relay.
    pub(super) relay: Option<Arc<RawLaneRelay>>,
    /// The plan, without what this host does not support.
    pub(super) data_path: DataPathPlan,
    /// Lines for `/readyz?verbose`.
    pub(super) detail: String,
}

/// Chooses the event engine and logs the choice. Relay threads run only if raw lanes are possible.
///
/// # Errors
/// The engine requested by name is impossible here, or a thread could not be started.
pub(super) fn start(
    plan: &DataPathPlan,
    tunnels_max: usize,
    silence_max: Duration,
    budget: &Arc<ProcessBudget>,
    metrics: &AditMetrics,
    services: &Tasks,
) -> anyhow::Result<Started> {
    let engine = probe(plan.relay_engine)?;
    let (data_path, tls_detail) = possible(*plan);
    let used = data_path.lane_security != LaneSecurity::Tls && plan.lanes_max > 0;
    tracing::info!(
        engine = engine.engine.name(),
        reason = engine.reason,
        used,
        "relay engine"
    );
    let detail = format!(
        "[+]relay-engine {}: {}\n{tls_detail}",
        engine.engine.name(),
        engine.reason
    );
    let mut started = Started {
        engine,
        relay: None,
        data_path,
        detail,
    };
    if !used {
        return Ok(started);
    }
    if data_path.lane_security == LaneSecurity::Plaintext {
        tracing::warn!(
            "--lane-security=plaintext: lanes carry tunnels in clear text after mutual authentication; a host on the network path \
             can read and change tunnel data"
        );
        metrics.insecure_flag("lane-security=plaintext");
    }
    let choice = started.engine.clone();
    let relay = RawLaneRelay::start(
        choice,
        tunnels_max,
        silence_max,
        Arc::clone(budget),
        metrics.clone(),
        give_up_here,
    )
    .context("cannot start the relay")?;
    let watched = Arc::clone(&relay);
    services.spawn_always("relay-watch", async move { watched.watch().await });
    started.relay = Some(relay);
    Ok(started)
}

/// Keeps kernel TLS in the plan if the host supports it; otherwise lanes use this process's TLS. Adds a line about it.
fn possible(plan: DataPathPlan) -> (DataPathPlan, String) {
    if plan.lane_security != LaneSecurity::Ktls {
        return (plan, String::new());
    }
    match probe_kernel_tls() {
        Ok(()) => {
            tracing::info!(
                "kernel TLS is available: raw lanes use it when the peer supports it, too"
            );
            let line = "[+]kernel-tls ready for raw lanes\n";
            (plan, line.to_owned())
        }
        Err(error) => {
            tracing::warn!(
                %error,
                "kernel TLS is not available on this host: lanes use user-space TLS; run `modprobe tls` if the kernel has that module"
            );
            let plan = DataPathPlan {
                lane_security: LaneSecurity::Tls,
                ..plan
            };
            let line = format!("[-]kernel-tls not available ({error}): lanes use user-space TLS\n");
            (plan, line)
        }
    }
}
