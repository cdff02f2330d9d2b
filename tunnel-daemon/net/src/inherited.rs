//! Listening sockets that a service manager opened before the start: socket activation, sd_listen_fds(3).

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use listenfd::ListenFd;
use rustix::net::sockopt::socket_acceptconn;

use crate::listen::{ListenAddr, Listener};
use crate::unix::UnixListening;

/// Sockets by their address, until a listener takes them. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct InheritedSockets(Arc<Mutex<Vec<Inherited>>>);

#[derive(Debug)]
enum Inherited {
    Tcp(TcpListener, SocketAddr),
    Unix(UnixListener, PathBuf),
}

impl Inherited {
    fn is_at(&self, address: &ListenAddr) -> bool {
        match (self, address) {
            (Self::Tcp(_, at), ListenAddr::Tcp(wanted)) => at == wanted,
            (Self::Tcp(_, at), ListenAddr::AnyTcp(port)) => {
                at.port() == *port && IpAddr::is_unspecified(&at.ip())
            }
            (Self::Unix(_, at), ListenAddr::Unix(wanted, _)) => at == wanted,
            (Self::Tcp(..), ListenAddr::Unix(..))
            | (Self::Unix(..), ListenAddr::Tcp(_) | ListenAddr::AnyTcp(_)) => false,
        }
    }

    fn address(&self) -> String {
        match self {
            Self::Tcp(_, at) => at.to_string(),
            Self::Unix(_, at) => at.display().to_string(),
        }
    }
}

impl InheritedSockets {
    /// The sockets that the environment names (`LISTEN_FDS`, `LISTEN_PID`). To be called once in a process: a second call
    /// would own the same descriptors.
    ///
    /// # Errors
    /// A descriptor is no listening stream socket, TCP or unix with a path.
    pub fn from_env() -> io::Result<Self> {
        let listening = |socket: BorrowedFd<'_>| {
            if socket_acceptconn(socket)? {
                return Ok(());
            }
            Err(io::Error::other(
                "it does not listen: leave Accept=yes out of its socket unit",
            ))
        };
        let mut passed = ListenFd::from_env();
        let mut sockets = Vec::with_capacity(passed.len());
        for index in 0..passed.len() {
            let socket = match passed.take_unix_listener(index) {
                Ok(Some(unix)) => {
                    listening(unix.as_fd())?;
                    let address = unix.local_addr()?;
                    let path = address.as_pathname().ok_or_else(|| {
                        io::Error::other("it is a unix socket without a path: give it one")
                    })?;
                    let path = path.to_owned();
                    Inherited::Unix(unix, path)
                }
                Ok(None) => continue,
                Err(_not_unix) => match passed.take_tcp_listener(index)? {
                    Some(tcp) => {
                        listening(tcp.as_fd())?;
                        let address = tcp.local_addr()?;
                        Inherited::Tcp(tcp, address)
                    }
                    None => continue,
                },
            };
            sockets.push(socket);
        }
        Ok(Self(Arc::new(Mutex::new(sockets))))
    }

    /// The socket that was passed for an address, if any. `before` gets a TCP socket first. Needs a tokio runtime.
    ///
    /// # Errors
    /// The runtime cannot register the socket.
    pub fn take(
        &self,
        address: &ListenAddr,
        before: impl FnOnce(BorrowedFd<'_>),
    ) -> io::Result<Option<Listener>> {
        let mut sockets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(at) = sockets.iter().position(|socket| socket.is_at(address)) else {
            return Ok(None);
        };
        let listener = match sockets.swap_remove(at) {
            Inherited::Tcp(socket, _) => {
                before(socket.as_fd());
                socket.set_nonblocking(true)?;
                Listener::Tcp(tokio::net::TcpListener::from_std(socket)?)
            }
            Inherited::Unix(socket, path) => {
                Listener::Unix(UnixListening::inherited(socket, path)?)
            }
        };
        Ok(Some(listener))
    }

    /// Addresses of the sockets that no listener has taken.
    #[must_use]
    pub fn left(&self) -> Vec<String> {
        let sockets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sockets.iter().map(Inherited::address).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpStream, UnixStream};

    use super::*;
    use crate::unix::StaleFile;

    fn sockets(passed: Vec<Inherited>) -> InheritedSockets {
        InheritedSockets(Arc::new(Mutex::new(passed)))
    }

    fn tcp(ip: IpAddr) -> (Inherited, u16) {
        let socket = TcpListener::bind((ip, 0)).unwrap();
        let at = socket.local_addr().unwrap();
        (Inherited::Tcp(socket, at), at.port())
    }

    #[tokio::test]
    async fn a_socket_is_taken_once_and_by_its_own_address() {
        let (passed, port) = tcp(Ipv4Addr::LOCALHOST.into());
        let inherited = sockets(vec![passed]);
        let take = |address: &ListenAddr| inherited.take(address, |_socket| ()).unwrap();
        let right = ListenAddr::Tcp((Ipv4Addr::LOCALHOST, port).into());
        for wrong in [
            ListenAddr::AnyTcp(port),
            ListenAddr::Tcp((Ipv6Addr::LOCALHOST, port).into()),
            ListenAddr::Tcp((Ipv4Addr::LOCALHOST, port ^ 1).into()),
            ListenAddr::Unix("/run/x".into(), StaleFile::Keep),
        ] {
            assert!(take(&wrong).is_none(), "{wrong}");
        }
        assert_eq!(inherited.left(), [format!("127.0.0.1:{port}")]);
        let listener = take(&right).unwrap();
        assert!(inherited.left().is_empty() && take(&right).is_none());
        let mut client = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        client.write_all(b"x").await.unwrap();
        let (mut socket, _peer) = listener.accept_tuned().await.unwrap();
        assert_eq!(socket.read_u8().await.unwrap(), b'x');
    }

    #[tokio::test]
    async fn a_wildcard_of_either_family_is_any_address() {
        let (passed, port) = tcp(Ipv4Addr::UNSPECIFIED.into());
        let inherited = sockets(vec![passed]);
        let listener = inherited.take(&ListenAddr::AnyTcp(port), |_socket| ());
        assert!(listener.unwrap().is_some());
    }

    /// The service manager keeps listening after this process ends, so the file belongs to the service manager.
    #[tokio::test]
    async fn the_file_of_an_inherited_unix_socket_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kas.sock");
        let socket = UnixListener::bind(&path).unwrap();
        let inherited = sockets(vec![Inherited::Unix(socket, path.clone())]);
        let address = ListenAddr::Unix(path.clone(), StaleFile::Remove);
        let listener = inherited.take(&address, |_socket| ()).unwrap().unwrap();
        let _client = UnixStream::connect(&path).await.unwrap();
        listener.accept_tuned().await.unwrap();
        drop(listener);
        assert!(path.exists());
    }
}
