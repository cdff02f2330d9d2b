//! Closed-loop round trips of 64 bytes: a connection sends the next request after the answer to the previous one.

use std::time::{Duration, Instant};

use adit_perf_plan::Sample;
use anyhow::{Context as _, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{Load, all, rate};
use crate::process;
use crate::way::{Dialer, Target, Tunnel, close};

/// Size of a request and of its answer.
pub(super) const MESSAGE_BYTES: usize = 64;
/// Round trips of a connection that are not measured.
const WARM_UP: u64 = 20;

/// Measures with each number of connections.
pub(super) async fn measure(load: &Load, sample: &mut Sample) -> anyhow::Result<()> {
    let lasting = load.plan.lasting();
    for &connections in &load.plan.connections {
        let name = format!("echo_{connections}");
        let before = process::cpu_seconds(&load.processes)?;
        let samples = closed_loop(&load.dialer, connections, lasting)
            .await
            .with_context(|| name.clone())?;
        rate(load, sample, &name, (samples.len(), lasting), before)?;
        sample.latencies(&name, samples)?;
    }
    Ok(())
}

/// Opens all connections first; then runs round trips on all of them for the given time.
///
/// # Errors
/// A dial or a round trip fails.
pub(super) async fn closed_loop(
    dialer: &Dialer,
    connections: usize,
    lasting: Duration,
) -> anyhow::Result<Vec<Duration>> {
    let mut tunnels = dialer.open_all(Target::Echo, connections).await?;
    for tunnel in &mut tunnels {
        warm_up(tunnel).await?;
    }
    ask_all(tunnels, Until::Time(Instant::now() + lasting)).await
}

/// Round trips that are not measured.
///
/// # Errors
/// A round trip fails.
pub(super) async fn warm_up(tunnel: &mut Tunnel) -> anyhow::Result<()> {
    for number in 0..WARM_UP {
        round_trip(tunnel, number).await?;
    }
    Ok(())
}

/// How long operations are repeated.
#[derive(Clone, Copy)]
pub(super) enum Until {
    Time(Instant),
    Count(usize),
}

impl Until {
    /// Whether another operation is due at `now`, after `done`.
    pub(super) fn goes_on(self, now: Instant, done: usize) -> bool {
        match self {
            Self::Time(end) => now < end,
            Self::Count(count) => done < count,
        }
    }
}

/// Runs round trips on each tunnel, and closes it.
///
/// # Errors
/// A round trip or a close fails.
pub(super) async fn ask_all(tunnels: Vec<Tunnel>, until: Until) -> anyhow::Result<Vec<Duration>> {
    let asking = tunnels.into_iter().map(|tunnel| ask(tunnel, until));
    Ok(all(asking.collect()).await?.concat())
}

async fn ask(mut tunnel: Tunnel, until: Until) -> anyhow::Result<Vec<Duration>> {
    let mut samples = Vec::with_capacity(4096);
    loop {
        let begin = Instant::now();
        if !until.goes_on(begin, samples.len()) {
            break;
        }
        round_trip(&mut tunnel, WARM_UP + samples.len() as u64).await?;
        samples.push(begin.elapsed());
    }
    close(tunnel).await?;
    Ok(samples)
}

/// Sends one request and compares the answer.
///
/// # Errors
/// The tunnel breaks, or the answer does not match the request.
pub(super) async fn round_trip(tunnel: &mut Tunnel, number: u64) -> anyhow::Result<()> {
    let question = message(number);
    let mut answer = [0; MESSAGE_BYTES];
    tunnel.write_all(&question).await?;
    tunnel.read_exact(&mut answer).await?;
    ensure!(answer == question, "the answer is to another question");
    Ok(())
}

/// A request that is unique on its connection.
pub(super) fn message(number: u64) -> [u8; MESSAGE_BYTES] {
    let mut message = [b'.'; MESSAGE_BYTES];
    for (to, from) in message.iter_mut().zip(number.to_be_bytes()) {
        *to = from;
    }
    message
}
