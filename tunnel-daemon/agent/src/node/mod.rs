//! Node to control plane, at the agent: connections of this node that a server's network is to serve.
//!
//! A listener accepts, something says where the connection wants to go ([`DestinationSource`]), and a tunnel is opened on a lane of some
//! server. What cannot be served is reset, and counted by reason.

mod proxy;

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio::sync::Semaphore;

pub use proxy::NodeProxy;

use adit_telemetry::labels::NodeRefusal;
use adit_tls::stream::ByteStream;

/// Connections of one listener at once.
pub const CONNECTIONS_PER_LISTENER_MAX: usize = 4096;
/// Of all listeners of an agent.
pub const CONNECTIONS_MAX: usize = 16_384;
/// Tasks for connections: beyond those above there is room for some that are accepted to be reset, each at once.
pub const TASKS_MAX: usize = CONNECTIONS_MAX + 1024;

/// Where an accepted connection wants to go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// `host:port` as servers are asked with it.
    pub destination: Arc<str>,
    /// The address its client called; `None`: the one that accepted it.
    pub called: Option<SocketAddr>,
}

/// Knows where accepted connections want to go.
pub trait DestinationSource: Send + Sync + 'static {
    /// Of this one; `peer` is who connected.
    ///
    /// # Errors
    /// It is not known, or not to be served.
    fn destination(&self, accepted: &TcpStream, peer: SocketAddr) -> Result<Wanted, NodeRefusal>;
}

/// All connections of a listener want to go to one place.
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

/// What the connections of one listener share. Clones name the same listener.
#[derive(Clone)]
pub struct NodeListener {
    proxy: Arc<NodeProxy>,
    source: Arc<dyn DestinationSource>,
    connections: Arc<Semaphore>,
}

impl NodeListener {
    /// For connections that want to go where `source` says.
    #[must_use]
    pub fn new(proxy: &Arc<NodeProxy>, source: Arc<dyn DestinationSource>) -> Self {
        Self::with_max(proxy, source, CONNECTIONS_PER_LISTENER_MAX)
    }

    /// As that, with so many connections at once.
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
    pub async fn serve(self, stream: ByteStream) {
        let ByteStream::Tcp(socket, peer) = stream else {
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
