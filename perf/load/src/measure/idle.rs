//! Memory of idle tunnels: resident memory of each process, and kernel memory, which the kernel accounts to no process.

use std::time::Duration;

use anyhow::Context as _;
use tokio::task::JoinSet;

use super::Load;
use crate::outcome::Outcome;
use crate::process::KernelMemory;
use crate::way::{Target, Tunnel};

/// Tunnels opened before the first measurement, so that one-time setup is not counted.
const FIRST: usize = 8;
/// Time for allocators and the kernel to settle.
const SETTLE: Duration = Duration::from_millis(300);

/// Runs the measurement. Each count grows from the previous one, and is compared with no tunnels.
pub(super) async fn measure(load: &Load<'_>, outcome: &mut Outcome) -> anyhow::Result<()> {
    let mut counts = load.plan.idle.clone();
    counts.sort_unstable();
    let mut tunnels = Vec::new();
    open_until(load, &mut tunnels, FIRST).await?;
    tokio::time::sleep(SETTLE).await;
    let before = Weight::now(load)?;
    for count in counts.into_iter().filter(|count| *count > 0) {
        open_until(load, &mut tunnels, FIRST + count).await?;
        tokio::time::sleep(SETTLE).await;
        note(load, count, &before, &Weight::now(load)?, outcome);
    }
    let mut closing = JoinSet::new();
    for tunnel in tunnels {
        closing.spawn(tunnel.close());
    }
    while let Some(closed) = closing.join_next().await {
        closed?.context("closing an idle tunnel")?;
    }
    Ok(())
}

async fn open_until(
    load: &Load<'_>,
    tunnels: &mut Vec<Tunnel>,
    count: usize,
) -> anyhow::Result<()> {
    while tunnels.len() < count {
        let tunnel = load.dialer.open(Target::Echo).await;
        let number = tunnels.len() + 1;
        tunnels.push(tunnel.with_context(|| format!("opening idle tunnel {number}"))?);
    }
    Ok(())
}

struct Weight {
    /// Resident memory of each process, in order of the processes.
    resident_kib: Vec<f64>,
    kernel: KernelMemory,
}

impl Weight {
    fn now(load: &Load<'_>) -> anyhow::Result<Self> {
        let resident = load.processes.iter().map(|process| process.resident_kib());
        Ok(Self {
            resident_kib: resident.collect::<Result<_, _>>()?,
            kernel: KernelMemory::now()?,
        })
    }
}

fn note(load: &Load<'_>, count: usize, before: &Weight, after: &Weight, outcome: &mut Outcome) {
    let each = |before: f64, after: f64| (after - before) / count as f64;
    let sum = |weight: &Weight| weight.resident_kib.iter().sum::<f64>();
    let pairs = before.resident_kib.iter().zip(&after.resident_kib);
    for (process, (before, after)) in load.processes.iter().zip(pairs) {
        let name = format!("idle_{count}_{}_kib", process.role);
        outcome.value(name, each(*before, *after));
    }
    if !load.processes.is_empty() {
        outcome.value(format!("idle_{count}_kib"), each(sum(before), sum(after)));
        outcome.value(format!("idle_{count}_resident_mib"), sum(after) / 1024.0);
    }
    outcome.value(
        format!("idle_{count}_kernel_kib"),
        each(before.kernel.slab_kib, after.kernel.slab_kib),
    );
    outcome.value(
        format!("idle_{count}_tcp_buffers_kib"),
        each(before.kernel.tcp_buffers_kib, after.kernel.tcp_buffers_kib),
    );
}
