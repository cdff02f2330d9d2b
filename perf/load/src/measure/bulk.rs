//! Downloads and uploads: payload bytes at the receiver, and the CPU time spent on them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use adit_perf_plan::Sample;
use anyhow::{Context as _, ensure};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::{Load, all};
use crate::process;
use crate::way::{Target, Tunnel};

/// Size of a read in a download.
pub(super) const READ_BYTES: usize = 256 * 1024;
/// Size of a write in an upload: what io.Copy writes at a time.
pub(super) const WRITE_BYTES: usize = 32 * 1024;
/// Transfers that do not end within this time are cut.
const STOP_LIMIT: Duration = Duration::from_secs(1);
const GIB: f64 = (1_u64 << 30) as f64;

/// Measures both directions with each number of streams.
pub(super) async fn measure(load: &Load, sample: &mut Sample) -> anyhow::Result<()> {
    for &streams in &load.plan.streams {
        for (direction, target) in [("down", Target::Source), ("up", Target::Sink)] {
            let name = format!("{direction}_{streams}");
            let measured = one(load, target, streams, &name, sample).await;
            measured.context(name)?;
        }
    }
    Ok(())
}

async fn one(
    load: &Load,
    target: Target,
    streams: usize,
    name: &str,
    sample: &mut Sample,
) -> anyhow::Result<()> {
    let mut transfers = Transfers::start(load, target, streams).await?;
    let before = transfers.reading(load).await?;
    tokio::time::sleep(load.plan.lasting()).await;
    let after = transfers.reading(load).await?;
    transfers.stop().await?;

    let bytes = after.1 - before.1;
    ensure!(bytes > 0, "not a byte arrived");
    sample.value(format!("{name}_gbit_s"), gbit_s(bytes, after.0 - before.0));
    if !load.processes.is_empty() {
        let cpu = after.2 - before.2;
        sample.value(format!("{name}_cpu_s_per_gib"), cpu * GIB / bytes as f64);
    }
    Ok(())
}

/// Gigabits per second.
pub(super) fn gbit_s(bytes: u64, took: Duration) -> f64 {
    bytes as f64 * 8.0 / took.as_secs_f64() / 1e9
}

/// Running transfers.
pub(super) struct Transfers {
    tasks: JoinSet<std::io::Result<()>>,
    stopping: Arc<AtomicBool>,
    /// Bytes of downloads, which arrive in this process.
    here: Arc<AtomicU64>,
    /// Uploads arrive in the sink, which reports the count.
    sink: Option<Sink>,
}

/// A connection to the sinks' counter, outside the measured path.
pub(super) struct Sink(BufReader<TcpStream>);

impl Sink {
    /// Connects to the counter at `control`.
    ///
    /// # Errors
    /// The connection is refused.
    pub(super) async fn connect(control: SocketAddr) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(control).await;
        Ok(Self(BufReader::new(stream.context("asking the sink")?)))
    }

    /// Bytes that all uploads together have delivered so far.
    ///
    /// # Errors
    /// The counter does not answer.
    pub(super) async fn received(&mut self) -> anyhow::Result<u64> {
        let mut line = String::new();
        self.0.write_all(b"received\n").await?;
        self.0.read_line(&mut line).await?;
        line.trim().parse().context("the sink answers a number")
    }
}

/// A moment, the bytes that had arrived, and the CPU time of the processes.
type Reading = (Instant, u64, f64);

impl Transfers {
    /// Opens all tunnels to a source or sink, then starts the transfers, and waits until they are at full speed.
    ///
    /// # Errors
    /// A dial fails, or the sinks' counter does not answer.
    pub(super) async fn start(load: &Load, target: Target, streams: usize) -> anyhow::Result<Self> {
        Self::start_at(load, target, streams, 0).await
    }

    /// Like [`Self::start`]; each source sends `rate` bytes a second, or as fast as they are taken for 0.
    ///
    /// # Errors
    /// Like [`Self::start`].
    pub(super) async fn start_at(
        load: &Load,
        target: Target,
        streams: usize,
        rate: u64,
    ) -> anyhow::Result<Self> {
        let tunnels = load.dialer.open_all(target, streams).await?;
        let stopping = Arc::new(AtomicBool::new(false));
        let here = Arc::new(AtomicU64::new(0));
        let mut tasks = JoinSet::new();
        for mut tunnel in tunnels {
            let (stopping, here) = (Arc::clone(&stopping), Arc::clone(&here));
            if target == Target::Sink {
                tunnel.write_all(b"load -1\n").await?;
                tasks.spawn(async move { upload(tunnel, &stopping).await });
            } else {
                let line = if rate == 0 {
                    "0\n".to_owned()
                } else {
                    format!("0 {rate}\n")
                };
                tunnel.write_all(line.as_bytes()).await?;
                tasks.spawn(async move { download(tunnel, &here, &stopping).await });
            }
        }
        let sink = match target {
            Target::Sink => Some(Sink::connect(load.control).await?),
            Target::Source | Target::Echo => None,
        };
        tokio::time::sleep(load.plan.lasting() / 3).await;
        Ok(Self {
            tasks,
            stopping,
            here,
            sink,
        })
    }

    async fn reading(&mut self, load: &Load) -> anyhow::Result<Reading> {
        let bytes = self.bytes().await?;
        let cpu = process::cpu_seconds(&load.processes)?;
        Ok((Instant::now(), bytes, cpu))
    }

    /// Bytes that have arrived so far.
    ///
    /// # Errors
    /// A transfer has ended, or the sinks' counter does not answer.
    pub(super) async fn bytes(&mut self) -> anyhow::Result<u64> {
        if let Some(ended) = self.tasks.try_join_next() {
            ended?.context("a transfer ended by itself")?;
            anyhow::bail!("a transfer ended by itself");
        }
        match &mut self.sink {
            None => Ok(self.here.load(Ordering::Relaxed)),
            Some(sink) => sink.received().await,
        }
    }

    /// Ends all transfers; stalled ones are cut.
    ///
    /// # Errors
    /// A transfer had failed before.
    pub(super) async fn stop(self) -> anyhow::Result<()> {
        self.stopping.store(true, Ordering::Relaxed);
        // Time is up: dropping the remaining tasks closes their connections.
        let ended = tokio::time::timeout(STOP_LIMIT, all(self.tasks)).await;
        ended.map_or(Ok(()), |ended| ended.map(drop))
    }
}

async fn download(
    mut tunnel: Tunnel,
    moved: &AtomicU64,
    stopping: &AtomicBool,
) -> std::io::Result<()> {
    let mut buffer = vec![0; READ_BYTES];
    while !stopping.load(Ordering::Relaxed) {
        let length = tunnel.read(&mut buffer).await?;
        if length == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        moved.fetch_add(length as u64, Ordering::Relaxed);
        // Many streams share few threads: yield after each read.
        tokio::task::yield_now().await;
    }
    Ok(())
}

async fn upload(mut tunnel: Tunnel, stopping: &AtomicBool) -> std::io::Result<()> {
    let buffer = vec![b'x'; WRITE_BYTES];
    while !stopping.load(Ordering::Relaxed) {
        tunnel.write_all(&buffer).await?;
        tokio::task::yield_now().await;
    }
    Ok(())
}
