//! Tests of tunnels opened by both ends of one lane: in turn, crossing each other, and cancelled at any stage.

use proptest::prelude::*;

use super::*;

fn with_origin(source: &str, destination: &str) -> OpenRequest {
    let origin = Origin {
        source: source.parse().unwrap(),
        destination: destination.parse().unwrap(),
    };
    OpenRequest {
        origin: Some(origin),
        forward: None,
        ..request()
    }
}

#[test]
fn both_ends_open_alternately_on_one_lane_past_sequence_wraparound() {
    let mut pair = Pair::new();
    for round in 0..70_000_u32 {
        let opener = if round % 2 == 0 { AGENT } else { SERVER };
        pair.ends[opener].open(&request(), 0).unwrap();
        pair.settle();
        assert_eq!(pair.take(1 - opener), [LaneEvent::Open(request())]);
        if round % 3 == 0 {
            pair.ends[1 - opener].refuse(RefusalCode::Refused, "");
        } else {
            pair.ends[1 - opener].accept();
            // Either end closes first.
            let closer = if round % 5 < 2 { opener } else { 1 - opener };
            pair.settle();
            pair.ends[closer].close("");
        }
        pair.settle();
        pair.assert_idle();
        pair.take(opener);
        pair.take(1 - opener);
    }
    assert_eq!(u32::from(pair.ends[AGENT].sequence()), 70_000 % 65_536);
}

#[test]
fn after_a_cancelled_agent_open_both_ends_can_open() {
    // Stages of the agent's OPEN: 0 queued, 1 sent, 2 read; of the answer: 3 queued, 4 sent, 5 read.
    for stage in 0..6 {
        for refused in [false, true] {
            let mut pair = Pair::new();
            pair.ends[AGENT].open(&request(), 0).unwrap();
            if stage >= 1 {
                pair.write(AGENT, 1);
            }
            if stage >= 2 {
                pair.read(SERVER, usize::MAX).unwrap();
            }
            if stage >= 3 && refused {
                pair.ends[SERVER].refuse(RefusalCode::Denied, "");
            } else if stage >= 3 {
                pair.ends[SERVER].accept();
            }
            if stage >= 4 {
                pair.write(SERVER, 1);
            }
            if stage >= 5 {
                pair.read(AGENT, usize::MAX).unwrap();
            }
            pair.ends[AGENT].reset("the client gave up");
            pair.settle();
            pair.assert_idle();
            pair.take(AGENT);
            pair.take(SERVER);
            for opener in [SERVER, AGENT] {
                pair.ends[opener].open(&request(), 0).unwrap();
                pair.settle();
                let seen = pair.take(1 - opener);
                assert_eq!(seen, [LaneEvent::Open(request())], "stage {stage}");
                pair.ends[1 - opener].accept();
                pair.settle();
                assert_eq!(pair.take(opener), [LaneEvent::Opened]);
                pair.ends[opener].close("");
                pair.settle();
                pair.take(AGENT);
                pair.take(SERVER);
            }
        }
    }
}

#[test]
fn server_open_crossing_a_cancelled_agent_open_counts_as_crossed() {
    let mut pair = Pair::new();
    pair.ends[AGENT].open(&request(), 0).unwrap();
    pair.write(AGENT, 1);
    pair.ends[SERVER].open(&request(), 0).unwrap();
    pair.write(SERVER, 1);
    pair.ends[AGENT].reset("the client gave up");
    pair.settle();
    pair.assert_idle();
    assert_eq!(pair.take(AGENT), [LaneEvent::Idle], "nothing to dial");
    let seen = pair.take(SERVER);
    assert!(pair.ends[SERVER].has_crossed());
    assert_eq!(seen, [reset("the client gave up"), LaneEvent::Idle]);
    pair.open();
}

