//! A TCP load balancer, which knows lanes by the protocol name in their TLS greeting.

use std::future::{Future as _, poll_fn};
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use adit_core::lane;

/// Most bytes of a greeting that are looked at.
const GREETING_BYTES_MAX: usize = 4096;

/// A connection, as its greeting shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Call {
    Link,
    Lane,
}

/// How connections are distributed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Order {
    RoundRobin,
    Random,
}

/// Distributes connections to servers.
pub(crate) struct Balancer {
    pub(crate) address: SocketAddr,
    servers: Arc<Mutex<Vec<SocketAddr>>>,
    /// Connections up to this number forward nothing.
    frozen: watch::Sender<usize>,
    /// In order of arrival; `None` before the greeting.
    calls: Arc<Mutex<Vec<Option<Call>>>>,
    _accepting: JoinSet<()>,
}

impl Balancer {
    /// In round-robin order.
    pub(crate) async fn to(servers: &[SocketAddr]) -> Self {
        Self::in_order(Order::RoundRobin, servers).await
    }

    pub(crate) async fn in_order(order: Order, servers: &[SocketAddr]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let servers = Arc::new(Mutex::new(servers.to_vec()));
        let behind = Arc::clone(&servers);
        let frozen = watch::Sender::new(0);
        let calls = Arc::new(Mutex::new(Vec::new()));
        let (thaws, seen) = (frozen.clone(), Arc::clone(&calls));
        let mut accepting = JoinSet::new();
        accepting.spawn(async move {
            let (mut copying, mut turn) = (JoinSet::new(), 0_usize);
            while let Ok((mut near, _peer)) = listener.accept().await {
                let server = {
                    let servers = behind.lock().expect("a list");
                    let at = match order {
                        Order::RoundRobin => turn,
                        Order::Random => rand::random_range(0..servers.len().max(1)),
                    };
                    servers.get(at % servers.len().max(1)).copied()
                };
                turn += 1;
                seen.lock().expect("a list").push(None);
                let Some(server) = server else { continue };
                let (number, frozen) = (turn, thaws.subscribe());
                let seen = Arc::clone(&seen);
                copying.spawn(async move {
                    let call = greeted(&near).await;
                    if let Ok(mut far) = TcpStream::connect(server).await {
                        seen.lock().expect("a list")[number - 1] = call;
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
            calls,
            _accepting: accepting,
        }
    }

    /// Acts like a NAT that forgets: existing connections stay open and forward nothing, and new connections work.
    pub(crate) fn freeze(&self) {
        let accepted = self.calls.lock().expect("a list").len();
        self.frozen.send_replace(accepted);
    }

    /// Acts like a black hole: all connections stay open and forward nothing, new ones, too.
    pub(crate) fn swallow(&self) {
        self.frozen.send_replace(usize::MAX);
    }

    /// All connections forward again, without loss.
    pub(crate) fn thaw(&self) {
        self.frozen.send_replace(0);
    }

    /// All connections so far, in order of arrival; those without a greeting are left out, and those to a server that is gone.
    pub(crate) fn calls(&self) -> Vec<Call> {
        let calls = self.calls.lock().expect("a list");
        calls.iter().copied().flatten().collect()
    }

    /// Replaces the servers for new connections.
    pub(crate) fn lead_to(&self, servers: &[SocketAddr]) {
        *self.servers.lock().expect("a list") = servers.to_vec();
    }
}

/// What a connection is for. Its greeting is one segment, and stays unread.
async fn greeted(near: &TcpStream) -> Option<Call> {
    let mut greeting = [0; GREETING_BYTES_MAX];
    let count = near
        .peek(&mut greeting)
        .await
        .ok()
        .filter(|count| *count > 0)?;
    let name = lane::ALPN.as_bytes();
    let is_lane = greeting[..count]
        .windows(name.len())
        .any(|bytes| bytes == name);
    Some(if is_lane { Call::Lane } else { Call::Link })
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
