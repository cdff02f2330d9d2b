//! The way to a server: name to addresses, TCP, an HTTP proxy in between if the environment asks for one, TLS.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::resolve::{Resolve, ResolveError, servers};
use crate::config::address::ServerAddress;
use crate::config::limits;
use crate::config::plan::ForwardProxy;
use crate::net::handshake::{HandshakeError, connect_tls};
use crate::net::reload::ReloadableClientTls;
use crate::net::socket;
use crate::net::stream::{ByteStream, PeerAddr, Socket};
use crate::net::tls::{TlsError, server_name};

/// Longest answer of a forward proxy, bytes.
const PROXY_HEAD_BYTES_MAX: usize = 16 * 1024;

/// How this agent gets to its servers.
pub struct Reach {
    /// Names to addresses.
    pub resolver: Arc<dyn Resolve>,
    /// Current certificates.
    pub tls: Arc<ReloadableClientTls>,
    /// From the environment.
    pub proxy: ForwardProxy,
}

/// An encrypted connection to a server, and the `:authority` its calls use.
pub struct Reached {
    /// Ready for HTTP/2.
    pub stream: ByteStream,
    /// The bare host with a client certificate, else host and port, as gRPC-Go does.
    pub authority: String,
}

/// Why a server cannot be reached.
#[derive(Debug, thiserror::Error)]
pub enum ReachError {
    /// The name has no address.
    #[error("lookup {name}: {source}")]
    Resolve {
        /// The name looked up.
        name: String,
        /// Why.
        source: ResolveError,
    },
    /// The host cannot be a TLS server name, or a file is broken.
    #[error(transparent)]
    Name(#[from] TlsError),
    /// No address accepted a connection; the last one's reason.
    #[error("dial {address}: {source}")]
    Tcp {
        /// The last address tried.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// No address came of the name.
    #[error("{0} has no address")]
    NoAddress(String),
    /// TLS.
    #[error(transparent)]
    Tls(#[from] HandshakeError),
    /// The forward proxy said no.
    #[error("proxy {proxy} refused to connect to {target}: {answer}")]
    Proxy {
        /// The proxy's address as configured.
        proxy: String,
        /// The server wanted.
        target: String,
        /// First line of its answer, or what went wrong.
        answer: String,
    },
}

impl Reach {
    /// Connects to one server. A cancelled call leaves nothing behind.
    ///
    /// # Errors
    /// See [`ReachError`]; of several addresses, the last one's.
    pub async fn connect(&self, address: &ServerAddress) -> Result<Reached, ReachError> {
        let (name, port) = match address {
            ServerAddress::Host { host, port } => (host.as_str(), *port),
            ServerAddress::Srv { name } => (name.as_str(), 0),
        };
        if let (ServerAddress::Host { host, port }, Some(proxy)) = (address, self.proxy_for(name)) {
            // The proxy resolves the name, which may mean nothing here.
            let tcp = self.through(&proxy, &join(host, *port)).await?;
            return self.secure(tcp, host, *port).await;
        }
        let draw = |below| rand::random_range(0..below);
        let found = servers(&*self.resolver, name, port, draw)
            .await
            .map_err(|source| ReachError::Resolve {
                name: name.to_owned(),
                source,
            })?;
        let mut last = ReachError::NoAddress(name.to_owned());
        for server in found {
            match TcpStream::connect(server.addr).await {
                Ok(tcp) => return self.secure(tcp, &server.host, server.addr.port()).await,
                Err(source) => {
                    last = ReachError::Tcp {
                        address: server.addr,
                        source,
                    }
                }
            }
        }
        Err(last)
    }

    async fn secure(&self, tcp: TcpStream, host: &str, port: u16) -> Result<Reached, ReachError> {
        let peer = tcp.peer_addr().map_err(HandshakeError::Failed)?;
        tune(&tcp);
        let name = server_name(host)?;
        let deadline = limits::TLS_HANDSHAKE_TIMEOUT;
        let stream = connect_tls(
            Socket::Tcp(tcp),
            PeerAddr::Tcp(peer),
            &self.tls,
            name,
            None,
            deadline,
        )
        .await?;
        let authority = if self.tls.spec().identity.is_some() {
            host.to_owned()
        } else {
            join(host, port)
        };
        Ok(Reached { stream, authority })
    }

    /// The proxy for this host, `host:port`, unless the exceptions name it.
    fn proxy_for(&self, host: &str) -> Option<String> {
        let proxy = self.proxy.https_proxy.as_deref()?;
        if excepted(host, self.proxy.no_proxy.as_deref().unwrap_or_default()) {
            return None;
        }
        let rest = proxy.strip_prefix("http://").unwrap_or(proxy);
        let address = rest.split('/').next().unwrap_or(rest);
        Some(if address.contains(':') {
            address.to_owned()
        } else {
            format!("{address}:80")
        })
    }

    async fn through(&self, proxy: &str, target: &str) -> Result<TcpStream, ReachError> {
        let failed = |answer: String| ReachError::Proxy {
            proxy: proxy.to_owned(),
            target: target.to_owned(),
            answer,
        };
        let (host, port) = proxy
            .rsplit_once(':')
            .ok_or_else(|| failed("no port in its address".to_owned()))?;
        let port: u16 = port
            .parse()
            .map_err(|_bad| failed(format!("bad port {port:?} in its address")))?;
        let host = host.trim_matches(['[', ']']);
        let mut tcp = TcpStream::connect((host, port))
            .await
            .map_err(|error| failed(error.to_string()))?;
        let request = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n");
        tcp.write_all(request.as_bytes())
            .await
            .map_err(|error| failed(error.to_string()))?;
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            // Byte by byte: nothing behind the head may be swallowed, and this happens once a connection.
            let byte = tcp
                .read_u8()
                .await
                .map_err(|error| failed(error.to_string()))?;
            head.push(byte);
            if head.len() > PROXY_HEAD_BYTES_MAX {
                return Err(failed("its answer is too long".to_owned()));
            }
        }
        let text = String::from_utf8_lossy(&head);
        let line = text.lines().next().unwrap_or_default();
        if line.split_whitespace().nth(1) == Some("200") {
            Ok(tcp)
        } else {
            Err(failed(line.to_owned()))
        }
    }
}

fn join(host: &str, port: u16) -> String {
    if host.contains(':') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

fn tune(tcp: &TcpStream) {
    let user_timeout = socket::set_user_timeout(tcp, limits::LINK_ACK_TIMEOUT);
    if let Err(error) = socket::tune_stream(tcp).and(user_timeout) {
        tracing::debug!(%error, "cannot tune a server connection");
    }
}

/// Whether `NO_PROXY` names the host: exact, a domain above it, or `*`; loopback is never proxied.
fn excepted(host: &str, list: &str) -> bool {
    let loopback = host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    loopback
        || list
            .split(',')
            .map(str::trim)
            .filter(|entry| !entry.is_empty())
            .any(|entry| {
                let network = entry.parse::<ipnet::IpNet>();
                if let (Ok(network), Ok(ip)) = (network, host.parse::<IpAddr>()) {
                    return network.contains(&ip);
                }
                let domain = entry.trim_start_matches('.');
                entry == "*"
                    || host == domain
                    || host
                        .strip_suffix(domain)
                        .is_some_and(|rest| rest.ends_with('.'))
            })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exceptions_match_hosts_domains_networks_and_everything() {
        for (host, list, expected) in [
            ("a.example", "", false),
            ("a.example", "example", true),
            ("a.example", ".example", true),
            ("aexample", "example", false),
            ("10.1.2.3", "10.0.0.0/8", true),
            ("11.1.2.3", "10.0.0.0/8", false),
            ("any", "x, *", true),
            ("127.0.0.1", "", true),
        ] {
            assert_eq!(excepted(host, list), expected, "{host} {list}");
        }
    }
}
