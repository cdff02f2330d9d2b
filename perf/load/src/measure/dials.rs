//! Dial, one round trip, close: rate per second, and time until the first answer.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use tokio::task::JoinSet;

use super::Load;
use super::echo::round_trip;
use crate::outcome::Outcome;
use crate::process;
use crate::way::{Dialer, Target};

/// Measures with each number of workers.
pub(super) async fn measure(load: &Load<'_>, outcome: &mut Outcome) -> anyhow::Result<()> {
    for &workers in &load.plan.dialers {
        let name = format!("dials_{workers}");
        let cpu = process::cpu_seconds(&load.processes)?;
        let begin = Instant::now();
        let mut dialing = JoinSet::new();
        for _ in 0..workers {
            dialing.spawn(worker(load.dialer.clone(), begin + load.plan.lasting()));
        }
        let mut samples = Vec::new();
        while let Some(dialed) = dialing.join_next().await {
            samples.extend(dialed?.with_context(|| name.clone())?);
        }
        let (count, took) = (samples.len() as f64, begin.elapsed().as_secs_f64());
        outcome.value(format!("{name}_per_s"), count / took);
        if !load.processes.is_empty() && count > 0.0 {
            let cpu = process::cpu_seconds(&load.processes)? - cpu;
            outcome.value(format!("{name}_cpu_us"), cpu * 1e6 / count);
        }
        outcome.latencies(&name, samples)?;
    }
    Ok(())
}

/// Dials, does one round trip and closes, repeatedly until `end`.
///
/// # Errors
/// A dial, a round trip or a close fails.
pub(super) async fn worker(dialer: Dialer, end: Instant) -> anyhow::Result<Vec<Duration>> {
    let mut samples = Vec::new();
    loop {
        let begin = Instant::now();
        if begin >= end {
            return Ok(samples);
        }
        let mut tunnel = dialer.open(Target::Echo).await?;
        round_trip(&mut tunnel, samples.len() as u64).await?;
        samples.push(begin.elapsed());
        tunnel.close().await.context("closing")?;
    }
}
