//! Paths to a target: a plain connection, HTTP CONNECT, SOCKS5, or the gRPC stream that kube-apiserver uses.

mod connect;
mod grpc;
mod socks5;

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use adit_perf_plan::Dialect;
use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixStream};
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
    /// Where the frontend listens, ADDRESS:PORT or the path of a unix socket; `tcp` needs none.
    #[arg(long, required_if_eq_any = [("dialect", "grpc"), ("dialect", "http-connect"), ("dialect", "socks5")])]
    frontend: Option<Frontend>,
    /// Where each target is reached: its own address, or for `tcp` the port that leads to it.
    #[arg(long, value_parser = crate::from_json::<Targets>)]
    targets: Targets,
}

/// Where a frontend listens.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Frontend {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

impl FromStr for Frontend {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(text
            .parse()
            .map_or_else(|_path| Self::Unix(text.into()), Self::Tcp))
    }
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
        let dial = async {
            let tunnel: Tunnel = match self.dialect {
                Dialect::Tcp => tcp(address).await?,
                Dialect::HttpConnect => connect::open(self.connect().await?, address).await?,
                Dialect::Socks5 => socks5::open(self.connect().await?, address).await?,
                Dialect::Grpc | Dialect::GrpcGo | Dialect::GrpcGoReused | Dialect::GrpcGoTls => {
                    Box::new(GrpcTunnel::open(self.connect().await?, address).await?)
                }
            };
            Ok(tunnel)
        };
        let late = |_elapsed| io::Error::new(io::ErrorKind::TimedOut, "the dial was not answered");
        timeout(DIAL_LIMIT, dial).await.map_err(late)?
    }

    /// A connection to the frontend.
    async fn connect(&self) -> io::Result<Tunnel> {
        match &self.frontend {
            Some(Frontend::Tcp(address)) => tcp(*address).await,
            Some(Frontend::Unix(path)) => Ok(Box::new(UnixStream::connect(path).await?)),
            None => Err(io::Error::other("this way needs --frontend")),
        }
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

async fn tcp(address: SocketAddr) -> io::Result<Tunnel> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    Ok(Box::new(stream))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frontend_is_an_address_with_a_port_or_else_a_path() {
        for (text, is_tcp) in [
            ("127.0.0.1:80", true),
            ("[::1]:80", true),
            ("/tmp/s.sock", false),
            ("127.0.0.1", false),
        ] {
            let Ok(frontend) = text.parse();
            assert_eq!(matches!(frontend, Frontend::Tcp(_)), is_tcp, "{text}");
        }
    }
}
