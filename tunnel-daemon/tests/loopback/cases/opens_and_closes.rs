//! Thousands of tunnels are opened and closed in both dialects, with every way for a client to leave, on every path. Neither
//! end leaks anything, and each tunnel and each byte is counted.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use adit_core::wire::packets::packet::Payload;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinSet;

use super::lane_processes::{Pair, nightly};
use crate::support::lanes::{HITS, SPLICED, opened};
use crate::support::process::{
    metric, named_program, not_one_descriptor_left, scrape, settled_fds, sum, sum_is, value,
};
use crate::support::raw::Connection;
use crate::support::wait::{within, within_for};
use crate::support::ways::Way;
use crate::support::world::sample;
use crate::support::{connect, targets};

const RAW_LANES: &str = "adit_tunnels_opened_total{path=\"raw-lane\"}";
const USED: &str = "adit_lanes_closed_total{reason=\"used\"}";
const CALLS: &str = "konnectivity_network_proxy_server_grpc_connections{service_method=\"Proxy\"}";

/// Concurrent clients.
const AT_ONCE: usize = 8;
/// Time for all tunnels of one [`Site::turn`].
const TURN_WITHIN: Duration = Duration::from_secs(300);
/// Limit on opened lanes, not counting those that raw lanes used up.
const LANES_MAX: f64 = 200.0;
/// Least number of raw lanes. A link may start 100 at once while other lanes are idle.
const RAW_LANES_MIN: f64 = 20.0;
/// Bytes of a tunnel that is to be spliced; splicing starts after 256 KiB of copying.
const BULK_BYTES: usize = 4 << 20;
/// Least number of bulk tunnels, and the time for as many as it takes. A link may start 50 raw lanes a second.
const BULK_TUNNELS: usize = 20;
const BULK_WITHIN: Duration = Duration::from_secs(60);

/// How a client leaves its tunnel.
#[derive(Clone, Copy)]
enum End {
    /// The client sends CLOSE_REQ or half-closes, and the target closes, too.
    InOrder,
    /// The client leaves after the answer.
    Heard,
    /// The client leaves before the answer.
    Unheard,
    /// The client leaves before it sends a byte.
    Silent,
}

impl End {
    const ALL: [Self; 4] = [Self::InOrder, Self::Heard, Self::Unheard, Self::Silent];
    /// Ends that lose no bytes.
    const COUNTABLE: [Self; 3] = [Self::InOrder, Self::Heard, Self::Silent];

    fn bytes(self, text: &[u8]) -> Bytes {
        let length = text.len() as u64;
        let (said, heard) = match self {
            Self::InOrder | Self::Heard => (length, length),
            Self::Unheard => (length, 0),
            Self::Silent => (0, 0),
        };
        Bytes { said, heard }
    }
}

/// Bytes that clients sent and received.
#[derive(Clone, Copy, Default)]
struct Bytes {
    said: u64,
    heard: u64,
}

impl Bytes {
    fn add(&mut self, more: Self) {
        self.said += more.said;
        self.heard += more.heard;
    }
}

/// The server's sockets, and the target.
#[derive(Clone)]
struct Site {
    connect: PathBuf,
    grpc: PathBuf,
    port: String,
    target: String,
}

impl Site {
    fn of(pair: &Pair) -> Self {
        let (_address, port) = pair.target.rsplit_once(':').expect("a port");
        Self {
            connect: pair.processes.world.connect(),
            grpc: pair.processes.world.grpc(),
            port: port.to_owned(),
            target: pair.target.clone(),
        }
    }

    /// The same target at a different address for each client: ports in TIME_WAIT may be unavailable for a minute.
    fn of_client(&self, client: usize) -> Self {
        Self {
            target: format!("127.0.0.{}:{}", client + 1, self.port),
            ..self.clone()
        }
    }

    /// Opens and closes this many tunnels, [`AT_ONCE`] at a time.
    async fn turn(&self, opens: usize, ends: &'static [End]) -> Bytes {
        let mut jobs = JoinSet::new();
        // Each client gets consecutive numbers. With a stride, each client would have one dialect and one end.
        let row = opens.div_ceil(AT_ONCE);
        for (client, first) in (0..opens).step_by(row).enumerate() {
            let numbers = first..opens.min(first + row);
            let site = self.of_client(client);
            jobs.spawn(async move {
                let mut bytes = Bytes::default();
                for number in numbers {
                    bytes.add(site.open_and_close(number, ends).await);
                }
                bytes
            });
        }
        within_for(TURN_WITHIN, "all of them", async {
            let mut bytes = Bytes::default();
            while let Some(job) = jobs.join_next().await {
                bytes.add(job.expect("each tunnel works"));
            }
            bytes
        })
        .await
    }

