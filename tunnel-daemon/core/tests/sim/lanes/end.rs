//! One end of a lane as its driver treats it: reads, acts, writes, and closes a lane that cannot be reused.

mod acts;
mod events;

use std::time::Duration;

use adit_core::lane::{FrameReader, LaneEnd, LaneRole, OpenRequest};
use adit_core::session::Moment;
use bytes::BytesMut;

use super::books::{Outcome, Record, Seen, Turn};
use super::endpoint::Endpoint;
use super::wire::{Found, Wire};
use crate::record::Who;

/// Bytes that may wait for the connection before the endpoint is asked for more.
const QUEUE_BYTES_MAX: usize = 16 << 10;
/// Frames that may wait for the connection before the endpoint is asked for more.
const QUEUE_FRAMES_MAX: usize = 32;
/// Encoded bytes that may wait before the connection takes some.
const OUT_BYTES_MAX: usize = 4 << 10;
/// Most frames queued at an end whose endpoint obeys `QUEUE_FRAMES_MAX`, including answers to the peer.
const FRAMES_MAX: usize = 64;
/// An OPEN that the peer's kernel has not acknowledged by then is retried on another path.
const ACKNOWLEDGED_WITHIN: Duration = Duration::from_secs(2);

/// The two directions of a lane's connection as one end sees them.
pub(super) struct Wires<'a> {
    pub(super) incoming: &'a mut Wire,
    pub(super) outgoing: &'a mut Wire,
}

/// The answer to a tunnel that the peer opens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verdict {
    Accept,
    AcceptFramed,
    Refuse,
    Reset,
}

/// State of an end.
#[derive(Debug)]
enum Stage {
    /// Waits for an OPEN of either end.
    Idle,
    Opening {
        uid: usize,
        /// Deadline for the peer kernel's acknowledgement of the OPEN; `None` once acknowledged.
        judged_at: Option<Moment>,
        gives_up_at: Moment,
    },
    Answering {
        uid: usize,
        verdict: Verdict,
        /// `None`: the answer never comes.
        ends_at: Option<Moment>,
    },
    Tunnel(Endpoint),
    /// Raw bytes follow; there are no more frames.
    Pipe {
        endpoint: Endpoint,
        heard_end: bool,
    },
    /// The endpoint is gone; the end of its tunnel is still in flight.
    Settling {
        uid: usize,
        /// Unacknowledged bytes at the last check.
        before: usize,
        until: Moment,
        /// The tunnel was reset, and its answer is missing.
        cutting: bool,
    },
}

#[derive(Debug)]
pub(super) struct End {
    role: LaneRole,
    pub(super) machine: LaneEnd,
    frames: FrameReader,
    out: BytesMut,
    stage: Stage,
    /// The number of a PING without an answer.
    ping: Option<u64>,
    closed: bool,
}

