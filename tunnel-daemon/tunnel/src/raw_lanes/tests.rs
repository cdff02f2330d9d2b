//! Tests of the hand-over of a lane from frames to raw bytes, at both ends and with both drivers. Wherever a read ends
//! and however much was read early, each byte arrives once and in order.

use std::io::Write as _;
use std::os::fd::AsFd as _;

use adit_core::lane::{FrameReader, LaneEnd, LaneEvent, LaneRole, OpenRequest, Piece};
use adit_core::session::MemoryPressure;
use adit_relay::{Preference, probe};
use rustix::net::sockopt::socket_send_buffer_size;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UnixStream};

use super::*;
use crate::lane::Lane;
use adit_telemetry::ServerMetrics;
use adit_telemetry::labels::EndReason;
use adit_telemetry::labels::Path;
use adit_telemetry::tunnels::{OpenTunnels, TunnelEntry, TunnelFacts, TunnelSide};

/// Time limit of one tunnel.
const PATIENCE: Duration = Duration::from_secs(30);
/// Bytes that each side sends once the relay has both sockets.
const LATE_BYTES: usize = 300;
/// Every length up to this one is tested, and [`BOUNDARIES`].
const LENGTH_MAX: usize = 300;
/// Buffer sizes of reads and writes: blocks of a socket's reader, joined chunks, buffers of a relay.
const BOUNDARIES: [usize; 8] = [512, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072];

/// Frames of both ends on a lane's first tunnel.
struct Said {
    /// The server's OPEN.
    open: Vec<u8>,
    /// The agent's answer, after another frame.
    opened: Vec<u8>,
}

impl Said {
    fn new() -> Self {
        let [mut server, mut agent] = [LaneRole::Server, LaneRole::Agent].map(LaneEnd::new);
        server.open(&request(), 0).unwrap();
        let mut open = Vec::new();
        while let Some(frame) = server.poll_frame() {
            open.extend_from_slice(&frame.to_bytes());
            let piece = Piece::Frame(frame.header, frame.payload);
            agent.handle(piece).unwrap();
        }
        agent.ping(1);
        agent.accept();
        let frames = std::iter::from_fn(|| agent.poll_frame());
        let opened = frames.flat_map(|frame| frame.to_bytes()).collect();
        Self { open, opened }
    }
}

fn request() -> OpenRequest {
    OpenRequest {
        protocol: "tcp".to_owned(),
        address: "target:80".to_owned(),
        raw: true,
        origin: None,
        forward: None,
    }
}

/// Bytes of a stream from an offset on. No block size hides a shift: 251 is prime.
fn pattern(from: usize, count: usize) -> Vec<u8> {
    (0..=250).cycle().skip(from % 251).take(count).collect()
}

fn lengths() -> impl Iterator<Item = usize> {
    let around = |size: usize| [size - 1, size, size + 1];
    (0..=LENGTH_MAX).chain(BOUNDARIES.into_iter().flat_map(around))
}

/// A relay, and the objects that its tunnels need.
struct World {
    relay: Arc<RawLaneRelay>,
    metrics: ServerMetrics,
    listener: TcpListener,
    entry: TunnelEntry,
    said: Said,
}

impl World {
    /// One world for each driver.
    async fn both() -> Vec<Self> {
        let mut worlds = Vec::new();
        for preference in [Preference::Epoll, Preference::IoUring] {
            match probe(preference) {
                Ok(choice) => worlds.push(Self::new(choice).await),
                Err(why) => {
                    // Other users may lack io_uring.
                    let root = rustix::process::geteuid().is_root();
                    assert!(!root || std::env::var_os("CI").is_none(), "{why}");
                    // Written to stderr directly, because the test harness captures `eprintln!`.
                    writeln!(io::stderr(), "SKIPPED pipes by {preference:?}: {why}").ok();
                }
            }
        }
        worlds
    }

    async fn new(choice: Choice) -> Self {
        Self::within(choice, None).await
    }

