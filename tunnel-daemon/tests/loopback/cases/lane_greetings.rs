//! Frames that a server sends right after READY. Dials wait for lanes, so an OPEN may arrive together with READY.

use adit_core::lane::{CONTROL_BYTES_MAX, LaneEvent};

use crate::support::lanes::IDLE;
use crate::support::server_lane::{ServerLane, ready, request};
use crate::support::stub_server::StubServer;
use crate::support::targets;
use crate::support::world::{World, agent_metric};

/// How frames are packed into TLS records.
#[derive(Clone, Copy, Debug)]
enum Records {
    /// READY in one record and all other frames in the next, as Adit's server sends them.
    AsOurServer,
    /// One record per frame.
    OneEach,
    /// All frames in as few records as possible.
    Together,
}

/// An address with a name of the maximum length that resolves to this machine.
fn longest_name(port: u16) -> String {
    let label = "x".repeat(63);
    let name = format!("{label}.{label}.{label}.{}.localhost", "y".repeat(51));
    assert_eq!(name.len(), 253);
    format!("{name}:{port}")
}

/// The longest address that fits an OPEN beside its protocol. It has no port.
fn longest_address() -> String {
    "a".repeat(CONTROL_BYTES_MAX - "\0\x03tcp".len())
}

/// The next event other than PONG.
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

/// The agent loses no frame, and the lane stays usable.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_of_any_length_in_one_write_with_ready_reach_the_lane() {
    let (port, _target) = targets::echo().await;
    let world = World::start(&[]).await;
    let (named, longest) = (longest_name(port), longest_address());
    for records in [Records::AsOurServer, Records::OneEach, Records::Together] {
        for address in [&named, &longest] {
            let mut server = StubServer::start(&world).await;
            let _agent = world.agent_of(server.port(), "a", &[]).await;
            let _link = server.accept().await.greet_with_lane();
            let mut lane = ServerLane::greet(&mut server).await;
            // WANT and OPEN, with a PING before and after.
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
                // The refused OPEN leaves nothing on the lane: another one works.
                lane.end.open(&request(&named), 0).expect("it is free");
            }
            serves(&mut lane).await;
        }
    }
}

/// The second half of the record arrives after the lane is bound.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partial_record_behind_ready_reaches_the_lane() {
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
    agent_metric(&agent, IDLE, 1.0).await;
    lane.write_sealed(second).await;
    serves(&mut lane).await;
}
