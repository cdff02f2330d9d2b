//! A long path between agents and their server: it delays all bytes, however many there are. It shows what limits a tunnel
//! above TCP, because the sockets at its ends are local.

use std::net::SocketAddr;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use adit_net::tasks::Tasks;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

/// Size of one read, and so the least amount in flight.
const PIECE_BYTES: usize = 64 * 1024;
/// Limit on pieces in flight in one direction, far above what any test expects.
const PIECES_MAX: usize = 1024;
const CONNECTIONS_MAX: usize = 1024;

/// Direction of bytes on a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Towards {
    Server,
    Agent,
}

/// Statistics of one connection.
#[derive(Default)]
struct Passage {
    /// Most bytes in flight at once, towards the server and towards the agent.
    most_bytes: [AtomicUsize; 2],
}

impl Passage {
    /// Most bytes in flight at once in one direction.
    fn most_bytes(&self, towards: Towards) -> usize {
        self.most_bytes[towards as usize].load(Relaxed)
    }
}

/// A path that works until this is dropped; see the module.
pub(crate) struct LongPath {
    /// Where agents connect.
    pub(crate) address: SocketAddr,
    connections: Arc<Mutex<Vec<Arc<Passage>>>>,
    _tasks: Tasks,
}

impl LongPath {
    /// A path to `server` that takes `delay` in each direction.
    pub(crate) async fn to(server: SocketAddr, delay: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let connections = Arc::new(Mutex::new(Vec::new()));
        let tasks = Tasks::new(3 * CONNECTIONS_MAX);
        let (known, carriers) = (Arc::clone(&connections), tasks.clone());
        tasks.spawn_always("long-path", async move {
            while let Ok((agent, _)) = listener.accept().await {
                let Ok(server) = TcpStream::connect(server).await else {
                    continue;
                };
                let passage = Arc::new(Passage::default());
                known
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(Arc::clone(&passage));
                let _ = (agent.set_nodelay(true), server.set_nodelay(true));
                let (from_agent, to_agent) = agent.into_split();
                let (from_server, to_server) = server.into_split();
                for (from, to, towards) in [
                    (from_agent, to_server, Towards::Server),
                    (from_server, to_agent, Towards::Agent),
                ] {
                    let carried = carry(from, to, towards, delay, Arc::clone(&passage));
                    carriers
                        .spawn("long-path-direction", carried)
                        .expect("room for a direction");
                }
            }
        });
        Self {
            address,
            connections,
            _tasks: tasks,
        }
    }

    /// All connections so far.
    fn connections(&self) -> Vec<Arc<Passage>> {
        let connections = self.connections.lock();
        connections.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Most bytes of one connection in flight at once in one direction.
    pub(crate) fn most_bytes(&self, towards: Towards) -> usize {
        let connections = self.connections();
        let most = connections
            .iter()
            .map(|passage| passage.most_bytes(towards));
        most.max().unwrap_or(0)
    }
}

/// Copies one direction of a connection, until it ends or the other side is gone.
async fn carry(
    mut from: OwnedReadHalf,
    to: OwnedWriteHalf,
    towards: Towards,
    delay: Duration,
    passage: Arc<Passage>,
) {
    let (held, due) = mpsc::channel::<(Instant, Vec<u8>)>(PIECES_MAX);
    let under_way = Arc::new(AtomicUsize::new(0));
    let take = async {
        let mut piece = vec![0; PIECE_BYTES];
        while let Ok(count @ 1..) = from.read(&mut piece).await {
            let bytes = under_way.fetch_add(count, Relaxed) + count;
            passage.most_bytes[towards as usize].fetch_max(bytes, Relaxed);
            let sent = held.send((Instant::now() + delay, piece[..count].to_vec()));
            if sent.await.is_err() {
                return;
            }
        }
        drop(held);
    };
    tokio::join!(take, give(to, due, &under_way));
}

async fn give(
    mut to: OwnedWriteHalf,
    mut due: mpsc::Receiver<(Instant, Vec<u8>)>,
    under_way: &AtomicUsize,
) {
    while let Some((arrival, bytes)) = due.recv().await {
        sleep_until(arrival).await;
        under_way.fetch_sub(bytes.len(), Relaxed);
        if to.write_all(&bytes).await.is_err() {
            return;
        }
    }
    let _gone = to.shutdown().await;
}
