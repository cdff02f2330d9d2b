//! As many idle tunnels as a process has descriptors for: first on lanes, then on the link. None is refused, and each uses
//! little memory, in both dialects and on each kind of lane. Server, agent, clients and targets are separate processes, so
//! that in-process servers of other tests keep their descriptors.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;
use tokio::net::UnixStream;
use tokio::task::JoinSet;

use super::lane_processes::nightly;
use crate::support::blocking;
use crate::support::lanes::{BUSY, IDLE, TARGETS, TUNNELS};
use crate::support::process::{
    Process, at_least, descriptors_without_lanes, metric, no_descriptor_left,
    raise_descriptor_limit, scrape, value,
};
use crate::support::raw::{Call, Connection};
use crate::support::wait::within_for;
use crate::support::ways::Way;
use crate::support::world::{World, sample};
use crate::support::{connect, targets};

const BY_LANE: &str = "adit_tunnels_opened_total{path=\"lane\"}";
const BY_PIPE: &str = "adit_tunnels_opened_total{path=\"raw-lane\"}";
const BY_LINK: &str = "adit_tunnels_opened_total{path=\"link\"}";

/// Environment variable with the role of a started copy of this program.
const ROLE: &str = "ADIT_TEST_ROLE_OF_IDLE_TUNNELS";
const TARGETS_APART: &str = "targets";
/// Log line of the targets, before and after their port.
const LISTENS: (&str, &str) = ("targets at port ", " are there");
/// Lifetime of the targets if their parent process is killed before it can kill them.
const TARGETS_LAST: Duration = Duration::from_secs(25 * 60);
/// Log line of the clients on success.
const ALL_SERVED: &str = "all idle tunnels were served";
/// Exceeds the sum of all limits of the clients, so that the clients fail first, with a reason, and stop their processes.
const CLIENTS_WITHIN: Duration = Duration::from_secs(20 * 60);

/// Lanes that the agent keeps idle, so that this many dials find one.
const WARM: u32 = 4;
/// Lane limit of one link, above what the descriptors allow. The default is 4,096.
const LANES_OF_SERVER: &str = "--lanes-per-link=10000";
const LANES_OF_AGENT: &str = "--lanes=10000";
/// Concurrent dials where the test does not wait for lanes.
const AT_ONCE: u32 = 8;
/// gRPC calls per connection.
const CALLS_PER_CONNECTION: usize = 100;
/// A link may begin 100 raw lanes at once, and 50 more per second.
const RAW_LANES_MIN: f64 = 50.0;
/// Most resident memory per tunnel, in each process. A buffer of 64 KiB per tunnel would exceed it.
const RESIDENT_MAX_BYTES: u64 = 48 << 10;
/// Limit for opening all tunnels, and for an echo on all of them.
const ALL_WITHIN: Duration = Duration::from_secs(240);

/// Starts this program again to run only `test`, in that role.
fn apart(role: &str, test: &str, dir: &Path) -> Process {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command
        .args(["--exact", &format!("cases::idle_tunnels::{test}")])
        .args(["--nocapture", "--test-threads=1"])
        .env(ROLE, role);
    Process::start_command(role, command, dir)
}

/// The role of the clients.
fn clients(way: Way) -> &'static str {
    match way {
        Way::Tls => "clients",
        Way::Epoll => "clients-epoll",
        Way::IoUring => "clients-io-uring",
    }
}

/// Number of tunnels, and descriptor limit of server and agent.
fn sizes(way: Way) -> (u32, u32) {
    let few = if way.has_raw_lanes() {
        (400, 1_024)
    } else {
        (600, 1_200)
    };
    nightly((10_000, 20_000), few)
}

fn is_asked_to_be(role: &str) -> bool {
    std::env::var_os(ROLE).is_some_and(|asked| asked == role)
}

/// Raises the descriptor limit to the maximum, which must cover one per client and those of the process itself.
fn raise_limit(clients: u32) {
    let limit = raise_descriptor_limit();
    let enough = limit.is_none_or(|most| most >= u64::from(clients) + 256);
    assert!(enough, "{clients} clients need a higher limit: {limit:?}");
}

/// Starts the process of the targets. Returns it with its port.
fn targets_apart(dir: &Path) -> (Process, u16) {
    let process = apart(TARGETS_APART, "targets_of_idle_tunnels_answer", dir);
    let port = |line: &str| {
        let port = line.strip_prefix(LISTENS.0)?.strip_suffix(LISTENS.1)?;
        port.parse::<u16>().ok()
    };
    let port = blocking::until("targets", Duration::from_secs(20), || {
        process.log().lines().find_map(port)
    });
    (process, port)
}

