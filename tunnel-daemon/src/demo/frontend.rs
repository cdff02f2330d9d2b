//! The client's side of a frontend: how a tunnel is requested in each dialect.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpStream, UnixStream};
use tonic::transport::Channel;

use super::folder::Folder;
use super::grpc_client::{self, ClientError, GrpcTunnel};
use super::http_client::{self, Connected, Io};
use adit_config::tls_policy::TlsPolicy;
use adit_net::tasks::Tasks;
use adit_telemetry::labels::ClientDialect;
use adit_tls::handshake::connect_tls;
use adit_tls::reload::{Reloadable, ReloadableClientTls};
use adit_tls::stream::{PeerAddr, Socket};
use adit_tls::tls::{Alpn, ClientTls, TlsError, server_name};

/// Time limit of a handshake inside one machine.
const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(10);

/// A frontend as its clients see it.
pub(super) struct Frontend {
    /// Short name for output lines.
    pub(super) name: &'static str,
    way: Way,
}

enum Way {
    Grpc {
        path: PathBuf,
        channel: Channel,
    },
    Connect(PathBuf),
    ConnectTls {
        address: SocketAddr,
        tls: Arc<ReloadableClientTls>,
    },
}

/// Why a tunnel did not open.
#[derive(Debug, thiserror::Error)]
pub(super) enum OpenError {
    /// The server refuses, with its own text; with an HTTP status if the frontend speaks HTTP.
    #[error("refused: {text}")]
    Refused {
        /// HTTP status.
        status: Option<u16>,
        /// The reason given.
        text: String,
    },
    /// Anything else.
    #[error("{0:#}")]
    Broken(anyhow::Error),
}

fn broken(error: impl Into<anyhow::Error>) -> OpenError {
    OpenError::Broken(error.into())
}

impl Frontend {
    /// gRPC on a unix socket. All tunnels share one connection, unlike with kube-apiserver's library: this is the harder case.
    ///
    /// # Errors
    /// The connection fails.
    pub(super) async fn grpc(path: PathBuf) -> Result<Self, ClientError> {
        let channel = grpc_client::connect(&path).await?;
        Ok(Self {
            name: "gRPC on a unix socket",
            way: Way::Grpc { path, channel },
        })
    }

    /// HTTP CONNECT on a unix socket.
    #[must_use]
    pub(super) fn connect(path: PathBuf) -> Self {
        Self {
            name: "HTTP CONNECT on a unix socket",
            way: Way::Connect(path),
        }
    }

    /// HTTP CONNECT over mutual TLS, with the folder's client certificate.
    ///
    /// # Errors
    /// A file is missing or broken.
    pub(super) fn connect_tls(address: SocketAddr, folder: &Folder) -> Result<Self, TlsError> {
        let tls = Reloadable::load(ClientTls {
            ca: folder.file("ca.crt"),
            identity: Some((folder.file("client.crt"), folder.file("client.key"))),
            policy: TlsPolicy::default(),
            alpn: Alpn::http11(),
        })?;
        Ok(Self {
            name: "HTTP CONNECT over mTLS",
            way: Way::ConnectTls { address, tls },
        })
    }

    /// Address or path, for people.
    #[must_use]
    pub(super) fn place(&self) -> String {
        match &self.way {
            Way::Grpc { path, .. } | Way::Connect(path) => path.display().to_string(),
            Way::ConnectTls { address, .. } => format!("https://{address}"),
        }
    }

    /// The dialect of the frontend's clients.
    #[must_use]
    pub(super) fn dialect(&self) -> ClientDialect {
        match &self.way {
            Way::Grpc { .. } => ClientDialect::Grpc,
            Way::Connect(_) | Way::ConnectTls { .. } => ClientDialect::HttpConnect,
        }
    }

    /// The socket of the gRPC frontend.
    #[must_use]
    pub(super) fn grpc_socket(&self) -> Option<&Path> {
        match &self.way {
            Way::Grpc { path, .. } => Some(path),
            Way::Connect(_) | Way::ConnectTls { .. } => None,
        }
    }

    /// The address of the TCP frontend.
    #[must_use]
    pub(super) fn tls_address(&self) -> Option<SocketAddr> {
        match &self.way {
            Way::ConnectTls { address, .. } => Some(*address),
            Way::Grpc { .. } | Way::Connect(_) => None,
        }
    }

    /// Opens a tunnel to `target`.
    ///
    /// # Errors
    /// [`OpenError`].
    pub(super) async fn open(
        &self,
        target: SocketAddr,
        tasks: &Tasks,
    ) -> Result<Box<dyn Io>, OpenError> {
        let target = target.to_string();
        match &self.way {
            Way::Grpc { channel, .. } => match GrpcTunnel::open(channel.clone(), &target).await {
                Ok(tunnel) => Ok(Box::new(tunnel.into_io())),
                Err(ClientError::Dial(text)) => Err(OpenError::Refused { status: None, text }),
                Err(error) => Err(broken(error)),
            },
            Way::Connect(path) => {
                let io = UnixStream::connect(path).await.map_err(broken)?;
                through_connect(io, &target, tasks).await
            }
            Way::ConnectTls { address, tls } => {
                let tcp = TcpStream::connect(address).await.map_err(broken)?;
                let name = server_name(&address.ip().to_string()).map_err(broken)?;
                let peer = PeerAddr::Tcp(*address);
                let socket = Socket::Tcp(tcp);
                let io = connect_tls(socket, peer, tls, name, None, HANDSHAKE_PATIENCE)
                    .await
                    .map_err(broken)?;
                through_connect(io, &target, tasks).await
            }
        }
    }
}

async fn through_connect(
    io: impl Io,
    target: &str,
    tasks: &Tasks,
) -> Result<Box<dyn Io>, OpenError> {
    match http_client::connect(io, target, tasks).await {
        Ok(Connected::Open(tunnel)) => Ok(Box::new(tunnel)),
        Ok(Connected::Refused(status, text)) => Err(OpenError::Refused {
            status: Some(status.as_u16()),
            text,
        }),
        Err(error) => Err(OpenError::Broken(error)),
    }
}