impl End {
    pub(super) fn new(role: LaneRole) -> Self {
        Self {
            role,
            machine: LaneEnd::new(role),
            frames: FrameReader::default(),
            out: BytesMut::new(),
            stage: Stage::Idle,
            ping: None,
            closed: false,
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Whether it waits for an OPEN of either end.
    pub(super) fn is_waiting(&self) -> bool {
        !self.closed && matches!(self.stage, Stage::Idle)
    }

    /// Whether this end may open a tunnel on it.
    pub(super) fn is_free(&self) -> bool {
        self.is_waiting() && self.machine.can_open()
    }

    /// Whether nothing of any tunnel is left at this end, and nothing is queued.
    pub(super) fn is_clean(&self) -> bool {
        self.is_free()
            && self.is_flushed()
            && self.frames.is_at_boundary()
            && !self.machine.is_draining()
    }

    /// Opens a tunnel; the end must be free. `want`: additional lanes that the server asks for.
    pub(super) fn open(&mut self, raw: bool, want: u32, turn: &mut Turn) {
        let uid = turn.records.len();
        if self.machine.sequence() > 0 {
            turn.coverage.note(Seen::UsedAgain);
        }
        let by_agent = self.role == LaneRole::Agent;
        turn.records.push(Record::new(by_agent, raw, turn.tame));
        let request = OpenRequest {
            protocol: "tcp".to_owned(),
            address: uid.to_string(),
            raw,
            origin: None,
            forward: None,
        };
        let opened = self.machine.open(&request, want);
        assert!(opened.is_ok(), "not free: {self:?}");
        let patience: &[u64] = if turn.tame {
            &[3_600_000]
        } else {
            &[0, 700, 4_000, 25_000, 25_000, 25_000, 25_000]
        };
        let patience = turn.rng.pick(patience);
        let gives_up_at = if turn.tame {
            turn.now.after(Duration::from_millis(patience))
        } else {
            turn.within_millis(patience)
        };
        self.stage = Stage::Opening {
            uid,
            judged_at: Some(turn.now.after(ACKNOWLEDGED_WITHIN)),
            gives_up_at,
        };
    }

    /// Allows no further tunnel on this lane.
    pub(super) fn drain(&mut self) {
        self.machine.drain();
    }

    /// Sends a PING on an idle lane. Only the server acts on a missing answer: it closes the lane.
    pub(super) fn sweep(&mut self, number: u64, turn: &mut Turn, wires: &mut Wires<'_>) {
        if !self.is_waiting() {
            return;
        }
        if self.role == LaneRole::Agent {
            return self.machine.ping(number);
        }
        if self.ping.is_some() {
            turn.coverage.note(Seen::NoPong);
            return self.close(turn, wires);
        }
        self.ping = Some(number);
        self.machine.ping(number);
    }

    /// Reads, acts, writes: the order of the driver.
    pub(super) fn step(&mut self, turn: &mut Turn, wires: &mut Wires<'_>) {
        self.read(turn, wires);
        if !self.closed {
            self.act(turn, wires);
        }
        if !self.closed {
            self.write(turn, wires);
        }
        let (frames, bytes) = (self.machine.queued_frames(), self.out.len());
        assert!(frames <= FRAMES_MAX, "{frames} frames pile up: {self:?}");
        let bytes_max = QUEUE_BYTES_MAX + OUT_BYTES_MAX;
        assert!(bytes <= bytes_max, "{bytes} bytes pile up");
    }

    fn read(&mut self, turn: &mut Turn, wires: &mut Wires<'_>) {
        let mut reads = turn.rng.within(1..=8);
        while !self.closed {
            if let Some(event) = self.machine.poll_event() {
                turn.moved = true;
                self.take(event, turn);
                continue;
            }
            if !self.wants_input(turn.now) {
                return;
            }
            if !self.machine.is_raw() {
                let piece = self.frames.next_piece().expect("frames of an honest end");
                if let Some(piece) = piece {
                    turn.moved = true;
                    let handled = self.machine.handle(piece.clone());
                    assert!(handled.is_ok(), "{handled:?} by {piece:?}: {self:?}");
                    continue;
                }
            }
            if reads == 0 {
                return;
            }
            reads -= 1;
            let max = turn.rng.pick(&[1, 7, 300, 20_000, 20_000]);
            let found = wires.incoming.read(max, turn.now);
            turn.moved |= !matches!(found, Found::Nothing);
            match found {
                Found::Nothing => return,
                Found::Reset => self.lost(turn, wires),
                Found::Bytes(bytes) => {
                    if let Stage::Pipe { endpoint, .. } = &mut self.stage {
                        endpoint.deliver(&bytes, turn);
                    } else {
                        self.frames.push(bytes);
                    }
                }
                Found::End => {
                    if let Stage::Pipe {
                        endpoint,
                        heard_end,
                    } = &mut self.stage
                    {
                        endpoint.told(turn);
                        *heard_end = true;
                    } else {
                        self.lost(turn, wires);
                    }
                }
            }
        }
    }

    fn wants_input(&self, now: Moment) -> bool {
        match &self.stage {
            Stage::Tunnel(endpoint) => endpoint.reads(now),
            Stage::Pipe {
                endpoint,
                heard_end,
            } => endpoint.reads(now) && !heard_end,
            // Queued frames leave before the next tunnel is considered.
            Stage::Settling { .. } => !self.machine.is_idle(),
            Stage::Idle | Stage::Opening { .. } | Stage::Answering { .. } => true,
        }
    }

    fn write(&mut self, turn: &mut Turn, wires: &mut Wires<'_>) {
        while self.out.len() < OUT_BYTES_MAX && self.cut_out_frame() {}
        let mut pieces = turn.rng.within(1..=3);
        while pieces > 0 && !self.out.is_empty() && wires.outgoing.room() > 0 {
            pieces -= 1;
            turn.moved = true;
            let max = turn.rng.pick(&[1, 9, 300, 20_000, 20_000]);
            let length = self.out.len().min(wires.outgoing.room()).min(max);
            let bytes = self.out.split_to(length).freeze();
            wires.outgoing.send(bytes, turn.now);
        }
    }

    /// Encodes the next frame; false when there is none.
    fn cut_out_frame(&mut self) -> bool {
        let frame = self.machine.poll_frame();
        if let Some(frame) = &frame {
            self.out.extend_from_slice(&frame.header.to_bytes());
            self.out.extend_from_slice(&frame.payload);
        }
        frame.is_some()
    }

    /// Whether everything queued has left this process.
    fn is_flushed(&self) -> bool {
        self.out.is_empty() && !self.machine.has_frames()
    }

    /// Bytes that the peer's kernel has not received.
    fn unacknowledged(&self, wires: &Wires<'_>) -> usize {
        self.machine.queued_bytes() + self.out.len() + wires.outgoing.unacknowledged()
    }

    /// A tunnel is open: from here on its bytes go through an endpoint.
    fn begin(&mut self, uid: usize, who: Who, turn: &mut Turn) {
        let mut endpoint = Endpoint::new(uid, who, turn);
        if !self.machine.is_raw() {
            self.stage = Stage::Tunnel(endpoint);
            return;
        }
        while self.cut_out_frame() {}
        let early = self.frames.take_rest();
        let early = early.expect("frames end between two of them");
        if !early.is_empty() {
            turn.coverage.note(Seen::EarlyBytes);
            endpoint.deliver(&early, turn);
        }
        let heard_end = false;
        self.stage = Stage::Pipe {
            endpoint,
            heard_end,
        };
    }

    /// The endpoint, or a failed attempt, needs the lane no more.
    fn let_go(&mut self, uid: usize, turn: &mut Turn) {
        turn.moved = true;
        self.stage = Stage::Settling {
            uid,
            before: usize::MAX,
            until: turn.now,
            cutting: false,
        };
    }

    /// The connection is lost, or the peer has closed it; its tunnel is lost as well.
    pub(super) fn lost(&mut self, turn: &mut Turn, wires: &mut Wires<'_>) {
        let carried = match &self.stage {
            Stage::Idle => None,
            Stage::Opening { uid, .. } => {
                turn.records[*uid].conclude(Outcome::Lost);
                Some(*uid)
            }
            Stage::Answering { uid, .. } => Some(*uid),
            Stage::Tunnel(endpoint) | Stage::Pipe { endpoint, .. } => {
                turn.coverage.note(Seen::LostTunnel);
                Some(endpoint.uid)
            }
            Stage::Settling { uid, .. } => (!self.machine.is_idle()).then_some(*uid),
        };
        if let Some(uid) = carried {
            turn.records[uid].cut = true;
        }
        self.close(turn, wires);
    }

    /// Closes the connection; bytes that the kernel has taken still arrive.
    pub(super) fn close(&mut self, turn: &mut Turn, wires: &mut Wires<'_>) {
        turn.moved = true;
        self.closed = true;
        wires.outgoing.finish(turn.now);
        wires.incoming.reset(false);
    }

    /// Resets the connection; bytes in flight are dropped.
    fn reset_connection(&mut self, turn: &mut Turn, wires: &mut Wires<'_>) {
        turn.moved = true;
        self.closed = true;
        wires.outgoing.reset(turn.rng.once_in(2));
        wires.incoming.reset(false);
    }
}
