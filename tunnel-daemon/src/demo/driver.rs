//! Drives tunnels through one frontend, and checks each answer.

use std::net::SocketAddr;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use anyhow::{Context as _, bail};

use super::frontend::Frontend;
use super::http_client::{HttpClient, Opened};
use super::stats::{Samples, speed};
use super::world::World;

/// Drives tunnels through one frontend.
pub(super) struct Driver<'a> {
    /// The running installation.
    pub(super) world: &'a World,
    /// The frontend under test.
    pub(super) frontend: &'a Frontend,
}

impl Driver<'_> {
    /// Opens an HTTP tunnel to `target`.
    pub(super) async fn open(&self, target: SocketAddr) -> anyhow::Result<HttpClient> {
        let tasks = &self.world.tasks;
        let io = match self.frontend.open(target, tasks).await? {
            Opened::Tunnel(io) => io,
            Opened::Refused(_status, text) => bail!("refused: {text}"),
        };
        HttpClient::over(io, &target.to_string(), tasks).await
    }

    /// Fetches the page of `target` through a new tunnel.
    pub(super) async fn page(&self, target: SocketAddr) -> anyhow::Result<()> {
        self.open(target).await?.page().await
    }

    /// Downloads and compares every byte; returns the speed.
    ///
    /// # Errors
    /// The first wrong byte, or a broken tunnel.
    pub(super) async fn download(&self, length: u64) -> anyhow::Result<String> {
        let mut client = self.open(self.world.bulk).await?;
        let started = Instant::now();
        client.download(length).await?;
        self.world.stats.down.fetch_add(length, Relaxed);
        Ok(speed(length, started))
    }

    /// Uploads; the target compares every byte. Returns the speed.
    ///
    /// # Errors
    /// The first wrong byte, or a broken tunnel.
    pub(super) async fn upload(&self, length: u64) -> anyhow::Result<String> {
        let mut client = self.open(self.world.bulk).await?;
        let started = Instant::now();
        client.upload(length).await?;
        self.world.stats.up.fetch_add(length, Relaxed);
        Ok(speed(length, started))
    }

    /// Sends `count` requests in sequence on one tunnel to `target`.
    ///
    /// # Errors
    /// A wrong answer, or a broken tunnel.
    pub(super) async fn answers(
        &self,
        target: SocketAddr,
        count: usize,
    ) -> anyhow::Result<Samples> {
        let mut client = self.open(target).await?;
        timed(count, "request", async || client.page().await).await
    }

    /// Opens `count` tunnels in sequence, with one request on each.
    ///
    /// # Errors
    /// A wrong answer, or a tunnel that does not open.
    pub(super) async fn dials(&self, count: usize) -> anyhow::Result<String> {
        let dial = async || self.page(self.world.web).await;
        let times = timed(count, "tunnel", dial).await?.text();
        Ok(format!("{count} times dial, request, close, {times}"))
    }
}

/// Does `work` `count` times in sequence; an error names its turn.
async fn timed(
    count: usize,
    name: &str,
    mut work: impl AsyncFnMut() -> anyhow::Result<()>,
) -> anyhow::Result<Samples> {
    let mut times = Samples::default();
    for number in 1..=count {
        let started = Instant::now();
        let done = work().await;
        done.with_context(|| format!("{name} {number} of {count}"))?;
        times.add(started);
    }
    Ok(times)
}
