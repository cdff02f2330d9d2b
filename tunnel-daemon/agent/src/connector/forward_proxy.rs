//! The way to servers through an HTTP proxy, which HTTPS_PROXY names (RFC 9110, section 9.3.6).

use std::io;
use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::Arc;

use adit_config::address::ServerAddress;
use adit_config::limits;
use adit_config::plan::{ForwardProxy, HttpProxy};
use adit_config::tls_policy::TlsPolicy;
use adit_core::session::{ProcessBudget, TunnelKind};
use adit_kube::no_proxy::is_excepted;
use adit_net::direct;
use adit_net::happy_eyeballs::Race;
use adit_net::resolve::{self, servers_of_host};
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
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, copy_bidirectional_with_sizes};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use super::{ConnectorError, Purpose, ServerConnector};

/// Connections that are copied to a socket of their own, at most: far above the tunnels of an agent.
const COPIED_MAX: usize = 10_000;
/// Bytes that such a connection may hold, each way.
const COPIED_BYTES: usize = 32 * 1024;
/// The same where memory is bounded.
const COPIED_SMALL_BYTES: usize = 8 * 1024;

/// Which servers are reached through which proxy.
pub struct ForwardProxies {
    settings: ForwardProxy,
    /// Or why the proxy cannot be used.
    tunnels: Result<ProxyTunnels, TlsError>,
}

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
                status: 407, wants, ..
            }) => {
                let wants = match wants.as_str() {
                    "" => "does not say what it wants",
                    wants => wants,
                };
                let setting = self.setting;
                Err(format!(
                    "the proxy answered status 407 ({wants}): give user and password in {setting}, as http://USER:PASSWORD@HOST:PORT; Adit has Basic"
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
        let bytes = if is_small {
            COPIED_SMALL_BYTES
        } else {
            COPIED_BYTES
        };
        let copying = async move {
            let _promise = promise;
            let copied = match far.write_all(&early).await {
                Ok(()) => copy_bidirectional_with_sizes(&mut far, &mut stream, bytes, bytes).await,
                Err(error) => Err(error),
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

impl ForwardProxies {
    /// Reads what TLS to the proxy trusts, if it is needed. Blocks. What cannot be read is an error of the connects that need it.
    #[must_use]
    pub fn new(
        settings: &ForwardProxy,
        policy: &TlsPolicy,
        budget: &Arc<ProcessBudget>,
        own_sockets: &OwnSockets,
    ) -> Self {
        let url = settings.https_proxy.as_deref();
        let proxy = url.and_then(|url| HttpProxy::parse(url).ok());
        let uses_tls = proxy.is_some_and(|proxy| uses_tls(settings, &proxy));
        if uses_tls && settings.is_clear {
            tracing::info!(
                "HTTPS_PROXY has a password: TLS to the proxy, where upstream would send it in clear"
            );
        }
        let trust = (policy, settings.ca_cert.as_deref());
        Self {
            settings: settings.clone(),
            tunnels: ProxyTunnels::new("HTTPS_PROXY", uses_tls, trust, (budget, own_sockets)),
        }
    }

    /// Every server is reached directly.
    #[must_use]
    pub fn none() -> Self {
        let budget = Arc::new(ProcessBudget::new(0));
        Self::new(
            &ForwardProxy::default(),
            &TlsPolicy::default(),
            &budget,
            &OwnSockets::off(),
        )
    }

    /// The proxy for this server, unless an exception names the server; or what is wrong with its URL.
    pub(super) fn of(&self, host: &str, port: u16) -> Option<Result<HttpProxy, &'static str>> {
        let proxy = self.settings.https_proxy.as_deref()?;
        let exceptions = self.settings.no_proxy.as_deref().unwrap_or_default();
        (!is_excepted(host, port, exceptions)).then(|| HttpProxy::parse(proxy))
    }

    /// In words for users: ` through the proxy HOST:PORT`, or nothing.
    #[must_use]
    pub fn way_to(&self, server: &ServerAddress) -> String {
        match server {
            ServerAddress::Host { host, port } => match self.of(host, *port) {
                Some(Ok(proxy)) => format!(" through the proxy {}", proxy.authority()),
                Some(Err(_)) | None => String::new(),
            },
            ServerAddress::Srv { .. } => String::new(),
        }
    }
}

/// grpc-go ignores the scheme `https`. A password is never sent in clear to a proxy of that scheme.
fn uses_tls(settings: &ForwardProxy, proxy: &HttpProxy) -> bool {
    proxy.is_tls && !(settings.is_clear && proxy.user.is_none())
}

impl ServerConnector {
    /// Connects to the first of a name's addresses that accepts; else returns the last error.
    async fn any_of(&self, host: &str, port: u16, purpose: Purpose) -> Result<TcpStream, String> {
        let draw = |below| rand::random_range(0..below);
        let found = servers_of_host(&*self.resolver, host, port, draw).await;
        let found = found.map_err(|error| error.to_string())?;
        let attempt = |server: resolve::ServerAddress| self.dial(server.addr, purpose);
        let mut race = Race::new(found, attempt);
        let mut failure = "the proxy's name has no address".to_owned();
        while let Some((_server, dialled)) = race.next().await {
            match dialled {
                Ok(tcp) => return Ok(tcp),
                Err(error) => failure = error.to_string(),
            }
        }
        Err(failure)
    }

    /// Connects to `target` through a proxy. Returns what TLS to the server runs over, and the proxy's address.
    pub(super) async fn through(
        &self,
        proxy: &HttpProxy,
        target: &str,
        purpose: Purpose,
    ) -> Result<(Socket, PeerAddr), ConnectorError> {
        let reaching = self.reach_through(proxy, target, purpose).await;
        reaching.map_err(|answer| ConnectorError::Proxy {
            proxy: proxy.authority(),
            target: target.to_owned(),
            answer,
        })
    }

    async fn reach_through(
        &self,
        proxy: &HttpProxy,
        target: &str,
        purpose: Purpose,
    ) -> Result<(Socket, PeerAddr), String> {
        let tcp = self.any_of(&proxy.host, proxy.port, purpose).await?;
        let peer = peer_of(&tcp)?;
        let tunnels = self.proxies.tunnels.as_ref().map_err(ToString::to_string)?;
        let socket = tunnels.open(tcp, proxy, target, false).await?;
        Ok((socket, peer))
    }
}

fn peer_of(tcp: &TcpStream) -> Result<PeerAddr, String> {
    let peer = tcp.peer_addr().map_err(|error| error.to_string())?;
    Ok(PeerAddr::Tcp(peer))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_through_a_proxy_is_named_without_its_password() {
        let settings = ForwardProxy {
            https_proxy: Some("http://us:s3cret@[fd00::1]:3128".to_owned()),
            no_proxy: Some("near.test".to_owned()),
            ..ForwardProxy::default()
        };
        let budget = Arc::new(ProcessBudget::new(1 << 20));
        let proxies = ForwardProxies::new(
            &settings,
            &TlsPolicy::default(),
            &budget,
            &OwnSockets::off(),
        );
        for (host, way) in [
            ("far.test", " through the proxy [fd00::1]:3128"),
            ("near.test", ""),
        ] {
            let (host, port) = (host.to_owned(), 8091);
            assert_eq!(proxies.way_to(&ServerAddress::Host { host, port }), way);
        }
    }

    /// Upstream (configuration): HTTPS_PROXY of the scheme https is spoken to in clear, but never with a password
    #[test]
    fn a_password_gets_to_a_proxy_of_the_scheme_https_by_tls_alone() {
        for (is_clear, url, by_tls) in [
            (false, "https://a", true),
            (false, "http://u:p@a", false),
            (true, "https://a", false),
            (true, "https://u:p@a", true),
            (true, "http://u:p@a", false),
        ] {
            let settings = ForwardProxy {
                is_clear,
                ..ForwardProxy::default()
            };
            let proxy = HttpProxy::parse(url).unwrap();
            assert_eq!(uses_tls(&settings, &proxy), by_tls, "{is_clear} {url}");
        }
    }
}