    async fn open_and_close(&self, number: usize, ends: &[End]) -> Bytes {
        let (text, end) = (text(number), ends[number % ends.len()]);
        let bytes = end.bytes(&text);
        if (number / ends.len()).is_multiple_of(2) {
            self.by_connect(&text, end).await;
        } else {
            self.by_grpc(number, text, end).await;
        }
        bytes
    }

    async fn by_connect(&self, text: &[u8], end: End) {
        let mut stream = connect::open(&self.connect, &self.target).await;
        match end {
            End::InOrder => {
                connect::echo(&mut stream, text).await;
                stream.shutdown().await.expect("a half-close");
                let rest = within("the end", stream.read(&mut [0])).await;
                assert_eq!(rest.expect("a clean end"), 0);
            }
            End::Heard => connect::echo(&mut stream, text).await,
            End::Unheard => stream.write_all(text).await.expect("taken"),
            End::Silent => (),
        }
    }

    /// Opens a connection for the tunnel, as kube-apiserver does.
    async fn by_grpc(&self, number: usize, text: Vec<u8>, end: End) {
        let connection = Connection::client_at(&self.grpc).await;
        let mut call = connection.proxy().await;
        let random = i64::try_from(number).expect("small");
        let conn = call.open(random, &self.target).await;
        match end {
            End::InOrder => {
                call.data(conn, text.clone());
                call.echo_arrives(conn, &text).await;
                call.close(conn);
                match call.payload().await {
                    Some(Payload::CloseResponse(close)) => assert_eq!(close.connect_id, conn),
                    other => panic!("instead of an end: {other:?}"),
                }
            }
            End::Heard => {
                call.data(conn, text.clone());
                call.echo_arrives(conn, &text).await;
            }
            End::Unheard => call.data(conn, text),
            End::Silent => (),
        }
    }

    /// Echoes many bytes. Every second client leaves in the middle; the others continue to EOF.
    async fn bulk(&self, number: usize, text: &[u8]) {
        let mut stream = connect::open(&self.connect, &self.target).await;
        if number.is_multiple_of(2) {
            return connect::echo_to_the_end(&mut stream, text).await;
        }
        let (mut read, mut write) = stream.split();
        let mut half = vec![0; text.len() / 2];
        let sending = async {
            write.write_all(text).await.expect("taken");
            std::future::pending::<()>().await;
        };
        let heard = within("half of it", async {
            tokio::select! {
                () = sending => unreachable!("it waits for ever"),
                heard = read.read_exact(&mut half) => heard,
            }
        });
        heard.await.expect("the tunnel lives");
        assert!(half == text[..half.len()]);
    }
}

/// The bytes sent on a tunnel.
fn text(number: usize) -> Vec<u8> {
    targets::pattern(number as u64, 1 + number % 5000)
}

/// Number of tunnels in a test. The full numbers need a named program: the one that cargo builds with the tests is too slow.
fn opens(way: Way) -> usize {
    let long = match (named_program(), way) {
        (None, _) => 10_000,
        (Some(_), Way::Tls) => 100_000,
        (Some(_), Way::Epoll | Way::IoUring) => 30_000,
    };
    nightly(long, 1_000)
}

/// Bytes that the server has counted for its tunnels since the start, and bytes of the relay at both ends.
struct Counted {
    to_target: f64,
    to_client: f64,
    /// Bytes counted by the relay threads of server and agent.
    relayed: [f64; 2],
}

impl Counted {
    /// Waits until both ends are at rest and have counted this many tunnels opened and closed.
    async fn after(tunnels: usize, pair: &Pair) -> Self {
        pair.assert_at_rest().await;
        metric(pair.processes.health, CALLS, 0.0).await;
        for health in healths(pair) {
            for family in ["adit_tunnels_opened_total", "adit_tunnels_closed_total"] {
                sum_is(health, family, tunnels as f64).await;
            }
        }
        let [server, agent] = healths(pair);
        let (server, agent) = (scrape(server).await, scrape(agent).await);
        let moved = |direction| {
            let series = format!("adit_tunnel_bytes_total{{direction=\"{direction}\"}}");
            sample(&server, &series).expect("a series")
        };
        Self {
            to_target: moved("to_target"),
            to_client: moved("to_client"),
            relayed: [&server, &agent].map(|text| sum(text, "adit_relay_bytes_total")),
        }
    }

