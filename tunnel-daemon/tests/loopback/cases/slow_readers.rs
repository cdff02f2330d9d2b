//! Clients that read 20 KB/s for a minute from a target that never stops sending, on every path. TCP stops the target, so
//! neither our memory nor the kernel's grows.

use std::time::Duration;

use super::lane_processes::Pair;
use crate::support::lanes::{HITS, IDLE, closed};
use crate::support::process::{at_least, value};
use crate::support::wait::until_still;
use crate::support::ways::Way;
use crate::support::{connect, targets};

/// Bytes that a client reads per second.
const RATE: usize = 20_000;
/// Reads per second.
const TURNS: u32 = 4;
const SECONDS: u32 = 60;
/// Limit for each process, beyond its memory after the first tunnel.
const RESIDENT_MAX: u64 = 8 << 20;
/// Kernel pipes for splicing, 256 KiB each: one for each direction of a tunnel, plus spare ones.
const KERNEL_PIPES_MAX: usize = 4;
/// Limit on what the server itself counts as held.
const HELD_MAX: f64 = 1e6;

/// Most bytes that the kernel grants one socket: the third number.
fn granted_by_the_kernel(sysctl: &str) -> u64 {
    let path = format!("/proc/sys/net/ipv4/{sysctl}");
    let text = std::fs::read_to_string(path).expect("Linux says so");
    let most = text.split_whitespace().nth(2).expect("three numbers");
    most.parse().expect("a number")
}

/// The server's count of tunnels on the path of a CONNECT client.
fn opened_by(way: Way) -> &'static str {
    if way.has_raw_lanes() {
        "adit_tunnels_opened_total{path=\"raw-lane\"}"
    } else {
        "adit_tunnels_opened_total{path=\"lane\"}"
    }
}

/// Reads for a minute, and then stops.
async fn read_slowly(way: Way) {
    if !way.is_possible("slow_readers") {
        return;
    }
    // In the TCP sockets of a process: the send buffer of a lane, and the receive buffer of a target that sent at full speed. A
    // target that nothing stops sends a hundred times as much.
    let queued_max = granted_by_the_kernel("tcp_rmem") + granted_by_the_kernel("tcp_wmem");
    let pair = Pair::start_with(way.flags()).await;
    let health = pair.processes.health;
    let (source, _flood) = targets::source(u64::MAX).await;
    let (socket, target) = (
        pair.processes.world.connect(),
        format!("127.0.0.1:{source}"),
    );
    // The first tunnel allocates what is allocated once for good.
    let mut first = connect::open(&socket, &target).await;
    connect::take(&mut first, 4_000_000).await;
    drop(first);
    pair.assert_at_rest().await;
    at_least(health, IDLE, 4.0).await;
    let programs = [&pair.processes.server, &pair.agent];
    let before = programs.map(|program| (program.resident_bytes(), program.pipes()));
    let assert_small = || {
        for (program, (resident, pipes)) in programs.into_iter().zip(before) {
            let more = program.resident_bytes().saturating_sub(resident);
            assert!(more < RESIDENT_MAX, "{way:?}: {more} bytes more");
            let queued = program.tcp_queue_bytes();
            assert!(queued <= queued_max, "{way:?}: {queued} bytes in sockets");
            let pipes = program.pipes().saturating_sub(pipes);
            assert!(pipes <= KERNEL_PIPES_MAX, "{way:?}: {pipes} pipes more");
        }
    };
    let mut stream = connect::open(&socket, &target).await;
    let mut at = 0;
    let mut turns = tokio::time::interval(Duration::from_secs(1) / TURNS);
    for turn in 1..=SECONDS * TURNS {
        turns.tick().await;
        let some = connect::take(&mut stream, RATE / TURNS as usize).await;
        assert!(
            some == targets::pattern(at, some.len()),
            "bytes from {at} on"
        );
        at += some.len() as u64;
        // Not in each turn: the kernel's socket table contains the sockets of all tests.
        if turn % TURNS == 0 {
            assert_small();
            assert!(value(health, "adit_held_bytes").await < HELD_MAX);
        }
    }
    until_still("the target is held", || pair.agent.tcp_queue_bytes()).await;
    assert_small();
    assert_eq!(value(health, HITS).await, 2.0);
    assert_eq!(value(health, opened_by(way)).await, 2.0);
    // The kernel's buffers are full, so TCP stops the target.
    assert!(pair.agent.tcp_queue_bytes() > 0);
    // No bytes were lost meanwhile.
    let some = connect::take(&mut stream, 2_000_000).await;
    assert!(some == targets::pattern(at, some.len()));
    drop(stream);
    pair.assert_at_rest().await;
    assert_eq!(value(health, &closed("lost")).await, 0.0);
}

/// The paths run at the same time, since they wait more than they compute.
///
/// Limit (memory): Kernel socket buffers of paused clients and targets
/// Limit (isolation): Memory of 20 KB/s readers on lanes | at most 8 MiB more per process, one kernel socket buffer per
/// direction, 4 pipes
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_readers_take_little_memory_on_lanes_and_raw_lanes() {
    let [tls, epoll, io_uring] = Way::ALL.map(|way| Box::pin(read_slowly(way)));
    tokio::join!(tls, epoll, io_uring);
}
