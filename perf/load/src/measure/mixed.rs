//! Echo beside bulk downloads: the latency of an interactive user while others transfer files.

use std::time::{Duration, Instant};

use adit_perf_plan::Sample;
use anyhow::Context as _;

use super::Load;
use super::bulk::{Transfers, gbit_s};
use super::echo::closed_loop;
use crate::way::{Dialer, Target};

/// An echo run that exceeds its duration by this much has stalled.
const STALL_LIMIT: Duration = Duration::from_secs(10);

/// Measures echo while downloads take all they get, and while they come at a limited rate, equal for all peers.
pub(super) async fn measure(load: &Load, sample: &mut Sample) -> anyhow::Result<()> {
    let streams = load.plan.mixed_streams;
    let transfers = Transfers::start(load, Target::Source, streams).await?;
    let gbit_s = beside(load, transfers, sample, "mixed_echo").await?;
    sample.value("mixed_down_gbit_s", gbit_s);
    let mbit_s = load.plan.limited_mbit_s;
    if mbit_s == 0 || streams == 0 {
        return Ok(());
    }
    let rate = mbit_s * 1_000_000 / 8 / streams as u64;
    let transfers = Transfers::start_at(load, Target::Source, streams, rate).await?;
    let name = format!("limited_{mbit_s}");
    let gbit_s = beside(load, transfers, sample, &name).await?;
    sample.value(format!("{name}_gbit_s"), gbit_s);
    Ok(())
}

/// Measures echo beside `transfers`, and ends them; returns their rate.
#[expect(
    clippy::disallowed_methods,
    reason = "the load generator is no service: it may end where a host refuses a thread"
)]
async fn beside(
    load: &Load,
    mut transfers: Transfers,
    sample: &mut Sample,
    name: &str,
) -> anyhow::Result<f64> {
    let lasting = load.plan.lasting();
    let before = (transfers.bytes().await?, Instant::now());
    let dialer = load.dialer.clone();
    let samples = tokio::task::spawn_blocking(move || echo_apart(&dialer, lasting))
        .await?
        .context("echo beside downloads")?;
    let bytes = transfers.bytes().await? - before.0;
    let rate = gbit_s(bytes, before.1.elapsed());
    transfers.stop().await?;
    sample.latencies(name, samples)?;
    Ok(rate)
}

/// Runs echo on a thread of its own: on the downloads' threads it would measure their scheduling.
fn echo_apart(dialer: &Dialer, lasting: Duration) -> anyhow::Result<Vec<Duration>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let limit = lasting + STALL_LIMIT;
    runtime.block_on(async {
        tokio::time::timeout(limit, closed_loop(dialer, 1, lasting))
            .await
            .context("echo stalled")?
    })
}
