//! Original destinations of redirected connections.

use std::io;
use std::net::SocketAddr;

use socket2::SockRef;
use tokio::net::TcpStream;

/// Why a connection is not served: its destination is unknown, or is this process.
#[derive(Debug, thiserror::Error)]
pub enum OriginError {
    /// No note of the destination exists, or the note is too old. A direct connection looks like that.
    #[error("nothing tells where this connection wanted to go")]
    Unknown,
    /// The connection was made to our listener itself.
    #[error("it wanted to go to our own address {0}")]
    OwnAddress(SocketAddr),
    /// The kernel refused to answer.
    #[error("the kernel does not tell where it wanted to go: {0}")]
    Kernel(#[from] io::Error),
}

/// Knows the original destinations of accepted connections.
pub trait OriginSource: Send + Sync + 'static {
    /// The original destination of a connection of `peer`. Called once per connection, right after accept.
    ///
    /// # Errors
    /// The destination is unknown, or must not be dialled.
    fn origin(&self, socket: &TcpStream, peer: SocketAddr) -> Result<SocketAddr, OriginError>;

    /// The rule that redirects connections to this destination; `None` where rules are not ours.
    fn rule(&self, _destination: SocketAddr) -> Option<String> {
        None
    }
}

/// Asks the socket: a REDIRECT rule leaves the destination with the connection tracker, a TPROXY rule in the socket itself.
#[derive(Clone, Copy, Debug)]
pub struct PacketFilterOrigin {
    /// Address of our listener.
    pub listener: SocketAddr,
}

impl OriginSource for PacketFilterOrigin {
    fn origin(&self, socket: &TcpStream, peer: SocketAddr) -> Result<SocketAddr, OriginError> {
        let option = SockRef::from(socket);
        let answer = if peer.is_ipv4() {
            option.original_dst_v4()
        } else {
            option.original_dst_v6()
        };
        // Not tracked, or the machine has no tracker: then no rule rewrote the destination, either.
        let untracked = [libc::ENOENT, libc::ENOPROTOOPT, libc::EOPNOTSUPP];
        let is_untracked = |errno| untracked.contains(&errno);
        let tracked = match answer {
            Err(error) if error.raw_os_error().is_some_and(is_untracked) => None,
            answer => answer?.as_socket(),
        };
        let destination = tracked.map_or_else(|| socket.local_addr(), Ok)?;
        let destination = SocketAddr::new(destination.ip().to_canonical(), destination.port());
        if self.is_own(destination) {
            return Err(OriginError::OwnAddress(destination));
        }
        Ok(destination)
    }
}

impl PacketFilterOrigin {
    /// Whether dialling the destination would reach our own listener. A wildcard listener owns its port on every address,
    /// so that port cannot be reached.
    fn is_own(&self, destination: SocketAddr) -> bool {
        let ip = self.listener.ip();
        destination.port() == self.listener.port()
            && (ip.is_unspecified() || ip.to_canonical() == destination.ip())
    }
}

/// Lets a listener accept connections to any address, which TPROXY rules need. Requires CAP_NET_ADMIN.
///
/// # Errors
/// The privilege is missing.
pub fn accept_any_address(listener: &impl std::os::fd::AsFd, v6: bool) -> io::Result<()> {
    let socket = SockRef::from(listener);
    if v6 {
        socket.set_ip_transparent_v6(true)
    } else {
        socket.set_ip_transparent_v4(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    #[tokio::test]
    async fn a_direct_connection_to_the_listener_is_refused() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let _client = TcpStream::connect(at).await.unwrap();
        let (socket, peer) = listener.accept().await.unwrap();
        let source = PacketFilterOrigin { listener: at };
        let refused = source.origin(&socket, peer);
        assert!(matches!(refused, Err(OriginError::OwnAddress(own)) if own == at));
    }

    #[test]
    fn a_listener_on_all_addresses_owns_its_port_on_each() {
        let any = PacketFilterOrigin {
            listener: "[::]:15001".parse().unwrap(),
        };
        assert!(any.is_own("192.0.2.1:15001".parse().unwrap()));
        assert!(!any.is_own("192.0.2.1:443".parse().unwrap()));
        let one = PacketFilterOrigin {
            listener: "192.0.2.7:15001".parse().unwrap(),
        };
        assert!(!one.is_own("192.0.2.1:15001".parse().unwrap()));
    }
}
