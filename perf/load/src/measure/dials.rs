//! Dial, one round trip, close: rate per second, and time until the first answer.

use std::time::{Duration, Instant};

use adit_perf_plan::Sample;
use anyhow::Context as _;

use super::echo::{Until, round_trip};
use super::{Load, all, rate};
use crate::process;
use crate::way::{Dialer, Target, close};

/// Measures with each number of workers.
pub(super) async fn measure(load: &Load, sample: &mut Sample) -> anyhow::Result<()> {
    for &workers in &load.plan.dialers {
        let name = format!("dials_{workers}");
        let cpu = process::cpu_seconds(&load.processes)?;
        let begin = Instant::now();
        let until = Until::Time(begin + load.plan.lasting());
        let dialing = (0..workers).map(|_| worker(load.dialer.clone(), until));
        let dialed = all(dialing.collect()).await.with_context(|| name.clone())?;
        let samples = dialed.concat();
        let done = (samples.len(), begin.elapsed());
        rate(load, sample, &name, done, cpu)?;
        sample.latencies(&name, samples)?;
    }
    Ok(())
}

/// Dials, does one round trip and closes, repeatedly.
///
/// # Errors
/// A dial, a round trip or a close fails.
pub(super) async fn worker(dialer: Dialer, until: Until) -> anyhow::Result<Vec<Duration>> {
    let mut samples = Vec::new();
    loop {
        let begin = Instant::now();
        if !until.goes_on(begin, samples.len()) {
            return Ok(samples);
        }
        let mut tunnel = dialer.open(Target::Echo).await?;
        round_trip(&mut tunnel, samples.len() as u64).await?;
        samples.push(begin.elapsed());
        close(tunnel).await?;
    }
}
