//! Listening sockets, TCP and unix. What happens to accepted connections is `accept`'s business.

use std::{
    fmt, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use socket2::{Domain, Socket as RawSocket, Type};
use tokio::net::TcpListener;

use crate::socket::tune_stream;
pub use crate::unix::{SocketMode, StaleFile, UnixBound, UnixListening};
use adit_tls::stream::{PeerAddr, Socket};

/// Connections the kernel may queue. The kernel clamps this to net.core.somaxconn, the value that Go asks for.
pub(super) const BACKLOG: i32 = 4096;

/// Where something should listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenAddr {
    /// One address.
    Tcp(SocketAddr),
    /// All addresses of both families, like Go's `:port`.
    AnyTcp(u16),
    /// A path.
    Unix(PathBuf, StaleFile),
}

impl fmt::Display for ListenAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::AnyTcp(port) => write!(f, ":{port}"),
            Self::Unix(path, _stale) => path.display().fmt(f),
        }
    }
}

/// Why nothing listens at an address.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}: {cause}; {remedy}")]
pub struct ListenError {
    address: String,
    cause: io::Error,
    remedy: &'static str,
}

impl ListenError {
    fn new(address: impl fmt::Display, cause: io::Error, remedy: &'static str) -> Self {
        let address = address.to_string();
        Self {
            address,
            cause,
            remedy,
        }
    }

    pub(super) fn unix(path: &Path, cause: io::Error) -> Self {
        let remedy = match cause.kind() {
            io::ErrorKind::AddrInUse => {
                "stop the process that listens on the path, or remove the file"
            }
            io::ErrorKind::NotFound => "create the directory",
            io::ErrorKind::PermissionDenied => "make the directory writable for this user",
            io::ErrorKind::Unsupported => "mount /proc",
            _ => "give another path, shorter than 108 bytes",
        };
        Self::new(path.display(), cause, remedy)
    }

    fn tcp(address: &ListenAddr, cause: io::Error) -> Self {
        let remedy = match cause.kind() {
            io::ErrorKind::AddrInUse => "stop the process that uses the port, or give another one",
            io::ErrorKind::AddrNotAvailable => "give an address of this host",
            io::ErrorKind::PermissionDenied => {
                "give a port above 1023, or the capability CAP_NET_BIND_SERVICE"
            }
            _ => "give another address",
        };
        Self::new(address, cause, remedy)
    }

    /// The error of a socket that a service manager passed.
    #[must_use]
    pub fn inherited(address: &ListenAddr, cause: io::Error) -> Self {
        Self::new(
            address,
            cause,
            "correct the socket unit of the service manager",
        )
    }

    /// The error of the system.
    #[must_use]
    pub fn cause(&self) -> &io::Error {
        &self.cause
    }
}

/// A listening socket of either kind.
#[derive(Debug)]
pub enum Listener {
    /// TCP.
    Tcp(TcpListener),
    /// Unix, with its file.
    Unix(UnixListening),
}

