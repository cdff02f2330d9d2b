//! Peers that send packets and read none. What waits for them counts in `--process-budget`, and ends links one by one.

use std::ops::Range;
use std::time::Duration;

use adit_core::wire::packets::PacketType;
use adit_core::wire::packets::packet::Payload;
use bytes::{BufMut as _, BytesMut};

use super::lane_processes::nightly;
use crate::support::connect;
use crate::support::memory_cgroup::MemoryCgroup;
use crate::support::process::{at_least, metric, value};
use crate::support::raw::{Call, Connection, data, encoded, framed};
use crate::support::skip::skip;
use crate::support::stub_server::StubServer;
use crate::support::targets;
use crate::support::wait::{stands_still, until};
use crate::support::world::{World, sample};

/// The smallest budget; of it 1 MiB may wait for peers.
const BUDGET: [&str; 2] = ["--agent-budget=4MiB", "--process-budget=4MiB"];
const ENDED: &str = "adit_links_ended_total{reason=\"control_queue\"}";
/// Memory of one close that waits, bytes.
const CLOSE_BYTES: f64 = 32.0;

/// Sends DATA for connections that do not exist. Each wants a close.
fn unknown(link: &mut Call, ids: Range<i64>) {
    let mut messages = BytesMut::new();
    for id in ids {
        messages.put(framed(&encoded(
            PacketType::Data.into(),
            Some(data(id, "x")),
        )));
    }
    link.bytes(messages);
}

/// All links share one certificate and one address, as the agents of one cluster may.
///
/// Limit (memory): Control packets and HTTP/2 frames that wait for peers that do not read
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_links_that_read_nothing_the_worst_one_ends_alone() {
    /// Less than 64 KiB of each link, and so many that HTTP/2 takes them in several turns.
    const EACH: i64 = 1_900;
    let (port, _target) = targets::echo().await;
    let world = World::start(&[&BUDGET[..], &["--proxy-strategies=destHost"]].concat()).await;
    let honest = world.agent_for("honest", "ipv4=127.0.0.1").await;
    let mut hostile = Vec::new();
    for number in 0..12 {
        let (connection, window) = Connection::deaf_agent(&world).await;
        let link = connection.link(&format!("deaf-{number}"), "").await;
        hostile.push((link, connection, window));
    }
    world.links(13).await;
    for (link, _connection, _window) in &mut hostile {
        unknown(link, 1..1 + EACH);
    }
    let scrape = world.server().metrics.scrape();
    let queued = || sample(&scrape.text(), "adit_queued_bytes").expect("a gauge");
    let of_all = 12.0 * 1_900.0 * CLOSE_BYTES;
    until("all closes are counted", || queued() >= of_all).await;

    let (mut worst, _connection, _window) = hostile.remove(0);
    unknown(&mut worst, 100_000..115_000);
    assert_eq!(worst.reset().await, Some(h2::Reason::ENHANCE_YOUR_CALM));
    world.server_metric(ENDED, 1.0).await;
    world.links(12).await;
    until("its closes are freed", || queued() < of_all).await;
    world.assert_serves(&format!("127.0.0.1:{port}")).await;

    // What waited for another link is not lost.
    let (mut reads, _connection, window) = hostile.remove(0);
    window.send(1 << 20).expect("the connection lives");
    for id in 1..=EACH {
        match reads.payload().await {
            Some(Payload::CloseRequest(close)) => assert_eq!(close.connect_id, id),
            other => panic!("no close but {other:?}"),
        }
    }
    world.server_metric(ENDED, 1.0).await;
    honest.stop().await;
}

/// Limit (memory): Control packets and HTTP/2 frames that wait for peers that do not read
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_ends_the_link_of_a_server_that_reads_nothing_and_calls_again() {
    let world = World::start(&[]).await;
    let mut server = StubServer::start(&world).await;
    let agent = world.agent_of(server.port(), "a", &BUDGET).await;
    let mut link = server.accept_deaf().await.greet(&[]);
    unknown(&mut link, 1..40_000);
    let scrape = agent.metrics.scrape();
    until("the agent ends the link", || {
        sample(&scrape.text(), ENDED).is_some_and(|count| count >= 1.0)
    })
    .await;
    let _again = server.accept().await.greet(&[]);
    agent.stop().await;
}

/// Links of one certificate, each with as many closes as a link could once hold.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_links_that_read_nothing_kill_no_server() {
    let links = nightly(128, 32);
    const MIB: u64 = 1 << 20;
    let server_group = match MemoryCgroup::new("unread", 160 * MIB) {
        Ok(group) => group,
        Err(why) => return skip("memory cgroups", &why),
    };
    let (port, _target) = targets::echo().await;
    let mut world = World::start(&[
        "--process-budget=64MiB",
        "--proxy-strategies=destHost",
        "--log-format=json",
    ])
    .await;
    world.stop_server(Duration::ZERO).await;
    let mut server = server_group.start("server", &world.server_args("0"), world.dir.path());
    let (agents, health) = (server.address("agents"), server.address("health"));
    let flags = ["--agent-identifiers=ipv4=127.0.0.1"];
    let honest = world.agent_of(agents.port(), "honest", &flags).await;
    metric(health, "adit_links{peer=\"adit\"}", 1.0).await;
    let mut hostile = Vec::new();
    for number in 0..links {
        let (connection, window) = Connection::deaf_agent_at(&world, agents).await;
        let mut link = connection.link(&format!("deaf-{number}"), "").await;
        unknown(&mut link, 1..65_000);
        hostile.push((link, connection, window));
    }
    at_least(health, ENDED, 1.0).await;
    stands_still(async || value(health, ENDED).await.to_bits()).await;
    let ended = value(health, ENDED).await;
    println!(
        "MEASURED {links} links that read nothing: {ended} ended, {} bytes queued; resident {} MiB, most in the cgroup {} MiB",
        value(health, "adit_queued_bytes").await,
        server.resident_bytes() / MIB,
        server_group.most_bytes() / MIB,
    );
    assert!(server.ended().is_none(), "killed");
    assert!(ended < links as f64, "all links of one owner were ended");
    let mut echo = connect::open(&world.connect(), &format!("127.0.0.1:{port}")).await;
    connect::echo(&mut echo, b"beside them").await;
    honest.stop().await;
}
