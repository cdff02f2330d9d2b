//! Tunnels on which nothing moves take no processor time, whatever readiness their sockets report meanwhile.

use std::io;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::support::clients::{Io, Kind};
use crate::support::targets;
use crate::support::wait::within;
use crate::support::ways::Way;
use crate::support::world::World;

/// The peer sends until the tunnel takes no more; the other peer does not read.
const SENDS: u8 = 1;
/// The peer half-closes after that.
const ENDS: u8 = 2;
/// All four behaviours of a peer.
const DOES: [u8; 4] = [0, SENDS, ENDS, SENDS | ENDS];
/// A write that takes longer than this means that the tunnel is full.
const FULL_AFTER: Duration = Duration::from_millis(300);
/// Limit per second. A busy loop of one task would take all of it.
const PROCESSOR_MAX: Duration = Duration::from_millis(100);
/// Number of seconds of which one must be quiet.
const SECONDS_MAX: usize = 15;

async fn behave(stream: &mut (impl Io + ?Sized), does: u8) -> io::Result<()> {
    if does & SENDS != 0 {
        let block = vec![7; 64 * 1024];
        while let Ok(written) = timeout(FULL_AFTER, stream.write(&block)).await {
            written?;
        }
    }
    if does & ENDS != 0 {
        stream.shutdown().await?;
    }
    Ok(())
}

/// On the link, on TLS lanes, and on raw lanes with each driver.
///
/// Limit (isolation): CPU time of 16 half-closed, closed or stuck tunnels | at most 100 ms in 1 s
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_closed_and_stuck_tunnels_take_no_cpu_time() {
    let link = (None, &["--lanes-per-link=0"][..]);
    let lanes = Way::ALL.map(|way| (Some(way), way.flags()));
    let ways = [link].into_iter().chain(lanes);
    let test = "half_closed_and_stuck_tunnels_take_no_cpu_time";
    for (way, flags) in ways.filter(|(way, _)| way.is_none_or(|way| way.is_possible(test))) {
        let agent_flags = if way.is_some() { flags } else { &[] };
        let (world, _agent) = World::linked(flags, agent_flags).await;
        // The first byte tells the target how to behave.
        let (port, _target) = targets::serve(|mut stream| async move {
            let does = stream.read_u8().await?;
            behave(&mut stream, does).await?;
            std::future::pending().await
        })
        .await;
        let target = format!("127.0.0.1:{port}");
        let mut under_way = JoinSet::new();
        for client in DOES {
            for does in DOES {
                let mut stream = Kind::Unix.open(&world, &target).await;
                under_way.spawn(async move {
                    stream.write_all(&[does]).await.expect("an open tunnel");
                    // A tunnel that both peers have ended may be closed.
                    let _over = behave(&mut *stream, client).await;
                    stream
                });
            }
        }
        let streams = within("all is full", under_way.join_all()).await;
        let mut used = Vec::new();
        loop {
            let before = processor_time();
            tokio::time::sleep(Duration::from_secs(1)).await;
            let second = processor_time() - before;
            if second <= PROCESSOR_MAX {
                break;
            }
            used.push(second);
            assert!(
                used.len() < SECONDS_MAX,
                "{way:?}: processor time of each second: {used:?}"
            );
        }
        drop(streams);
    }
}

/// Processor time of all threads of this process.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::try_from(time).expect("it is not negative")
}