/// Body of the process of the targets. Does nothing without that role.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn targets_of_idle_tunnels_answer() {
    if !is_asked_to_be(TARGETS_APART) {
        return;
    }
    raise_limit(nightly(10_000, 600));
    let (port, _echo) = targets::echo().await;
    eprintln!("{}{port}{}", LISTENS.0, LISTENS.1);
    let _over = tokio::time::timeout(TARGETS_LAST, std::future::pending::<()>()).await;
}

/// Sockets of the server, and the target to dial.
#[derive(Clone)]
struct Site {
    connect: PathBuf,
    grpc: PathBuf,
    target: String,
}

/// Open tunnels, each second one of a gRPC client.
#[derive(Default)]
struct Open {
    streams: Vec<UnixStream>,
    calls: Vec<(Call, i64)>,
    /// Connections that carry `calls`.
    connections: Vec<Connection>,
}

impl Open {
    async fn one_more(&mut self, site: &Site) {
        if self.streams.len() <= self.calls.len() {
            let stream = connect::open(&site.connect, &site.target).await;
            return self.streams.push(stream);
        }
        let opened = self.calls.len();
        if opened.is_multiple_of(CALLS_PER_CONNECTION) {
            let connection = Connection::client_at(&site.grpc).await;
            self.connections.push(connection);
        }
        let connection = self.connections.last().expect("made with its first call");
        let mut call = connection.proxy().await;
        let random = i64::try_from(opened).expect("few");
        let conn = call.open(random, &site.target).await;
        self.calls.push((call, conn));
    }

    /// Opens `count` more tunnels, one after another.
    async fn more(mut self, count: usize, site: &Site) -> Self {
        for _tunnel in 0..count {
            self.one_more(site).await;
        }
        self
    }

    fn count(&self) -> u32 {
        u32::try_from(self.streams.len() + self.calls.len()).expect("few")
    }

    async fn echo_on_each(&mut self) {
        const TEXT: &[u8] = b"not forgotten";
        for stream in &mut self.streams {
            connect::echo(stream, TEXT).await;
        }
        for (call, conn) in &mut self.calls {
            call.echo(*conn, TEXT).await;
        }
    }
}

/// Opens `count` tunnels, `AT_ONCE` of them concurrently.
async fn open_some(site: &Site, count: u32) -> Vec<Open> {
    let mut jobs = JoinSet::new();
    for worker in 0..AT_ONCE {
        let site = site.clone();
        let share = (worker..count).step_by(AT_ONCE as usize).count();
        jobs.spawn(async move { Open::default().more(share, &site).await });
    }
    jobs.join_all().await
}

/// Runs the clients as a separate process.
fn clients_apart(way: Way) {
    if !way.is_possible("idle_tunnels") {
        return;
    }
    let dir = TempDir::new().expect("a directory");
    let test = "clients_of_idle_tunnels_are_all_served";
    let mut clients = apart(clients(way), test, dir.path());
    let status = clients.wait(CLIENTS_WITHIN);
    assert!(status.success(), "{status}");
    assert!(clients.log().contains(ALL_SERVED), "the test is not there");
}

/// Tunnels that the server has opened on framed lanes, on raw lanes and on the link.
async fn opened_by_way(health: SocketAddr) -> [f64; 3] {
    let text = scrape(health).await;
    [BY_LANE, BY_PIPE, BY_LINK].map(|series| sample(&text, series).expect("a series"))
}

/// Limit (isolation): 10,000 idle tunnels with 20,000 descriptors | none refused; at most 48 KiB each per process.
/// Those without a lane use the link
#[test]
fn idle_tunnels_use_lanes_up_to_the_descriptor_limit_and_none_is_refused() {
    clients_apart(Way::Tls);
}

/// Limit (isolation): 10,000 idle tunnels with 20,000 descriptors
#[test]
fn idle_tunnels_on_plaintext_lanes_are_all_served_with_epoll() {
    clients_apart(Way::Epoll);
}

/// Limit (isolation): 10,000 idle tunnels with 20,000 descriptors
#[test]
fn idle_tunnels_on_plaintext_lanes_are_all_served_with_io_uring() {
    clients_apart(Way::IoUring);
}

