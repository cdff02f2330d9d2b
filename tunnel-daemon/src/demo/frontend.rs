//! The client's side of a frontend: how a tunnel is requested in each dialect.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::net::{TcpStream, UnixStream};
use tonic::transport::Channel;

use super::folder::Folder;
use super::grpc_client::{self, ClientError, GrpcTunnel};
use super::http_client::{self, Opened};
use adit_config::tls_policy::TlsPolicy;
use adit_net::tasks::Tasks;
use adit_tls::handshake::connect_tls;
use adit_tls::reload::{Reloadable, ReloadableClientTls};
use adit_tls::stream::{PeerAddr, Socket};
use adit_tls::tls::{Alpn, ClientTls, server_name};

/// Time limit of a handshake inside one machine.
const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(10);

/// A frontend as its clients see it.
pub(super) struct Frontend {
    /// Short name for output lines.
    pub(super) name: &'static str,
    /// Address or path, for people.
    pub(super) place: String,
    dialect: Dialect,
}

enum Dialect {
    /// All tunnels share one connection, unlike with kube-apiserver's library: this is the harder case.
    Grpc(Channel),
    Connect,
    ConnectTls(SocketAddr, Arc<ReloadableClientTls>),
}

impl Frontend {
    /// The frontends whose sockets are in the folder, and the one on TCP, for the folder's client certificate.
    ///
    /// # Errors
    /// The gRPC connection fails, or a certificate cannot be used.
    pub(super) async fn all(folder: &Folder, secure: SocketAddr) -> anyhow::Result<[Self; 3]> {
        let [grpc, connect] = ["grpc.sock", "http-connect.sock"].map(|name| folder.file(name));
        let channel = grpc_client::connect(grpc.as_ref()).await;
        let tls = Reloadable::load(ClientTls {
            crl: None,
            ca: folder.file("ca.crt").into(),
            identity: Some((
                folder.file("client.crt").into(),
                folder.file("client.key").into(),
            )),
            policy: TlsPolicy::default(),
            alpn: Alpn::http11(),
        });
        let tls = tls.context("TLS of the client")?;
        let frontend = |name, place, dialect| Self {
            name,
            place,
            dialect,
        };
        Ok([
            frontend(
                "gRPC on a unix socket",
                grpc,
                Dialect::Grpc(channel.context("gRPC frontend")?),
            ),
            frontend("HTTP CONNECT on a unix socket", connect, Dialect::Connect),
            frontend(
                "HTTP CONNECT over mTLS",
                format!("https://{secure}"),
                Dialect::ConnectTls(secure, tls),
            ),
        ])
    }

    /// Asks for a tunnel to `target`.
    ///
    /// # Errors
    /// A broken connection; a refusal is not an error.
    pub(super) async fn open(&self, target: SocketAddr, tasks: &Tasks) -> anyhow::Result<Opened> {
        let target = target.to_string();
        match &self.dialect {
            Dialect::Grpc(channel) => match GrpcTunnel::open(channel.clone(), &target).await {
                Ok(tunnel) => Ok(Opened::Tunnel(Box::new(tunnel.into_io()))),
                Err(ClientError::Dial(text)) => Ok(Opened::Refused(None, text)),
                Err(error) => Err(error.into()),
            },
            Dialect::Connect => {
                http_client::connect(UnixStream::connect(&self.place).await?, &target, tasks).await
            }
            Dialect::ConnectTls(address, tls) => {
                let socket = Socket::Tcp(TcpStream::connect(address).await?);
                let name = server_name(&address.ip().to_string())?;
                let peer = PeerAddr::Tcp(*address);
                let io = connect_tls(socket, peer, tls, name, None, HANDSHAKE_PATIENCE).await?;
                http_client::connect(io, &target, tasks).await
            }
        }
    }
}
