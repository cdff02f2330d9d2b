//! Servers and agents as processes of their own, with many tunnels on lanes: what one leaves behind, when it ends in order
//! or is killed, and what it costs.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use adit_core::wire::packets::packet::Payload;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::processes::Processes;
use crate::support::process::{
    Process, at_least, descriptors_without_lanes, metric, no_descriptor_left, scrape, value,
};
use crate::support::raw::{Call, Connection};
use crate::support::wait::{until_still, within, within_for};
use crate::support::world::sample;
use crate::support::{connect, targets};

const IDLE: &str = "adit_lanes{state=\"idle\"}";
const BUSY: &str = "adit_lanes{state=\"busy\"}";
const HITS: &str = "adit_lane_dials_total{result=\"hit\"}";
const TUNNELS: &str = "konnectivity_network_proxy_server_established_connections";
const TARGETS: &str = "konnectivity_network_proxy_agent_open_endpoint_connections";
const LOST: &str = "adit_tunnels_closed_total{reason=\"lane_lost\"}";

/// Full length at night, a short one else.
pub(super) fn nightly<T>(long: T, short: T) -> T {
    if std::env::var_os("ADIT_NIGHTLY").is_some() {
        long
    } else {
        short
    }
}

/// A server and an agent with lanes, and a target that echoes.
struct Pair {
    processes: Processes,
    agent: Process,
    agent_health: SocketAddr,
    target: String,
    _echo: adit::net::tasks::Tasks,
}

impl Pair {
    async fn start() -> Self {
        Self::start_with(&[]).await
    }

    /// With these flags at both ends.
    async fn start_with(flags: &[&str]) -> Self {
        let processes = Processes::start(flags).await;
        let agent = processes.agent("a", flags);
        let agent_health = agent.address("health");
        at_least(processes.health, IDLE, 4.0).await;
        let (port, echo) = targets::echo().await;
        Self {
            processes,
            agent,
            agent_health,
            target: format!("127.0.0.1:{port}"),
            _echo: echo,
        }
    }

    /// Nothing is open, waits or is held at either end.
    async fn assert_at_rest(&self) {
        let health = self.processes.health;
        metric(health, TUNNELS, 0.0).await;
        metric(health, BUSY, 0.0).await;
        metric(health, "adit_held_bytes", 0.0).await;
        metric(self.agent_health, TARGETS, 0.0).await;
        metric(self.agent_health, "adit_held_bytes", 0.0).await;
    }

