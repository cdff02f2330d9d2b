//! What a server sends right behind its greeting of a lane: dials wait for lanes, so an OPEN may be there with READY.

use adit_core::lane::{CONTROL_BYTES_MAX, LaneEvent};

use crate::support::lanes::IDLE;
use crate::support::server_lane::{ServerLane, ready, request};
use crate::support::stub_server::StubServer;
use crate::support::targets;
use crate::support::wait::until;
use crate::support::world::{World, sample};

/// How frames become records of the TLS session.
#[derive(Clone, Copy, Debug)]
enum Records {
    /// READY is alone and what waits behind it is together, as our server does it.
    AsOurServer,
    /// One of each.
    OneEach,
    /// As few as there may be.
    Together,
}

/// The address with the longest name there is, and it is this machine's.
fn longest_name(port: u16) -> String {
    let label = "x".repeat(63);
    let name = format!("{label}.{label}.{label}.{}.localhost", "y".repeat(51));
    assert_eq!(name.len(), 253);
    format!("{name}:{port}")
}

/// An address of as many bytes as an OPEN can carry beside its protocol. It has no port.
fn longest_address() -> String {
    "a".repeat(CONTROL_BYTES_MAX - "\0\x03tcp".len())
}

/// The next event that no ping has to do with.
async fn event(lane: &mut ServerLane) -> LaneEvent {
    loop {
        match lane.event().await.expect("the agent keeps its lane") {
            LaneEvent::Pong(_) => (),
            event => return event,
        }
    }
}

async fn serves(lane: &mut ServerLane) {
    assert_eq!(event(lane).await, LaneEvent::Opened);
    lane.end.send(b"on a new lane".to_vec().into());
    let mut back: Vec<u8> = Vec::new();
    while back.len() < b"on a new lane".len() {
        match event(lane).await {
            LaneEvent::Data(bytes) => back.extend_from_slice(&bytes),
            other => panic!("instead of an echo: {other:?}"),
        }
    }
    assert_eq!(back, b"on a new lane");
}

/// READY and frames behind it, in one write: the agent loses none of them, and the lane lives on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_in_one_write_with_ready_are_the_lanes_however_long_they_are() {
    let (port, _target) = targets::echo().await;
    let world = World::start(&[]).await;
    let (named, longest) = (longest_name(port), longest_address());
    for records in [Records::AsOurServer, Records::OneEach, Records::Together] {
        for address in [&named, &longest] {
            let mut server = StubServer::start(&world).await;
            let _agent = world.agent_of(server.port(), "a", &[]).await;
            let _link = server.accept().await.greet_with_lane();
            let mut lane = ServerLane::greet(&mut server).await;
            // A wish for lanes goes with it, and there is a ping on either side.
            lane.end.ping(1);
            lane.end
                .open(&request(address), 3)
                .expect("the lane is free");
            lane.end.ping(2);
            let behind = lane.waiting();
            assert_eq!(behind.len(), 4);
            let frames = match records {
                Records::AsOurServer => vec![ready(), behind.concat()],
                Records::OneEach => [vec![ready()], behind].concat(),
                Records::Together => vec![[vec![ready()], behind].concat().concat()],
            };
            let sealed = lane.sealed(&frames);
            lane.write_sealed(&sealed).await;
            if *address == longest {
                match event(&mut lane).await {
                    LaneEvent::Failed { text, .. } => {
                        assert!(text.contains("dial address is too long"), "{text}");
                    }
                    other => panic!("{records:?}: instead of a refusal: {other:?}"),
                }
                assert_eq!(event(&mut lane).await, LaneEvent::Idle);
                // Nothing of it is left on the lane.
                lane.end.open(&request(&named), 0).expect("it is free");
            }
            serves(&mut lane).await;
        }
    }
}

/// A record whose second half is still on its way when the lane is bound belongs to the lane, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_that_is_half_there_with_ready_is_the_lanes() {
    let (port, _target) = targets::echo().await;
    let world = World::start(&[]).await;
    let mut server = StubServer::start(&world).await;
    let agent = world.agent_of(server.port(), "a", &[]).await;
    let _link = server.accept().await.greet_with_lane();
    let mut lane = ServerLane::greet(&mut server).await;
    let address = longest_name(port);
    lane.end
        .open(&request(&address), 0)
        .expect("the lane is free");
    let mut frames = vec![ready()];
    frames.extend(lane.waiting());
    let sealed = lane.sealed(&frames);
    let (first, second) = sealed.split_at(sealed.len() - 100);
    lane.write_sealed(first).await;
    until("the lane is bound", || {
        sample(&agent.metrics.scrape().text(), IDLE) == Some(1.0)
    })
    .await;
    lane.write_sealed(second).await;
    serves(&mut lane).await;
}
