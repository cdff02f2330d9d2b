//! A TCP load balancer.

use std::future::{Future as _, poll_fn};
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Distributes connections to servers in round-robin order.
pub(crate) struct Balancer {
    pub(crate) address: SocketAddr,
    servers: Arc<Mutex<Vec<SocketAddr>>>,
    /// Connections up to this number forward nothing.
    frozen: watch::Sender<usize>,
    accepted: Arc<Mutex<usize>>,
    _accepting: JoinSet<()>,
}

impl Balancer {
    pub(crate) async fn to(servers: &[SocketAddr]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let servers = Arc::new(Mutex::new(servers.to_vec()));
        let behind = Arc::clone(&servers);
        let frozen = watch::Sender::new(0);
        let accepted = Arc::new(Mutex::new(0));
        let (thaws, count) = (frozen.clone(), Arc::clone(&accepted));
        let mut accepting = JoinSet::new();
        accepting.spawn(async move {
            let (mut copying, mut turn) = (JoinSet::new(), 0_usize);
            while let Ok((mut near, _peer)) = listener.accept().await {
                let server = {
                    let servers = behind.lock().expect("a list");
                    servers.get(turn % servers.len().max(1)).copied()
                };
                turn += 1;
                *count.lock().expect("a number") = turn;
                let Some(server) = server else { continue };
                let (number, frozen) = (turn, thaws.subscribe());
                copying.spawn(async move {
                    if let Ok(mut far) = TcpStream::connect(server).await {
                        let copy = tokio::io::copy_bidirectional(&mut near, &mut far);
                        unless_frozen(number, frozen, copy).await;
                    }
                });
            }
        });
        Self {
            address,
            servers,
            frozen,
            accepted,
            _accepting: accepting,
        }
    }

    /// Acts like a NAT that forgets: existing connections stay open and forward nothing, and new connections work.
    pub(crate) fn freeze(&self) {
        let accepted = *self.accepted.lock().expect("a number");
        self.frozen.send_replace(accepted);
    }

    /// All connections forward again, without loss.
    pub(crate) fn thaw(&self) {
        self.frozen.send_replace(0);
    }

    /// Replaces the servers for new connections.
    pub(crate) fn lead_to(&self, servers: &[SocketAddr]) {
        *self.servers.lock().expect("a list") = servers.to_vec();
    }
}

/// Polls `copy` only while the connection of this number is not frozen.
async fn unless_frozen<T>(
    number: usize,
    mut frozen: watch::Receiver<usize>,
    copy: impl Future<Output = T>,
) {
    let mut copy = pin!(copy);
    loop {
        let is_frozen = number <= *frozen.borrow_and_update();
        let mut changed = pin!(frozen.changed());
        let over = poll_fn(|cx| {
            if changed.as_mut().poll(cx).is_ready() {
                return Poll::Ready(false);
            }
            if is_frozen {
                return Poll::Pending;
            }
            copy.as_mut().poll(cx).map(|_over| true)
        });
        if over.await {
            return;
        }
    }
}
