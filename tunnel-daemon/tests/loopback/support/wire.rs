//! The connections between an agent and its server, which a test can cut, silence or hold.

use std::io;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex};

use adit::agent::RunningAgent;
use socket2::{SockFilter, SockRef};
use tokio::io::AsyncReadExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::{AbortHandle, JoinSet};

use super::world::World;

/// Copies each connection of an agent to its server.
pub(crate) struct Wire {
    pub(crate) address: SocketAddr,
    connections: Arc<Mutex<Vec<Connection>>>,
    held: Arc<Held>,
    _accepting: JoinSet<()>,
}

struct Connection {
    copying: AbortHandle,
    /// The socket towards the server.
    server: OwnedFd,
    /// The socket towards the agent.
    agent: OwnedFd,
}

/// Connections that are accepted from agents and not forwarded.
#[derive(Default)]
struct Held {
    wanted: AtomicBool,
    now: AtomicUsize,
    most: AtomicUsize,
    let_go: Notify,
}

impl Held {
    /// Holds a connection until its agent closes it or all are released.
    async fn hold(&self, mut agent: TcpStream) {
        let now = self.now.fetch_add(1, Relaxed) + 1;
        self.most.fetch_max(now, Relaxed);
        let given_up = async {
            let mut said = [0; 4096];
            while let Ok(1..) = agent.read(&mut said).await {}
        };
        tokio::select! {
            () = given_up => (),
            () = self.let_go.notified() => (),
        }
        self.now.fetch_sub(1, Relaxed);
    }
}

impl Wire {
    pub(crate) async fn to(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("it is bound");
        let connections = Arc::new(Mutex::new(Vec::new()));
        let held = Arc::new(Held::default());
        let (known, mut accepting) = (Arc::clone(&connections), JoinSet::new());
        let holding = Arc::clone(&held);
        accepting.spawn(async move {
            let mut copying = JoinSet::new();
            while let Ok((mut agent, _peer)) = listener.accept().await {
                if holding.wanted.load(Relaxed) {
                    let holding = Arc::clone(&holding);
                    copying.spawn(async move { holding.hold(agent).await });
                    continue;
                }
                let mut server = TcpStream::connect(server).await.expect("it listens");
                let kept = [agent.as_fd(), server.as_fd()].map(|fd| fd.try_clone_to_owned());
                let [kept_agent, kept_server] = kept.map(|fd| fd.expect("a descriptor"));
                let copying = copying.spawn(async move {
                    let _over = tokio::io::copy_bidirectional(&mut agent, &mut server).await;
                    for end in [SockRef::from(&agent), SockRef::from(&server)] {
                        // Each socket has another descriptor, so a drop would not close it.
                        let _over_before = end.shutdown(Shutdown::Both);
                    }
                });
                known.lock().expect("nothing panics").push(Connection {
                    copying,
                    server: kept_server,
                    agent: kept_agent,
                });
            }
        });
        Self {
            address,
            connections,
            held,
            _accepting: accepting,
        }
    }

    /// A server and an agent with these flags, warm lanes, and the connections between them.
    pub(crate) async fn between(flags: &[&str]) -> (World, RunningAgent, Self) {
        let world = World::start(flags).await;
        let wire = Self::to(world.server().agents).await;
        let agent = world.agent_of(wire.address.port(), "agent-1", flags).await;
        world.links(1).await;
        super::lanes::warm(&world).await;
        (world, agent, wire)
    }

    /// Cuts the link, which is the first connection of an agent.
    pub(crate) fn cut_link(&self) {
        let mut connections = self.connections.lock().expect("nothing panics");
        connections.remove(0).copying.abort();
    }

    /// Number of connections of agents so far, without those that were held.
    pub(crate) fn connections(&self) -> usize {
        self.connections.lock().expect("nothing panics").len()
    }

    /// From now on new connections are accepted and not answered.
    pub(crate) fn hold(&self) {
        self.held.wanted.store(true, Relaxed);
    }

    /// Closes the held connections, and forwards new ones to the server again.
    pub(crate) fn let_go(&self) {
        self.held.wanted.store(false, Relaxed);
        self.held.let_go.notify_waiters();
    }

    /// Number of connections held now, and the most at once so far.
    pub(crate) fn held(&self) -> (usize, usize) {
        (self.held.now.load(Relaxed), self.held.most.load(Relaxed))
    }

    /// Drops everything that the server sends on lanes, unacknowledged, as when the path is gone. A filter on the socket drops
    /// all packets before TCP sees them.
    ///
    /// # Errors
    /// This host allows filters only to privileged processes.
    pub(crate) fn cut_lane_input(&self) -> io::Result<()> {
        self.deafen(|lane| &lane.server)
    }

    /// As [`Self::cut_lane_input`], and also drops what agents send on lanes.
    ///
    /// # Errors
    /// As for [`Self::cut_lane_input`].
    pub(crate) fn cut_lane_input_of_both(&self) -> io::Result<()> {
        self.deafen(|lane| &lane.server)?;
        self.deafen(|lane| &lane.agent)
    }

    fn deafen(&self, end: impl Fn(&Connection) -> &OwnedFd) -> io::Result<()> {
        /// Returns 0: no byte of the packet is kept.
        const DROP: SockFilter = SockFilter::new(0x06, 0, 0, 0);
        let connections = self.connections.lock().expect("nothing panics");
        assert!(connections.len() > 1, "a link and lanes");
        for lane in &connections[1..] {
            let socket = SockRef::from(end(lane));
            socket.attach_filter(&[DROP])?;
        }
        Ok(())
    }
}
