//! The table of open tunnels of a process, for status output: an entry is added when a tunnel opens, removed when it ends, and
//! not touched in between. The tunnel's own task stores its byte counts as they change.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::access::cut;
use crate::families::{Counters, Registrar, families};
use crate::labels::{ClientDialect, Direction, Driver, Engine, Path};

/// Parts of the table, each with its own lock, so that tunnels that open concurrently rarely contend.
const SHARDS: usize = 16;
/// [`LiveTunnel::rtt_micros`] before the first request for it.
const UNKNOWN: u32 = u32::MAX;

/// Which end of a tunnel this process serves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TunnelSide {
    /// A server: its socket is the client's.
    Client(ClientDialect),
    /// An agent: its socket is the target's.
    Target,
}

/// Facts about a tunnel when it opens.
#[derive(Clone, Copy, Debug)]
pub struct TunnelFacts<'a> {
    /// Which end this process serves.
    pub side: TunnelSide,
    /// The process at the other end: the agent's id on a server, the server's id on an agent.
    pub peer: &'a str,
    /// What the agent has proved; on an agent nothing.
    pub principal: Option<&'a Arc<str>>,
    /// The tunnel's link, by number; 0 where links have none.
    pub link: u64,
    /// host:port as the client asked for it; truncated.
    pub destination: &'a str,
    /// The path that the tunnel takes.
    pub path: Path,
}

/// Quality of the connection to the peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PathQuality {
    /// Smoothed round-trip time.
    pub rtt: Duration,
    /// Retransmitted segments since the connection began.
    pub retransmits: u32,
}

/// A tunnel whose bytes are moved and counted outside its task.
pub trait Relayed: Send + Sync {
    /// Bytes of this end's socket that the other end took, and bytes that this end's socket took.
    fn bytes(&self) -> (u64, u64);
    /// What moves the bytes, and its I/O driver.
    fn mover(&self) -> (Engine, Driver);
    /// Quality of the path to the process at the other end; asks the kernel.
    fn quality(&self) -> Option<PathQuality>;
}

/// One open tunnel.
pub struct LiveTunnel {
    id: u64,
    side: TunnelSide,
    peer: Box<str>,
    principal: Option<Arc<str>>,
    link: u64,
    destination: Box<str>,
    path: Path,
    opened: Instant,
    sent: AtomicU64,
    received: AtomicU64,
    /// Path quality was requested.
    asked: AtomicBool,
    rtt_micros: AtomicU32,
    retransmits: AtomicU32,
    relayed: OnceLock<Box<dyn Relayed>>,
    /// Bytes published in the metrics: to target, to client.
    published: [AtomicU64; 2],
    /// The tunnel was requested by an agent.
    is_of_agent: bool,
}

families! {
    /// Byte counters of tunnels.
    pub(super) struct TunnelBytes(families) {
        /// Payload bytes moved through tunnels, by direction; includes open tunnels
        of_clients: Counters<Direction> = families.counters_from_zero("tunnel_bytes_total", "direction"),
        /// Payload bytes moved through tunnels from node to control plane, by direction; includes open tunnels
        of_agents: Counters<Direction> = families.counters_from_zero("node_tunnel_bytes_total", "direction"),
    }
}

/// A snapshot of an open tunnel.
#[derive(Clone, Debug)]
pub struct TunnelView {
    /// The tunnel's id in this process; never reused.
    pub id: u64,
    /// Which end this process serves.
    pub side: TunnelSide,
    /// The process at the other end.
    pub peer: String,
    /// What the agent has proved.
    pub principal: Option<Arc<str>>,
    /// The tunnel's link, by number.
    pub link: u64,
    /// host:port as the client asked for it.
    pub destination: String,
    /// The path that the tunnel takes.
    pub path: Path,
    /// Time since it opened.
    pub age: Duration,
    /// Payload bytes from client to target.
    pub bytes_to_target: u64,
    /// Payload bytes from target to client.
    pub bytes_to_client: u64,
    /// What moves the bytes.
    pub engine: Engine,
    /// The I/O driver of the sockets.
    pub driver: Driver,
    /// Quality of the path to the other end, if this tunnel has a connection of its own.
    pub quality: Option<PathQuality>,
}

