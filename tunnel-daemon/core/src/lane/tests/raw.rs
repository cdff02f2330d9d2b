//! Tests of raw lanes: where frames end, and which end may still send frames.

use proptest::prelude::*;

use super::*;

fn raw_request() -> OpenRequest {
    OpenRequest {
        raw: true,
        ..request()
    }
}

impl Pair {
    /// Sends raw bytes behind the queued frames of one end.
    fn send_raw(&mut self, at: usize, bytes: &[u8]) {
        self.write(at, usize::MAX);
        self.wires[at].extend_from_slice(bytes);
    }

    /// A pair whose agent has received the server's OPEN of a raw lane.
    fn asked() -> Self {
        let mut pair = Self::new();
        pair.ends[SERVER].open(&raw_request(), 3).unwrap();
        pair.settle();
        let asked = [
            LaneEvent::Want(Want::Open(3)),
            LaneEvent::Open(raw_request()),
        ];
        assert_eq!(pair.take(AGENT), asked);
        pair
    }
}

/// Wherever a read ends, exactly the bytes behind OPENED belong to the tunnel.
#[test]
fn the_switch_loses_no_byte_wherever_a_read_ends() {
    let bytes: Vec<u8> = (0..=255).collect();
    for cut in 0..HEADER_BYTES + bytes.len() {
        let mut pair = Pair::asked();
        pair.ends[AGENT].accept();
        assert!(pair.ends[AGENT].is_raw() && !pair.ends[SERVER].is_raw());
        pair.send_raw(AGENT, &bytes);
        pair.read(SERVER, cut).unwrap();
        pair.read(SERVER, usize::MAX).unwrap();
        assert_eq!(pair.take(SERVER), [LaneEvent::Opened], "cut at {cut}");
        assert!(pair.ends[SERVER].is_raw());
        assert_eq!(pair.raw[SERVER][..], bytes, "cut at {cut}");
        pair.send_raw(SERVER, &bytes);
        pair.read(AGENT, usize::MAX).unwrap();
        assert_eq!(pair.raw[AGENT][..], bytes);
    }
}

#[test]
fn a_refused_raw_open_leaves_the_lane_usable() {
    let mut pair = Pair::asked();
    pair.ends[AGENT].refuse(RefusalCode::Failed, "no route");
    pair.settle();
    let (code, text) = (RefusalCode::Failed, "no route".to_owned());
    let refused = [LaneEvent::Failed { code, text }, LaneEvent::Idle];
    assert_eq!(pair.take(SERVER), refused);
    assert_eq!(pair.take(AGENT), [LaneEvent::Idle]);
    pair.open();
}

/// When the agent's kernel did not take over TLS, the dial still succeeds, and the lane is reusable afterwards.
#[test]
fn a_raw_open_accepted_with_frames_is_a_framed_tunnel() {
    let mut pair = Pair::asked();
    assert!(pair.ends[SERVER].may_turn_raw());
    pair.ends[AGENT].accept_framed();
    pair.ends[AGENT].send(Bytes::from_static(b"from the target"));
    pair.settle();
    let data = LaneEvent::Data(Bytes::from_static(b"from the target"));
    assert_eq!(pair.take(SERVER), [LaneEvent::Opened, data]);
    let server = &mut pair.ends[SERVER];
    assert!(server.is_sending() && !server.is_raw() && !server.may_turn_raw());
    server.send(Bytes::from_static(b"from the client"));
    server.close("");
    pair.settle();
    let data = LaneEvent::Data(Bytes::from_static(b"from the client"));
    let closed = LaneEvent::PeerClosed {
        text: String::new(),
    };
    assert_eq!(pair.take(AGENT), [data, closed, LaneEvent::Idle]);
    pair.take(SERVER);
    pair.open();
}

/// An agent that resets the tunnel before its answer has not switched to raw bytes.
#[test]
fn a_raw_open_reset_before_the_answer_is_acknowledged() {
    let mut pair = Pair::asked();
    pair.ends[AGENT].reset("changed my mind");
    pair.settle();
    assert_eq!(
        pair.take(SERVER),
        [reset("changed my mind"), LaneEvent::Idle]
    );
    assert_eq!(pair.take(AGENT), [LaneEvent::Idle]);
    pair.open();
}

/// The peer might read a frame as bytes for the target.
#[test]
fn no_frame_is_sent_between_a_raw_open_and_its_answer() {
    let mut pair = Pair::asked();
    let server = &mut pair.ends[SERVER];
    server.ping(1);
    server.drain();
    server
        .handle(frame(FrameType::Ping, 0, 0, b"12345678"))
        .unwrap();
    server.send(Bytes::from_static(b"early"));
    server.fin();
    server.close("");
    assert!(!server.has_frames());
    // A cancelled dial sends nothing either: the connection has to be closed.
    server.reset("gave up");
    assert!(!server.has_frames() && server.is_raw() && !server.is_idle());
    assert!(server.handle(frame(FrameType::Opened, 0, 1, b"")).is_err());
}

#[test]
fn an_unsent_raw_open_is_withdrawn_by_a_reset() {
    let mut pair = Pair::new();
    let server = &mut pair.ends[SERVER];
    server.open(&raw_request(), 0).unwrap();
    server.reset("gave up");
    assert!(server.is_idle() && !server.has_frames() && !server.is_raw());
    assert_eq!(pair.take(SERVER), [LaneEvent::Idle]);
    pair.open();
}