    /// A world whose sockets have at most that many KiB in each direction.
    async fn within(choice: Choice, socket_kib: Option<u16>) -> Self {
        let metrics = ServerMetrics::new(&[]);
        let facts = TunnelFacts {
            side: TunnelSide::Target,
            peer: "",
            principal: None,
            link: 0,
            destination: "",
            path: Path::RawLane,
        };
        let adit = metrics.adit().clone();
        let budget = Arc::new(ProcessBudget::new(1 << 30).with_socket_buffers(socket_kib));
        Self {
            relay: RawLaneRelay::start(choice, 16, PATIENCE, budget, adit, || ()).unwrap(),
            metrics,
            listener: TcpListener::bind("127.0.0.1:0").await.unwrap(),
            entry: Arc::new(OpenTunnels::default()).enter(&facts),
            said: Said::new(),
        }
    }

    /// The two ends of a lane's connection.
    async fn connection(&self) -> (TcpStream, TcpStream) {
        let address = self.listener.local_addr().unwrap();
        let (one, other) = tokio::join!(TcpStream::connect(address), self.listener.accept());
        (one.unwrap(), other.unwrap().0)
    }

    /// A lane that has read part of its peer's bytes. The first cut ends the bytes read with the greeting; the second
    /// ends those read with the end of TLS. The rest is in the socket.
    fn lane(socket: TcpStream, role: LaneRole, said: &[u8], cuts: [usize; 2]) -> Lane {
        let mut frames = FrameReader::default();
        frames.push(Bytes::copy_from_slice(&said[..cuts[0]]));
        let left = Bytes::copy_from_slice(&said[cuts[0]..cuts[1]]);
        Lane::in_clear(socket, role, frames, left)
    }

    /// Relays a tunnel whose `near` socket sends and receives that many bytes.
    async fn carry(&self, near: UnixStream, early: Vec<u8>, raw_lane: RawLane, bytes: [usize; 2]) {
        let near = near.into_std().unwrap().into();
        let live = self.entry.live();
        let outcome = self.relay.run(near, early.into(), raw_lane, &live).await;
        assert!(outcome.end.reason == EndReason::Closed, "{outcome:?}");
        let counted = [outcome.from_socket, outcome.to_socket];
        assert_eq!(counted, bytes.map(|bytes| bytes as u64));
    }

    /// Tests the server's end: `early` bytes of its client arrive before the answer, and `spoken` bytes of the target
    /// after it.
    async fn server_end(&self, early: usize, spoken: usize, cuts: [usize; 2]) {
        let (socket, agent) = self.connection().await;
        let (near, client) = UnixStream::pair().unwrap();
        let said = [&self.said.opened[..], &pattern(0, spoken)].concat();
        let serving = async {
            let mut lane = Self::lane(socket, LaneRole::Server, &said, cuts);
            lane.end().open(&request(), 0).unwrap();
            assert!(lane.prepare_raw());
            let flushed = std::future::poll_fn(|cx| lane.poll_flush(cx)).await;
            flushed.unwrap();
            assert_eq!(lane.event().await.unwrap(), LaneEvent::Opened);
            let raw_lane = lane.into_raw(self.metrics.adit()).unwrap();
            let bytes = [early + LATE_BYTES, spoken + LATE_BYTES];
            self.carry(near, pattern(0, early), raw_lane, bytes).await;
        };
        let agent_says = [&said[cuts[1]..], &pattern(spoken, LATE_BYTES)].concat();
        let agent_hears = [&self.said.open[..], &pattern(0, early + LATE_BYTES)].concat();
        let agent = exchange(agent, agent_says, agent_hears);
        let client_hears = pattern(0, spoken + LATE_BYTES);
        let client = exchange(client, pattern(early, LATE_BYTES), client_hears);
        tokio::join!(serving, agent, client);
    }

    /// Tests the agent's end. Its target sends `spoken` bytes before the relay takes over. The server sends `early` bytes
    /// as soon as it has the answer.
    async fn agent_end(&self, early: usize, spoken: usize, cuts: [usize; 2]) {
        let (socket, mut server) = self.connection().await;
        let (near, mut target) = UnixStream::pair().unwrap();
        let Said { open, opened } = &self.said;
        let serving = async {
            let mut lane = Self::lane(socket, LaneRole::Agent, open, cuts);
            assert_eq!(lane.event().await.unwrap(), LaneEvent::Open(request()));
            near.readable().await.unwrap();
            lane.end().ping(1);
            assert!(lane.may_be_raw() && lane.accept_raw().unwrap());
            let raw_lane = lane.into_raw(self.metrics.adit()).unwrap();
            let bytes = [spoken + LATE_BYTES, early + LATE_BYTES];
            self.carry(near, Vec::new(), raw_lane, bytes).await;
        };
        let server = async {
            server.write_all(&open[cuts[1]..]).await.unwrap();
            let mut answer = vec![0; opened.len()];
            server.read_exact(&mut answer).await.unwrap();
            assert!(answer == *opened, "{answer:?}");
            let hears = pattern(0, spoken + LATE_BYTES);
            exchange(server, pattern(0, early + LATE_BYTES), hears).await;
        };
        let target = async {
            // At least one byte has arrived when the lane is handed over.
            target.write_all(&pattern(0, spoken.max(1))).await.unwrap();
            let late = spoken + LATE_BYTES - spoken.max(1);
            let hears = pattern(0, early + LATE_BYTES);
            exchange(target, pattern(spoken.max(1), late), hears).await;
        };
        tokio::join!(serving, server, target);
    }

