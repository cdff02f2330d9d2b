//! Server and agent as separate processes with many tunnels on lanes: what remains when one of them is killed.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use adit::status::Socket;
use adit::status::model::{LinkStatus, Status};
use adit_core::wire::packets::packet::Payload;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::processes::Processes;
use crate::support::lanes::{BUSY, HITS, IDLE, LINKS, TARGETS, TUNNELS, ended, opened};
use crate::support::process::{
    Process, at_least, descriptors_without_lanes, metric, no_descriptor_left, scrape, value,
};
use crate::support::raw::{Call, Connection};
use crate::support::wait::{eventually, within};
use crate::support::world::sample;
use crate::support::{connect, targets};

const CLIENTS: &str = "konnectivity_network_proxy_server_http_connections";
const LOST: &str = "adit_tunnels_closed_total{reason=\"lane_lost\"}";

/// `long` in nightly runs, otherwise `short`.
pub(super) fn nightly<T>(long: T, short: T) -> T {
    if std::env::var_os("ADIT_NIGHTLY").is_some() {
        long
    } else {
        short
    }
}

/// A server and an agent with lanes, and a target that echoes.
pub(super) struct Pair {
    pub(super) processes: Processes,
    pub(super) agent: Process,
    pub(super) agent_health: SocketAddr,
    pub(super) target: String,
    /// Admin sockets of server and agent.
    admin: [PathBuf; 2],
    _echo: adit_net::tasks::Tasks,
}

/// Resources that a process has in use, by name. Empty at rest.
fn in_use(admin: &Path) -> Vec<(&'static str, u64)> {
    let status = Socket::new(admin).ask::<Status>("/v1/status");
    let status = status.expect("an answer");
    let relay = &status.relay;
    let of_links = |count: fn(&LinkStatus) -> u64| status.links.iter().map(count).sum::<u64>();
    let mut counts = vec![
        ("tunnels", status.tunnels.open),
        ("pending dials", status.pending_dials.unwrap_or(0)),
        ("tunnels of links", of_links(|link| link.tunnels)),
        ("bytes held by links", of_links(|link| link.held_bytes)),
        ("bytes held", status.memory.held_bytes),
        ("tunnels of the relay", relay.tunnels),
        ("slots of the relay", relay.slots),
        ("pipes of the relay", relay.pipes),
        ("bytes of the relay's buffers", relay.buffer_bytes),
    ];
    counts.retain(|(_, count)| *count > 0);
    counts
}

