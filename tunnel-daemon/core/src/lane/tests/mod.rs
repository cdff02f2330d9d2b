//! Tests of both ends of a lane, step by step: the meaning of each event, and every crossing that the simulation found.

mod both;
mod frames;
mod raw;
mod simulated;

use bytes::{Bytes, BytesMut};

use super::*;

fn request() -> OpenRequest {
    OpenRequest {
        protocol: "tcp".to_owned(),
        address: "10.0.0.1:10250".to_owned(),
        raw: false,
        origin: None,
        forward: None,
    }
}

/// Both ends of a lane and the bytes in flight, in order for each direction.
struct Pair {
    ends: [LaneEnd; 2],
    readers: [FrameReader; 2],
    wires: [BytesMut; 2],
    seen: [Vec<LaneEvent>; 2],
    /// Raw bytes each end has read after its last frame.
    raw: [BytesMut; 2],
}

const SERVER: usize = 0;
const AGENT: usize = 1;

impl Pair {
    fn new() -> Self {
        Self {
            ends: [LaneRole::Server, LaneRole::Agent].map(LaneEnd::new),
            readers: Default::default(),
            wires: Default::default(),
            seen: Default::default(),
            raw: Default::default(),
        }
    }

    /// Writes up to `frames` frames of one end.
    fn write(&mut self, at: usize, frames: usize) {
        for _frame in 0..frames {
            let Some(frame) = self.ends[at].poll_frame() else {
                return;
            };
            self.wires[at].extend_from_slice(&frame.to_bytes());
        }
    }

    /// Lets one end read up to `bytes` that the other end has written.
    fn read(&mut self, at: usize, bytes: usize) -> Result<(), LaneViolation> {
        let wire = &mut self.wires[1 - at];
        let bytes = bytes.min(wire.len());
        self.readers[at].push(wire.split_to(bytes).freeze());
        while !self.ends[at].is_raw()
            && let Some(piece) = self.readers[at].next_piece()?
        {
            self.ends[at].handle(piece)?;
            while let Some(event) = self.ends[at].poll_event() {
                self.seen[at].push(event);
            }
        }
        if self.ends[at].is_raw() {
            let rest = self.readers[at].take_rest().expect("between two frames");
            self.raw[at].extend_from_slice(&rest);
        }
        Ok(())
    }

    fn settle(&mut self) {
        for _round in 0..10 {
            for at in [SERVER, AGENT] {
                self.write(at, usize::MAX);
                self.read(1 - at, usize::MAX).unwrap();
            }
        }
    }

    fn take(&mut self, at: usize) -> Vec<LaneEvent> {
        while let Some(event) = self.ends[at].poll_event() {
            self.seen[at].push(event);
        }
        std::mem::take(&mut self.seen[at])
    }

    fn opened() -> Self {
        let mut pair = Self::new();
        pair.open();
        pair
    }

    fn open(&mut self) {
        self.ends[SERVER].open(&request(), 0).unwrap();
        self.settle();
        assert_eq!(self.take(AGENT), [LaneEvent::Open(request())]);
        self.ends[AGENT].accept();
        self.settle();
        assert_eq!(self.take(SERVER), [LaneEvent::Opened]);
    }

    fn assert_idle(&self) {
        assert!(self.ends[SERVER].is_idle() && self.ends[AGENT].is_idle());
    }
}

fn frame(kind: FrameType, flags: u8, sequence: u16, payload: &'static [u8]) -> Piece {
    let length = u32::try_from(payload.len()).unwrap();
    let header = Header {
        kind,
        flags,
        sequence,
        length,
    };
    Piece::Frame(header, Bytes::from_static(payload))
}

fn closed(text: &str) -> LaneEvent {
    LaneEvent::PeerClosed {
        text: text.to_owned(),
    }
}

fn reset(text: &str) -> LaneEvent {
    LaneEvent::PeerReset {
        text: text.to_owned(),
    }
}

