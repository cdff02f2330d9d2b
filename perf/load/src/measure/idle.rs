//! Memory of idle tunnels: resident memory of each process, and kernel memory, which the kernel accounts to no process.

use std::time::Duration;

use adit_perf_plan::Sample;
use anyhow::Context as _;

use super::{Load, all};
use crate::process::{Process, kernel_kib};
use crate::way::{Target, close};

/// Tunnels opened before the first measurement, so that one-time setup is not counted.
const FIRST: usize = 8;
/// Time for allocators and the kernel to settle.
const SETTLE: Duration = Duration::from_millis(300);

/// Runs the measurement. Each count grows from the previous one, and is compared with no tunnels.
pub(super) async fn measure(load: &Load, sample: &mut Sample) -> anyhow::Result<()> {
    let mut counts = load.plan.idle.clone();
    counts.sort_unstable();
    let mut tunnels = load.dialer.open_all(Target::Echo, FIRST).await?;
    tokio::time::sleep(SETTLE).await;
    let before = weigh(load)?;
    for count in counts.into_iter().filter(|count| *count > 0) {
        let more = (FIRST + count).saturating_sub(tunnels.len());
        tunnels.extend(load.dialer.open_all(Target::Echo, more).await?);
        tokio::time::sleep(SETTLE).await;
        note(load, count, &before, &weigh(load)?, sample);
    }
    let closing = tunnels.into_iter().map(close);
    let closed = all(closing.collect()).await;
    closed.map(drop).context("closing an idle tunnel")
}

/// Resident memory of each process, in order of the processes, and of the kernel's structures.
type Weight = (Vec<f64>, f64);

fn weigh(load: &Load) -> anyhow::Result<Weight> {
    let resident = load.processes.iter().map(Process::resident_kib);
    Ok((resident.collect::<Result<_, _>>()?, kernel_kib()?))
}

fn note(load: &Load, count: usize, before: &Weight, after: &Weight, sample: &mut Sample) {
    let each = |before: f64, after: f64| (after - before) / count as f64;
    let sum = |weight: &Weight| weight.0.iter().sum::<f64>();
    for (at, process) in load.processes.iter().enumerate() {
        let name = format!("idle_{count}_{}_kib", process.role);
        sample.value(name, each(before.0[at], after.0[at]));
    }
    if !load.processes.is_empty() {
        sample.value(format!("idle_{count}_kib"), each(sum(before), sum(after)));
        sample.value(format!("idle_{count}_resident_mib"), sum(after) / 1024.0);
    }
    let kernel = each(before.1, after.1);
    sample.value(format!("idle_{count}_kernel_kib"), kernel);
}
