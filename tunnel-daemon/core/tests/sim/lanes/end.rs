//! One end of a lane as its driver treats it: reads, acts, writes, and closes what cannot be used again.

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

/// Bytes that may wait here for the connection before an endpoint is asked for more.
const QUEUE_BYTES_MAX: usize = 16 << 10;
/// Frames likewise.
const QUEUE_FRAMES_MAX: usize = 32;
/// Bytes of frames cut out before the connection has to take some.
const OUT_BYTES_MAX: usize = 4 << 10;
/// Frames that wait at an end whose endpoints keep to that, with answers to the peer.
const FRAMES_MAX: usize = 64;
/// An OPEN that the other kernel has not acknowledged by then is taken elsewhere.
const ACKNOWLEDGED_WITHIN: Duration = Duration::from_secs(2);

/// The two directions of a lane's connection as one end sees them.
pub(super) struct Wires<'a> {
    pub(super) incoming: &'a mut Wire,
    pub(super) outgoing: &'a mut Wire,
}

/// What is to come of a tunnel that the peer asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verdict {
    Accept,
    AcceptFramed,
    Refuse,
    Reset,
}

/// What an end does with its lane.
#[derive(Debug)]
enum Stage {
    /// Waits for somebody to open a tunnel.
    Idle,
    Opening {
        uid: usize,
        /// When the OPEN has to be acknowledged by the other kernel, until that was seen.
        judged_at: Option<Moment>,
        gives_up_at: Moment,
    },
    Answering {
        uid: usize,
        verdict: Verdict,
        /// `None`: never.
        ends_at: Option<Moment>,
    },
    Tunnel(Endpoint),
    /// Frames are over.
    Pipe {
        endpoint: Endpoint,
        heard_end: bool,
    },
    /// The endpoint is gone; the end of its tunnel is still on its way.
    Settling {
        uid: usize,
        /// Bytes that were on their way when it was last looked at.
        before: usize,
        until: Moment,
        /// Cut off, and waiting for the answer.
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
    /// The number of a ping without an answer.
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

    /// Whether it waits for a tunnel, whoever opens it.
    pub(super) fn is_waiting(&self) -> bool {
        !self.closed && matches!(self.stage, Stage::Idle)
    }

    /// Whether a tunnel may be opened on it here.
    pub(super) fn is_free(&self) -> bool {
        self.is_waiting() && self.machine.can_open()
    }

    /// Whether nothing of any tunnel is left here, and nothing waits.
    pub(super) fn is_clean(&self) -> bool {
        self.is_free()
            && self.is_flushed()
            && self.frames.is_at_boundary()
            && !self.machine.is_draining()
    }

    /// Opens a tunnel; the end is free. `want`: lanes the server would like beside it.
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

    /// Wants no further tunnel on this lane.
    pub(super) fn drain(&mut self) {
        self.machine.drain();
    }

    /// Asks the peer of a lane that waits for a sign of life. Only the server minds: a lane that owes one is closed.
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

    /// Reads, acts, writes: in that order, as the driver does.
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
            // What waits leaves before the next tunnel is looked at.
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

    /// Makes bytes of the next frame; false when there is none.
    fn cut_out_frame(&mut self) -> bool {
        let frame = self.machine.poll_frame();
        if let Some(frame) = &frame {
            self.out.extend_from_slice(&frame.header.to_bytes());
            self.out.extend_from_slice(&frame.payload);
        }
        frame.is_some()
    }

    /// Whether all that was to be written has left this process.
    fn is_flushed(&self) -> bool {
        self.out.is_empty() && !self.machine.has_frames()
    }

    /// Bytes that the other kernel does not have.
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

    /// The endpoint, or who would have been one, needs the lane no more.
    fn let_go(&mut self, uid: usize, turn: &mut Turn) {
        turn.moved = true;
        self.stage = Stage::Settling {
            uid,
            before: usize::MAX,
            until: turn.now,
            cutting: false,
        };
    }

    /// The connection is no more, or the other end has closed it; with it goes what it carries.
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

    /// Closes the connection; what its kernel has taken still arrives.
    pub(super) fn close(&mut self, turn: &mut Turn, wires: &mut Wires<'_>) {
        turn.moved = true;
        self.closed = true;
        wires.outgoing.finish(turn.now);
        wires.incoming.reset(false);
    }

    /// Closes it so that what is on its way is dropped.
    fn reset_connection(&mut self, turn: &mut Turn, wires: &mut Wires<'_>) {
        turn.moved = true;
        self.closed = true;
        wires.outgoing.reset(turn.rng.once_in(2));
        wires.incoming.reset(false);
    }
}
