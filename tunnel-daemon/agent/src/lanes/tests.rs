//! Tests of bound lanes, needed or not, and of servers that refuse further lanes.

use std::future::pending;

use adit_core::ids::LinkId;
use adit_core::lane::{FrameReader, LaneEvent, LaneRole, OpenRequest};
use adit_core::wire::metadata::LANE_SECRET_BYTES;
use bytes::Bytes;
use futures_util::FutureExt as _;
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::link::tests::context;
use adit_host::descriptors::Descriptors;
use adit_tunnel::lane::LaneRoom;

fn keeper(name: &str, context: &LinkContext) -> LaneKeeper {
    keeper_of(name, 8, context)
}

fn keeper_of(name: &str, lanes_max: u32, context: &LinkContext) -> LaneKeeper {
    let grant = LaneGrant {
        link: LinkId(1),
        lanes_max,
        secret: [7; LANE_SECRET_BYTES].into(),
    };
    LaneKeeper::new(
        ServerId::new(name),
        &grant,
        lanes_max as usize,
        false,
        context,
    )
}

/// Both ends of a lane, the agent's first.
async fn pair() -> (Lane, Lane) {
    let lanes = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let socket = TcpStream::connect(lanes.local_addr().unwrap());
    let (socket, accepted) = tokio::join!(socket, lanes.accept());
    let end = |socket, role| Lane::in_clear(socket, role, FrameReader::default(), Bytes::new());
    (
        end(socket.unwrap(), LaneRole::Agent),
        end(accepted.unwrap().0, LaneRole::Server),
    )
}

/// As many lanes as the keeper may have: their agent ends and their server ends.
async fn pairs(keeper: &LaneKeeper) -> (Vec<Lane>, Vec<Lane>) {
    let (mut lanes, mut servers) = (Vec::new(), Vec::new());
    for _lane in 0..keeper.lanes_max() {
        let (lane, server) = pair().await;
        lanes.push(lane);
        servers.push(server);
    }
    (lanes, servers)
}

/// Binds the next of these lanes, if one is left, and counts the attempts.
async fn next_of(
    keeper: &LaneKeeper,
    lanes: &Mutex<Vec<Lane>>,
    opened: &AtomicUsize,
) -> Result<(LaneKeeper, Lane), OpenError> {
    opened.fetch_add(1, Relaxed);
    let lane = lanes.lock().unwrap().pop();
    match lane {
        Some(lane) => Ok((keeper.clone(), lane)),
        None => pending().await,
    }
}