/// Waits until a process has nothing in use.
async fn until_at_rest(admin: &Path) {
    const LOOKS: u32 = 600;
    let mut left = Vec::new();
    for _look in 0..LOOKS {
        left = in_use(admin);
        if left.is_empty() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("left in use, says {}: {left:?}", admin.display());
}

impl Pair {
    async fn start() -> Self {
        Self::start_with(&[]).await
    }

    /// With these flags at both ends.
    pub(super) async fn start_with(flags: &[&str]) -> Self {
        let of_server = [&["--admin-socket={certs}/server.sock"], flags].concat();
        let processes = Processes::start(&of_server).await;
        let dir = processes.world.files.dir();
        let admin = ["server.sock", "agent.sock"].map(|name| dir.join(name));
        let of_agent = format!("--admin-socket={}", admin[1].display());
        let agent = processes.agent("a", &[&[of_agent.as_str()], flags].concat());
        let agent_health = agent.address("health");
        at_least(processes.health, IDLE, 4.0).await;
        let (port, echo) = targets::echo().await;
        Self {
            processes,
            agent,
            agent_health,
            target: format!("127.0.0.1:{port}"),
            admin,
            _echo: echo,
        }
    }

    /// Asserts that neither end has open tunnels, pending dials or held bytes.
    pub(super) async fn assert_at_rest(&self) {
        let health = self.processes.health;
        for series in [TUNNELS, CLIENTS, BUSY, "adit_held_bytes"] {
            metric(health, series, 0.0).await;
        }
        for series in [TARGETS, BUSY] {
            metric(self.agent_health, series, 0.0).await;
        }
        // The admin sockets also have current counts of the relay. An agent's gauge of held bytes is always 0.
        for admin in &self.admin {
            until_at_rest(admin).await;
        }
    }

    /// Asserts that server and agent count equally many open lanes, and equally many lanes ever bound.
    pub(super) async fn assert_lanes_add_up(&self) {
        let lanes = async |health| {
            let text = scrape(health).await;
            let of = |series| sample(&text, series).expect("a series");
            (of(IDLE) + of(BUSY), opened(&text))
        };
        // Lanes may be opening or closing at this moment.
        eventually("lanes to add up", async || {
            lanes(self.processes.health).await == lanes(self.agent_health).await
        })
        .await;
    }

    /// `count` tunnels on lanes, half of them in each dialect.
    async fn tunnels_on_lanes(&self, count: usize) -> (Vec<UnixStream>, Vec<(Connection, Call)>) {
        let (mut streams, mut calls) = (Vec::new(), Vec::new());
        let health = self.processes.health;
        for number in 0..count {
            at_least(health, IDLE, 1.0).await;
            if number % 2 == 0 {
                let socket = self.processes.world.connect();
                streams.push(connect::open(&socket, &self.target).await);
            } else {
                let (connection, mut call) = Connection::proxied(&self.processes.world).await;
                let random = i64::try_from(number).expect("small");
                let conn = call.open(random, &self.target).await;
                call.echo(conn, b"on a lane").await;
                calls.push((connection, call));
            }
        }
        let all = u32::try_from(count).expect("small");
        assert_eq!(value(health, HITS).await, f64::from(all));
        metric(health, BUSY, f64::from(all)).await;
        (streams, calls)
    }
}

/// Dials start at fixed times, regardless of earlier ones. Each becomes a tunnel, on a lane or on the link.
///
/// Limit (isolation): 1,000 dials within 1 s at an agent with 4 idle lanes | all succeed
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_dials_in_one_second_all_succeed() {
    const DIALS: u32 = 1_000;
    let pair = Pair::start().await;
    let start = tokio::time::Instant::now();
    let mut dials = JoinSet::new();
    for number in 0..DIALS {
        let (socket, target) = (pair.processes.world.connect(), pair.target.clone());
        dials.spawn(async move {
            tokio::time::sleep_until(start + Duration::from_secs(1) * number / DIALS).await;
            connect::open(&socket, &target).await
        });
    }
    let mut open = within("all dials", dials.join_all()).await;
    metric(pair.processes.health, TUNNELS, f64::from(DIALS)).await;
    let text = scrape(pair.processes.health).await;
    let by_lane = ["hit", "miss", "unacknowledged"].map(|result| {
        sample(
            &text,
            &format!("adit_lane_dials_total{{result=\"{result}\"}}"),
        )
        .expect("a series")
    });
    assert_eq!(by_lane.iter().sum::<f64>(), f64::from(DIALS));
    assert!(by_lane[0] >= 4.0 && by_lane[2] == 0.0, "{by_lane:?}");
    for stream in &mut open {
        connect::echo(stream, b"each of them works").await;
    }
    drop(open);
    pair.assert_at_rest().await;
    pair.assert_lanes_add_up().await;
}

/// The kernel closes the sockets of a killed process. So the other end sees it at once, long before its own timeout of 20 s.
const NOTICED: Duration = Duration::from_secs(5);

/// Limit (times): Tunnels on lanes of a killed process | end at once at the other end, at most 5 s later
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tunnels_on_lanes_of_a_killed_agent_end_with_a_reason() {
    let mut pair = Pair::start().await;
    let health = pair.processes.health;
    let before = descriptors_without_lanes(&pair.processes.server, health).await;
    let (mut streams, mut calls) = pair.tunnels_on_lanes(50).await;
    pair.agent.kill();
    let killed = Instant::now();
    for (_connection, call) in &mut calls {
        match call.payload().await {
            Some(Payload::CloseResponse(close)) => {
                assert_eq!(close.error, "tunnel closed by the server: lane_lost");
            }
            other => panic!("{other:?}"),
        }
    }
    for stream in &mut streams {
        within("the end", stream.read(&mut [0])).await.ok();
    }
    metric(health, LOST, 50.0).await;
    assert!(killed.elapsed() < NOTICED, "{:?}", killed.elapsed());
    drop((streams, calls));
    for series in [TUNNELS, BUSY, IDLE, "adit_held_bytes", LINKS] {
        metric(health, series, 0.0).await;
    }
    no_descriptor_left(&pair.processes.server, health, before).await;
}

/// Limit (times): Tunnels on lanes of a killed process
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn targets_of_tunnels_on_lanes_of_a_killed_server_are_closed() {
    let mut pair = Pair::start().await;
    let agent_health = pair.agent_health;
    let before = descriptors_without_lanes(&pair.agent, agent_health).await;
    let (mut streams, calls) = pair.tunnels_on_lanes(50).await;
    metric(agent_health, TARGETS, 50.0).await;
    pair.processes.server.kill();
    let killed = Instant::now();
    for stream in &mut streams {
        within("the end", stream.read(&mut [0])).await.ok();
    }
    for series in [TARGETS, BUSY, IDLE, "adit_held_bytes"] {
        metric(agent_health, series, 0.0).await;
    }
    assert!(killed.elapsed() < NOTICED, "{:?}", killed.elapsed());
    let lost = "adit_lanes_closed_total{reason=\"lost\"}";
    assert!(value(agent_health, lost).await >= 50.0);
    no_descriptor_left(&pair.agent, agent_health, before).await;
    drop((streams, calls));
}

/// Opens raw-lane tunnels that carry bytes. Returns them with the reports of their targets.
async fn pipes_on(
    pair: &Pair,
) -> (
    Vec<UnixStream>,
    adit_net::tasks::Tasks,
    mpsc::Receiver<targets::Sum>,
) {
    let (port, target, seen) = targets::summing().await;
    let health = pair.processes.health;
    let mut streams = Vec::new();
    for _pipe in 0..RAW_LANES {
        at_least(health, IDLE, 4.0).await;
        let socket = pair.processes.world.connect();
        let mut stream = connect::open(&socket, &format!("127.0.0.1:{port}")).await;
        stream.write_all(b"some of it").await.expect("taken");
        streams.push(stream);
    }
    let opened = "adit_tunnels_opened_total{path=\"raw-lane\"}";
    assert_eq!(value(health, opened).await, f64::from(RAW_LANES));
    metric(pair.agent_health, TARGETS, f64::from(RAW_LANES)).await;
    (streams, target, seen)
}

const RAW_LANES: u32 = 10;
const PLAINTEXT: &str = "--lane-security=plaintext";

/// On a raw lane FIN means that all bytes were sent. When the kernel closes the sockets of a killed process, targets must
/// see RST instead.
///
/// Limit (times): Tunnels on lanes of a killed process
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn targets_of_raw_lanes_of_a_killed_server_or_agent_see_a_reset() {
    for kill_server in [true, false] {
        let mut pair = Pair::start_with(&[PLAINTEXT]).await;
        let (mut streams, _target, mut seen) = pipes_on(&pair).await;
        let killed = Instant::now();
        if kill_server {
            pair.processes.server.kill();
        } else {
            pair.agent.kill();
        }
        for _pipe in 0..RAW_LANES {
            let sum = within("what a target saw", seen.recv()).await;
            let sum = sum.expect("the target runs");
            assert!(!sum.clean, "a cut stream looks whole: {sum:?}");
        }
        for stream in &mut streams {
            within("the end", stream.read(&mut [0])).await.ok();
        }
        if kill_server {
            for series in [TARGETS, BUSY, IDLE] {
                metric(pair.agent_health, series, 0.0).await;
            }
        } else {
            let reset = ended("target_reset");
            metric(pair.processes.health, &reset, f64::from(RAW_LANES)).await;
            for series in [TUNNELS, BUSY, IDLE] {
                metric(pair.processes.health, series, 0.0).await;
            }
        }
        assert!(killed.elapsed() < NOTICED, "{:?}", killed.elapsed());
    }
}

/// Raw lanes are counted like other lanes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closed_raw_lanes_leave_nothing_behind() {
    let pair = Pair::start_with(&[PLAINTEXT]).await;
    let (streams, _target, mut seen) = pipes_on(&pair).await;
    drop(streams);
    for _pipe in 0..RAW_LANES {
        let sum = within("what a target saw", seen.recv()).await;
        assert!(sum.expect("the target runs").clean);
    }
    pair.assert_at_rest().await;
    pair.assert_lanes_add_up().await;
}