    /// The relay's metrics: its tunnels, and panics of its threads.
    fn counted(&self) -> [f64; 2] {
        self.relay.publish();
        let text = self.metrics.scrape().text();
        ["adit_relay_tunnels{", "adit_relay_thread_panics_total "].map(|series| {
            let line = text.lines().find(|line| line.starts_with(series)).unwrap();
            line.rsplit_once(' ').unwrap().1.parse().unwrap()
        })
    }

    /// The agent's lane, handed over for the tunnel that the server opens.
    async fn agent_pipe(&self, socket: TcpStream) -> RawLane {
        let open = &self.said.open;
        let mut lane = Self::lane(socket, LaneRole::Agent, open, [open.len(); 2]);
        assert_eq!(lane.event().await.unwrap(), LaneEvent::Open(request()));
        assert!(lane.may_be_raw() && lane.accept_raw().unwrap());
        lane.into_raw(self.metrics.adit()).unwrap()
    }

    /// Tests the agent's end of an open tunnel: the relay fits its sockets to the available memory, and to the bound
    /// `from_birth`.
    async fn buffers_fit(&self, from_birth: Option<u16>) {
        let (socket, mut server) = self.connection().await;
        let (near, mut target) = UnixStream::pair().unwrap();
        let seen = [socket.as_fd(), near.as_fd()].map(|fd| fd.try_clone_to_owned().unwrap());
        let size = |fd: &OwnedFd| socket_send_buffer_size(fd).unwrap();
        let sizes = || seen.each_ref().map(size);
        let before = sizes();
        let raw_lane = self.agent_pipe(socket).await;
        let near = near.into_std().unwrap().into();
        let live = self.entry.live();
        let running = self.relay.run(near, Bytes::new(), raw_lane, &live);
        let changing = async {
            server.write_all(b"before").await.unwrap();
            target.read_exact(&mut [0; 6]).await.unwrap();
            let small = [32 * 1024; 2];
            let bound = from_birth.map_or(usize::MAX, |kib| usize::from(kib) * 1024);
            for (pressure, is_small) in [
                (MemoryPressure::None, false),
                (MemoryPressure::High, true),
                (MemoryPressure::None, false),
            ] {
                self.relay.budget.set_pressure(pressure);
                self.relay.fit_buffers();
                let sizes = sizes();
                if is_small {
                    assert_eq!(sizes, small);
                } else {
                    // The host's limit may be below the kernel's own default.
                    let in_bounds = |bytes: &usize| (small[0] + 1..=bound).contains(bytes);
                    assert!(sizes.iter().all(in_bounds), "{sizes:?}");
                    assert!(from_birth.is_none() || sizes[1] <= before[1], "{sizes:?}");
                }
            }
            drop((server, target));
        };
        let (_outcome, ()) = tokio::join!(running, changing);
    }

    /// Tests the agent's end of an open tunnel whose relay threads fail.
    async fn lost_with_its_thread(&self) {
        let (socket, mut server) = self.connection().await;
        let (near, mut target) = UnixStream::pair().unwrap();
        let raw_lane = self.agent_pipe(socket).await;
        let near = near.into_std().unwrap().into();
        let live = self.entry.live();
        let running = self.relay.run(near, Bytes::new(), raw_lane, &live);
        let failing = async {
            server.write_all(b"before").await.unwrap();
            let mut heard = [0; 6];
            target.read_exact(&mut heard).await.unwrap();
            assert_eq!(self.counted(), [1.0, 0.0]);
            self.relay.handle.plant_fault();
        };
        let (outcome, ()) = tokio::join!(running, failing);
        assert!(outcome.end.reason == EndReason::RelayFailed, "{outcome:?}");
        let told = (outcome.end.reason, outcome.to_socket);
        assert_eq!(told, (EndReason::RelayFailed, 6));
        let end = server.read_to_end(&mut Vec::new()).await.unwrap_err();
        assert_eq!(end.kind(), io::ErrorKind::ConnectionReset);
        // All threads must have failed, or the next tunnel might get a thread that is about to fail.
        let choice = self.relay.handle.choice().clone();
        let threads = RelayConfig::new(choice).threads as f64;
        while self.counted()[1] < threads {
            tokio::task::yield_now().await;
        }
        assert_eq!(self.counted(), [0.0, threads]);
    }
}

