//! A fixed number of operations, however long they take: an external tool counts their cost.

use std::net::SocketAddr;
use std::time::Duration;

use adit_perf_plan::{Operation, Sample};
use anyhow::{Context as _, ensure};
use tokio::io::{AsyncWriteExt as _, BufReader};

use super::Load;
use super::bulk::{READ_BYTES, Sink, WRITE_BYTES};
use super::dials::worker;
use super::echo::{Until, ask_all};
use crate::way::{Dialer, Target};

const MIB: u64 = 1 << 20;
/// Interval between two queries whether the sinks have received everything.
const ASK_EVERY: Duration = Duration::from_millis(5);

/// Runs the planned operations. Records their number, which shows that all of them were done.
pub(super) async fn measure(load: &Load, sample: &mut Sample) -> anyhow::Result<()> {
    let counted = load.plan.counted;
    let counted = counted.context("the plan does not say what: `counted` is missing")?;
    let (times, dialer) = (counted.times, &load.dialer);
    match counted.operation {
        Operation::Echo => echoes(dialer, counted.connections, times).await?,
        Operation::Dial => drop(worker(dialer.clone(), Until::Count(times)).await?),
        Operation::Down => download(dialer, times as u64 * MIB).await?,
        Operation::Up => upload(dialer, load.control, times as u64 * MIB).await?,
    }
    sample.value("counted_times", times as f64);
    Ok(())
}

async fn echoes(dialer: &Dialer, connections: usize, times: usize) -> anyhow::Result<()> {
    ensure!(
        times.checked_rem(connections) == Some(0),
        "{times} echoes cannot be shared by {connections} connections"
    );
    let tunnels = dialer.open_all(Target::Echo, connections).await?;
    ask_all(tunnels, Until::Count(times / connections)).await?;
    Ok(())
}

/// Returns when the source ends the stream: then no bytes are in flight.
async fn download(dialer: &Dialer, bytes: u64) -> anyhow::Result<()> {
    let mut tunnel = dialer.open(Target::Source).await?;
    tunnel.write_all(format!("{bytes}\n").as_bytes()).await?;
    let mut tunnel = BufReader::with_capacity(READ_BYTES, tunnel);
    let moved = tokio::io::copy_buf(&mut tunnel, &mut tokio::io::sink()).await?;
    ensure!(moved == bytes, "{moved} of {bytes} bytes arrived");
    Ok(())
}

/// Returns when the sink has received all bytes.
async fn upload(dialer: &Dialer, control: SocketAddr, bytes: u64) -> anyhow::Result<()> {
    let mut sink = Sink::connect(control).await?;
    let all = sink.received().await? + bytes;
    let mut tunnel = dialer.open(Target::Sink).await?;
    tunnel.write_all(b"load -1\n").await?;
    let piece = vec![b'x'; WRITE_BYTES];
    for _ in 0..bytes / WRITE_BYTES as u64 {
        tunnel.write_all(&piece).await?;
    }
    // Keep the tunnel open until then: closing it would drop bytes in flight.
    while sink.received().await? < all {
        tokio::time::sleep(ASK_EVERY).await;
    }
    Ok(())
}
