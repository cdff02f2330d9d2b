//! Tunnels through an HTTP proxy (RFC 9110, section 9.3.6), for links, lanes and targets.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use adit_config::limits;
use adit_config::plan::HttpProxy;
use adit_config::tls_policy::TlsPolicy;
use adit_core::session::{ProcessBudget, TunnelKind};
use adit_net::direct;
use adit_net::self_sockets::OwnSockets;
use adit_net::socket::tune_stream;
use adit_net::tasks::Tasks;
use adit_proxy::connect::{NoTunnel, open_tunnel};
use adit_relay::{BufferSizes, SocketBuffers};
use adit_tls::cause::TlsCause;
use adit_tls::nested::{Nested, SystemTrust};
use adit_tls::stream::{ByteStream, PeerAddr, Socket};
use adit_tls::tls::{TlsError, server_name};
use adit_tunnel::reset_on_close;
use bytes::Bytes;
use rustix::net::sockopt::socket_error;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, copy_bidirectional_with_sizes};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

/// Connections that are copied to a socket of their own, at most: far above the tunnels of an agent.
const COPIED_MAX: usize = 10_000;
/// Bytes that such a connection may hold, each way.
const COPIED_BYTES: usize = 32 * 1024;
/// The same where memory is bounded.
const COPIED_SMALL_BYTES: usize = 8 * 1024;
/// How often the socket of such a connection is looked after.
const LOOKED_AFTER: Duration = Duration::from_secs(5);

/// Tunnels through a proxy.
pub struct ProxyTunnels {
    /// What TLS to it trusts, if it is spoken to by TLS.
    trust: Option<SystemTrust>,
    /// The setting that names it.
    setting: &'static str,
    budget: Arc<ProcessBudget>,
    own_sockets: OwnSockets,
    copied: Tasks,
}

impl ProxyTunnels {
    /// Reads what TLS to the proxy trusts: `ca_cert`, or what the system does. Blocks. `setting` names the proxy.
    ///
    /// # Errors
    /// No certificate can be used.
    pub fn new(
        setting: &'static str,
        uses_tls: bool,
        (policy, ca_cert): (&TlsPolicy, Option<&Path>),
        (budget, own_sockets): (&Arc<ProcessBudget>, &OwnSockets),
    ) -> Result<Self, TlsError> {
        let trust = uses_tls.then(|| SystemTrust::load(policy, ca_cert));
        Ok(Self {
            trust: trust.transpose()?,
            setting,
            budget: Arc::clone(budget),
            own_sockets: own_sockets.clone(),
            copied: Tasks::new(COPIED_MAX),
        })
    }

    /// Asks the proxy at the other end of `tcp` for a tunnel to `target`, an authority. `may_speak`: the target may send first.
    ///
    /// # Errors
    /// Why not, in words.
    pub async fn open(
        &self,
        mut tcp: TcpStream,
        proxy: &HttpProxy,
        target: &str,
        may_speak: bool,
    ) -> Result<Socket, String> {
        let Some(trust) = &self.trust else {
            let early = self.ask(&mut tcp, target, proxy, may_speak).await?;
            if early.is_empty() {
                return Ok(Socket::Tcp(tcp));
            }
            let peer = peer_of(&tcp)?;
            return self
                .copied(ByteStream::Plain(Socket::Tcp(tcp), peer), early)
                .await;
        };
        let peer = peer_of(&tcp)?;
        let name = server_name(&proxy.host).map_err(|error| error.to_string())?;
        let connecting = trust.connect(name, ByteStream::Plain(Socket::Tcp(tcp), peer));
        let connected = timeout(limits::TLS_HANDSHAKE_TIMEOUT, connecting).await;
        let connected = connected.map_err(|_elapsed| "TLS to the proxy timed out".to_owned())?;
        let failed =
            |error: io::Error| format!("TLS to the proxy: {}", TlsCause::of_handshake(&error));
        let mut stream = connected.map_err(failed)?;
        let early = self.ask(&mut stream, target, proxy, may_speak).await?;
        self.copied(stream, early).await
    }

    async fn ask(
        &self,
        stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
        target: &str,
        proxy: &HttpProxy,
        may_speak: bool,
    ) -> Result<Bytes, String> {
        match open_tunnel(stream, target, proxy.authorization().as_deref()).await {
            Ok(early) if early.is_empty() || may_speak => Ok(early),
            Ok(_early) => Err("the proxy speaks before it is asked".to_owned()),
            Err(NoTunnel::Refused {
                status: 407,
                challenge,
                ..
            }) => {
                let challenge = match challenge.as_str() {
                    "" => "without a challenge",
                    challenge => challenge,
                };
                let setting = self.setting;
                Err(format!(
                    "the proxy answered status 407 ({challenge}): give user and password in {setting}, as http://USER:PASSWORD@HOST:PORT; Adit has Basic"
                ))
            }
            Err(NoTunnel::Refused { status, .. }) => {
                Err(format!("the proxy answered status {status}"))
            }
            Err(NoTunnel::Closed) => {
                Err("the proxy closed the connection before it answered".to_owned())
            }
            Err(other) => Err(other.to_string()),
        }
    }

