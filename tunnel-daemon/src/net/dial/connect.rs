//! Making one TCP connection, with the socket options every target gets.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpSocket, TcpStream};

/// As Go's default: a target that vanished is noticed even on an idle tunnel.
const KEEPALIVE: Duration = Duration::from_secs(15);

/// One attempt to connect to one address.
pub trait Connect: Send + Sync {
    /// What a connection is.
    type Stream: Send;

    /// Connects, or fails with the error of the operating system. Has no deadline of its own; dropping
    /// the future gives up and leaves nothing open.
    fn connect(&self, addr: SocketAddr) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

/// Real sockets: no delay, keepalive every 15 s.
#[derive(Clone, Copy, Debug)]
pub struct TcpConnect;

impl Connect for TcpConnect {
    type Stream = TcpStream;

    async fn connect(&self, addr: SocketAddr) -> io::Result<TcpStream> {
        let socket = if addr.is_ipv4() {
            TcpSocket::new_v4()
        } else {
            TcpSocket::new_v6()
        }?;
        socket.set_nodelay(true)?;
        let keepalive = TcpKeepalive::new()
            .with_time(KEEPALIVE)
            .with_interval(KEEPALIVE);
        SockRef::from(&socket).set_tcp_keepalive(&keepalive)?;
        let stream = socket.connect(addr).await?;
        // With nobody listening on an ephemeral port of this machine, the kernel may choose that very port
        // as the source, and the socket ends up connected to itself.
        if stream.local_addr()? == stream.peer_addr()? {
            return Err(io::Error::from(io::ErrorKind::ConnectionRefused));
        }
        Ok(stream)
    }
}
