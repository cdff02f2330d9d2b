//! Sockets for name servers. The DNS library has no zone in its addresses, as in `nameserver fe80::1%eth0`, without which the
//! kernel cannot reach a link-local address. Connections over TCP bypass a redirect of this process.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hickory_resolver::net::runtime::iocompat::AsyncIoTokioAsStd;
use hickory_resolver::net::runtime::{DnsUdpSocket, RuntimeProvider, TokioRuntimeProvider};
use tokio::net::UdpSocket;

use crate::direct;
use crate::self_sockets::OwnSockets;
use adit_host::interfaces::index_of;

/// Connect timeout where the library gives none; its own value.
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// The zone of an address, behind the `%`: the name or the index of an interface.
pub(super) type Zone = Arc<str>;

/// Opens the sockets for one name server.
#[derive(Clone)]
pub(super) struct ZonedRuntime {
    runtime: TokioRuntimeProvider,
    zone: Option<Zone>,
    own_sockets: OwnSockets,
}

impl ZonedRuntime {
    pub(super) fn new(zone: Option<Zone>, own_sockets: OwnSockets) -> Self {
        Self {
            runtime: TokioRuntimeProvider::default(),
            zone,
            own_sockets,
        }
    }

    /// The address with the scope of its zone. The interface is looked up for each socket: interfaces come and go. An address
    /// that is not link-local needs no scope, and its zone may not exist here: a pod may have the file of its node.
    ///
    /// # Errors
    /// The interface does not exist.
    fn with_scope(&self, server: SocketAddr) -> io::Result<SocketAddr> {
        match (server, &self.zone) {
            (SocketAddr::V6(mut server), Some(zone)) if server.ip().is_unicast_link_local() => {
                let index = index_of(zone).or_else(|| zone.parse().ok());
                let absent = || io::Error::other(format!("no interface {zone} with IPv6"));
                server.set_scope_id(index.ok_or_else(absent)?);
                Ok(server.into())
            }
            _ => Ok(server),
        }
    }
}

type Opening<T> = Pin<Box<dyn Send + Future<Output = io::Result<T>>>>;

impl RuntimeProvider for ZonedRuntime {
    type Handle = <TokioRuntimeProvider as RuntimeProvider>::Handle;
    type Timer = <TokioRuntimeProvider as RuntimeProvider>::Timer;
    type Udp = ZonedUdpSocket;
    type Tcp = <TokioRuntimeProvider as RuntimeProvider>::Tcp;

    fn create_handle(&self) -> Self::Handle {
        self.runtime.create_handle()
    }

    fn connect_tcp(
        &self,
        server_addr: SocketAddr,
        bind_addr: Option<SocketAddr>,
        timeout: Option<Duration>,
    ) -> Opening<Self::Tcp> {
        let (target, own_sockets) = (self.with_scope(server_addr), self.own_sockets.clone());
        Box::pin(async move {
            let target = target?;
            let socket = direct::socket_for(target)?;
            if let Some(bind_addr) = bind_addr {
                socket.bind(bind_addr)?;
            }
            socket.set_nodelay(true)?;
            let connecting = direct::connect(&own_sockets, socket, target);
            let limit = timeout.unwrap_or(CONNECT_MAX);
            let connected = tokio::time::timeout(limit, connecting).await;
            Ok(AsyncIoTokioAsStd(connected??))
        })
    }

    fn bind_udp(&self, local_addr: SocketAddr, server_addr: SocketAddr) -> Opening<Self::Udp> {
        let target = self.with_scope(server_addr);
        Box::pin(async move {
            let target = target?;
            let socket = UdpSocket::bind(local_addr).await?;
            Ok(ZonedUdpSocket { socket, target })
        })
    }
}

/// A socket for one name server. It sends to the address with the scope. The library compares senders without the scope.
pub(super) struct ZonedUdpSocket {
    socket: UdpSocket,
    target: SocketAddr,
}

impl DnsUdpSocket for ZonedUdpSocket {
    type Time = <UdpSocket as DnsUdpSocket>::Time;

    fn poll_recv_from(
        &self,
        cx: &mut Context<'_>,
        buf: &mut [u8],
    ) -> Poll<io::Result<(usize, SocketAddr)>> {
        DnsUdpSocket::poll_recv_from(&self.socket, cx, buf)
    }

    fn poll_send_to(
        &self,
        cx: &mut Context<'_>,
        buf: &[u8],
        _target: SocketAddr,
    ) -> Poll<io::Result<usize>> {
        DnsUdpSocket::poll_send_to(&self.socket, cx, buf, self.target)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zone_is_the_scope_of_a_link_local_address() {
        let at = |text: &str| -> SocketAddr { text.parse().unwrap() };
        let scoped = |zone: Option<&str>, server: &str| {
            let zoned = ZonedRuntime::new(zone.map(Zone::from), OwnSockets::off());
            zoned.with_scope(at(server))
        };
        let (link_local, v4) = ("[fe80::1]:53", "10.0.0.1:53");
        assert_eq!(scoped(Some("7"), link_local).unwrap(), at("[fe80::1%7]:53"));
        assert_eq!(scoped(None, link_local).unwrap(), at(link_local));
        assert_eq!(scoped(Some("7"), v4).unwrap(), at(v4));
        let global = "[2001:db8::1]:53";
        assert_eq!(scoped(Some("no-such-one"), global).unwrap(), at(global));
        let error = scoped(Some("no-such-one"), link_local).unwrap_err();
        assert!(error.to_string().contains("no-such-one"), "{error}");
    }

    #[tokio::test]
    async fn a_question_goes_to_the_address_with_its_scope() {
        let server = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let asking = ZonedUdpSocket {
            socket: UdpSocket::bind("127.0.0.1:0").await.unwrap(),
            target: server.local_addr().unwrap(),
        };
        let without_zone = "127.0.0.1:9".parse().unwrap();
        asking.send_to(b"question", without_zone).await.unwrap();
        let (mut buf, asked) = ([0; 8], asking.socket.local_addr().unwrap());
        assert_eq!(server.recv_from(&mut buf).await.unwrap(), (8, asked));
        server.send_to(b"answer", asked).await.unwrap();
        assert_eq!(asking.recv_from(&mut buf).await.unwrap().0, 6);
    }
}
