//! Two Envoys between agents and servers, as KKP has them: one takes TCP connections on the node, and carries them by CONNECT over HTTP/2
//! to the other, with the configurations of docs/guides/routers.md.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use tempfile::TempDir;
use tokio::io::AsyncWriteExt as _;

use super::routers::ApiServer;
use crate::support::lanes::{HITS, IDLE, value, warm};
use crate::support::process::Process;
use crate::support::routers::{Kind, block, envoy, placed};
use crate::support::wait::{until, until_still};
use crate::support::world::World;
use crate::support::{connect, ports, targets};

const HEADING: &str = "Inside HTTP/2 CONNECT";

struct Pair {
    dir: TempDir,
    /// Where a node's programs find the servers and the API server.
    servers: SocketAddr,
    api_server: SocketAddr,
    control: String,
    ends: Option<[Process; 2]>,
}

impl Pair {
    fn start(servers: SocketAddr, api_server: SocketAddr) -> Self {
        let [near, near_api, between] =
            [(); 3].map(|()| SocketAddr::from(([127, 0, 0, 1], ports::free())));
        let node = block(HEADING, "yaml", 0);
        let node = placed(&node, "127.0.0.1:8091", near);
        let node = placed(&node, "127.0.0.1:6443", near_api);
        let node = placed(&node, "203.0.113.1:8088", between);
        let control = block(HEADING, "yaml", 1);
        let control = placed(&control, "8088", between);
        let control = placed(&control, "10.0.0.1:8091", servers);
        let control = placed(&control, "10.0.0.9:6443", api_server);
        let dir = TempDir::new().expect("a folder");
        let ends = [
            envoy("node", &node, dir.path()),
            envoy("control", &control, dir.path()),
        ];
        Self {
            dir,
            servers: near,
            api_server: near_api,
            control,
            ends: Some(ends),
        }
    }

    /// Kills the Envoy of the control plane.
    fn stop_control(&mut self) {
        let ends = self.ends.as_mut().expect("they run");
        ends[1].kill();
    }

    fn run_control(&mut self) {
        let ends = self.ends.as_mut().expect("they run");
        ends[1] = envoy("control", &self.control, self.dir.path());
    }
}

/// Links and lanes, and beside them a client of the node, also after one Envoy was away.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_and_a_nodes_client_pass_http2_connect() {
    const BYTES: usize = 8 << 20;
    if !Kind::Envoy.is_here("an_agent_and_a_nodes_client_pass_http2_connect") {
        return;
    }
    let (target, _echo) = targets::local_echo().await;
    let world = World::start(&[]).await;
    let api_server = ApiServer::start(&world).await;
    let mut pair = Pair::start(world.server().agents, api_server.address);
    let _agent = world.agent_of(pair.servers.port(), "agent-1", &[]).await;
    for restarts in 0..=1 {
        if restarts > 0 {
            pair.stop_control();
            world.links(0).await;
            world.server_metric(IDLE, 0.0).await;
            pair.run_control();
        }
        world.links(1).await;
        warm(&world).await;
        let before = value(&world, HITS);
        world.assert_serves(&target).await;
        let mut stream = connect::open(&world.connect(), &target).await;
        connect::echo_to_the_end(&mut stream, &targets::pattern(0, BYTES)).await;
        assert_eq!(value(&world, HITS), before + 3.0);
        ApiServer::is_at(&world, pair.api_server).await;
    }
}

/// All connections of the node share one connection between the Envoys.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stalled_readers_delay_no_others_in_http2_connect() {
    const STALLED: usize = 8;
    if !Kind::Envoy.is_here("stalled_readers_delay_no_others_in_http2_connect") {
        return;
    }
    let (target, _echo) = targets::local_echo().await;
    let sent = Arc::new(AtomicU64::new(0));
    let sending = Arc::clone(&sent);
    let (source, _source) = targets::serve(move |mut stream| {
        let sent = Arc::clone(&sending);
        async move {
            loop {
                sent.fetch_add(stream.write(&[7; 16 * 1024]).await? as u64, Relaxed);
            }
        }
    })
    .await;
    let world = World::start(&[]).await;
    let api_server = ApiServer::start(&world).await;
    let pair = Pair::start(world.server().agents, api_server.address);
    let _agent = world.agent_of(pair.servers.port(), "agent-1", &[]).await;
    warm(&world).await;
    let source = format!("127.0.0.1:{source}");
    let _stalled = connect::open_many(&world.connect(), &source, STALLED).await;
    // The first bytes have come, and no more are taken.
    until("bytes", || sent.load(Relaxed) > 0).await;
    until_still("all readers stall", || sent.load(Relaxed)).await;
    for _dial in 0..20 {
        world.assert_serves(&target).await;
    }
    ApiServer::is_at(&world, pair.api_server).await;
}