#[test]
fn tunnels_follow_each_other_on_one_lane_with_half_close_in_both_orders() {
    let mut pair = Pair::new();
    for first in [SERVER, AGENT, SERVER] {
        pair.open();
        let second = 1 - first;
        pair.ends[first].send(Bytes::from_static(b"last words"));
        pair.ends[first].fin();
        pair.settle();
        let data = LaneEvent::Data(Bytes::from_static(b"last words"));
        assert_eq!(pair.take(second), [data, LaneEvent::PeerFin]);
        pair.ends[second].send(Bytes::from_static(b"answer"));
        pair.ends[second].fin();
        pair.settle();
        let data = LaneEvent::Data(Bytes::from_static(b"answer"));
        let expected = [data, LaneEvent::PeerFin, LaneEvent::Idle];
        assert_eq!(pair.take(first), expected);
        assert_eq!(pair.take(second), [LaneEvent::Idle]);
        pair.assert_idle();
    }
}

#[test]
fn a_close_delivers_sent_bytes_and_discards_received_ones() {
    let mut pair = Pair::opened();
    pair.ends[SERVER].send(Bytes::from_static(b"bye"));
    pair.ends[AGENT].send(Bytes::from_static(b"nobody reads this"));
    pair.ends[SERVER].close("");
    pair.settle();
    let data = LaneEvent::Data(Bytes::from_static(b"bye"));
    assert_eq!(pair.take(AGENT), [data, closed(""), LaneEvent::Idle]);
    assert_eq!(pair.take(SERVER), [LaneEvent::Idle]);
    pair.assert_idle();
}

#[test]
fn a_close_after_a_half_close_still_delivers_what_was_sent() {
    let mut pair = Pair::opened();
    pair.ends[SERVER].send(Bytes::from_static(b"bye"));
    pair.ends[SERVER].fin();
    pair.ends[SERVER].close("");
    pair.ends[SERVER].close("twice");
    pair.settle();
    let data = LaneEvent::Data(Bytes::from_static(b"bye"));
    let expected = [data, LaneEvent::PeerFin, closed(""), LaneEvent::Idle];
    assert_eq!(pair.take(AGENT), expected);
    assert_eq!(pair.take(SERVER), [LaneEvent::Idle]);
    pair.open();
}

#[test]
fn crossing_closes_leave_the_lane_idle() {
    let mut pair = Pair::opened();
    pair.ends[SERVER].fin();
    pair.ends[SERVER].close("");
    pair.ends[AGENT].close("read: connection reset by peer");
    pair.settle();
    pair.assert_idle();
    // Neither end reports the other's close: both had already closed.
    assert_eq!(pair.take(AGENT), [LaneEvent::Idle]);
    assert_eq!(pair.take(SERVER), [LaneEvent::Idle]);
    pair.open();
}

#[test]
fn the_reason_of_a_close_reaches_the_other_end() {
    let mut pair = Pair::opened();
    pair.ends[AGENT].close("read tcp: connection reset by peer");
    pair.settle();
    let why = closed("read tcp: connection reset by peer");
    assert_eq!(pair.take(SERVER), [why, LaneEvent::Idle]);
    pair.assert_idle();
}

#[test]
fn a_reset_discards_sent_bytes_and_leaves_the_lane_clean() {
    let mut pair = Pair::opened();
    pair.ends[SERVER].send(Bytes::from_static(b"void"));
    pair.ends[AGENT].send(Bytes::from_static(b"on its way"));
    pair.write(AGENT, 1);
    pair.ends[SERVER].reset("client gone");
    pair.settle();
    assert_eq!(pair.take(AGENT), [reset("client gone"), LaneEvent::Idle]);
    assert_eq!(pair.take(SERVER), [LaneEvent::Idle]);
    pair.open();
}