impl LiveTunnel {
    /// Sets the bytes read from and written to this end's socket. Called only by the task that owns the tunnel.
    #[inline]
    pub fn moved(&self, sent: u64, received: u64) {
        self.sent.store(sent, Relaxed);
        self.received.store(received, Relaxed);
    }

    /// Whether [`Self::report_quality`] was requested; clears the request.
    #[inline]
    #[must_use]
    pub fn is_asked(&self) -> bool {
        self.asked.load(Relaxed) && self.asked.swap(false, Relaxed)
    }

    /// Stores the current quality of the path.
    pub fn report_quality(&self, quality: PathQuality) {
        let micros = u32::try_from(quality.rtt.as_micros()).unwrap_or(UNKNOWN - 1);
        self.retransmits.store(quality.retransmits, Relaxed);
        self.rtt_micros.store(micros, Relaxed);
    }

    /// From now on `relayed` moves and counts the bytes.
    pub fn relayed_by(&self, relayed: Box<dyn Relayed>) {
        // A tunnel is handed over once.
        let _first = self.relayed.set(relayed);
    }

    /// A snapshot. Requests the path quality from the tunnel's task for the next snapshot.
    #[must_use]
    pub fn view(&self, now: Instant) -> TunnelView {
        let (bytes_to_target, bytes_to_client) = self.bytes();
        let ((engine, driver), quality) = match self.relayed.get() {
            None => ((Engine::Copy, Driver::Task), self.quality()),
            Some(relayed) => (relayed.mover(), relayed.quality()),
        };
        TunnelView {
            id: self.id,
            side: self.side,
            peer: self.peer.to_string(),
            principal: self.principal.clone(),
            link: self.link,
            destination: self.destination.to_string(),
            path: self.path,
            age: now.saturating_duration_since(self.opened),
            bytes_to_target,
            bytes_to_client,
            engine,
            driver,
            quality,
        }
    }

    /// Payload bytes from client to target, and from target to client.
    #[must_use]
    pub fn bytes(&self) -> (u64, u64) {
        let (sent, received) = match self.relayed.get() {
            None => (self.sent.load(Relaxed), self.received.load(Relaxed)),
            Some(relayed) => relayed.bytes(),
        };
        match self.side {
            TunnelSide::Client(_) => (sent, received),
            TunnelSide::Target => (received, sent),
        }
    }

    /// Adds the bytes moved since the last call to the metrics. With concurrent calls each byte is added once.
    fn publish(&self, counters: &TunnelBytes) {
        let (to_target, to_client) = self.bytes();
        let [target, client] = &self.published;
        let new =
            |published: &AtomicU64, now: u64| now.saturating_sub(published.fetch_max(now, Relaxed));
        let (to_target, to_client) = (new(target, to_target), new(client, to_client));
        let family = if self.is_of_agent {
            &counters.of_agents
        } else {
            &counters.of_clients
        };
        family.of(Direction::ToTarget).inc_by(to_target);
        family.of(Direction::ToClient).inc_by(to_client);
    }

    /// The tunnel's id in this process.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The process at the other end.
    #[must_use]
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// What the agent has proved.
    #[must_use]
    pub fn principal(&self) -> Option<&str> {
        self.principal.as_deref()
    }

    /// host:port as the client asked for it.
    #[must_use]
    pub fn destination(&self) -> &str {
        &self.destination
    }

    /// The path that the tunnel takes.
    #[must_use]
    pub fn path(&self) -> Path {
        self.path
    }

    /// The tunnel's link, by number.
    #[must_use]
    pub fn link(&self) -> u64 {
        self.link
    }

    fn quality(&self) -> Option<PathQuality> {
        self.asked.store(true, Relaxed);
        let micros = self.rtt_micros.load(Relaxed);
        (micros != UNKNOWN).then(|| PathQuality {
            rtt: Duration::from_micros(micros.into()),
            retransmits: self.retransmits.load(Relaxed),
        })
    }
}