    /// Each lane that was bound is idle or was counted when it went.
    async fn assert_lanes_add_up(&self) {
        for health in [self.processes.health, self.agent_health] {
            within("lanes to add up", async {
                loop {
                    let text = scrape(health).await;
                    let closed: f64 = text
                        .lines()
                        .filter(|line| line.starts_with("adit_lanes_closed_total{"))
                        .filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok())
                        .sum();
                    let of = |series| sample(&text, series).expect("a series");
                    if of("adit_lanes_opened_total") - closed == of(IDLE) + of(BUSY) {
                        return;
                    }
                    // Some are opened or given up at this moment.
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            })
            .await;
        }
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
                let connection = Connection::client(&self.processes.world).await;
                let mut call = connection.proxy().await;
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

/// One tunnel from open to close, ended in one of four ways.
async fn open_and_close(pair: (&std::path::Path, &str), number: usize) {
    let (socket, target) = pair;
    let mut stream = connect::open(socket, target).await;
    let text = targets::pattern(number as u64, 1 + number % 5000);
    match number % 4 {
        // The client half-closes, the target follows.
        0 => {
            connect::echo(&mut stream, &text).await;
            stream.shutdown().await.expect("a half-close");
            let rest = within("the end", stream.read(&mut [0])).await;
            assert_eq!(rest.expect("a clean end"), 0);
        }
        // The client is gone after an answer, before it, or before it says a word.
        1 => connect::echo(&mut stream, &text).await,
        2 => stream.write_all(&text).await.expect("taken"),
        _ => (),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_opens_and_closes_over_lanes_leave_nothing_behind() {
    const AT_ONCE: usize = 8;
    let opens = nightly(10_000, 1_000);
    let pair = Pair::start().await;
    let health = pair.processes.health;
    let socket = pair.processes.world.connect();
    // Once through everything, so that what is opened once for good is open.
    for number in 0..4 {
        open_and_close((&socket, &pair.target), number).await;
    }
    pair.assert_at_rest().await;
    let server_fds = descriptors_without_lanes(&pair.processes.server, health).await;
    let agent_fds = descriptors_without_lanes(&pair.agent, pair.agent_health).await;
    let mut jobs = JoinSet::new();
    for worker in 0..AT_ONCE {
        let (socket, target) = (socket.clone(), pair.target.clone());
        jobs.spawn(async move {
            for number in (worker..opens).step_by(AT_ONCE) {
                open_and_close((&socket, &target), number).await;
            }
        });
    }
    within_for(Duration::from_secs(300), "all of them", async {
        while let Some(job) = jobs.join_next().await {
            job.expect("each tunnel works");
        }
    })
    .await;
    pair.assert_at_rest().await;
    pair.assert_lanes_add_up().await;
    no_descriptor_left(&pair.processes.server, health, server_fds).await;
    no_descriptor_left(&pair.agent, pair.agent_health, agent_fds).await;
    // They were on lanes, and few lanes were enough.
    let all = f64::from(u32::try_from(opens).expect("fits"));
    assert!(value(health, HITS).await >= all * 0.8);
    assert!(value(health, "adit_lanes_opened_total").await < 200.0);
    for reason in ["lost", "violation", "silent", "link_gone"] {
        let closed = format!("adit_lanes_closed_total{{reason=\"{reason}\"}}");
        assert_eq!(value(health, &closed).await, 0.0, "{reason}");
    }
}

/// Dials start on time, whatever became of those before; lanes or not, each becomes a tunnel.
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

/// The kernel closes what a killed process had open, so the other end knows at once, long before the 20 s after which it
/// would find out by itself.
const NOTICED: Duration = Duration::from_secs(5);

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
    for series in [
        TUNNELS,
        BUSY,
        IDLE,
        "adit_held_bytes",
        "adit_links{peer=\"adit\"}",
    ] {
        metric(health, series, 0.0).await;
    }
    no_descriptor_left(&pair.processes.server, health, before).await;
}

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

/// Tunnels without frames whose bytes flow, and what their targets see.
async fn pipes_on(
    pair: &Pair,
) -> (
    Vec<UnixStream>,
    adit::net::tasks::Tasks,
    mpsc::Receiver<targets::Sum>,
) {
    let (port, target, seen) = targets::summing().await;
    let health = pair.processes.health;
    let mut streams = Vec::new();
    for _pipe in 0..PIPES {
        at_least(health, IDLE, 4.0).await;
        let socket = pair.processes.world.connect();
        let mut stream = connect::open(&socket, &format!("127.0.0.1:{port}")).await;
        stream.write_all(b"some of it").await.expect("taken");
        streams.push(stream);
    }
    let opened = "adit_tunnels_opened_total{path=\"raw-lane\"}";
    assert_eq!(value(health, opened).await, f64::from(PIPES));
    metric(pair.agent_health, TARGETS, f64::from(PIPES)).await;
    (streams, target, seen)
}

const PIPES: u32 = 10;
const PLAINTEXT: &str = "--lane-security=plaintext";

/// The kernel ends what a killed process had open, and an end is all that a tunnel without frames has to say that all was
/// sent: it must not look like one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn targets_of_pipes_of_a_killed_server_or_agent_see_a_reset() {
    for kill_server in [true, false] {
        let mut pair = Pair::start_with(&[PLAINTEXT]).await;
        let (mut streams, _target, mut seen) = pipes_on(&pair).await;
        let killed = Instant::now();
        if kill_server {
            pair.processes.server.kill();
        } else {
            pair.agent.kill();
        }
        for _pipe in 0..PIPES {
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
            let reset = "adit_tunnels_closed_total{reason=\"target_reset\"}";
            metric(pair.processes.health, reset, f64::from(PIPES)).await;
            for series in [TUNNELS, BUSY, IDLE] {
                metric(pair.processes.health, series, 0.0).await;
            }
        }
        assert!(killed.elapsed() < NOTICED, "{:?}", killed.elapsed());
    }
}

/// Lanes that became pipes are counted like all others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pipes_leave_nothing_behind() {
    let pair = Pair::start_with(&[PLAINTEXT]).await;
    let (streams, _target, mut seen) = pipes_on(&pair).await;
    drop(streams);
    for _pipe in 0..PIPES {
        let sum = within("what a target saw", seen.recv()).await;
        assert!(sum.expect("the target runs").clean);
    }
    pair.assert_at_rest().await;
    pair.assert_lanes_add_up().await;
}

/// Most bytes the kernel lets one socket have: the third number.
fn granted_by_the_kernel(sysctl: &str) -> u64 {
    let path = format!("/proc/sys/net/ipv4/{sysctl}");
    let text = std::fs::read_to_string(path).expect("Linux says so");
    let most = text.split_whitespace().nth(2).expect("three numbers");
    most.parse().expect("a number")
}

/// A reader of 20 KB/s, and then of nothing, from a target that could send for ever: TCP holds the target, not our memory nor
/// the kernel's. Server and agent have these flags; `path` is what the tunnel travels on.
async fn slow_reader(flags: &[&str], path: &str) {
    const RATE: usize = 20_000;
    /// Of each process, beyond what it had with one tunnel.
    const RESIDENT_MAX: u64 = 8 << 20;
    /// Pipes of the kernel by which bytes are spliced, 256 KiB each: one for each direction of a tunnel, and some kept.
    const KERNEL_PIPES_MAX: usize = 4;
    // In the TCP sockets of a process: what the kernel grants a lane, to be sent, and a target that sent at full speed until
    // it was held. A target that is not held sends a hundred times as much.
    let queued_max = granted_by_the_kernel("tcp_rmem") + granted_by_the_kernel("tcp_wmem");
    let seconds = nightly(60, 4);
    let pair = Pair::start_with(flags).await;
    let health = pair.processes.health;
    let (source, _flood) = targets::source(u64::MAX).await;
    let (socket, target) = (
        pair.processes.world.connect(),
        format!("127.0.0.1:{source}"),
    );
    // What is allocated once for good.
    let mut first = connect::open(&socket, &target).await;
    let mut some = vec![0; 4_000_000];
    within("bytes", first.read_exact(&mut some))
        .await
        .expect("the tunnel lives");
    drop(first);
    pair.assert_at_rest().await;
    at_least(health, IDLE, 4.0).await;
    let programs = [&pair.processes.server, &pair.agent];
    let before = programs.map(|program| (program.resident_bytes(), program.pipes()));
    let assert_small = || {
        for (program, (resident, pipes)) in programs.into_iter().zip(before) {
            let more = program.resident_bytes().saturating_sub(resident);
            assert!(more < RESIDENT_MAX, "{more} bytes more");
            let queued = program.tcp_queue_bytes();
            assert!(queued <= queued_max, "{queued} bytes in its sockets");
            let pipes = program.pipes().saturating_sub(pipes);
            assert!(pipes <= KERNEL_PIPES_MAX, "{pipes} pipes more");
        }
    };
    let mut stream = connect::open(&socket, &target).await;
    let mut at = 0;
    let mut turn = tokio::time::interval(Duration::from_millis(250));
    for _quarter in 0..seconds * 4 {
        turn.tick().await;
        let mut some = vec![0; RATE / 4];
        within("bytes", stream.read_exact(&mut some))
            .await
            .expect("the tunnel lives");
        assert!(
            some == targets::pattern(at, some.len()),
            "bytes from {at} on"
        );
        at += some.len() as u64;
        assert_small();
        assert!(value(health, "adit_held_bytes").await < 1e6);
    }
    until_still("the target is held", || pair.agent.tcp_queue_bytes()).await;
    assert_small();
    assert_eq!(value(health, HITS).await, 2.0);
    let opened = format!("adit_tunnels_opened_total{{path=\"{path}\"}}");
    assert_eq!(value(health, &opened).await, 2.0);
    // The kernels' buffers are full, so the target is held.
    assert!(pair.agent.tcp_queue_bytes() > 0);
    // Nothing of it was lost meanwhile.
    let mut some = vec![0; 2_000_000];
    within("bytes after the pause", stream.read_exact(&mut some))
        .await
        .expect("the tunnel lives");
    assert!(some == targets::pattern(at, some.len()));
    drop(stream);
    pair.assert_at_rest().await;
    assert_eq!(
        value(health, "adit_lanes_closed_total{reason=\"lost\"}").await,
        0.0
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_reader_on_a_lane_costs_no_memory() {
    slow_reader(&[], "lane").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_reader_on_a_pipe_costs_no_memory_with_epoll() {
    slow_reader(&[PLAINTEXT, "--relay-engine=epoll"], "raw-lane").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_reader_on_a_pipe_costs_no_memory_with_io_uring() {
    slow_reader(&[PLAINTEXT, "--relay-engine=io-uring"], "raw-lane").await;
}