#[test]
fn resets_of_both_ends_cross_and_leave_the_lane_clean() {
    let mut pair = Pair::opened();
    pair.ends[SERVER].reset("");
    pair.ends[AGENT].reset("");
    pair.settle();
    pair.assert_idle();
    assert_eq!(pair.take(SERVER), [LaneEvent::Idle]);
    assert_eq!(pair.take(AGENT), [LaneEvent::Idle]);
    pair.open();
}

#[test]
fn a_late_reset_does_not_hit_the_next_tunnel() {
    let mut pair = Pair::opened();
    // The agent has finished; its reset crosses the server's FIN and the OPEN right behind that FIN.
    pair.ends[AGENT].fin();
    pair.settle();
    pair.ends[SERVER].fin();
    pair.ends[AGENT].reset("late");
    pair.write(AGENT, usize::MAX);
    pair.ends[SERVER].open(&request(), 0).unwrap();
    pair.settle();
    let seen = pair.take(AGENT);
    assert_eq!(seen, [LaneEvent::Idle, LaneEvent::Open(request())]);
    pair.ends[AGENT].accept();
    pair.settle();
    let seen = pair.take(SERVER);
    let expected = [LaneEvent::PeerFin, LaneEvent::Idle, LaneEvent::Opened];
    assert_eq!(seen, expected);
}

#[test]
fn a_reset_of_a_finished_tunnel_is_acknowledged() {
    let mut pair = Pair::opened();
    pair.ends[AGENT].fin();
    pair.settle();
    pair.ends[SERVER].fin();
    pair.ends[AGENT].reset("late");
    pair.settle();
    pair.assert_idle();
    pair.take(SERVER);
    pair.take(AGENT);
    pair.open();
}

#[test]
fn a_refused_open_leaves_the_lane_free() {
    let mut pair = Pair::new();
    pair.ends[SERVER].open(&request(), 0).unwrap();
    pair.settle();
    pair.ends[AGENT].refuse(RefusalCode::Failed, "connection refused");
    pair.settle();
    let text = String::from("connection refused");
    let code = RefusalCode::Failed;
    let failed = LaneEvent::Failed { code, text };
    assert_eq!(pair.take(SERVER), [failed, LaneEvent::Idle]);
    pair.take(AGENT);
    pair.open();
}

#[test]
fn a_cancelled_dial_is_reset_at_the_peer_only_if_sent() {
    let mut pair = Pair::new();
    pair.ends[SERVER].open(&request(), 0).unwrap();
    pair.ends[SERVER].reset("");
    assert_eq!(pair.take(SERVER), [LaneEvent::Idle]);
    pair.settle();
    assert_eq!(pair.take(AGENT), []);

    pair.ends[SERVER].open(&request(), 0).unwrap();
    pair.settle();
    pair.ends[SERVER].reset("");
    // The agent's answer crosses the server's reset.
    pair.ends[AGENT].accept();
    pair.settle();
    let open = LaneEvent::Open(request());
    assert_eq!(pair.take(AGENT), [open, reset(""), LaneEvent::Idle]);
    assert_eq!(pair.take(SERVER), [LaneEvent::Idle]);
    // A late answer of the agent's dialler is ignored.
    pair.ends[AGENT].accept();
    pair.ends[AGENT].refuse(RefusalCode::Failed, "");
    pair.settle();
    pair.open();
}

#[test]
fn the_servers_open_wins_over_a_crossing_open() {
    let mut pair = Pair::new();
    pair.ends[SERVER].open(&request(), 0).unwrap();
    pair.ends[AGENT].open(&request(), 0).unwrap();
    pair.write(SERVER, 1);
    pair.write(AGENT, 1);
    pair.settle();
    let (code, text) = (RefusalCode::Busy, String::new());
    let failed = LaneEvent::Failed { code, text };
    let expected = [failed, LaneEvent::Idle, LaneEvent::Open(request())];
    assert_eq!(pair.take(AGENT), expected);
    pair.ends[AGENT].accept();
    pair.settle();
    assert_eq!(pair.take(SERVER), [LaneEvent::Opened]);
    pair.ends[SERVER].close("");
    pair.settle();
    pair.assert_idle();
}

