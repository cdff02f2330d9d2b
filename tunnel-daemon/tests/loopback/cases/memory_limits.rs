//! Server and agent in small memory cgroups while readers pause.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use adit::demo::grpc_client::{ClientError, GrpcTunnel};
use tokio::net::UnixStream;

use super::lane_processes::nightly;
use super::memory_promises::{admit, admitted, cgroups, limited};
use crate::support::process::{Process, metric, scrape, sum};
use crate::support::wait::{stands_still, within_for};
use crate::support::world::{World, sample};
use crate::support::{connect, targets};

const MIB: u64 = 1 << 20;
/// Readers that open at once. A server that counts no queues and no socket buffers is killed at 130 readers in 64 MiB.
const AT_ONCE: usize = 10;
/// Echoes per round, and rounds. The lowest 99th percentile of the rounds counts.
const ECHOES: usize = 500;
const ROUNDS: usize = 5;
/// Allowed ratio of the 99th percentile beside paused readers to the one without them.
const BESIDE: u32 = 3;
/// Limit of each step. Generous, because other tests run concurrently.
const PATIENCE: Duration = Duration::from_secs(120);

/// The lowest 99th percentile of echoes on one tunnel, over some rounds.
async fn p99(stream: &mut UnixStream) -> Duration {
    let mut best = Duration::MAX;
    for _round in 0..ROUNDS {
        let mut took = Vec::new();
        for _echo in 0..ECHOES {
            let began = Instant::now();
            connect::echo(stream, b"is there anybody").await;
            took.push(began.elapsed());
        }
        took.sort_unstable();
        best = best.min(took[ECHOES * 99 / 100]);
    }
    best
}

/// Waits until the kernel's buffers for the readers are full and no byte moves.
async fn until_no_byte_moves(health: SocketAddr) {
    let moved = async || sum(&scrape(health).await, "adit_tunnel_bytes_total").to_bits();
    within_for(PATIENCE, "no byte moves", stands_still(moved)).await;
}

/// The frontend of the readers.
#[derive(Clone, Copy, Debug)]
enum Frontend {
    Connect,
    /// Each tunnel has its own connection, as with kube-apiserver.
    Grpc,
}

/// A client that reads nothing until dropped. `None` if the server refuses it for lack of memory.
async fn pause(world: &World, frontend: Frontend, source: &str) -> Option<Box<dyn Send>> {
    if let Frontend::Grpc = frontend {
        return match GrpcTunnel::open(world.channel().await, source).await {
            Ok(tunnel) => Some(Box::new(tunnel)),
            Err(ClientError::Dial(error)) if error.contains("short of memory") => None,
            Err(error) => panic!("{error}"),
        };
    }
    let stream = admitted(world, source).await?;
    Some(Box::new(stream))
}

/// Pauses readers and asserts that no process is killed. Returns the 99th percentile of an echo before and beside them.
/// `None` without memory cgroups.
async fn readers_pause(
    limit: u64,
    readers: usize,
    frontend: Frontend,
    flags: &[&str],
) -> Option<[Duration; 2]> {
    let groups = cgroups(limit)?;
    let is_version_2 = groups[0].is_version_2();
    // A gRPC reader takes 2 MiB before it pauses. In a virtual machine that takes minutes.
    let is_long = matches!(frontend, Frontend::Grpc) && is_version_2;
    let readers = if is_long { readers.min(100) } else { readers };
    let (world, server, agent) = limited(&groups, flags, &[]).await;
    let (health, agent_health) = (server.address("health"), agent.address("health"));
    let (echo_port, _echo) = targets::echo().await;
    let (source, source_port) = targets::with_small_window();
    let _source = targets::source_on(source, u64::MAX);
    let source = format!("127.0.0.1:{source_port}");
    let mut echo = connect::open(&world.connect(), &format!("127.0.0.1:{echo_port}")).await;
    let before = p99(&mut echo).await;

    // In version 2 the limit also covers socket buffers.
    let few = if is_version_2 { 8 } else { 4 };
    let pausing = admit(readers, AT_ONCE, || pause(&world, frontend, &source));
    let (paused, refused) = within_for(PATIENCE, "readers that pause", pausing).await;
    until_no_byte_moves(agent_health).await;
    let beside = p99(&mut echo).await;
    let used = |process: &Process| process.resident_bytes() / MIB;
    let memory = |text: &str| {
        ["held", "queued", "kernel"].map(|what| {
            let bytes = sample(text, &format!("adit_{what}_bytes")).expect("a gauge");
            format!("{what} {:.1} MiB", bytes / 1_048_576.0)
        })
    };
    for health in [health, agent_health] {
        println!("MEASURED {}", memory(&scrape(health).await).join(", "));
    }
    println!(
        "MEASURED {readers} readers by {frontend:?} in {} MiB {flags:?}: {} paused, {refused} refused; resident server {} MiB, agent {} MiB; most in the \
         cgroups {} and {} MiB; echo p99 {before:?} before, {beside:?} beside them",
        limit / MIB,
        paused.len(),
        used(&server),
        used(&agent),
        groups[0].most_bytes() / MIB,
        groups[1].most_bytes() / MIB,
    );
    assert!(paused.len() >= readers / few, "most are refused: {refused}");
    // Refusals stop once the readers are gone.
    drop((paused, echo));
    for health in [health, agent_health] {
        for what in ["held", "queued", "kernel"] {
            metric(health, &format!("adit_{what}_bytes"), 0.0).await;
        }
    }
    let target = format!("127.0.0.1:{echo_port}");
    // The server checks the usage of the cgroup ten times a second.
    within_for(PATIENCE, "an end of the refusals", async {
        while pause(&world, frontend, &target).await.is_none() {}
    })
    .await;
    let mut stream = connect::open(&world.connect(), &target).await;
    connect::echo(&mut stream, b"served again").await;
    Some([before, beside])
}

async fn an_echo_is_not_slower(flags: &[&str]) {
    if let Some([before, beside]) = readers_pause(64 * MIB, 400, Frontend::Connect, flags).await {
        assert!(
            beside <= before * BESIDE,
            "echo p99 {before:?} before, {beside:?} beside paused readers"
        );
    }
}

/// Limit (memory): Memory of the cgroup, without pages of files
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_echo_beside_400_paused_readers_is_as_fast() {
    an_echo_is_not_slower(&[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_echo_beside_400_paused_readers_is_as_fast_without_lanes() {
    an_echo_is_not_slower(&["--lanes-per-link=0"]).await;
}

/// Limit (memory): Tunnels while `--process-budget` is in use
/// Limit (memory): Kernel socket buffers of paused clients and targets
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn paused_readers_kill_nobody_in_64_mebibytes() {
    readers_pause(64 * MIB, nightly(400, 150), Frontend::Connect, &[]).await;
}

/// Limit (memory): Tunnels while `--process-budget` is in use
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn paused_readers_kill_nobody_in_64_mebibytes_without_lanes() {
    readers_pause(
        64 * MIB,
        nightly(400, 150),
        Frontend::Connect,
        &["--lanes-per-link=0"],
    )
    .await;
}

/// Limit (memory): Tunnels while `--process-budget` is in use
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn paused_readers_in_256_mebibytes_are_all_served() {
    readers_pause(256 * MIB, nightly(400, 60), Frontend::Connect, &[]).await;
}

/// Limit (memory): Payload in HTTP/2 that a gRPC client has not read
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn paused_grpc_readers_cause_no_oom_kill_in_64_mebibytes() {
    readers_pause(64 * MIB, nightly(400, 100), Frontend::Grpc, &[]).await;
}