/// The peer waits for the acknowledgement, even if the raw lane is never requested.
#[test]
fn a_late_reset_is_acknowledged_before_a_queued_open() {
    let mut pair = Pair::opened();
    pair.ends[SERVER].close("");
    pair.ends[AGENT].close("");
    pair.settle();
    pair.take(SERVER);
    let server = &mut pair.ends[SERVER];
    server.open(&raw_request(), 0).unwrap();
    let sequence = server.sequence().wrapping_sub(1);
    server
        .handle(frame(FrameType::Reset, 0, sequence, b""))
        .unwrap();
    let kinds: Vec<FrameType> = std::iter::from_fn(|| server.poll_frame())
        .map(|frame| frame.header.kind)
        .collect();
    assert_eq!(kinds, [FrameType::ResetAck, FrameType::Open]);
    server
        .handle(frame(FrameType::Reset, 0, sequence, b""))
        .unwrap();
    assert!(!server.has_frames(), "the peer may have gone over by now");
}

#[test]
fn a_raw_open_wins_over_a_crossing_open() {
    let mut pair = Pair::new();
    pair.ends[SERVER].open(&raw_request(), 0).unwrap();
    pair.ends[AGENT].open(&request(), 0).unwrap();
    pair.settle();
    let (code, text) = (RefusalCode::Busy, String::new());
    let yielded = [
        LaneEvent::Failed { code, text },
        LaneEvent::Idle,
        LaneEvent::Open(raw_request()),
    ];
    assert_eq!(pair.take(AGENT), yielded);
    assert_eq!(pair.take(SERVER), []);
    pair.ends[AGENT].accept();
    pair.send_raw(AGENT, b"hello");
    pair.settle();
    assert_eq!(pair.take(SERVER), [LaneEvent::Opened]);
    assert_eq!(&pair.raw[SERVER][..], b"hello");
    assert!(pair.raw[AGENT].is_empty());
}

/// One step of a simulated raw lane; the numbers choose the end.
#[derive(Clone, Debug)]
enum Step {
    Open(usize, bool),
    Accept(usize),
    AcceptFramed(usize),
    Refuse(usize),
    Send(usize, usize),
    Fin(usize),
    Reset(usize),
    Ping(usize),
    Write(usize, usize),
    Read(usize, usize),
}

fn step() -> impl Strategy<Value = Step> {
    let end = 0..2_usize;
    prop_oneof![
        4 => (end.clone(), any::<bool>()).prop_map(|(at, raw)| Step::Open(at, raw)),
        4 => end.clone().prop_map(Step::Accept),
        2 => end.clone().prop_map(Step::AcceptFramed),
        1 => end.clone().prop_map(Step::Refuse),
        4 => (end.clone(), 1..300_usize).prop_map(|(at, bytes)| Step::Send(at, bytes)),
        2 => end.clone().prop_map(Step::Fin),
        1 => end.clone().prop_map(Step::Reset),
        1 => end.clone().prop_map(Step::Ping),
        6 => (end.clone(), 1..4_usize).prop_map(|(at, frames)| Step::Write(at, frames)),
        8 => (end, 1..400_usize).prop_map(|(at, bytes)| Step::Read(at, bytes)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Framed and raw tunnels in random order, with random delays: no end sees a violation. The raw bytes that an end
    /// reads are those its peer sent, from the first byte on.
    #[test]
    fn raw_bytes_begin_where_frames_end(steps in proptest::collection::vec(step(), 0..200)) {
        let mut pair = Pair::new();
        let mut sent = [Vec::new(), Vec::new()];
        let mut next = 0_u8;
        let mut closed = false;
        for step in steps {
            match step {
                Step::Open(at, raw) => {
                    let want = u32::from(at == SERVER);
                    let _busy = pair.ends[at].open(&OpenRequest { raw, ..request() }, want);
                }
                Step::Accept(at) => pair.ends[at].accept(),
                Step::AcceptFramed(at) => pair.ends[at].accept_framed(),
                Step::Refuse(at) => pair.ends[at].refuse(RefusalCode::Failed, "no"),
                Step::Send(at, bytes) => {
                    let payload: Vec<u8> = (0..bytes).map(|_| { next = next.wrapping_add(1); next }).collect();
                    if pair.ends[at].is_raw() {
                        sent[at].extend_from_slice(&payload);
                        pair.send_raw(at, &payload);
                    } else {
                        pair.ends[at].send(payload.into());
                    }
                }
                Step::Fin(at) => pair.ends[at].fin(),
                Step::Reset(at) => {
                    let before = pair.ends[at].is_raw();
                    pair.ends[at].reset("");
                    // The dial was cancelled, so the lane's owner closes the connection.
                    closed = !before && pair.ends[at].is_raw();
                }
                Step::Ping(at) => pair.ends[at].ping(1),
                Step::Write(at, frames) => pair.write(at, frames),
                Step::Read(at, bytes) => {
                    pair.read(at, bytes).map_err(|violation| TestCaseError::fail(violation.to_string()))?;
                    pair.take(at);
                }
            }
            if closed {
                break;
            }
        }
        if !closed {
            pair.settle();
        }
        for at in [SERVER, AGENT] {
            let heard = &pair.raw[at][..];
            prop_assert!(sent[1 - at].starts_with(heard), "bytes that nobody sent");
            prop_assert!(closed || heard.len() == sent[1 - at].len(), "bytes lost");
        }
        prop_assert!(closed || pair.ends[SERVER].is_raw() == pair.ends[AGENT].is_raw());
    }
}
