//! A load balancer of connections.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// Leads connections to servers in turns.
pub(crate) struct Balancer {
    pub(crate) address: SocketAddr,
    servers: Arc<Mutex<Vec<SocketAddr>>>,
    _accepting: JoinSet<()>,
}

impl Balancer {
    pub(crate) async fn to(servers: &[SocketAddr]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let servers = Arc::new(Mutex::new(servers.to_vec()));
        let behind = Arc::clone(&servers);
        let mut accepting = JoinSet::new();
        accepting.spawn(async move {
            let (mut copying, mut turn) = (JoinSet::new(), 0_usize);
            while let Ok((mut near, _peer)) = listener.accept().await {
                let server = {
                    let servers = behind.lock().expect("a list");
                    servers.get(turn % servers.len().max(1)).copied()
                };
                turn += 1;
                let Some(server) = server else { continue };
                copying.spawn(async move {
                    if let Ok(mut far) = TcpStream::connect(server).await {
                        let _over = tokio::io::copy_bidirectional(&mut near, &mut far).await;
                    }
                });
            }
        });
        Self {
            address,
            servers,
            _accepting: accepting,
        }
    }

    /// From now on these.
    pub(crate) fn lead_to(&self, servers: &[SocketAddr]) {
        *self.servers.lock().expect("a list") = servers.to_vec();
    }
}