impl Listener {
    /// Binds and listens. `before` gets a TCP socket that is bound and does not listen yet. Needs a tokio runtime.
    ///
    /// # Errors
    /// The address is in use, not local, or not allowed; the text names it.
    pub fn bind_with(
        address: &ListenAddr,
        before: impl Fn(BorrowedFd<'_>),
    ) -> Result<Self, ListenError> {
        let tcp = |result: io::Result<TcpListener>| {
            result
                .map(Self::Tcp)
                .map_err(|cause| ListenError::tcp(address, cause))
        };
        match address {
            ListenAddr::Tcp(socket_address) => tcp(bind_tcp(*socket_address, &before)),
            ListenAddr::AnyTcp(port) => {
                let v6 = bind_tcp((IpAddr::from(Ipv6Addr::UNSPECIFIED), *port).into(), &before);
                // Hosts without IPv6 refuse the socket or the address; then there is only one family to listen on.
                let without_v6 = |error: &io::Error| {
                    error.raw_os_error() == Some(libc::EAFNOSUPPORT)
                        || error.kind() == io::ErrorKind::AddrNotAvailable
                };
                tcp(match v6 {
                    Err(error) if without_v6(&error) => {
                        bind_tcp((Ipv4Addr::UNSPECIFIED, *port).into(), &before)
                    }
                    bound => bound,
                })
            }
            ListenAddr::Unix(path, stale) => UnixListening::bind(path, *stale).map(Self::Unix),
        }
    }

    /// Listens on a TCP socket that is already bound, after `before` has seen it. Needs a tokio runtime.
    ///
    /// # Errors
    /// The error of listen(2).
    pub fn adopt(socket: OwnedFd, before: impl FnOnce(BorrowedFd<'_>)) -> io::Result<Self> {
        before(socket.as_fd());
        let socket = RawSocket::from(socket);
        socket.listen(BACKLOG)?;
        socket.set_nonblocking(true)?;
        TcpListener::from_std(socket.into()).map(Self::Tcp)
    }

    /// The bound address, with the port that port 0 became; `None` for unix sockets.
    #[must_use]
    pub fn tcp_addr(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(listener) => listener.local_addr().ok(),
            Self::Unix(_) => None,
        }
    }

    /// Waits for a connection and sets its options. Cancelling loses no connection.
    ///
    /// # Errors
    /// The error of accept(2).
    pub async fn accept_tuned(&self) -> io::Result<(Socket, PeerAddr)> {
        match self {
            Self::Tcp(listener) => {
                let (socket, address) = listener.accept().await?;
                // Fails only when the peer is already gone, which the first read reports.
                let _tuned = tune_stream(&socket);
                Ok((Socket::Tcp(socket), PeerAddr::Tcp(unmapped(address))))
            }
            Self::Unix(listening) => Ok((Socket::Unix(listening.accept().await?), PeerAddr::Unix)),
        }
    }
}

fn bind_tcp(address: SocketAddr, before: impl Fn(BorrowedFd<'_>)) -> io::Result<TcpListener> {
    TcpListener::from_std(listen(address, before)?)
}

/// Listens on one address; on the wildcard address of IPv6 for both families, whatever `net.ipv6.bindv6only` says. The
/// socket is non-blocking.
///
/// # Errors
/// The error of `listen(2)` or of a call before it.
pub fn listen(
    address: SocketAddr,
    before: impl Fn(BorrowedFd<'_>),
) -> io::Result<std::net::TcpListener> {
    let socket = RawSocket::new(Domain::for_address(address), Type::STREAM, None)?;
    // A restarted server binds while connections of its predecessor are in TIME_WAIT.
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        // Go: only the wildcard address serves both families.
        socket.set_only_v6(!address.ip().is_unspecified())?;
    }
    socket.bind(&address.into())?;
    before(socket.as_fd());
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// The address of a peer; that of an IPv4 peer of a dual-stack socket as IPv4.
fn unmapped(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

#[cfg(test)]
mod tests {
    use super::*;
    use socket2::SockRef;
    use tokio::net::TcpStream;

    fn loopback(port: u16) -> ListenAddr {
        ListenAddr::Tcp((Ipv4Addr::LOCALHOST, port).into())
    }

    #[tokio::test]
    async fn accepted_sockets_are_tuned_and_know_their_peer() {
        let listener = Listener::bind_with(&loopback(0), |_socket| ()).unwrap();
        let client = TcpStream::connect(listener.tcp_addr().unwrap())
            .await
            .unwrap();
        let (socket, peer) = listener.accept_tuned().await.unwrap();
        assert_eq!(peer, PeerAddr::Tcp(client.local_addr().unwrap()));
        assert!(SockRef::from(&socket).tcp_nodelay().unwrap());
        assert!(SockRef::from(&socket).keepalive().unwrap());
    }

    #[tokio::test]
    async fn port_in_use_is_an_error_naming_the_address() {
        let first = Listener::bind_with(&loopback(0), |_socket| ()).unwrap();
        let address = first.tcp_addr().unwrap();
        let error = Listener::bind_with(&ListenAddr::Tcp(address), |_socket| ()).unwrap_err();
        assert_eq!(error.cause().kind(), io::ErrorKind::AddrInUse);
        assert!(error.to_string().contains(&address.to_string()), "{error}");
    }

    #[tokio::test]
    async fn foreign_address_is_an_error_naming_it() {
        let error = Listener::bind_with(&ListenAddr::Tcp(([192, 0, 2, 1], 0).into()), |_socket| ())
            .unwrap_err();
        assert!(error.to_string().contains("192.0.2.1"), "{error}");
    }

    #[tokio::test]
    async fn port_without_address_serves_ipv4_peers_by_their_ipv4_address() {
        let listener = Listener::bind_with(&ListenAddr::AnyTcp(0), |_socket| ()).unwrap();
        let port = listener.tcp_addr().unwrap().port();
        let client = TcpStream::connect((Ipv4Addr::LOCALHOST, port))
            .await
            .unwrap();
        let (_socket, peer) = listener.accept_tuned().await.unwrap();
        assert_eq!(peer, PeerAddr::Tcp(client.local_addr().unwrap()));
    }
}
