//! Dials all at once on a path that has carried nothing yet, then closed-loop round trips on the same connections; and the same
//! again. Connections keep the path that their dial got, so a first burst that finds nothing ready stays slower for life.

use std::time::{Duration, Instant};

use adit_perf_plan::Sample;
use anyhow::Context as _;

use super::echo::{Until, ask_all, round_trip, warm_up};
use super::{Load, all, rate};
use crate::process;
use crate::way::{Dialer, Target, Tunnel};

/// Measures the first burst of this path, and the second.
pub(super) async fn measure(load: &Load, sample: &mut Sample) -> anyhow::Result<()> {
    let (connections, lasting) = (load.plan.burst_connections, load.plan.lasting());
    for burst in ["cold", "warm"] {
        let name = format!("{burst}_{connections}");
        let measured = async {
            let (mut tunnels, dials) = open_at_once(&load.dialer, connections).await?;
            for tunnel in &mut tunnels {
                warm_up(tunnel).await?;
            }
            let cpu = process::cpu_seconds(&load.processes)?;
            let samples = ask_all(tunnels, Until::Time(Instant::now() + lasting)).await?;
            anyhow::Ok((samples, dials, cpu))
        };
        let (samples, dials, cpu) = measured.await.with_context(|| name.clone())?;
        rate(load, sample, &name, (samples.len(), lasting), cpu)?;
        sample.latencies(&name, samples)?;
        sample.latencies(&format!("{name}_dial"), dials)?;
    }
    Ok(())
}

/// Opens tunnels, each in a task of its own; returns them with the duration of each dial and its first answer.
///
/// # Errors
/// A dial or its first round trip fails.
async fn open_at_once(
    dialer: &Dialer,
    connections: usize,
) -> anyhow::Result<(Vec<Tunnel>, Vec<Duration>)> {
    let dial = |_connection| {
        let dialer = dialer.clone();
        async move {
            let begin = Instant::now();
            let mut tunnel = dialer.open(Target::Echo).await?;
            round_trip(&mut tunnel, 0).await?;
            anyhow::Ok((tunnel, begin.elapsed()))
        }
    };
    let dialed = all((0..connections).map(dial).collect()).await?;
    Ok(dialed.into_iter().unzip())
}