    fn since(&self, before: &Self) -> Self {
        Self {
            to_target: self.to_target - before.to_target,
            to_client: self.to_client - before.to_client,
            relayed: [0, 1].map(|end| self.relayed[end] - before.relayed[end]),
        }
    }
}

/// Health ports of server and agent.
fn healths(pair: &Pair) -> [SocketAddr; 2] {
    [pair.processes.health, pair.agent_health]
}

/// The test for one path.
async fn thousands(way: Way) {
    if !way.is_possible("opens_and_closes") {
        return;
    }
    let pair = Pair::start_with(way.flags()).await;
    let site = Site::of(&pair);
    // Each client opens every kind of tunnel once, so that descriptors opened once for good are already open.
    let mut opened = 2 * End::ALL.len() * AT_ONCE;
    site.turn(opened, &End::ALL).await;
    let before = Counted::after(opened, &pair).await;
    let [server, agent] = healths(&pair);
    let server_fds = settled_fds(&pair.processes.server, server).await;
    let agent_fds = settled_fds(&pair.agent, agent).await;

    let half = opens(way) / 2;
    let bytes = site.turn(half, &End::COUNTABLE).await;
    opened += half;
    let after = Counted::after(opened, &pair).await;
    let counted = after.since(&before);
    let clients = (bytes.said as f64, bytes.heard as f64);
    assert_eq!((counted.to_target, counted.to_client), clients);
    let [at_server, at_agent] = counted.relayed;
    assert_eq!(at_server, at_agent);
    assert_eq!(at_server > 0.0, way.has_raw_lanes());

    let bytes = site.turn(half, &End::ALL).await;
    opened += half;
    let counted = Counted::after(opened, &pair).await.since(&after);
    // Bytes in flight when their client left may be counted or not.
    let (said, heard) = (bytes.said as f64, bytes.heard as f64);
    let ordered = [heard, counted.to_client, counted.to_target, said];
    assert!(ordered.is_sorted(), "{ordered:?}");

    if way.has_raw_lanes() {
        opened += splice(&pair, &site).await;
        Counted::after(opened, &pair).await;
    }
    pair.assert_lanes_add_up().await;
    not_one_descriptor_left(&pair.processes.server, server, server_fds).await;
    not_one_descriptor_left(&pair.agent, agent, agent_fds).await;
    assert_on_lanes(&pair, way, opened).await;
}

/// Opens tunnels in sequence until both ends have spliced. Kernel pipes are then in use, and some are cut while they hold
/// bytes. Returns the number of tunnels.
async fn splice(pair: &Pair, site: &Site) -> usize {
    let text = targets::pattern(0, BULK_BYTES);
    let [server, agent] = healths(pair);
    within_for(BULK_WITHIN, "bytes spliced at both ends", async {
        let mut tunnels = 0;
        while tunnels < BULK_TUNNELS
            || value(server, SPLICED).await == 0.0
            || value(agent, SPLICED).await == 0.0
        {
            site.bulk(tunnels, &text).await;
            tunnels += 1;
        }
        tunnels
    })
    .await
}

/// Asserts that the tunnels used lanes, and that few lanes were enough.
async fn assert_on_lanes(pair: &Pair, way: Way, opens: usize) {
    let health = pair.processes.health;
    let (pipes, used) = (value(health, RAW_LANES).await, value(health, USED).await);
    let lanes = opened(&scrape(health).await);
    if way.has_raw_lanes() {
        assert!(pipes >= RAW_LANES_MIN, "{pipes} pipes");
    } else {
        let all = f64::from(u32::try_from(opens).expect("fits"));
        assert!(value(health, HITS).await >= all * 0.8);
        assert_eq!((pipes, used), (0.0, 0.0));
    }
    assert!(lanes - used < LANES_MAX, "{lanes} lanes, {used} used up");
    for reason in ["lost", "violation", "silent", "link_gone"] {
        let closed = format!("adit_lanes_closed_total{{reason=\"{reason}\"}}");
        assert_eq!(value(health, &closed).await, 0.0, "{reason}");
    }
}

/// Limit (isolation): 160,000 tunnels opened and closed | no descriptor, lane, slot, pipe or byte leaks; every tunnel
/// and byte is counted
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_tunnels_on_lanes_leave_nothing_behind() {
    thousands(Way::Tls).await;
}

/// Limit (isolation): 160,000 tunnels opened and closed
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_tunnels_on_raw_lanes_leave_nothing_behind_with_epoll() {
    thousands(Way::Epoll).await;
}

/// Limit (isolation): 160,000 tunnels opened and closed
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_tunnels_on_raw_lanes_leave_nothing_behind_with_io_uring() {
    thousands(Way::IoUring).await;
}
