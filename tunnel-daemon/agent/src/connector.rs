//! Connects to a server: resolves the name, opens TCP, through an HTTP proxy if the environment names one, and runs TLS.

mod error;
mod forward_proxy;

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use adit_core::ids::AgentId;
use adit_core::lane;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

pub use error::ConnectorError;
pub use forward_proxy::ForwardProxies;

use adit_config::address::ServerAddress;
use adit_config::limits;
use adit_net::accounts::{Accounts, Labels};
use adit_net::direct;
use adit_net::happy_eyeballs::Race;
use adit_net::resolve::{self, Resolve, servers_of_host, servers_of_service};
use adit_net::self_sockets::OwnSockets;
use adit_net::socket;
use adit_telemetry::labels::AccountRole;
use adit_tls::handshake::connect_tls;
use adit_tls::reload::ReloadableClientTls;
use adit_tls::stream::{ByteStream, PeerAddr, Socket};
use adit_tls::tls::server_name;

/// The part of [`limits::LINK_CONNECT_TIMEOUT`] that all addresses of a name share. The rest is for the lookup, the greeting,
/// and reporting why the addresses failed.
const ADDRESSES_TIME: Duration = Duration::from_secs(15);
/// Least time for TLS to one of several addresses: all agents of a server that restarts connect at once.
const TLS_TIME_MIN: Duration = Duration::from_secs(5);

/// Limit on remembered addresses: more than a control plane has servers.
const RECENT_MAX: usize = 64;

const _: () = assert!(ADDRESSES_TIME.as_secs() < limits::LINK_CONNECT_TIMEOUT.as_secs());

/// Connects this agent to its servers.
pub struct ServerConnector {
    /// Resolves names to addresses.
    pub resolver: Arc<dyn Resolve>,
    /// Current TLS files.
    pub tls: Arc<ReloadableClientTls>,
    /// Which servers are reached through HTTP proxies.
    pub proxies: ForwardProxies,
    /// Kernel accounting.
    pub accounts: Accounts,
    /// Sockets that a redirect on this node must not capture.
    pub own_sockets: OwnSockets,
    /// The id of this agent.
    pub agent: AgentId,
    /// Addresses of earlier links.
    pub recent_servers: RecentServers,
}

/// Addresses in the order of the last link to each. The least recent address is tried first, so that a server that comes back
/// is found at the next attempt and not by chance.
#[derive(Debug, Default)]
pub struct RecentServers(Mutex<Vec<SocketAddr>>);

impl RecentServers {
    /// Sorts the most recent address last, within each priority; unknown addresses stay first, in their order.
    fn last(&self, servers: &mut [resolve::ServerAddress]) {
        let recent_servers = self.locked();
        let since = |addr| recent_servers.iter().position(|other| *other == addr);
        servers.sort_by_key(|server| (server.priority, since(server.addr).map_or(0, |at| at + 1)));
    }

    fn now(&self, addr: SocketAddr) {
        let mut recent_servers = self.locked();
        recent_servers.retain(|other| *other != addr);
        if recent_servers.len() >= RECENT_MAX {
            recent_servers.remove(0);
        }
        recent_servers.push(addr);
    }

    fn locked(&self) -> MutexGuard<'_, Vec<SocketAddr>> {
        // Nothing panics while the lock is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An encrypted connection to a server, and the `:authority` its calls use.
pub struct Connected {
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
    Tunnel,
}

impl ServerConnector {
    /// Connects to one server: through the first address that accepts a connection and proves to be the server. A cancelled
    /// call has no effect.
    ///
    /// # Errors
    /// See [`ConnectorError`]; of several addresses, the most specific failure.
    pub async fn connect(&self, address: &ServerAddress) -> Result<Connected, ConnectorError> {
        self.connect_for(address, Purpose::Link).await
    }

