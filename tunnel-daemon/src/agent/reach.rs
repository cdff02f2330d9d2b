//! The way to a server: name to addresses, TCP, an HTTP proxy in between if the environment asks for one, TLS.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use adit_core::ids::AgentId;
use adit_core::lane;
use adit_core::text::Excerpt;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};

use crate::config::address::ServerAddress;
use crate::config::limits;
use crate::config::plan::ForwardProxy;
use crate::ebpf::account::{Accounts, Labels};
use crate::net::handshake::{HandshakeError, connect_tls};
use crate::net::reload::ReloadableClientTls;
use crate::net::resolve::{Resolve, ResolveError, servers_of_host, servers_of_service};
use crate::net::socket;
use crate::net::stream::{ByteStream, PeerAddr, Socket};
use crate::net::tls::{Alpn, TlsError, server_name};
use crate::telemetry::labels::AccountRole;

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
    /// Accounting in the kernel.
    pub accounts: Accounts,
    /// Whose connections these are.
    pub agent: AgentId,
}

/// An encrypted connection to a server, and the `:authority` its calls use.
pub struct Reached {
    /// Ready for HTTP/2.
    pub stream: ByteStream,
    /// The bare host with a client certificate, else host and port, as gRPC-Go does.
    pub authority: String,
}

/// What a connection to a server is for.
#[derive(Clone, Copy)]
enum Purpose {
    Link,
    Lane,
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
        self.connect_for(address, Purpose::Link).await
    }

    /// Connects a lane to whichever server answers there; not yet bound. A cancelled call leaves nothing behind.
    ///
    /// # Errors
    /// As [`Self::connect`]. A server that knows no lanes refuses the handshake.
    pub async fn connect_lane(&self, address: &ServerAddress) -> Result<ByteStream, ReachError> {
        let reached = self.connect_for(address, Purpose::Lane).await?;
        Ok(reached.stream)
    }

    async fn connect_for(
        &self,
        address: &ServerAddress,
        purpose: Purpose,
    ) -> Result<Reached, ReachError> {
        if let ServerAddress::Host { host, port } = address
            && let Some(proxy) = self.proxy_for(host, *port)
        {
            let proxy = proxy_address(proxy).map_err(|why| ReachError::Proxy {
                proxy: "of HTTPS_PROXY".to_owned(),
                target: join(host, *port),
                answer: why.to_owned(),
            })?;
            // The proxy resolves the name, which may mean nothing here.
            let tcp = self.through(&proxy, &join(host, *port)).await?;
            return self.secure(tcp, host, *port, purpose).await;
        }
        let (name, found) = match address {
            ServerAddress::Host { host, port } => {
                (host, servers_of_host(&*self.resolver, host, *port).await)
            }
            ServerAddress::Srv { name } => {
                let draw = |below| rand::random_range(0..below);
                (name, servers_of_service(&*self.resolver, name, draw).await)
            }
        };
        let found = found.map_err(|source| ReachError::Resolve {
            name: name.clone(),
            source,
        })?;
        let mut last = ReachError::NoAddress(name.clone());
        for server in found {
            match self.dial(server.addr, purpose).await {
                Ok(tcp) => {
                    let port = server.addr.port();
                    return self.secure(tcp, &server.host, port, purpose).await;
                }
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

    /// One TCP connection, which the kernel may account for.
    async fn dial(&self, addr: SocketAddr, purpose: Purpose) -> io::Result<TcpStream> {
        let socket = if addr.is_ipv4() {
            TcpSocket::new_v4()
        } else {
            TcpSocket::new_v6()
        }?;
        let labels = Labels {
            role: match purpose {
                Purpose::Link => AccountRole::Link,
                Purpose::Lane => AccountRole::Lane,
            },
            agent: self.agent.as_str(),
            destination_class: "",
        };
        let accounted = self.accounts.connecting(&socket, &labels);
        socket
            .connect(addr)
            .await
            .inspect_err(|_refused| self.accounts.failed(accounted))
    }

    async fn secure(
        &self,
        tcp: TcpStream,
        host: &str,
        port: u16,
        purpose: Purpose,
    ) -> Result<Reached, ReachError> {
        let peer = tcp.peer_addr().map_err(HandshakeError::Failed)?;
        let alpn = match purpose {
            Purpose::Link => {
                tune(&tcp);
                None
            }
            Purpose::Lane => {
                socket::tune_lane(&tcp);
                Some(Alpn::only_records(lane::ALPN))
            }
        };
        let name = server_name(host)?;
        let deadline = limits::TLS_HANDSHAKE_TIMEOUT;
        let stream = connect_tls(
            Socket::Tcp(tcp),
            PeerAddr::Tcp(peer),
            &self.tls,
            name,
            alpn.as_ref(),
            deadline,
        )
        .await?;
        let authority = if self.tls.spec().identity.is_some() {
            bracketed(host)
        } else {
            join(host, port)
        };
        Ok(Reached { stream, authority })
    }

    /// The proxy for this server as configured, unless the exceptions name it.
    fn proxy_for(&self, host: &str, port: u16) -> Option<&str> {
        let proxy = self.proxy.https_proxy.as_deref()?;
        let exceptions = self.proxy.no_proxy.as_deref().unwrap_or_default();
        (!excepted(host, port, exceptions)).then_some(proxy)
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
        let mut words = line.split_whitespace();
        if words.next().is_some_and(|word| word.starts_with("HTTP/1."))
            && words.next() == Some("200")
        {
            Ok(tcp)
        } else {
            Err(failed(Excerpt(line).to_string()))
        }
    }
}

fn join(host: &str, port: u16) -> String {
    format!("{}:{port}", bracketed(host))
}

/// As RFC 3986 section 3.2.2 writes hosts.
fn bracketed(host: &str) -> String {
    if host.contains(':') {
        format!("[{host}]")
    } else {
        host.to_owned()
    }
}

fn tune(tcp: &TcpStream) {
    let user_timeout = socket::set_user_timeout(tcp, limits::LINK_ACK_TIMEOUT);
    if let Err(error) = socket::tune_stream(tcp).and(user_timeout) {
        tracing::debug!(%error, "cannot tune a server connection");
    }
}

/// `host:port` of an `http://` proxy, port 80 if it names none.
///
/// # Errors
/// What is not supported; never with what was configured, since a password may be in it.
fn proxy_address(text: &str) -> Result<String, &'static str> {
    let rest = match text.split_once("://") {
        Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => rest,
        Some(_) => return Err("only http:// proxies are supported"),
        None => text,
    };
    let address = rest.split(['/', '?', '#']).next().unwrap_or(rest);
    if address.contains('@') {
        return Err("a user name or password for the proxy is not supported");
    }
    let has_port = match address.strip_prefix('[') {
        Some(bracketed) => bracketed.contains("]:"),
        None => address.contains(':'),
    };
    Ok(if has_port {
        address.to_owned()
    } else {
        format!("{address}:80")
    })
}

/// Whether `NO_PROXY` names the server, by the rules of Go's `httpproxy`: `*`, networks, and addresses or
/// domains with or without a port. A domain stands for itself and all below it, with a dot or `*.` in front only
/// for those below it. Loopback is never proxied.
fn excepted(host: &str, port: u16, list: &str) -> bool {
    let ip = host.parse::<IpAddr>().ok().map(|ip| ip.to_canonical());
    if host == "localhost" || ip.is_some_and(|ip| ip.is_loopback()) {
        return true;
    }
    let host = host.to_ascii_lowercase();
    let names = |entry: &str| {
        if entry == "*" {
            return true;
        }
        if let Ok(network) = entry.parse::<ipnet::IpNet>() {
            return ip.is_some_and(|ip| network.contains(&ip));
        }
        let (name, only) = split_port(entry);
        if name.is_empty() || only.is_some_and(|only| only != port.to_string()) {
            return false;
        }
        if let Ok(address) = name.parse::<IpAddr>() {
            return ip == Some(address.to_canonical());
        }
        let below = name.strip_prefix('*').unwrap_or(name);
        match below.strip_prefix('.') {
            Some(_) => host.ends_with(below),
            None => host == name || host.ends_with(&format!(".{name}")),
        }
    };
    list.to_ascii_lowercase()
        .split(',')
        .map(str::trim)
        .any(|entry| !entry.is_empty() && names(entry))
}

/// As Go splits: brackets around IPv6 only together with a port; an empty port is any.
fn split_port(entry: &str) -> (&str, Option<&str>) {
    let split = match entry.strip_prefix('[') {
        Some(bracketed) => bracketed.split_once("]:"),
        None => entry
            .split_once(':')
            .filter(|(_, port)| !port.contains(':')),
    };
    match split {
        Some((name, port)) => (name, Some(port).filter(|port| !port.is_empty())),
        None => (entry, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_of_ipv6_can_be_the_authority_of_calls() {
        for (host, expected) in [
            ("fd00::1", "[fd00::1]"),
            ("10.0.0.1", "10.0.0.1"),
            ("server.test", "server.test"),
        ] {
            let authority = bracketed(host);
            assert_eq!(authority, expected);
            assert!(authority.parse::<http::uri::Authority>().is_ok());
        }
        assert_eq!(join("::1", 8091), "[::1]:8091");
    }

    /// The table of Go's `httpproxy`, and entries that its documentation names.
    #[test]
    fn exceptions_match_as_in_go() {
        const LIST: &str = "foobar.com, .barbaz.net, 192.168.1.1, 192.168.1.2:81, 192.168.1.3:80, 10.0.0.0/30, \
            2001:db8::52:0:1, [2001:db8::52:0:2]:443, [2001:db8::52:0:3]:80, 2002:db8:a::45/64, *.wild.example, Upper.Example";
        for (host, expected) in [
            ("localhost", true),
            ("127.0.0.1", true),
            ("127.0.0.2", true),
            ("::1", true),
            ("::2", false),
            ("192.168.1.1", true),
            ("192.168.1.2", false),
            ("192.168.1.3", true),
            ("192.168.1.4", false),
            ("10.0.0.2", true),
            ("10.0.0.4", false),
            ("2001:db8::52:0:1", true),
            ("2001:db8::52:0:2", false),
            ("2001:db8::52:0:3", true),
            ("2002:db8:a::123", true),
            ("fe80::424b:c8be:1643:a1b6", false),
            ("barbaz.net", false),
            ("www.barbaz.net", true),
            ("foobar.com", true),
            ("www.foobar.com", true),
            ("foofoobar.com", false),
            ("baz.com", false),
            ("localhost.net", false),
            ("local.localhost", false),
            ("barbarbaz.net", false),
            ("wwwbarbaz.net", false),
            ("a.wild.example", true),
            ("wild.example", false),
            ("upper.example", true),
            ("UPPER.example", true),
        ] {
            assert_eq!(excepted(host, 80, LIST), expected, "{host}");
        }
        for (host, list, expected) in [
            ("a.example", "", false),
            ("a.example", " , ,", false),
            ("a.example", "x, *", true),
            ("a.example", ":80", false),
            ("a.example", "a.example:", true),
            ("a.example", "a.example:80", true),
            ("a.example", "a.example:8080", false),
            ("1.2.3.4", "::ffff:1.2.3.4", true),
        ] {
            assert_eq!(excepted(host, 80, list), expected, "{host} {list}");
        }
    }

    #[test]
    fn proxies_are_plain_http_and_never_show_a_password() {
        for (text, expected) in [
            ("http://proxy.example:3128", Ok("proxy.example:3128")),
            ("HTTP://proxy.example/", Ok("proxy.example:80")),
            ("proxy.example:3128", Ok("proxy.example:3128")),
            ("http://[2001:db8::1]", Ok("[2001:db8::1]:80")),
            ("http://[2001:db8::1]:3128/x", Ok("[2001:db8::1]:3128")),
        ] {
            assert_eq!(proxy_address(text).as_deref(), expected.as_ref().copied());
        }
        for text in [
            "https://proxy.example",
            "socks5://proxy.example",
            "http://me:s3cret@proxy.example:3128",
            "me:s3cret@proxy.example",
        ] {
            let error = proxy_address(text).unwrap_err();
            assert!(!error.contains("s3cret"), "{error}");
        }
    }
}
