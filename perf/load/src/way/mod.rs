//! Paths to a target: a plain connection, HTTP CONNECT, or the gRPC stream that kube-apiserver uses.

mod connect;
mod grpc;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::str::FromStr;
use std::task::{Context, Poll};
use std::time::Duration;

use anyhow::Context as _;
use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};

use grpc::GrpcTunnel;

/// Time limit of a dial; healthy peers need far less.
const DIAL_LIMIT: Duration = Duration::from_secs(20);

/// How a target is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Way {
    /// Connect to the address: the target itself, or a port that leads to it.
    Tcp,
    /// HTTP CONNECT through the frontend's unix socket.
    HttpConnect,
    /// A gRPC stream through the frontend's unix socket, on an HTTP/2 connection of its own.
    Grpc,
}

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
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Targets {
    echo: SocketAddr,
    source: SocketAddr,
    sink: SocketAddr,
}

impl FromStr for Targets {
    type Err = serde_json::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        serde_json::from_str(text)
    }
}

impl Targets {
    /// The address of this target.
    pub(crate) fn address(&self, target: Target) -> SocketAddr {
        match target {
            Target::Echo => self.echo,
            Target::Source => self.source,
            Target::Sink => self.sink,
        }
    }
}

/// Opens tunnels.
#[derive(Clone, Debug)]
pub(crate) struct Dialer {
    route: Route,
    targets: Targets,
}

#[derive(Clone, Debug)]
enum Route {
    Tcp,
    HttpConnect(PathBuf),
    Grpc(PathBuf),
}

/// A byte stream to a target. Dropping it closes it at once; [`Tunnel::close`] closes gRPC tunnels by protocol.
pub(crate) enum Tunnel {
    /// A connection of its own.
    Tcp(TcpStream),
    /// A connection to the frontend that serves this tunnel alone.
    Unix(UnixStream),
    /// A gRPC stream.
    Grpc(Box<GrpcTunnel>),
}

impl Dialer {
    /// # Errors
    /// This way needs a frontend, and none is given.
    pub(crate) fn new(
        way: Way,
        frontend: Option<PathBuf>,
        targets: Targets,
    ) -> anyhow::Result<Self> {
        let socket = || {
            frontend.context("name the frontend's unix socket with --frontend: this way needs it")
        };
        let route = match way {
            Way::Tcp => Route::Tcp,
            Way::HttpConnect => Route::HttpConnect(socket()?),
            Way::Grpc => Route::Grpc(socket()?),
        };
        Ok(Self { route, targets })
    }

    /// Opens a tunnel to `target`.
    ///
    /// # Errors
    /// The dial is refused, or takes longer than [`DIAL_LIMIT`].
    pub(crate) async fn open(&self, target: Target) -> io::Result<Tunnel> {
        let address = self.targets.address(target);
        let dial = async {
            match &self.route {
                Route::Tcp => {
                    let stream = TcpStream::connect(address).await?;
                    stream.set_nodelay(true)?;
                    Ok(Tunnel::Tcp(stream))
                }
                Route::HttpConnect(socket) => {
                    connect::open(socket, address).await.map(Tunnel::Unix)
                }
                Route::Grpc(socket) => {
                    let tunnel = GrpcTunnel::open(socket, address).await?;
                    Ok(Tunnel::Grpc(Box::new(tunnel)))
                }
            }
        };
        tokio::time::timeout(DIAL_LIMIT, dial)
            .await
            .map_err(|_elapsed| {
                io::Error::new(io::ErrorKind::TimedOut, "the dial was not answered")
            })?
    }
}

impl Tunnel {
    /// Closes the tunnel as its client would: gRPC waits for the answer to the close, the others just close.
    ///
    /// # Errors
    /// The answer to the close does not arrive.
    pub(crate) async fn close(self) -> io::Result<()> {
        match self {
            Self::Tcp(_) | Self::Unix(_) => Ok(()),
            Self::Grpc(tunnel) => tunnel.close().await,
        }
    }
}

impl AsyncRead for Tunnel {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_read(cx, buffer),
            Self::Unix(stream) => Pin::new(stream).poll_read(cx, buffer),
            Self::Grpc(tunnel) => tunnel.poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for Tunnel {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Unix(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Grpc(tunnel) => tunnel.poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            Self::Unix(stream) => Pin::new(stream).poll_flush(cx),
            // Packets are already handed to HTTP/2: this side buffers none.
            Self::Grpc(_) => Poll::Ready(Ok(())),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Grpc(tunnel) => Poll::Ready(tunnel.ask_to_close()),
        }
    }
}