    /// Connects a lane to whichever server answers at the address; the lane is not bound yet. A cancelled call has no effect.
    ///
    /// # Errors
    /// See [`Self::connect`]. A server without support for lanes refuses the handshake.
    pub async fn connect_lane(
        &self,
        address: &ServerAddress,
    ) -> Result<ByteStream, ConnectorError> {
        let reached = self.connect_for(address, Purpose::Lane).await?;
        Ok(reached.stream)
    }

    /// Connects for one tunnel, by whatever protocol the TLS configuration names. A cancelled call has no effect.
    ///
    /// # Errors
    /// See [`Self::connect`].
    pub async fn connect_client(
        &self,
        address: &ServerAddress,
    ) -> Result<ByteStream, ConnectorError> {
        let reached = self.connect_for(address, Purpose::Tunnel).await?;
        Ok(reached.stream)
    }

    async fn connect_for(
        &self,
        address: &ServerAddress,
        purpose: Purpose,
    ) -> Result<Connected, ConnectorError> {
        if let ServerAddress::Host { host, port } = address
            && let Some(proxy) = self.proxies.of(host, *port)
        {
            let proxy = proxy.map_err(|why| ConnectorError::Proxy {
                proxy: "of HTTPS_PROXY or --https-proxy".to_owned(),
                target: address.to_string(),
                answer: format!("it {why}"),
            })?;
            // The proxy resolves the name, which this host may be unable to resolve.
            let (socket, peer) =
                Box::pin(self.through(&proxy, &address.to_string(), purpose)).await?;
            let limit = limits::TLS_HANDSHAKE_TIMEOUT;
            return self
                .secure((socket, peer), host, *port, purpose, limit)
                .await;
        }
        let draw = |below| rand::random_range(0..below);
        let (name, found) = match address {
            ServerAddress::Host { host, port } => {
                let found = servers_of_host(&*self.resolver, host, *port, draw);
                (host, found.await)
            }
            ServerAddress::Srv { name } => {
                let found = servers_of_service(&*self.resolver, name, draw);
                (name, found.await)
            }
        };
        let mut found = found.map_err(|source| ConnectorError::Resolve {
            name: name.clone(),
            source,
        })?;
        if let Purpose::Link = purpose {
            self.recent_servers.last(&mut found);
        }
        let reached = self.first_of(found, purpose).await;
        let reached = reached.map_err(|failure| {
            failure.unwrap_or_else(|| ConnectorError::NoAddress(name.clone()))
        })?;
        if let (Purpose::Link, PeerAddr::Tcp(address)) = (purpose, reached.stream.peer()) {
            self.recent_servers.now(address);
        }
        Ok(reached)
    }

    /// Connects to the first of `servers` that accepts TCP and finishes TLS. Connects overlap: an address that does not answer
    /// delays the next by 300 ms. Handshakes do not overlap, since slow ones would burden all servers; they share the time.
    /// Records with a greater priority number are tried once those before them have failed or used their share of the time.
    ///
    /// # Errors
    /// The most specific failure; `None` if there was no address to try.
    async fn first_of(
        &self,
        servers: Vec<resolve::ServerAddress>,
        purpose: Purpose,
    ) -> Result<Connected, Option<ConnectorError>> {
        let end = Instant::now() + ADDRESSES_TIME;
        let ranks: Vec<_> = servers.chunk_by(|a, b| a.priority == b.priority).collect();
        let share = ADDRESSES_TIME / u32::try_from(ranks.len()).unwrap_or(u32::MAX).max(1);
        let mut left = servers.len();
        let mut told: Option<ConnectorError> = None;
        let last = ranks.len().saturating_sub(1);
        for (rank, servers) in ranks.into_iter().enumerate() {
            let until = if rank == last {
                end
            } else {
                Instant::now() + share
            };
            let behind = left - servers.len();
            let mut race = Race::new(servers.to_vec(), |server: resolve::ServerAddress| {
                self.dial(server.addr, purpose)
            });
            loop {
                let next = if rank == last && told.is_none() {
                    race.next().await
                } else {
                    // Before the caller's timeout, which would hide the reason.
                    timeout_at(until, race.next()).await.unwrap_or(None)
                };
                let Some((server, dialled)) = next else {
                    break;
                };
                let failure = match dialled {
                    Ok(tcp) => {
                        let time = end.saturating_duration_since(Instant::now());
                        if time.is_zero() && told.is_some() {
                            return Err(told);
                        }
                        let limit = tls_time(time, left);
                        let (host, port) = (&server.host, server.addr.port());
                        // Boxed: this future is far larger than the rest of the call.
                        let socket = (Socket::Tcp(tcp), PeerAddr::Tcp(server.addr));
                        match Box::pin(self.secure(socket, host, port, purpose, limit)).await {
                            Ok(reached) => return Ok(reached),
                            Err(failure) => failure,
                        }
                    }
                    Err(source) => ConnectorError::Tcp {
                        address: server.addr,
                        source,
                    },
                };
                left -= 1;
                let address = server.addr;
                tracing::debug!(%address, %failure, left, "cannot connect to a server address");
                told = Some(match told {
                    Some(before) => before.or_more_telling(failure),
                    None => failure,
                });
            }
            left = behind;
        }
        Err(told)
    }