#[test]
fn a_cancelled_crossing_open_leaves_the_lane_clean() {
    let mut pair = Pair::new();
    pair.ends[AGENT].open(&request(), 0).unwrap();
    pair.write(AGENT, 1);
    pair.ends[AGENT].reset("");
    pair.ends[SERVER].open(&request(), 0).unwrap();
    pair.write(SERVER, 1);
    pair.settle();
    pair.assert_idle();
    // The server learns that its tunnel did not open; the agent reports no tunnel.
    assert_eq!(pair.take(SERVER), [reset(""), LaneEvent::Idle]);
    assert_eq!(pair.take(AGENT), [LaneEvent::Idle]);
    pair.open();
}

#[test]
fn the_agent_opens_when_the_lane_is_free() {
    let mut pair = Pair::new();
    pair.ends[AGENT].open(&request(), 0).unwrap();
    pair.settle();
    assert_eq!(pair.take(SERVER), [LaneEvent::Open(request())]);
    pair.ends[SERVER].refuse(RefusalCode::Denied, "not allowed");
    pair.settle();
    let (code, text) = (RefusalCode::Denied, String::from("not allowed"));
    let failed = LaneEvent::Failed { code, text };
    assert_eq!(pair.take(AGENT), [failed, LaneEvent::Idle]);
}

#[test]
fn a_draining_lane_serves_the_open_that_crossed_and_no_other() {
    let mut pair = Pair::new();
    pair.ends[AGENT].drain();
    pair.ends[AGENT].drain();
    pair.ends[SERVER].open(&request(), 0).unwrap();
    pair.settle();
    assert_eq!(pair.take(AGENT), [LaneEvent::Open(request())]);
    pair.ends[AGENT].accept();
    pair.settle();
    let expected = [LaneEvent::Draining, LaneEvent::Opened];
    assert_eq!(pair.take(SERVER), expected);
    pair.ends[SERVER].close("");
    pair.settle();
    assert!(pair.ends[SERVER].is_idle() && !pair.ends[SERVER].can_open());
    assert_eq!(pair.ends[SERVER].open(&request(), 0), Err(NotIdle));
}

/// Limit (peers): PING answers and control frames queued on a lane
#[test]
fn pings_are_answered_beside_a_tunnel_and_at_most_16_are_queued() {
    let mut pair = Pair::opened();
    pair.ends[AGENT].send(Bytes::from_static(b"x"));
    for number in 0..100 {
        pair.ends[SERVER].ping(number);
    }
    pair.write(SERVER, usize::MAX);
    pair.read(AGENT, usize::MAX).unwrap();
    pair.settle();
    let seen = pair.take(SERVER);
    assert_eq!(seen[0], LaneEvent::Data(Bytes::from_static(b"x")));
    let pongs: Vec<LaneEvent> = (0..16).map(LaneEvent::Pong).collect();
    assert_eq!(seen[1..], pongs);
    pair.ends[SERVER].ping(7);
    pair.settle();
    assert_eq!(pair.take(SERVER), [LaneEvent::Pong(7)]);
}

#[test]
fn a_want_frame_precedes_its_open() {
    let mut pair = Pair::new();
    pair.ends[SERVER].open(&request(), 9).unwrap();
    pair.settle();
    let expected = [LaneEvent::Want(Want::Open(9)), LaneEvent::Open(request())];
    assert_eq!(pair.take(AGENT), expected);
    // It may also come beside a tunnel.
    pair.ends[SERVER].want(Want::Keep(16));
    pair.settle();
    assert_eq!(pair.take(AGENT), [LaneEvent::Want(Want::Keep(16))]);
}