/// A lane counts from its binding, not from the first poll of its task.
#[tokio::test]
async fn no_more_lanes_are_opened_than_are_wanted() {
    let context = context(10);
    let ours = keeper("ours", &context);
    let (lanes, _servers) = pairs(&ours).await;
    let (lanes, opened) = (Mutex::new(lanes), AtomicUsize::new(0));
    let open = |_cause| next_of(&ours, &lanes, &opened);
    let all_wait = async {
        while ours.count().idle < ours.wanted() {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        () = all_wait => (),
        () = ours.clone().run(open) => panic!("it keeps lanes"),
    }
    assert_eq!(opened.load(Relaxed), ours.wanted());
}

/// A server may ask for more lanes than there are descriptors. Each attempt here lasts for ever.
///
/// Limit (peers): Lanes that servers ask for at once
#[tokio::test]
async fn lanes_that_a_server_asks_for_are_opened_at_once_up_to_a_limit() {
    for (asked, expected) in [(0, 0), (13, 13), (u32::MAX, Growth::GRANT_MAX)] {
        let context = context(10);
        let ours = keeper_of("ours", 1000, &context);
        let (missing, granted) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let open = |cause| {
            let count = match cause {
                Cause::Missing => &missing,
                Cause::Asked => &granted,
            };
            count.fetch_add(1, Relaxed);
            pending()
        };
        let opens = async {
            for _again in 0..3 {
                ours.want(Want::Open(asked));
                for _look in 0..100 {
                    tokio::task::yield_now().await;
                }
                if asked < 100 {
                    return;
                }
            }
        };
        tokio::select! {
            () = opens => (),
            () = ours.clone().run(open) => panic!("it keeps lanes"),
        }
        let opened = (missing.load(Relaxed), granted.load(Relaxed));
        assert_eq!(opened, (Growth::AT_ONCE, expected));
    }
}

/// A server may open a tunnel on a lane as soon as the lane is bound, so its slot must be reserved before that.
#[tokio::test]
async fn a_lane_slot_is_reserved_before_opening() {
    let mut context = context(10);
    context.lane_room = Arc::new(LaneRoom::new(1, Arc::new(Descriptors::unlimited())));
    let [first, second] = ["first", "second"].map(|name| keeper(name, &context));
    let opened = AtomicUsize::new(0);
    let nothing = Mutex::new(Vec::new());
    let open = |_cause| next_of(&first, &nothing, &opened);
    let looks = async {
        while opened.load(Relaxed) == 0 {
            tokio::task::yield_now().await;
        }
        // The second keeper checks for room as well.
        second.missed();
        for _look in 0..100 {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        () = looks => (),
        () = first.clone().run(open) => panic!("it keeps lanes"),
        () = second.clone().run(|_cause| next_of(&second, &nothing, &opened)) => panic!("it keeps lanes"),
    }
    assert_eq!(opened.load(Relaxed), 1);
    // A lane that is being opened does not count as busy.
    assert_eq!(first.count().busy, 0);
}

/// The lane already holds the last slot, so its own slot must not block it.
#[tokio::test]
async fn a_lane_of_another_link_is_kept_when_it_takes_the_last_slot() {
    let mut context = context(10);
    context.lane_room = Arc::new(LaneRoom::new(1, Arc::new(Descriptors::unlimited())));
    let (ours, theirs) = (keeper("ours", &context), keeper_of("theirs", 1, &context));
    let (lane, _server) = pair().await;
    let (lanes, opened) = (Mutex::new(vec![lane]), AtomicUsize::new(0));
    let kept = async {
        tokio::select! {
            () = all_idle(&theirs, 1) => (),
            () = ours.clone().run(|_cause| next_of(&theirs, &lanes, &opened)) => panic!("it keeps lanes"),
        }
    };
    let kept = tokio::time::timeout(Duration::from_secs(10), kept).await;
    assert!(kept.is_ok(), "{:?} of theirs", theirs.count());
}

/// Waits until exactly `idle` lanes exist and all are idle. Paused time does not advance meanwhile, because the task is
/// never idle.
async fn all_idle(keeper: &LaneKeeper, idle: usize) {
    let wanted = Lanes {
        idle,
        ..Lanes::default()
    };
    while keeper.count() != wanted {
        tokio::task::yield_now().await;
    }
}

/// Lanes opened for a burst are closed again, down to the lanes that are always kept.
///
/// Limit (peers): Idle lanes of an agent
#[tokio::test(start_paused = true)]
async fn unused_lanes_are_drained_after_a_while() {
    const DAY: Duration = Duration::from_secs(24 * 60 * 60);
    let context = context(10);
    let ours = keeper("ours", &context);
    let (lanes, servers) = pairs(&ours).await;
    // A server closes a lane on DRAIN; these ends do the same.
    let closing = servers
        .into_iter()
        .map(|mut lane| async move { matches!(lane.event().await, Ok(LaneEvent::Draining)) });
    let mut closing: FuturesUnordered<_> = closing.collect();
    let (lanes, opened) = (Mutex::new(lanes), AtomicUsize::new(0));
    let open = |_cause| next_of(&ours, &lanes, &opened);
    let shrinks = async {
        all_idle(&ours, 4).await;
        ours.missed();
        all_idle(&ours, 8).await;
        let since = moment();
        let shrunk = async {
            while ours.wanted() > 4 {
                tokio::time::sleep(LOOK_EVERY).await;
            }
        };
        let shrunk = tokio::time::timeout(DAY, shrunk).await;
        shrunk.expect("it wants fewer at last");
        let unused = moment().since(since);
        // DRAIN passes through the kernel, which does not follow paused time.
        tokio::time::resume();
        for _lane in 0..4 {
            assert_eq!(closing.next().await, Some(true));
        }
        all_idle(&ours, 4).await;
        tokio::time::pause();
        let further = tokio::time::timeout(Duration::from_secs(600), closing.next()).await;
        assert!(further.is_err(), "the others are kept: {further:?}");
        unused
    };
    let unused = tokio::select! {
        unused = shrinks => unused,
        () = ours.clone().run(open) => panic!("it keeps lanes"),
    };
    // The first one-minute window includes the time with fewer lanes; the next window is evaluated only at the following
    // check.
    assert!((60..150).contains(&unused.as_secs()), "{unused:?}");
    assert_eq!((opened.load(Relaxed), ours.wanted()), (8, 4));
}

/// A draining lane takes no more tunnels, however long the server keeps it, so the agent opens a replacement.
#[tokio::test]
async fn a_lane_that_its_server_drains_is_not_idle() {
    let context = context(10);
    let ours = keeper("ours", &context);
    let (lanes, mut servers) = pairs(&ours).await;
    // The lane that is opened first.
    let mut leaving = servers.pop().unwrap();
    let (lanes, opened) = (Mutex::new(lanes), AtomicUsize::new(0));
    let open = |_cause| next_of(&ours, &lanes, &opened);
    let replaced = async {
        all_idle(&ours, 4).await;
        leaving.end().drain();
        let wanted = Lanes {
            idle: 4,
            busy: 1,
            opening: 0,
        };
        while ours.count() != wanted {
            // Polling sends DRAIN; the agent does not close the lane.
            assert!(leaving.event().now_or_never().is_none());
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        () = replaced => (),
        () = ours.clone().run(open) => panic!("it keeps lanes"),
        () = tokio::time::sleep(Duration::from_secs(30)) => panic!("{:?}", ours.count()),
    }
    assert_eq!(opened.load(Relaxed), 5);
}

/// Attempts within ten minutes at a server with room for one lane. Tunnels on that lane succeed at the given interval.
async fn attempts_beside_one_lane(tunnel_every: Option<Duration>) -> usize {
    let context = context(10);
    let ours = keeper("ours", &context);
    let (lane, _server) = pair().await;
    let (lane, attempts) = (Mutex::new(Some(lane)), AtomicUsize::new(0));
    let open = |_cause| async {
        attempts.fetch_add(1, Relaxed);
        let lane = lane.lock().unwrap().take();
        lane.map(|lane| (ours.clone(), lane))
            .ok_or_else(|| OpenError("full".to_owned()))
    };
    let tunnels = async {
        let Some(every) = tunnel_every else { return };
        loop {
            tokio::time::sleep(every).await;
            ours.0.proved.store(true, Relaxed);
            ours.0.changed.notify_one();
        }
    };
    let keeping = async { tokio::join!(ours.clone().run(open), tunnels) };
    let ten_minutes = tokio::time::timeout(Duration::from_secs(600), keeping);
    assert!(ten_minutes.await.is_err(), "it keeps lanes");
    assert_eq!(ours.count().idle, 1);
    attempts.load(Relaxed)
}

/// One bound lane does not end the backoff towards a server that refuses further lanes.
#[tokio::test(start_paused = true)]
async fn attempts_to_a_server_with_room_for_one_lane_back_off() {
    let attempts = attempts_beside_one_lane(None).await;
    // Four concurrent attempts, then one after each backoff, which doubles up to a minute.
    assert!((10..25).contains(&attempts), "{attempts}");
}

/// Successful tunnels on the bound lane do not end the backoff either.
#[tokio::test(start_paused = true)]
async fn tunnels_on_existing_lanes_end_no_backoff() {
    let attempts = attempts_beside_one_lane(Some(Duration::from_millis(100))).await;
    assert!((4..25).contains(&attempts), "{attempts}");
}

/// Behind a balancer of many servers most attempts reach other servers. Time does not advance here, so a backoff would
/// never end.
///
/// Limit (times): Backoff of lanes after three failures in a row
#[tokio::test(start_paused = true)]
async fn one_of_five_servers_behind_a_balancer_gets_its_lanes_without_a_backoff() {
    const SERVERS: usize = 5;
    /// Far more attempts than needed, yet finished within about a second.
    const TURNS: usize = 1_000_000;
    let context = context(100);
    let (ours, other) = (keeper("ours", &context), keeper_of("other", 1000, &context));
    other.0.idle.store(1000, Relaxed);
    let (lanes, _servers) = pairs(&ours).await;
    let (lanes, attempts) = (Mutex::new(lanes), AtomicUsize::new(0));
    let open = |_cause| async {
        let at = attempts.fetch_add(1, Relaxed);
        if at % SERVERS == SERVERS - 1 {
            let lane = lanes.lock().unwrap().pop();
            return lane.map_or_else(
                || Err(OpenError("none is left".to_owned())),
                |lane| Ok((ours.clone(), lane)),
            );
        }
        let (lane, _gone) = pair().await;
        Ok((other.clone(), lane))
    };
    let all_there = async {
        for _turn in 0..TURNS {
            if ours.count().idle == Growth::WARM {
                return true;
            }
            tokio::task::yield_now().await;
        }
        false
    };
    let are_there = tokio::select! {
        are_there = all_there => are_there,
        () = ours.clone().run(open) => panic!("it keeps lanes"),
    };
    assert!(are_there, "{:?} after {attempts:?} attempts", ours.count());
    assert!(attempts.load(Relaxed) >= SERVERS * Growth::WARM);
}

/// Behind a balancer a lane may reach a server that has enough lanes. The server may open a tunnel before the agent sends
/// DRAIN.
///
/// Limit (isolation): A dial on a lane that its agent is about to close | served
#[tokio::test]
async fn a_tunnel_on_an_excess_lane_is_served() {
    let context = context(10);
    let (ours, other) = (keeper("ours", &context), keeper("other", &context));
    other.0.idle.store(8, Relaxed);
    let target = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (lane, mut server) = pair().await;
    let lane = Mutex::new(Some(lane));
    let given = AtomicBool::new(false);
    let open = |_cause| async {
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
        forward: None,
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

/// Limit (times): A server of the agent's zone that had no lane for a connection of the node within 1 s | is not preferred for 5 s
#[tokio::test(start_paused = true)]
async fn a_near_server_that_lacked_a_lane_is_not_preferred_for_a_while() {
    let context = context(1);
    let grant = LaneGrant {
        link: LinkId(1),
        lanes_max: 1,
        secret: [7; LANE_SECRET_BYTES].into(),
    };
    let near = LaneKeeper::new(ServerId::new("near"), &grant, 1, true, &context);
    assert!(near.is_near() && !keeper("far", &context).is_near());
    near.lacks();
    assert!(!near.is_near());
    tokio::time::advance(LACKED_FOR).await;
    assert!(near.is_near());
}
