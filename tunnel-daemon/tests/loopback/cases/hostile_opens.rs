//! Agents that request tunnels without permission, or too many of them. The server refuses and counts the requests. Others
//! are not affected.

use adit_core::ids::DialId;
use adit_core::lane::{FrameType, LaneEvent, OpenRequest, RefusalCode};
use adit_core::peer::Forward;
use adit_core::registry::{Scope, Strategy};

use crate::support::lanes::value;
use crate::support::server_lane::request;
use crate::support::stub_lane::{self, Stub, bound, frame, one_idle};
use crate::support::targets;
use crate::support::world::World;

/// Asserts that the server denies an OPEN and keeps the lane.
async fn assert_denied(lane: &mut Stub) {
    match lane.event().await {
        Some(LaneEvent::Failed { code, .. }) => assert_eq!(code, RefusalCode::Denied),
        other => panic!("instead of a refusal: {other:?}"),
    }
    assert_eq!(lane.event().await, Some(LaneEvent::Idle));
}

/// Only the server may request a raw lane. An agent that requests one is refused, even for an allowed destination, and keeps
/// its lane.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_requests_a_raw_lane_is_refused() {
    let (target, _echo) = targets::local_echo().await;
    let address = target.clone();
    let world = World::start(&[&format!("--allowed-destination={address}")]).await;
    let (_connection, _call, mut lane) = bound(&world).await;
    one_idle(&world).await;
    let ask = |raw| OpenRequest {
        raw,
        ..request(&address)
    };
    lane.end.open(&ask(true), 0).expect("the lane is free");
    assert_denied(&mut lane).await;
    let failed = "adit_node_refusals_total{reason=\"failed\"}";
    assert_eq!(value(&world, failed), 1.0);
    // A framed tunnel on the same lane is allowed.
    lane.end.open(&ask(false), 0).expect("the lane is free");
    assert!(matches!(lane.event().await, Some(LaneEvent::Opened)));
    lane.end.send(b"with frames".to_vec().into());
    assert_eq!(
        lane.event().await,
        Some(LaneEvent::Data(b"with frames".to_vec().into()))
    );
}

/// Only servers forward dials, on a port of their own: an agent that says it forwards one is refused, whatever it asks for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_forwards_a_dial_is_refused_and_counted() {
    let (target, _echo) = targets::local_echo().await;
    let world = World::start(&[&format!("--allowed-destination={target}")]).await;
    let (_connection, _call, mut lane) = bound(&world).await;
    one_idle(&world).await;
    let forward = Forward {
        scope: Scope::named(Strategy::Default, "").expect("a key"),
        time_left: None,
        owner: None,
        dial: DialId(1),
        client: String::new(),
    };
    let ask = OpenRequest {
        forward: Some(forward.encode()),
        ..request(&target)
    };
    lane.end.open(&ask, 0).expect("the lane is free");
    assert_denied(&mut lane).await;
    let offences = "adit_protocol_offences_total{kind=\"forward\"}";
    assert_eq!(value(&world, offences), 1.0);
}

/// Leading zeros of a port are valid. A long address would occupy memory for as long as its tunnel is open.
///
/// Limit (sizes): Protocol and address of a dial
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_asks_for_a_long_address_is_refused() {
    let (port, _echo) = targets::echo().await;
    let allowed = format!("--allowed-destination=127.0.0.1:{port}");
    let world = World::start(&[&allowed]).await;
    let (_connection, _call, mut lane) = bound(&world).await;
    one_idle(&world).await;
    let ask = |zeros| request(&format!("127.0.0.1:{}{port}", "0".repeat(zeros)));
    lane.end.open(&ask(1024), 0).expect("the lane is free");
    assert_denied(&mut lane).await;
    let refused = "adit_node_refusals_total{reason=\"not_allowed\"}";
    assert_eq!(value(&world, refused), 1.0);
    lane.end.open(&ask(900), 0).expect("the lane is free");
    assert!(matches!(lane.event().await, Some(LaneEvent::Opened)));
}

/// The refusal has the code `Limit`.
///
/// Limit (peers): Tunnels requested by one agent | 200 per second, 1,000 at once
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_opens_too_often_is_rate_limited() {
    let world = World::start(&["--allowed-destination=10.0.0.1:1"]).await;
    let (_connection, _call, mut lane) = bound(&world).await;
    one_idle(&world).await;
    let request = request("10.0.0.1:80");
    let mut denied = 0;
    loop {
        lane.end.open(&request, 0).expect("the lane is free");
        match lane.event().await {
            Some(LaneEvent::Failed {
                code: RefusalCode::Denied,
                ..
            }) => denied += 1,
            Some(LaneEvent::Failed { code, .. }) => {
                assert_eq!(code, RefusalCode::Limit);
                break;
            }
            other => panic!("after {denied}: {other:?}"),
        }
        assert_eq!(lane.event().await, Some(LaneEvent::Idle));
        assert!(denied < 100_000, "no end of it");
    }
    assert!(denied >= 1000, "{denied}");
    let series = "adit_node_refusals_total{reason=\"limit\"}";
    assert_eq!(value(&world, series), 1.0);
}

fn open(sequence: u16) -> Vec<u8> {
    frame(FrameType::Open, sequence, b"\0\x03tcp10.0.0.1:80")
}

/// Otherwise endless OPENs would occupy the task that serves all idle lanes.
///
/// Limit (peers): Refused OPENs in one batch of an idle lane | 64, then the lane ends
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_with_endless_forbidden_opens_loses_its_lane() {
    const OPENS: u16 = 1000;
    let world = World::start(&[]).await;
    let (_connection, _call, mut lane) = bound(&world).await;
    one_idle(&world).await;
    // One TLS record per OPEN, so that each answer leaves before the next OPEN is read.
    for sequence in 1..=OPENS {
        lane.bytes(&open(sequence)).await;
    }
    let mut answers = 0;
    while lane.piece().await.is_some() {
        answers += 1;
    }
    assert!(answers < OPENS, "each was answered");
    let closed = "adit_lanes_closed_total{reason=\"violation\"}";
    assert_eq!(value(&world, closed), 1.0);
}

/// OPENs without waiting for answers, both allowed and forbidden. At most the agent loses its lane.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pipelined_opens_cost_an_agent_at_most_their_lane() {
    for flags in [&[][..], &["--allowed-destination=10.0.0.1:1"]] {
        let world = World::start(flags).await;
        let (_connection, _call, grant) = stub_lane::agent(&world).await;
        let mut lane = Stub::granted(&world, &grant).await;
        one_idle(&world).await;
        let frames: Vec<u8> = (1..=20_000).flat_map(open).collect();
        // Sends all at once, then reads answers until the server closes the lane or has answered everything.
        lane.bytes(&frames).await;
        let mut answers = 0;
        while answers < 20_000 && lane.piece().await.is_some() {
            answers += 1;
        }
        let mut other = Stub::connect(&world, "agent").await;
        assert!(other.bind(&grant).await, "the link and the server live");
        drop(lane);
        one_idle(&world).await;
    }
}