#[test]
fn open_carries_the_origin_of_the_connection() {
    for asked in [
        with_origin("10.0.0.7:40000", "127.0.0.1:6443"),
        with_origin("[fd00::7]:1", "[::1]:65535"),
        with_origin("10.0.0.7:0", "[fd00::1]:2"),
        OpenRequest {
            raw: true,
            ..with_origin("10.0.0.7:1", "10.0.0.8:2")
        },
    ] {
        let mut pair = Pair::new();
        pair.ends[AGENT].open(&asked, 0).unwrap();
        pair.write(AGENT, 1);
        pair.read(SERVER, usize::MAX).unwrap();
        assert_eq!(pair.take(SERVER), [LaneEvent::Open(asked)]);
    }
    for broken in [
        &b"\0\x03tcp"[..],
        b"\0\x03tcp\x05aaaaaa\x04bbbbbb",
        b"\0\x03tcp\x04aaaaaa\x04bbbbb",
        b"\0\x03tcp\x06aaaaaa\x04bbbbbb",
    ] {
        let piece = frame(FrameType::Open, Header::ORIGIN, 1, broken);
        let read = LaneEnd::new(LaneRole::Server).handle(piece);
        assert_eq!(read, Err(LaneViolation::Unreadable(FrameType::Open)));
    }
}

#[test]
fn refusals_keep_their_reason_and_unknown_ones_are_failures() {
    use RefusalCode::{
        Busy, Denied, Failed, Leaving, Limit, NotFound, Refused, TimedOut, Unreachable,
    };
    let known = [
        Failed,
        Busy,
        Denied,
        Refused,
        Unreachable,
        TimedOut,
        NotFound,
        Limit,
        Leaving,
    ];
    for code in known {
        let mut pair = Pair::new();
        pair.ends[AGENT].open(&request(), 0).unwrap();
        pair.settle();
        pair.ends[SERVER].refuse(code, "why");
        pair.settle();
        let text = "why".to_owned();
        assert_eq!(
            pair.take(AGENT),
            [LaneEvent::Failed { code, text }, LaneEvent::Idle]
        );
        pair.assert_idle();
    }
    let mut end = LaneEnd::new(LaneRole::Agent);
    end.open(&request(), 0).unwrap();
    end.handle(frame(FrameType::Failed, 0, 1, b"\xfe")).unwrap();
    let (code, text) = (Failed, String::new());
    assert_eq!(end.poll_event(), Some(LaneEvent::Failed { code, text }));
}

/// One end with a fixed number of tunnels to open in sequence; it retries after each yield.
#[derive(Default)]
struct Opener {
    left: usize,
    opening: bool,
    opened: usize,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// An end that yields retries; in the end both ends have opened all their tunnels.
    ///
    /// Limit (isolation): 300 simultaneous dials of each end over few lanes | all succeed and no lane is lost
    #[test]
    fn crossing_opens_all_succeed_in_the_end(turns in proptest::collection::vec((0..2_usize, 0..3_usize, any::<bool>()), 0..400)) {
        const TUNNELS: usize = 5;
        let mut pair = Pair::new();
        let mut openers = [Opener::default(), Opener::default()].map(|opener| Opener { left: TUNNELS, ..opener });
        let mut gave_up = [0; 2];
        let steady = (0..400).map(|turn| (turn % 2, usize::MAX, false));
        for (at, frames, gives_up) in turns.into_iter().chain(steady) {
            let opener = &mut openers[at];
            if !opener.opening && opener.left > 0 && pair.ends[at].open(&request(), 0).is_ok() {
                opener.opening = true;
            } else if opener.opening && gives_up && gave_up[at] < 20 {
                gave_up[at] += 1;
                opener.opening = false;
                pair.ends[at].reset("");
            }
            pair.write(at, frames);
            pair.read(1 - at, usize::MAX).map_err(|violation| TestCaseError::fail(violation.to_string()))?;
            for event in pair.take(1 - at) {
                let opener = &mut openers[1 - at];
                match event {
                    LaneEvent::Open(_) => pair.ends[1 - at].accept(),
                    LaneEvent::Opened if opener.opening => {
                        opener.opening = false;
                        opener.left -= 1;
                        opener.opened += 1;
                        pair.ends[1 - at].close("");
                    }
                    LaneEvent::Failed { .. } | LaneEvent::PeerReset { .. } => opener.opening = false,
                    _ => (),
                }
            }
        }
        for opener in &openers {
            prop_assert_eq!((opener.opened, opener.left), (TUNNELS, 0));
        }
    }
}
