//! A thousand agents with tokens at once, alone and beside strangers.

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
/// Most of all links and lanes that may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// Lanes that are being connected at once: fewer than one address may have.
const AT_ONCE: usize = 32;
/// Silent strangers: as many as connections may wait to be bound.
const STRANGERS: u32 = 256;

/// Who is linked, and what its lanes are bound by.
struct Linked {
    _connection: Vec<Connection>,
    links: Vec<(Call, LaneGrant)>,
}

/// Links of all agents, as after a server's restart. All are at one address, which has few places until the first of them is let
/// in, so some have to come again, as agents do.
async fn link_all(tokens: &Tokens) -> Linked {
    let began = Instant::now();
    let mut connections = Vec::new();
    // As many as one process has descriptors for, over connections that each have some.
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
async fn a_thousand_agents_come_back_with_as_many_reviews() {
    let tokens = Tokens::start(&[]).await;
    let _linked = link_all(&tokens).await;
    assert_eq!(tokens.api.reviews(), AGENTS);
    let refused = "adit_agents_refused_total{reason=\"token\"}";
    assert_eq!(value(&tokens.world, refused), 0.0);
}

/// Somebody of an address of its own who wants a lane and then says nothing.
async fn stranger(tokens: &Tokens, number: u32) -> Stub {
    let address = Ipv4Addr::from(u32::from(Ipv4Addr::new(127, 8, 0, 1)) + number);
    let socket = TcpSocket::new_v4().expect("a socket");
    socket
        .bind(SocketAddr::from((address, 0)))
        .expect("an address of loopback");
    let tcp = socket.connect(tokens.world.server().agents).await;
    Stub::nobody_over(tcp.expect("it listens"), &tokens.world).await
}

/// Half of all places are kept for addresses that links come from.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_agents_get_lanes_beside_silent_strangers() {
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
    // An agent learns a moment before its lane is counted.
    let idle = "adit_lanes{state=\"idle\"}";
    until("all lanes", || value(&tokens.world, idle) == 1000.0).await;
    // They were silent all the while; as many as are let wait were, and more if the first had to go meanwhile.
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
