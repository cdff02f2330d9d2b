//! What lies between an agent and its server: connections that a test can cut or deafen.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex};

use socket2::{SockFilter, SockRef};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};

/// Copies each connection of an agent to its server.
pub(crate) struct Wire {
    pub(crate) address: SocketAddr,
    connections: Arc<Mutex<Vec<Connection>>>,
    _accepting: JoinSet<()>,
}

struct Connection {
    copying: AbortHandle,
    /// Its socket towards the server.
    server: OwnedFd,
}

impl Wire {
    pub(crate) async fn to(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("it is bound");
        let connections = Arc::new(Mutex::new(Vec::new()));
        let (known, mut accepting) = (Arc::clone(&connections), JoinSet::new());
        accepting.spawn(async move {
            let mut copying = JoinSet::new();
            while let Ok((mut agent, _peer)) = listener.accept().await {
                let mut server = TcpStream::connect(server).await.expect("it listens");
                let kept = server.as_fd().try_clone_to_owned();
                let copying = copying.spawn(async move {
                    let _over = tokio::io::copy_bidirectional(&mut agent, &mut server).await;
                });
                known.lock().expect("nothing panics").push(Connection {
                    copying,
                    server: kept.expect("a descriptor"),
                });
            }
        });
        Self {
            address,
            connections,
            _accepting: accepting,
        }
    }

    /// What an agent opens first is its link.
    pub(crate) fn cut_link(&self) {
        let mut connections = self.connections.lock().expect("nothing panics");
        connections.remove(0).copying.abort();
    }

    /// Nothing that the server sends on a lane arrives any more, nor is it acknowledged: as when the path is gone: the
    /// socket's own filter drops all packets, before TCP sees them.
    ///
    /// # Errors
    /// This host lets only privileged processes have filters.
    pub(crate) fn deafen_lanes(&self) -> io::Result<()> {
        /// Returns 0: of this packet no byte is wanted.
        const DROP: SockFilter = SockFilter::new(0x06, 0, 0, 0);
        let connections = self.connections.lock().expect("nothing panics");
        assert!(connections.len() > 1, "a link and lanes");
        for lane in &connections[1..] {
            let socket = SockRef::from(&lane.server);
            socket.attach_filter(&[DROP])?;
        }
        Ok(())
    }
}
