//! Tunnels opened and closed by the thousand, in both dialects and in every way a client can leave: nothing stays behind at
//! either end, whatever they travelled on.

use std::path::PathBuf;
use std::time::Duration;

use adit_core::wire::packets as wire;
use adit_core::wire::packets::PacketType;
use adit_core::wire::packets::packet::Payload;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinSet;

use super::lane_processes::{Pair, nightly};
use crate::support::lanes::HITS;
use crate::support::process::{descriptors_without_lanes, no_descriptor_left, value};
use crate::support::raw::Connection;
use crate::support::wait::{within, within_for};
use crate::support::ways::Way;
use crate::support::{connect, targets};

const PIPES: &str = "adit_tunnels_opened_total{path=\"raw-lane\"}";
const USED: &str = "adit_lanes_closed_total{reason=\"used\"}";

/// Clients at the same time.
const AT_ONCE: usize = 8;
/// Ways to end a tunnel, each of them in both dialects.
const ENDS: usize = 4;
/// Lanes that tunnels one after the other need, beside those that end as pipes.
const LANES_MAX: f64 = 200.0;
/// A link may begin a hundred pipes at once, wherever other lanes are idle.
const PIPES_MIN: f64 = 20.0;

/// Where clients find the server, and what they ask for.
#[derive(Clone)]
struct Site {
    connect: PathBuf,
    grpc: PathBuf,
    target: String,
}

impl Site {
    /// One tunnel from open to close.
    async fn open_and_close(&self, number: usize) {
        if (number / ENDS).is_multiple_of(2) {
            self.by_connect(number).await;
        } else {
            self.by_grpc(number).await;
        }
    }

    async fn by_connect(&self, number: usize) {
        let mut stream = connect::open(&self.connect, &self.target).await;
        let text = text(number);
        match number % ENDS {
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

    /// On a connection of its own, as kube-apiserver does it.
    async fn by_grpc(&self, number: usize) {
        let connection = Connection::client_at(&self.grpc).await;
        let mut call = connection.proxy().await;
        let random = i64::try_from(number).expect("small");
        let conn = call.open(random, &self.target).await;
        let text = text(number);
        match number % ENDS {
            // The client asks for the end.
            0 => {
                call.data(conn, text.clone());
                call.echo_arrives(conn, &text).await;
                let close = wire::CloseRequest { connect_id: conn };
                call.packet(PacketType::CloseReq, Payload::CloseRequest(close));
                match call.payload().await {
                    Some(Payload::CloseResponse(close)) => assert_eq!(close.connect_id, conn),
                    other => panic!("instead of an end: {other:?}"),
                }
            }
            // As above: it is gone, heard or not.
            1 => {
                call.data(conn, text.clone());
                call.echo_arrives(conn, &text).await;
            }
            2 => call.data(conn, text),
            _ => (),
        }
    }
}

/// What is said on a tunnel.
fn text(number: usize) -> Vec<u8> {
    targets::pattern(number as u64, 1 + number % 5000)
}

/// Opens and closes `opens` tunnels, some at a time.
async fn thousands(way: Way) {
    if !way.is_possible("opens_and_closes") {
        return;
    }
    let opens: usize = nightly(10_000, 1_000);
    let pair = Pair::start_with(way.flags()).await;
    let health = pair.processes.health;
    let site = Site {
        connect: pair.processes.world.connect(),
        grpc: pair.processes.world.grpc(),
        target: pair.target.clone(),
    };
    // Once through everything, so that what is opened once for good is open.
    for number in 0..2 * ENDS {
        site.open_and_close(number).await;
    }
    pair.assert_at_rest().await;
    let server_fds = descriptors_without_lanes(&pair.processes.server, health).await;
    let agent_fds = descriptors_without_lanes(&pair.agent, pair.agent_health).await;
    let mut jobs = JoinSet::new();
    // In a row for each client, or each would have one dialect and one end.
    let row = opens.div_ceil(AT_ONCE);
    for first in (0..opens).step_by(row) {
        let numbers = first..opens.min(first + row);
        let site = site.clone();
        jobs.spawn(async move {
            for number in numbers {
                site.open_and_close(number).await;
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
    assert_on_lanes(&pair, way, opens).await;
}

/// They were on lanes, and few lanes were enough.
async fn assert_on_lanes(pair: &Pair, way: Way, opens: usize) {
    let health = pair.processes.health;
    let (pipes, used) = (value(health, PIPES).await, value(health, USED).await);
    let lanes = value(health, "adit_lanes_opened_total").await;
    if way.has_pipes() {
        assert!(pipes >= PIPES_MIN, "{pipes} pipes");
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_on_lanes_leave_nothing_behind() {
    thousands(Way::Tls).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_on_lanes_in_clear_text_leave_nothing_behind_with_epoll() {
    thousands(Way::Epoll).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_on_lanes_in_clear_text_leave_nothing_behind_with_io_uring() {
    thousands(Way::IoUring).await;
}