    /// A socket with the bytes of `stream`, `early` first. Whichever of both is reset or cut off resets the other.
    async fn copied(
        &self,
        mut stream: impl Nested + 'static,
        early: Bytes,
    ) -> Result<Socket, String> {
        let is_small = self.budget.starts_small();
        let promise = self.budget.promise(TunnelKind::Grpc);
        let promise = promise.ok_or("short of memory")?;
        let (near, mut far) = pair(&self.own_sockets)
            .await
            .map_err(|error| error.to_string())?;
        if is_small {
            let fitted = SocketBuffers::default().fit(&far, BufferSizes::Small, true);
            fitted.map_err(|error| error.to_string())?;
        }
        let watched = far.as_fd().try_clone_to_owned();
        let watched = watched.map_err(|error| error.to_string())?;
        let bytes = if is_small {
            COPIED_SMALL_BYTES
        } else {
            COPIED_BYTES
        };
        let copying = async move {
            let _promise = promise;
            let copying = async {
                far.write_all(&early).await?;
                copy_bidirectional_with_sizes(&mut far, &mut stream, bytes, bytes).await
            };
            let copied = tokio::select! {
                copied = copying => copied,
                error = gone(&watched) => Err(error),
            };
            if let Err(error) = copied {
                tracing::debug!(%error, "a connection through a proxy was cut off");
                reset_on_close(&far);
                if let Some(tcp) = stream.tcp() {
                    reset_on_close(tcp);
                }
            }
        };
        let spawned = self.copied.spawn("copied-through-proxy", copying);
        spawned.map_err(|_full| "too many connections through it".to_owned())?;
        Ok(Socket::Tcp(near))
    }
}

/// Why the other end of `socket` is gone. A copy that has read its end, and waits for the proxy alone, would not notice.
async fn gone(socket: impl AsFd) -> io::Error {
    loop {
        tokio::time::sleep(LOOKED_AFTER).await;
        match socket_error(&socket) {
            Ok(Ok(())) => (),
            Ok(Err(error)) | Err(error) => return error.into(),
        }
    }
}

/// Two ends of a connection of this process: TCP, which has resets where a unix socket has only an end.
async fn pair(own_sockets: &OwnSockets) -> io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let at = listener.local_addr()?;
    let near = direct::connect(own_sockets, direct::socket_for(at)?, at).await?;
    loop {
        let (far, peer) = listener.accept().await?;
        // Others on this host may have been faster.
        if peer == near.local_addr()? {
            tune_stream(&near)?;
            tune_stream(&far)?;
            return Ok((near, far));
        }
    }
}

pub(super) fn peer_of(tcp: &TcpStream) -> Result<PeerAddr, String> {
    let peer = tcp.peer_addr().map_err(|error| error.to_string())?;
    Ok(PeerAddr::Tcp(peer))
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;

    use super::*;

    /// A client that has ended its half and is reset then: the proxy would wait for ever for a target that sends nothing.
    #[tokio::test(start_paused = true)]
    async fn a_reset_behind_an_end_ends_the_connection_to_the_proxy() {
        let (budget, off) = (Arc::new(ProcessBudget::new(1 << 30)), OwnSockets::off());
        let trust = (&TlsPolicy::default(), None);
        let tunnels = ProxyTunnels::new("HTTPS_PROXY", false, trust, (&budget, &off)).unwrap();
        let (proxied, mut proxy) = pair(&off).await.unwrap();
        let peer = peer_of(&proxied).unwrap();
        let stream = ByteStream::Plain(Socket::Tcp(proxied), peer);
        let early = Bytes::from_static(b"early");
        let Ok(Socket::Tcp(mut near)) = tunnels.copied(stream, early).await else {
            panic!("a TCP socket");
        };
        let mut read = [0; 5];
        near.read_exact(&mut read).await.unwrap();
        assert_eq!(&read, b"early");
        near.shutdown().await.unwrap();
        assert_eq!(proxy.read(&mut read).await.unwrap(), 0, "the end passes");
        reset_on_close(&near);
        drop(near);
        let over = async {
            while budget.promised_bytes() > 0 {
                tokio::time::sleep(LOOKED_AFTER).await;
            }
        };
        timeout(10 * LOOKED_AFTER, over).await.expect("it ends");
        let told = proxy.take_error().unwrap().map(|error| error.kind());
        assert_eq!(
            told,
            Some(io::ErrorKind::BrokenPipe),
            "a reset behind an end"
        );
    }
}