/// Sends all of `says` and then FIN; must receive `hears` and then EOF.
async fn exchange(stream: impl AsyncRead + AsyncWrite, says: Vec<u8>, hears: Vec<u8>) {
    let (mut read, mut write) = tokio::io::split(stream);
    let saying = async {
        write.write_all(&says).await.unwrap();
        write.shutdown().await.unwrap();
    };
    let mut heard = Vec::new();
    let ((), end) = tokio::join!(saying, read.read_to_end(&mut heard));
    end.unwrap();
    let same = heard
        .iter()
        .zip(&hears)
        .take_while(|(one, other)| one == other);
    let same = same.count();
    assert!(
        heard == hears,
        "{} bytes instead of {}, and right are the first {same}",
        heard.len(),
        hears.len()
    );
}

/// Every pair of cuts up to `max`, the second not before the first.
fn cuts(max: usize) -> impl Iterator<Item = [usize; 2]> {
    (0..=max).flat_map(move |first| (first..=max).map(move |second| [first, second]))
}

async fn within(what: &str, tunnel: impl Future<Output = ()>) {
    let over = tokio::time::timeout(PATIENCE, tunnel).await;
    assert!(over.is_ok(), "not in time: {what}");
}

#[tokio::test]
async fn a_server_loses_no_byte_at_the_switch_wherever_its_reads_end() {
    const SPOKEN: usize = 9;
    for world in World::both().await {
        for cuts in cuts(world.said.opened.len() + SPOKEN) {
            let tunnel = world.server_end(5, SPOKEN, cuts);
            within(&format!("reads that end at {cuts:?}"), tunnel).await;
        }
    }
}

#[tokio::test]
async fn an_agent_loses_no_byte_at_the_switch_wherever_its_reads_end() {
    for world in World::both().await {
        for cuts in cuts(world.said.open.len()) {
            let tunnel = world.agent_end(5, 9, cuts);
            within(&format!("reads that end at {cuts:?}"), tunnel).await;
        }
    }
}

/// The server has read no byte, half of the bytes or all bytes after the answer.
#[tokio::test]
async fn a_server_loses_no_early_byte_however_many_there_are() {
    for world in World::both().await {
        let answer = world.said.opened.len();
        for length in lengths() {
            for read in [0, length / 2, length] {
                let tunnel = world.server_end(length, length, [0, answer + read]);
                within(&format!("{length} bytes, {read} read"), tunnel).await;
            }
        }
    }
}

/// Limit (memory): Memory of the cgroup, without pages of files
#[tokio::test]
async fn sockets_of_open_tunnels_are_as_large_as_memory_allows() {
    for world in World::both().await {
        within("a tunnel", world.buffers_fit(None)).await;
        let choice = world.relay.handle.choice().clone();
        let bounded = World::within(choice, Some(256)).await;
        within("a bounded one", bounded.buffers_fit(Some(256))).await;
    }
}

/// A lost tunnel reports why, its peer sees a reset, and the threads continue with other tunnels. All of that is counted.
#[tokio::test]
async fn a_failed_relay_thread_ends_its_tunnels_and_serves_new_ones() {
    for world in World::both().await {
        let lost = world.lost_with_its_thread();
        within("a tunnel whose thread fails", lost).await;
        within("the next one", world.agent_end(5, 9, [0, 0])).await;
    }
}

#[tokio::test]
async fn an_agent_loses_no_early_byte_however_many_there_are() {
    for world in World::both().await {
        for length in lengths() {
            let tunnel = world.agent_end(length, length, [0, 0]);
            within(&format!("{length} bytes"), tunnel).await;
        }
    }
}