impl fmt::Debug for LiveTunnel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LiveTunnel")
            .field("id", &self.id)
            .field("destination", &self.destination)
            .finish_non_exhaustive()
    }
}

/// The table of open tunnels. One per process, shared by reference.
#[derive(Default)]
pub struct OpenTunnels {
    shards: [Mutex<HashMap<u64, Arc<LiveTunnel>>>; SHARDS],
    opened: AtomicU64,
    /// `None`: bytes are not counted.
    bytes: Option<TunnelBytes>,
}

impl OpenTunnels {
    /// A table whose tunnels' bytes are counted.
    pub(super) fn counted_in(bytes: TunnelBytes) -> Self {
        Self {
            bytes: Some(bytes),
            ..Self::default()
        }
    }

    /// Updates the byte counters. Call it before they are read: tunnels touch no metric while bytes move.
    pub fn publish_bytes(&self) {
        if let Some(counters) = &self.bytes {
            for live in self.all() {
                live.publish(counters);
            }
        }
    }

    /// Adds a tunnel requested by a client; it stays in the table until the entry is dropped.
    pub fn enter(self: &Arc<Self>, facts: &TunnelFacts<'_>) -> TunnelEntry {
        self.enter_as(facts, false)
    }

    /// Adds a tunnel requested by an agent.
    pub fn enter_node(self: &Arc<Self>, facts: &TunnelFacts<'_>) -> TunnelEntry {
        self.enter_as(facts, true)
    }

    fn enter_as(self: &Arc<Self>, facts: &TunnelFacts<'_>, is_of_agent: bool) -> TunnelEntry {
        let id = self.opened.fetch_add(1, Relaxed) + 1;
        let live = Arc::new(LiveTunnel {
            id,
            side: facts.side,
            peer: cut(facts.peer).into(),
            principal: facts.principal.cloned(),
            link: facts.link,
            destination: cut(facts.destination).into(),
            path: facts.path,
            opened: Instant::now(),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            asked: AtomicBool::new(false),
            rtt_micros: AtomicU32::new(UNKNOWN),
            retransmits: AtomicU32::new(0),
            relayed: OnceLock::new(),
            published: [AtomicU64::new(0), AtomicU64::new(0)],
            is_of_agent,
        });
        self.shard(id).insert(id, Arc::clone(&live));
        TunnelEntry {
            table: Arc::clone(self),
            live,
        }
    }

    /// All open tunnels, unordered. No lock is held while the caller uses them.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<LiveTunnel>> {
        let mut all = Vec::new();
        for shard in &self.shards {
            all.extend(locked(shard).values().cloned());
        }
        all
    }

    fn shard(&self, id: u64) -> MutexGuard<'_, HashMap<u64, Arc<LiveTunnel>>> {
        let [first, ..] = &self.shards;
        let at = usize::try_from(id % SHARDS as u64).unwrap_or(0);
        locked(self.shards.get(at).unwrap_or(first))
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while the lock is held.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for OpenTunnels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OpenTunnels")
    }
}

/// A tunnel's entry in the table, removed when dropped.
#[must_use = "the tunnel leaves the table as soon as its entry is dropped"]
#[derive(Debug)]
pub struct TunnelEntry {
    table: Arc<OpenTunnels>,
    live: Arc<LiveTunnel>,
}

impl TunnelEntry {
    /// The tunnel's counters, for the task that moves its bytes.
    #[must_use]
    pub fn live(&self) -> Arc<LiveTunnel> {
        Arc::clone(&self.live)
    }
}

