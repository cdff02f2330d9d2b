//! A name server that is asked over TCP, by connections that others open: through a tunnel.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use hickory_resolver::net::runtime::iocompat::AsyncIoTokioAsStd;
use hickory_resolver::net::runtime::{RuntimeProvider, TokioRuntimeProvider};
use hickory_resolver::proto::rr::Name;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UdpSocket;

use super::ResolveError;
use super::cache::AddressCache;
use super::dns::NameServers;

/// Longest wait for one answer, with the dial of its connection.
const ATTEMPT_MAX: Duration = Duration::from_secs(5);

/// A connection to a name server.
pub trait DnsConnection: AsyncRead + AsyncWrite + Send + Sync + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Sync + Unpin> DnsConnection for T {}

/// Opens connections to name servers.
pub trait Connect: Send + Sync + 'static {
    /// Opens one. The caller gives up after `limit`.
    fn connect(
        &self,
        server: SocketAddr,
        limit: Duration,
    ) -> BoxFuture<'static, io::Result<Box<dyn DnsConnection>>>;
}

/// Asks one name server, and keeps answers as long as they hold, at most 10 s.
pub struct TunnelledResolver {
    connect: Arc<dyn Connect>,
    /// The client of the address that was asked last.
    client: Mutex<Option<Client>>,
    cache: AddressCache,
}

#[derive(Clone)]
struct Client {
    server: SocketAddr,
    /// Number of the address, for the cache.
    generation: u64,
    servers: Arc<NameServers<Through>>,
}

impl TunnelledResolver {
    /// `connect` opens its connections.
    #[must_use]
    pub fn new(connect: Arc<dyn Connect>) -> Self {
        Self {
            connect,
            client: Mutex::default(),
            cache: AddressCache::default(),
        }
    }

    /// The addresses of an absolute name, by the name server at `server`. Never empty.
    ///
    /// # Errors
    /// [`ResolveError::NotFound`] if the server says so; others if it gives no such answer.
    pub async fn lookup_ip(
        &self,
        server: SocketAddr,
        name: &str,
    ) -> Result<Vec<IpAddr>, ResolveError> {
        let client = self.client(server)?;
        let absolute = format!("{}.", name.trim_end_matches('.'));
        let parsed = Name::from_ascii(&absolute).map_err(|_bad| ResolveError::NotFound)?;
        let asked = async move { client.servers.addresses(&[parsed]).await };
        self.cache
            .get_or_ask(client.generation, &absolute, || asked)
            .await
    }

    fn client(&self, server: SocketAddr) -> Result<Client, ResolveError> {
        // Nothing panics while the lock is held.
        let mut kept = self.client.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = kept.as_ref().filter(|client| client.server == server) {
            return Ok(client.clone());
        }
        let through = Through(Arc::clone(&self.connect), TokioRuntimeProvider::default());
        let servers = NameServers::over_tcp(server, through, ATTEMPT_MAX)?;
        let client = Client {
            server,
            generation: kept.as_ref().map_or(0, |before| before.generation + 1),
            servers: Arc::new(servers),
        };
        *kept = Some(client.clone());
        Ok(client)
    }
}

/// Connects as the owner of the resolver does.
#[derive(Clone)]
struct Through(Arc<dyn Connect>, TokioRuntimeProvider);

type Opening<T> = Pin<Box<dyn Send + Future<Output = io::Result<T>>>>;

impl RuntimeProvider for Through {
    type Handle = <TokioRuntimeProvider as RuntimeProvider>::Handle;
    type Timer = <TokioRuntimeProvider as RuntimeProvider>::Timer;
    type Udp = UdpSocket;
    type Tcp = AsyncIoTokioAsStd<Box<dyn DnsConnection>>;

    fn create_handle(&self) -> Self::Handle {
        self.1.create_handle()
    }

    fn connect_tcp(
        &self,
        server_addr: SocketAddr,
        _bind_addr: Option<SocketAddr>,
        timeout: Option<Duration>,
    ) -> Opening<Self::Tcp> {
        let limit = timeout.unwrap_or(ATTEMPT_MAX);
        let connecting = self.0.connect(server_addr, limit);
        Box::pin(async move {
            Ok(AsyncIoTokioAsStd(
                tokio::time::timeout(limit, connecting).await??,
            ))
        })
    }

    fn bind_udp(&self, _local: SocketAddr, _server: SocketAddr) -> Opening<Self::Udp> {
        let unsupported = io::ErrorKind::Unsupported;
        Box::pin(std::future::ready(Err(unsupported.into())))
    }
}