    /// Opens one TCP connection, counted in kernel accounting.
    async fn dial(&self, addr: SocketAddr, purpose: Purpose) -> io::Result<TcpStream> {
        let socket = direct::socket_for(addr)?;
        let labels = Labels {
            role: match purpose {
                Purpose::Link => AccountRole::Link,
                Purpose::Lane | Purpose::Tunnel => AccountRole::Lane,
            },
            agent: self.agent.as_str(),
            destination_class: "",
        };
        let accounted = self.accounts.connecting(&socket, &labels);
        let tcp = direct::connect(&self.own_sockets, socket, addr)
            .await
            .inspect_err(|_refused| self.accounts.failed(accounted))?;
        match purpose {
            Purpose::Link => tune(&tcp),
            Purpose::Lane | Purpose::Tunnel => socket::tune_lane(&tcp),
        }
        Ok(tcp)
    }

    async fn secure(
        &self,
        (socket, peer): (Socket, PeerAddr),
        host: &str,
        port: u16,
        purpose: Purpose,
        limit: Duration,
    ) -> Result<Connected, ConnectorError> {
        let alpn = match purpose {
            Purpose::Link | Purpose::Tunnel => None,
            Purpose::Lane => Some(self.tls.spec().alpn.records_beside(lane::ALPN)),
        };
        let name = server_name(host)?;
        let stream = connect_tls(socket, peer, &self.tls, name, alpn.as_ref(), limit).await?;
        let authority = if self.tls.spec().identity.is_some() {
            bracketed(host)
        } else {
            format!("{}:{port}", bracketed(host))
        };
        Ok(Connected { stream, authority })
    }
}

/// TLS timeout for one of `addresses` remaining addresses: its share of `left` in whole seconds, at most the timeout of a
/// single address.
fn tls_time(left: Duration, addresses: usize) -> Duration {
    let addresses = u32::try_from(addresses).unwrap_or(u32::MAX).max(1);
    let share = Duration::from_secs((left / addresses).as_secs());
    share.clamp(TLS_TIME_MIN, limits::TLS_HANDSHAKE_TIMEOUT)
}

/// The host as RFC 3986 section 3.2.2 writes it.
fn bracketed(host: &str) -> String {
    if host.contains(':') {
        format!("[{host}]")
    } else {
        host.to_owned()
    }
}

fn tune(tcp: &TcpStream) {
    if let Err(error) = socket::tune_link(tcp, limits::LINK_ACK_TIMEOUT) {
        tracing::debug!(%error, "cannot tune a server connection");
    }
}

#[cfg(test)]
mod tests;
