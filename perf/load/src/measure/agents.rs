//! Agents that have nothing to do: what the server holds for each, what all of them cost it in CPU time, and how long a
//! dial takes that goes to one of them.

use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::{Load, dials};
use crate::agents::Agents;
use crate::outcome::Outcome;
use crate::process::{self, Process};

/// The process that is weighed.
const SERVER: &str = "server";
/// Connected before anything is weighed, so that what the server sets up once is not counted.
const FIRST: usize = 8;
/// Length of a look at how busy the processes are: longer than the pauses of agents that wait for room to open more lanes.
const LOOK: Duration = Duration::from_secs(3);
/// Share of a core from which on they are still busy with what was opened, such as lanes.
const BUSY_SHARE: f64 = 0.05;
/// Those that are never quiet are measured as they are.
const SETTLE_LIMIT: Duration = Duration::from_secs(60);

/// See the module. Larger counts are reached from smaller ones; each is weighed against none. Dials come last, since they
/// leave buffers behind.
pub(super) async fn measure(load: &Load<'_>, outcome: &mut Outcome) -> anyhow::Result<()> {
    let server = load.processes.iter().find(|one| one.role == SERVER);
    let server = server.context("name the server with --process=server=PID")?;
    let port = load.agents.as_ref();
    let port = port.context("say with --agents where agents connect")?;
    let mut agents = Agents::new(port, true)?;
    let mut counts = load.plan.agents.clone();
    counts.retain(|count| *count > 0);
    counts.sort_unstable();
    agents.grow(FIRST).await?;
    settle(&load.processes).await?;
    let before = server.resident_kib()?;
    for &count in &counts {
        agents.grow(FIRST + count).await?;
        settle(&load.processes).await?;
        let after = server.resident_kib()?;
        let each = (after - before) / count as f64;
        outcome.value(format!("agents_{count}_server_kib"), each);
        outcome.value(format!("agents_{count}_server_mib"), after / 1024.0);
        let window = Duration::from_secs_f64(load.plan.agents_seconds.clamp(0.01, 600.0));
        let share = cpu_share(server, window).await?;
        outcome.value(format!("agents_{count}_idle_cpu_percent"), share * 100.0);
    }
    if let Some(most) = counts.last() {
        let end = Instant::now() + load.plan.lasting();
        let samples = dials::worker(load.dialer.clone(), end).await;
        let samples = samples.with_context(|| format!("dialing one of {most} agents"))?;
        outcome.latencies(&format!("agents_{most}_dial"), samples)?;
    }
    agents.stop().await;
    Ok(())
}

/// Waits until the processes have done what connecting gave them to do.
async fn settle(processes: &[Process]) -> anyhow::Result<()> {
    let end = Instant::now() + SETTLE_LIMIT;
    loop {
        let (before, begin) = (process::cpu_seconds(processes)?, Instant::now());
        tokio::time::sleep(LOOK).await;
        let spent = process::cpu_seconds(processes)? - before;
        if spent < BUSY_SHARE * begin.elapsed().as_secs_f64() || begin > end {
            return Ok(());
        }
    }
}

/// Share of one core that a process takes.
async fn cpu_share(process: &Process, window: Duration) -> anyhow::Result<f64> {
    let (before, begin) = (process.cpu_seconds()?, Instant::now());
    tokio::time::sleep(window).await;
    Ok((process.cpu_seconds()? - before) / begin.elapsed().as_secs_f64())
}