impl Drop for TunnelEntry {
    fn drop(&mut self) {
        self.table.shard(self.live.id).remove(&self.live.id);
        if let Some(counters) = &self.table.bytes {
            self.live.publish(counters);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(destination: &str) -> TunnelFacts<'_> {
        TunnelFacts {
            side: TunnelSide::Client(ClientDialect::Grpc),
            peer: "agent",
            principal: None,
            link: 7,
            destination,
            path: Path::Lane,
        }
    }

    fn views(table: &OpenTunnels) -> Vec<TunnelView> {
        let now = Instant::now();
        table.all().iter().map(|live| live.view(now)).collect()
    }

    #[test]
    fn a_tunnel_is_in_the_table_from_its_opening_to_its_end() {
        let table = Arc::new(OpenTunnels::default());
        let one = table.enter(&facts("a:1"));
        let two = table.enter(&facts("b:2"));
        one.live().moved(3, 5);
        let mut seen = views(&table);
        seen.sort_by_key(|view| view.id);
        assert_eq!(
            (
                seen[0].bytes_to_target,
                seen[0].bytes_to_client,
                seen[0].link
            ),
            (3, 5, 7)
        );
        drop(one);
        let left: Vec<String> = views(&table).into_iter().map(|v| v.destination).collect();
        assert_eq!(left, ["b:2"]);
        drop(two);
        assert!(views(&table).is_empty());
    }

    fn counters() -> TunnelBytes {
        let registry = prometheus::Registry::new();
        let families = Registrar::new(&registry, "adit_");
        TunnelBytes {
            of_clients: families.counters("tunnel_bytes_total", "a", "direction"),
            of_agents: families.counters("node_tunnel_bytes_total", "a", "direction"),
        }
    }

    #[test]
    fn bytes_of_open_tunnels_are_counted_once() {
        let table = Arc::new(OpenTunnels::counted_in(counters()));
        let counted = || {
            table.publish_bytes();
            let TunnelBytes {
                of_clients,
                of_agents,
            } = table.bytes.as_ref().unwrap();
            [of_clients, of_agents].map(|family| {
                [Direction::ToTarget, Direction::ToClient].map(|way| family.of(way).get())
            })
        };
        let (tunnel, node) = (table.enter(&facts("a:1")), table.enter_node(&facts("b:2")));
        tunnel.live().moved(10, 20);
        node.live().moved(1, 2);
        assert_eq!(counted(), [[10, 20], [1, 2]]);
        assert_eq!(counted(), [[10, 20], [1, 2]], "nothing moved since");
        let late = tunnel.live();
        late.moved(15, 20);
        drop((tunnel, node));
        assert_eq!(counted(), [[15, 20], [1, 2]], "the rest at the end");
        late.publish(table.bytes.as_ref().unwrap());
        assert_eq!(
            counted(),
            [[15, 20], [1, 2]],
            "a scrape that crossed the end"
        );
    }

    #[test]
    fn the_target_side_swaps_the_byte_directions() {
        let table = Arc::new(OpenTunnels::default());
        let side = TunnelSide::Target;
        let entry = table.enter(&TunnelFacts {
            side,
            ..facts("a:1")
        });
        entry.live().moved(3, 5);
        let view = entry.live().view(Instant::now());
        assert_eq!((view.bytes_to_target, view.bytes_to_client), (5, 3));
    }

    #[test]
    fn path_quality_is_requested_by_a_view_and_shown_in_the_next() {
        let table = Arc::new(OpenTunnels::default());
        let entry = table.enter(&facts("a:1"));
        let live = entry.live();
        assert!(!live.is_asked(), "nobody looked yet");
        assert_eq!(live.view(Instant::now()).quality, None);
        assert!(live.is_asked() && !live.is_asked(), "once for each look");
        let quality = PathQuality {
            rtt: Duration::from_micros(1_500),
            retransmits: 2,
        };
        live.report_quality(quality);
        assert_eq!(live.view(Instant::now()).quality, Some(quality));
    }

    /// Limit (operations): Texts of a tunnel in the list of open tunnels | 256 bytes each of destination and peer id
    #[test]
    fn destinations_are_cut_to_256_bytes() {
        let table = Arc::new(OpenTunnels::default());
        let long = "x".repeat(1 << 20);
        let entry = table.enter(&facts(&long));
        assert_eq!(entry.live().view(Instant::now()).destination.len(), 256);
    }
}
