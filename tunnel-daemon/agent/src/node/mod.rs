//! Node proxy at the agent: connections from this node to destinations in a server's network.
//!
//! A listener accepts, a [`DestinationSource`] tells the destination, and a tunnel is opened on a lane of some server. A
//! connection that cannot be served is reset, and counted by reason.

mod proxy;

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio::sync::Semaphore;

pub use proxy::NodeProxy;

use adit_telemetry::labels::NodeRefusal;
use adit_tls::stream::{ByteStream, PeerAddr, Socket};

/// Limit on connections of one listener.
pub const CONNECTIONS_PER_LISTENER_MAX: usize = 4096;
/// Limit on connections of all listeners of an agent.
pub const CONNECTIONS_MAX: usize = 16_384;
/// Limit on tasks for connections: more than the connections above, so that refused ones can be reset at once.
pub const TASKS_MAX: usize = CONNECTIONS_MAX + 1024;

/// The destination of an accepted connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// `host:port`, as sent to servers.
    pub destination: Arc<str>,
    /// The address that the client dialled; `None`: the local address of the accepted socket.
    pub called: Option<SocketAddr>,
}

/// Finds the destinations of accepted connections.
pub trait DestinationSource: Send + Sync + 'static {
    /// The destination of `accepted`; `peer` is the client's address.
    ///
    /// # Errors
    /// The destination is unknown, or must not be served.
    fn destination(&self, accepted: &TcpStream, peer: SocketAddr) -> Result<Wanted, NodeRefusal>;
}

/// One destination for all connections of a listener.
#[derive(Clone, Debug)]
pub struct Fixed(pub Arc<str>);

impl DestinationSource for Fixed {
    fn destination(&self, _: &TcpStream, _: SocketAddr) -> Result<Wanted, NodeRefusal> {
        Ok(Wanted {
            destination: Arc::clone(&self.0),
            called: None,
        })
    }
}

/// State shared by the connections of one listener. Clones share the same listener.
#[derive(Clone)]
pub struct NodeListener {
    proxy: Arc<NodeProxy>,
    source: Arc<dyn DestinationSource>,
    connections: Arc<Semaphore>,
}

impl NodeListener {
    /// A listener for connections whose destination `source` tells.
    #[must_use]
    pub fn new(proxy: &Arc<NodeProxy>, source: Arc<dyn DestinationSource>) -> Self {
        Self::with_max(proxy, source, CONNECTIONS_PER_LISTENER_MAX)
    }

    /// Like [`Self::new`], with `connections_max`.
    fn with_max(
        proxy: &Arc<NodeProxy>,
        source: Arc<dyn DestinationSource>,
        connections_max: usize,
    ) -> Self {
        Self {
            proxy: Arc::clone(proxy),
            source,
            connections: Arc::new(Semaphore::new(connections_max)),
        }
    }

    /// Serves one accepted connection to its end. A cancelled call resets its tunnel.
    pub fn serve(self, stream: ByteStream) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(self.serve_stream(stream))
    }

    async fn serve_stream(self, stream: ByteStream) {
        let ByteStream::Plain(Socket::Tcp(socket), PeerAddr::Tcp(peer)) = stream else {
            return;
        };
        let places = (
            self.connections.try_acquire(),
            self.proxy.connections.try_acquire(),
        );
        let (Ok(_here), Ok(_at_all)) = places else {
            return self.proxy.refuse(&socket, peer, "", NodeRefusal::Limit);
        };
        match self.source.destination(&socket, peer) {
            Ok(wanted) => self.proxy.serve(socket, peer, &wanted).await,
            Err(why) => self.proxy.refuse(&socket, peer, "", why),
        }
    }
}

#[cfg(test)]
mod tests;