/// Body of the process of the clients. Does nothing without that role.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_of_idle_tunnels_are_all_served() {
    let mut ways = Way::ALL.into_iter();
    let Some(way) = ways.find(|way| is_asked_to_be(clients(*way))) else {
        return;
    };
    let (tunnels, limit) = sizes(way);
    // Lanes get a third of the descriptors after a reserve of 512, so that all tunnels find room.
    let lanes_max = (limit - 512) / 3;
    // 90 %: dials do not wait for the last lanes.
    let on_lanes = lanes_max - lanes_max / 10;
    raise_limit(tunnels);
    let flags = [&["--log-format=json"][..], way.flags()].concat();
    let mut world = World::start(&[&flags[..], &[LANES_OF_SERVER]].concat()).await;
    world.stop_server(Duration::ZERO).await;
    let dir = world.dir.path().to_owned();
    let (_targets, port) = targets_apart(&dir);
    let server = Process::start_limited("server", limit, &world.server_args("0"), &dir);
    let (agents, health) = (server.address("agents"), server.address("health"));
    let flags = [&flags[..], &[LANES_OF_AGENT]].concat();
    let args = world.agent_args("a", agents.port(), &flags);
    let agent = Process::start_limited("agent", limit, &args, &dir);
    let agent_health = agent.address("health");
    at_least(health, IDLE, f64::from(WARM)).await;
    let site = Site {
        connect: world.connect(),
        grpc: world.grpc(),
        target: format!("127.0.0.1:{port}"),
    };

    // One tunnel of each dialect first, so that descriptors opened once per process are open.
    drop(Open::default().more(2, &site).await);
    for (health, series) in [(health, TUNNELS), (health, BUSY), (agent_health, TARGETS)] {
        metric(health, series, 0.0).await;
    }
    let before = [
        descriptors_without_lanes(&server, health).await,
        descriptors_without_lanes(&agent, agent_health).await,
    ];
    let resident = [&server, &agent].map(Process::resident_bytes);
    let opened = opened_by_way(health).await;

    let mut first = Open::default();
    within_for(ALL_WITHIN, "tunnels on lanes", async {
        // A dial may miss lanes that the server is pinging at that moment.
        while value(health, BUSY).await < f64::from(on_lanes) {
            at_least(health, IDLE, f64::from(WARM)).await;
            for _tunnel in 0..WARM {
                first.one_more(&site).await;
            }
        }
    })
    .await;
    let rest = open_some(&site, tunnels - first.count());
    let mut open = within_for(ALL_WITHIN, "the other tunnels", rest).await;
    open.push(first);

    // A refused tunnel would have failed the test before.
    metric(health, TUNNELS, f64::from(tunnels)).await;
    metric(agent_health, TARGETS, f64::from(tunnels)).await;
    let now = opened_by_way(health).await;
    let more: [f64; 3] = std::array::from_fn(|place| now[place] - opened[place]);
    let [by_lane, by_pipe, by_link] = more;
    assert_eq!(by_lane + by_pipe + by_link, f64::from(tunnels));
    let pipes_min = if way.has_raw_lanes() {
        RAW_LANES_MIN
    } else {
        0.0
    };
    assert!(by_pipe >= pipes_min, "{by_pipe} pipes");
    let by_lane = by_lane + by_pipe;
    let busy = value(health, BUSY).await;
    assert_eq!(by_lane, busy, "each has a lane of its own");
    let lanes = f64::from(on_lanes)..=f64::from(lanes_max);
    assert!(
        lanes.contains(&by_lane),
        "{by_lane} on lanes, not {lanes:?}"
    );
    for (program, resident) in [&server, &agent].into_iter().zip(resident) {
        let each = program.resident_bytes().saturating_sub(resident) / u64::from(tunnels);
        assert!(each < RESIDENT_MAX_BYTES, "{each} bytes for each");
        assert!(program.descriptors() < limit as usize);
    }

    within_for(ALL_WITHIN, "an answer on each", async {
        for some in &mut open {
            some.echo_on_each().await;
        }
    })
    .await;
    drop(open);
    for (health, series) in [(health, TUNNELS), (health, BUSY), (agent_health, TARGETS)] {
        metric(health, series, 0.0).await;
    }
    no_descriptor_left(&server, health, before[0]).await;
    no_descriptor_left(&agent, agent_health, before[1]).await;
    eprintln!("{ALL_SERVED}");
}
