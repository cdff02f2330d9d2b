//! Closed-loop round trips of 64 bytes: a connection sends the next request after the answer to the previous one.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinSet;

use super::Load;
use crate::outcome::Outcome;
use crate::process;
use crate::way::{Dialer, Target, Tunnel};

/// Size of a request and of its answer.
pub(super) const MESSAGE_BYTES: usize = 64;
/// Round trips of a connection that are not measured.
const WARM_UP: u64 = 20;

/// Measures with each number of connections.
pub(super) async fn measure(load: &Load<'_>, outcome: &mut Outcome) -> anyhow::Result<()> {
    let lasting = load.plan.lasting();
    for &connections in &load.plan.connections {
        let name = format!("echo_{connections}");
        let before = process::cpu_seconds(&load.processes)?;
        let samples = closed_loop(&load.dialer, connections, lasting)
            .await
            .with_context(|| name.clone())?;
        let cpu = process::cpu_seconds(&load.processes)? - before;
        if !load.processes.is_empty() && !samples.is_empty() {
            let each = cpu * 1e6 / samples.len() as f64;
            outcome.value(format!("{name}_cpu_us"), each);
        }
        outcome.value(
            format!("{name}_per_s"),
            samples.len() as f64 / lasting.as_secs_f64(),
        );
        outcome.latencies(&name, samples)?;
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
    let mut tunnels = Vec::with_capacity(connections);
    for _ in 0..connections {
        let mut tunnel = dialer.open(Target::Echo).await?;
        warm_up(&mut tunnel).await?;
        tunnels.push(tunnel);
    }
    ask_all(tunnels, lasting).await
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

/// Runs round trips on all tunnels for the given time, and closes them.
///
/// # Errors
/// A round trip or a close fails.
pub(super) async fn ask_all(
    tunnels: Vec<Tunnel>,
    lasting: Duration,
) -> anyhow::Result<Vec<Duration>> {
    let end = Instant::now() + lasting;
    let mut asking = JoinSet::new();
    for tunnel in tunnels {
        asking.spawn(ask_until(tunnel, end));
    }
    let mut samples = Vec::new();
    while let Some(asked) = asking.join_next().await {
        samples.extend(asked??);
    }
    Ok(samples)
}

async fn ask_until(mut tunnel: Tunnel, end: Instant) -> anyhow::Result<Vec<Duration>> {
    let mut samples = Vec::with_capacity(4096);
    let mut number = WARM_UP;
    loop {
        let begin = Instant::now();
        if begin >= end {
            break;
        }
        round_trip(&mut tunnel, number).await?;
        samples.push(begin.elapsed());
        number += 1;
    }
    tunnel.close().await.context("closing")?;
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
