//! Paths to a target: a plain connection, HTTP CONNECT, or the gRPC stream that kube-apiserver uses.

mod connect;
mod grpc;

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use adit_perf_plan::Dialect;
use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use grpc::GrpcTunnel;

/// Time limit of a dial; healthy peers need far less.
const DIAL_LIMIT: Duration = Duration::from_secs(20);
/// Time limit for the answer to a close, as in the Go library.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);

/// The target of a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// Returns the bytes it receives.
    Echo,
    /// Sends endlessly once requested.
    Source,
    /// Counts the bytes it receives.
    Sink,
}

/// Address of each target.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Targets {
    pub(crate) echo: SocketAddr,
    pub(crate) source: SocketAddr,
    pub(crate) sink: SocketAddr,
}

/// Opens tunnels.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Dialer {
    /// How targets are reached.
    #[arg(long = "way", value_enum)]
    dialect: Dialect,
    /// Unix socket of the frontend; `tcp` needs none.
    #[arg(long, required_if_eq_any = [("dialect", "grpc"), ("dialect", "http-connect")])]
    frontend: Option<PathBuf>,
    /// Where each target is reached: its own address, or for `tcp` the port that leads to it.
    #[arg(long, value_parser = crate::from_json::<Targets>)]
    targets: Targets,
}

/// A byte stream to a target. Dropping it closes it at once; [`close`] closes it by protocol.
pub(crate) type Tunnel = Box<dyn Stream>;

/// Both directions of a byte stream.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

impl Dialer {
    /// Opens a tunnel to `target`.
    ///
    /// # Errors
    /// The dial is refused, or takes longer than [`DIAL_LIMIT`].
    pub(crate) async fn open(&self, target: Target) -> io::Result<Tunnel> {
        let address = match target {
            Target::Echo => self.targets.echo,
            Target::Source => self.targets.source,
            Target::Sink => self.targets.sink,
        };
        let frontend = self.frontend.as_deref().unwrap_or_else(|| Path::new(""));
        let dial = async {
            let tunnel: Tunnel = match self.dialect {
                Dialect::Tcp => {
                    let stream = TcpStream::connect(address).await?;
                    stream.set_nodelay(true)?;
                    Box::new(stream)
                }
                Dialect::HttpConnect => Box::new(connect::open(frontend, address).await?),
                Dialect::Grpc | Dialect::GrpcGo => {
                    Box::new(GrpcTunnel::open(frontend, address).await?)
                }
            };
            Ok(tunnel)
        };
        let late = |_elapsed| io::Error::new(io::ErrorKind::TimedOut, "the dial was not answered");
        timeout(DIAL_LIMIT, dial).await.map_err(late)?
    }

    /// Opens tunnels to `target`, one after the other.
    ///
    /// # Errors
    /// A dial fails; the error names its number.
    pub(crate) async fn open_all(
        &self,
        target: Target,
        count: usize,
    ) -> anyhow::Result<Vec<Tunnel>> {
        let mut tunnels = Vec::with_capacity(count);
        for number in 1..=count {
            let tunnel = self.open(target).await;
            tunnels.push(tunnel.with_context(|| format!("opening tunnel {number}"))?);
        }
        Ok(tunnels)
    }
}

/// Closes a tunnel as its client would: gRPC waits for the answer to the close, the others just close.
///
/// # Errors
/// The answer to the close does not arrive.
pub(crate) async fn close(mut tunnel: Tunnel) -> anyhow::Result<()> {
    let closed = timeout(CLOSE_LIMIT, tunnel.shutdown()).await;
    match closed.context("the close was not confirmed")? {
        // A plain connection whose peer was faster.
        Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(()),
        closed => closed.context("closing"),
    }
}
