//! Agents that connect at once, and idle agents: the server's memory for each, its CPU time for all, and the duration of a dial through one of them.

use std::slice;
use std::time::{Duration, Instant};

use adit_perf_plan::Sample;
use anyhow::Context as _;

use super::echo::Until;
use super::{Load, dials};
use crate::agents::Agents;
use crate::process::{self, Process};

/// Role of the measured process.
const SERVER: &str = "server";
/// Agents connected before the first measurement, so that the server's one-time setup is not counted.
const FIRST: usize = 8;
/// Period over which CPU use is sampled: longer than the backoff of agents that wait for room to open more lanes.
const LOOK: Duration = Duration::from_secs(3);
/// Share of a core above which a process still counts as busy, for example with opening lanes.
const BUSY_SHARE: f64 = 0.05;
/// Longest wait for idle processes; busy ones are measured after it all the same.
const SETTLE_LIMIT: Duration = Duration::from_secs(60);

/// Runs the measurement. Each count grows from the previous one, and is compared with no agents. Dials come last, since they
/// leave buffers behind.
pub(super) async fn measure(load: &Load, sample: &mut Sample) -> anyhow::Result<()> {
    let server = load.processes.iter().find(|one| one.role == SERVER);
    let server = server.context("name the server with --process=server=PID")?;
    let mut agents = Agents::new(&load.agents, true)?;
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
        sample.value(format!("agents_{count}_server_kib"), each);
        sample.value(format!("agents_{count}_server_mib"), after / 1024.0);
        let window = Duration::from_secs_f64(load.plan.agents_seconds.clamp(0.01, 600.0));
        let share = cpu_share(slice::from_ref(server), window).await?;
        sample.value(format!("agents_{count}_idle_cpu_percent"), share * 100.0);
    }
    if let Some(most) = counts.last() {
        let until = Until::Time(Instant::now() + load.plan.lasting());
        let samples = dials::worker(load.dialer.clone(), until).await;
        let samples = samples.with_context(|| format!("dialing one of {most} agents"))?;
        sample.latencies(&format!("agents_{most}_dial"), samples)?;
    }
    agents.stop().await;
    Ok(())
}

/// Measures agents that connect all at once, as after a server's restart: links established per second. Each count starts from
/// no agents. Without lanes, so that all peers do the same work.
pub(super) async fn measure_links(load: &Load, sample: &mut Sample) -> anyhow::Result<()> {
    for &count in load.plan.agents.iter().filter(|count| **count > 0) {
        let mut agents = Agents::new(&load.agents, false)?;
        let began = Instant::now();
        agents.grow(count).await?;
        let rate = count as f64 / began.elapsed().as_secs_f64();
        sample.value(format!("links_{count}_per_s"), rate);
        agents.stop().await;
    }
    Ok(())
}

/// Waits until the processes have finished the work that connecting caused.
async fn settle(processes: &[Process]) -> anyhow::Result<()> {
    let end = Instant::now() + SETTLE_LIMIT;
    while cpu_share(processes, LOOK).await? >= BUSY_SHARE && Instant::now() < end {}
    Ok(())
}

/// CPU use of processes together, as a share of one core.
async fn cpu_share(processes: &[Process], window: Duration) -> anyhow::Result<f64> {
    let (before, begin) = (process::cpu_seconds(processes)?, Instant::now());
    tokio::time::sleep(window).await;
    Ok((process::cpu_seconds(processes)? - before) / begin.elapsed().as_secs_f64())
}
