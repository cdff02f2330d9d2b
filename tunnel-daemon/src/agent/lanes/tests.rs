//! A lane that was bound and is not needed.

use std::future::pending;

use adit_core::ids::LinkId;
use adit_core::lane::{FrameReader, LaneRole};
use adit_core::wire::metadata::LANE_SECRET_BYTES;
use bytes::Bytes;
use tokio::net::TcpListener;

use super::*;
use crate::agent::link::tests::context;

fn keeper(name: &str, context: &LinkContext) -> LaneKeeper {
    let grant = LaneGrant {
        link: LinkId(1),
        lanes_max: 8,
        secret: [7; LANE_SECRET_BYTES],
    };
    LaneKeeper::new(ServerId::new(name), &grant, 8, context)
}

/// Behind a balancer a lane may come to a server that has all it wants. It has said nothing yet when that server uses it.
#[tokio::test]
async fn a_tunnel_that_is_opened_on_a_lane_nobody_needs_is_served() {
    let context = context(10);
    let (ours, other) = (keeper("ours", &context), keeper("other", &context));
    other.0.idle.store(8, Relaxed);
    let lanes = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let socket = TcpStream::connect(lanes.local_addr().unwrap());
    let (socket, accepted) = tokio::join!(socket, lanes.accept());
    let end = |socket, role| Lane::in_clear(socket, role, FrameReader::default(), Bytes::new());
    let mut server = end(accepted.unwrap().0, LaneRole::Server);
    let lane = Mutex::new(Some(end(socket.unwrap(), LaneRole::Agent)));
    let given = AtomicBool::new(false);
    let open = || async {
        let lane = lane.lock().unwrap().take();
        match lane {
            Some(lane) => {
                given.store(true, Relaxed);
                Ok((other.clone(), lane))
            }
            None => pending().await,
        }
    };
    let request = OpenRequest {
        protocol: "tcp".to_owned(),
        address: target.local_addr().unwrap().to_string(),
        raw: false,
        origin: None,
    };
    server.end().open(&request, 0).unwrap();
    let opened = async {
        loop {
            match server.event().await {
                Ok(LaneEvent::Opened) => return,
                Ok(LaneEvent::Draining) => (),
                other => panic!("{other:?}"),
            }
        }
    };
    tokio::select! {
        () = opened => (),
        () = ours.clone().run(open) => panic!("it keeps lanes"),
        () = tokio::time::sleep(Duration::from_secs(30)) => panic!("no answer"),
    }
    assert!(given.load(Relaxed) && server.state().is_draining());
}
