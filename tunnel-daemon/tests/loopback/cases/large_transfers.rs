//! Transfers larger than any buffer, in both directions at once. Each byte is checked on arrival.

use std::time::Duration;

use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;

use super::lane_processes::{Pair, nightly};
use crate::support::clients::Io;
use crate::support::connect;
use crate::support::process::{metric, named_program, value};
use crate::support::seeded::{Chunks, End, Heard, Words};
use crate::support::wait::{within, within_for};
use crate::support::ways::Way;

/// Limit for the whole transfer.
const WITHIN: Duration = Duration::from_secs(300);
/// Size of the largest chunk, in bits.
const CHUNK_BITS: usize = 18;

/// Bytes each way. Nightly it is 1 GiB if `ADIT_PROGRAM` names a program, because the program that cargo builds for tests is
/// slow.
fn bytes() -> usize {
    let long = if named_program().is_some() {
        1 << 30
    } else {
        256 << 20
    };
    nightly(long, 16 << 20)
}

/// Sends and receives at one end of a transfer, until the peer's FIN.
async fn exchange(io: impl Io, says: Words, hears: Words, seed: u64) -> Heard {
    let (mut read, mut write) = tokio::io::split(io);
    let (mut said, mut heard) = (
        Chunks::new(seed, CHUNK_BITS),
        Chunks::new(seed + 1, CHUNK_BITS),
    );
    let saying = async {
        let all = says.say(0..says.bytes, &mut write, &mut said).await;
        all.expect("the tunnel takes it");
        write.shutdown().await.expect("a half-close");
    };
    let hearing = hears.hear(usize::MAX, &mut read, &mut heard);
    let ((), heard) = tokio::join!(saying, hearing);
    heard
}

async fn arrives_whole(way: Way) {
    if !way.is_possible("large_transfers") {
        return;
    }
    let pair = Pair::start_with(way.flags()).await;
    let server = pair.processes.health;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("bound").to_string();
    let socket = pair.processes.world.connect();
    let opened = async { tokio::join!(connect::open(&socket, &address), listener.accept()) };
    let (client, accepted) = within("a tunnel", opened).await;
    let (target, _agent) = accepted.expect("a connection");

    let bytes = bytes();
    let (up, down) = (Words::new(1, bytes), Words::new(2, bytes));
    let exchanged = async {
        tokio::join!(
            exchange(client, up, down, 10),
            exchange(target, down, up, 20)
        )
    };
    let (at_client, at_target) = within_for(WITHIN, "all of it, both ways", exchanged).await;
    let whole = Heard {
        bytes,
        intact: true,
        end: End::InOrder,
    };
    assert_eq!((at_client, at_target), (whole, whole));
    for direction in ["to_target", "to_client"] {
        let series = format!("adit_tunnel_bytes_total{{direction=\"{direction}\"}}");
        metric(server, &series, bytes as f64).await;
    }
    let path = if way.has_raw_lanes() {
        "raw-lane"
    } else {
        "lane"
    };
    let series = format!("adit_tunnels_opened_total{{path=\"{path}\"}}");
    assert_eq!(value(server, &series).await, 1.0);
    pair.assert_at_rest().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_transfers_arrive_whole_on_a_lane() {
    arrives_whole(Way::Tls).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_transfers_arrive_whole_on_a_raw_lane_with_epoll() {
    arrives_whole(Way::Epoll).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_transfers_arrive_whole_on_a_raw_lane_with_io_uring() {
    arrives_whole(Way::IoUring).await;
}
