//! A thousand agents with tokens at once, alone and beside peers without one.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use adit_core::wire::metadata::LaneGrant;
use futures_util::StreamExt as _;
use futures_util::stream::{FuturesUnordered, iter};
use tokio::net::TcpSocket;

use super::tokens::Tokens;
use crate::support::lanes::value;
use crate::support::raw::{Call, Connection};
use crate::support::stub_lane::{Stub, ask, grant};
use crate::support::wait::until;

const AGENTS: usize = 1000;
/// Time for all links, and for all lanes.
const PATIENCE: Duration = Duration::from_secs(30);
/// Lanes that connect concurrently: fewer than one address may have.
const AT_ONCE: usize = 32;
/// Silent peers: as many as the limit on unbound connections.
const STRANGERS: u32 = 256;

/// Links of agents, with the grants for their lanes.
struct Linked {
    _connection: Vec<Connection>,
    links: Vec<(Call, LaneGrant)>,
}

/// Links all agents, as after a restart of the server. All of them share one address, which has few slots until its first agent
/// is admitted. So some agents are refused and retry, as real agents do.
async fn link_all(tokens: &Tokens) -> Linked {
    let began = Instant::now();
    let mut connections = Vec::new();
    // This process has too few descriptors for a connection per agent, so several agents share one.
    for _connection in 0..AGENTS / 8 {
        connections.push(tokens.stranger().await);
    }
    let bearers: Vec<String> = (0..AGENTS)
        .map(|n| tokens.bearer(&format!("node-{n}")))
        .collect();
    let mut waiting: Vec<usize> = (0..AGENTS).collect();
    let mut links = Vec::new();
    while !waiting.is_empty() && began.elapsed() < PATIENCE {
        let mut calls = Vec::new();
        for n in waiting.drain(..) {
            let id = format!("agent-{n}");
            let headers = [("authorization", bearers[n].as_str())];
            let connection = &connections[n % connections.len()];
            calls.push((n, ask(connection, &id, &headers).await));
        }
        for (n, mut call) in calls {
            match grant(&mut call).await {
                Some(grant) => links.push((call, grant)),
                None => waiting.push(n),
            }
        }
    }
    assert_eq!(
        (links.len(), tokens.world.server().links()),
        (AGENTS, AGENTS)
    );
    Linked {
        _connection: connections,
        links,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_agents_link_with_one_token_review_each() {
    let tokens = Tokens::start(&[]).await;
    let _linked = link_all(&tokens).await;
    assert_eq!(tokens.api.reviews(), AGENTS);
    let refused = "adit_agents_refused_total{reason=\"token\"}";
    assert_eq!(value(&tokens.world, refused), 0.0);
}

/// A peer with its own address that asks for a lane and then sends nothing.
async fn stranger(tokens: &Tokens, number: u32) -> Stub {
    let address = Ipv4Addr::from(u32::from(Ipv4Addr::new(127, 8, 0, 1)) + number);
    let socket = TcpSocket::new_v4().expect("a socket");
    socket
        .bind(SocketAddr::from((address, 0)))
        .expect("an address of loopback");
    let tcp = socket.connect(tokens.world.server().agents).await;
    Stub::nobody_over(tcp.expect("it listens"), &tokens.world).await
}

/// Half of all slots are reserved for addresses that have links.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_agents_get_lanes_beside_silent_connections() {
    let tokens = Tokens::start(&[]).await;
    let linked = link_all(&tokens).await;
    let mut strangers = Vec::new();
    for number in 0..STRANGERS {
        strangers.push(stranger(&tokens, number).await);
    }
    let began = Instant::now();
    let lane = async |grant: &LaneGrant| {
        while began.elapsed() < PATIENCE {
            let mut lane = Stub::nobody(tokens.world.server().agents, &tokens.world).await;
            if lane.bind(grant).await {
                return Some(lane);
            }
        }
        None
    };
    let lanes: Vec<Option<Stub>> = iter(linked.links.iter().map(|(_call, grant)| lane(grant)))
        .buffer_unordered(AT_ONCE)
        .collect()
        .await;
    let bound = lanes.iter().flatten().count();
    assert_eq!((bound, lanes.len()), (AGENTS, AGENTS));
    // An agent learns that its lane is bound a moment before the server counts it.
    let idle = "adit_lanes{state=\"idle\"}";
    until("all lanes", || value(&tokens.world, idle) == 1000.0).await;
    // The silent peers kept their slots meanwhile. The server greeted as many as may wait, and more if it closed the first
    // ones.
    let mut silent = strangers
        .into_iter()
        .map(|mut stranger| async move { stranger.piece().await.is_some() })
        .collect::<FuturesUnordered<_>>();
    let mut greeted = 0;
    while let Some(is_greeted) = silent.next().await {
        greeted += usize::from(is_greeted);
    }
    assert!(greeted >= 128, "the server has said hello to {greeted}");
}
