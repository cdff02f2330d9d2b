//! The state machine of one end of a lane.

mod incoming;
mod raw;

use std::collections::VecDeque;

use bytes::Bytes;

use super::event::LaneEvent;
use super::frame::{DATA_BYTES_MAX, FrameType, Header, OutFrame};
use super::growth::Want;
use super::out::Outgoing;
use super::payload::{OpenRequest, RefusalCode, cut, open_flags, open_payload, refusal_payload};

/// Which end this is; decides whose OPEN yields when both ends open at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LaneRole {
    /// The server's OPEN wins.
    Server,
    /// The agent's OPEN yields.
    Agent,
}

/// The lane carries a tunnel, or takes no further tunnels.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the lane is not free for a tunnel")]
pub struct NotIdle;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum LanePhase {
    Idle,
    /// Our OPEN has no answer yet.
    Opening,
    /// The peer's OPEN has no answer yet.
    Answering,
    Open {
        sending: bool,
        receiving: bool,
        /// This end has closed: further data is discarded.
        discarding: bool,
    },
    /// Our RESET has no answer yet.
    Resetting,
    /// The lane is raw: no more frames.
    Raw,
}

/// One end of a bound lane.
#[derive(Debug)]
pub struct LaneEnd {
    role: LaneRole,
    state: LanePhase,
    sequence: u16,
    /// The tunnel being opened is to be raw.
    raw: bool,
    /// The peer opened a tunnel with the same sequence, and was told that our OPEN wins.
    crossed: bool,
    draining: bool,
    drain_sent: bool,
    /// Mute while the peer might read our frames as bytes of a raw tunnel.
    out: Outgoing,
    events: VecDeque<LaneEvent>,
}

impl LaneEnd {
    /// The end of a lane without a tunnel.
    #[must_use]
    pub fn new(role: LaneRole) -> Self {
        Self {
            role,
            state: LanePhase::Idle,
            sequence: 0,
            raw: false,
            crossed: false,
            draining: false,
            drain_sent: false,
            out: Outgoing::default(),
            events: VecDeque::new(),
        }
    }

    /// Whether the lane carries no tunnel and no frames of one are in flight.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.state == LanePhase::Idle
    }

    /// Whether this end has reset a tunnel and awaits the RESET_ACK.
    #[must_use]
    pub fn is_resetting(&self) -> bool {
        self.state == LanePhase::Resetting
    }

    /// Whether a tunnel may be opened.
    #[must_use]
    pub fn can_open(&self) -> bool {
        self.is_idle() && !self.draining && !self.drain_sent
    }

    /// Whether either end has sent DRAIN.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.draining || self.drain_sent
    }

    /// Whether the lane is raw: its bytes are the tunnel's, without frames. A cancelled dial of a raw tunnel may leave the
    /// lane raw without a tunnel; then only closing the connection informs the peer.
    #[must_use]
    pub fn is_raw(&self) -> bool {
        self.state == LanePhase::Raw
    }

    /// Whether the tunnel is open and this end may still send on it.
    #[must_use]
    pub fn is_sending(&self) -> bool {
        matches!(self.state, LanePhase::Open { sending: true, .. })
    }

    /// Whether exactly one end has sent FIN.
    #[must_use]
    pub fn is_half_closed(&self) -> bool {
        matches!(self.state, LanePhase::Open { sending, receiving, .. } if sending != receiving)
    }

    /// Server: the agent opened a tunnel with the same sequence, and was told that the server's OPEN wins.
    #[must_use]
    pub fn has_crossed(&self) -> bool {
        self.crossed
    }

    /// Frames not yet taken by [`Self::poll_frame`].
    #[must_use]
    pub fn queued_frames(&self) -> usize {
        self.out.frames()
    }

    /// Sequence number of the current tunnel, or of the last one.
    #[must_use]
    pub fn sequence(&self) -> u16 {
        self.sequence
    }

    /// Payload bytes queued and not yet taken by [`Self::poll_frame`].
    #[must_use]
    pub fn queued_bytes(&self) -> usize {
        self.out.bytes()
    }

    /// The next frame to write.
    pub fn poll_frame(&mut self) -> Option<OutFrame> {
        self.out.pop()
    }

    /// Frees unused memory before a wait that may be long.
    pub fn rest(&mut self) {
        self.out.rest();
        if self.events.is_empty() {
            self.events = VecDeque::new();
        }
    }

    /// Whether [`Self::poll_frame`] would return a frame.
    #[must_use]
    pub fn has_frames(&self) -> bool {
        self.out.frames() > 0
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<LaneEvent> {
        self.events.pop_front()
    }

    /// The event that [`Self::poll_event`] would return.
    #[must_use]
    pub fn peek_event(&self) -> Option<&LaneEvent> {
        self.events.front()
    }

    /// Opens a tunnel. `want`: number of additional lanes that the server asks for.
    ///
    /// # Errors
    /// The lane is not free.
    pub fn open(&mut self, request: &OpenRequest, want: u32) -> Result<(), NotIdle> {
        if !self.can_open() {
            return Err(NotIdle);
        }
        if want > 0 {
            self.want(Want::Open(want));
        }
        self.sequence = self.sequence.wrapping_add(1);
        self.crossed = false;
        self.state = LanePhase::Opening;
        self.put(FrameType::Open, open_flags(request), open_payload(request));
        self.raw = request.raw;
        self.out.set_mute(request.raw);
        Ok(())
    }

    /// Server: asks for lanes.
    pub fn want(&mut self, want: Want) {
        let (flags, lanes) = match want {
            Want::Open(lanes) => (0, lanes),
            Want::Keep(lanes) => (Header::KEEP, lanes),
        };
        let payload = Bytes::copy_from_slice(&lanes.to_be_bytes());
        self.out
            .push(OutFrame::new(FrameType::Want, flags, 0, payload));
    }

    /// Accepts the peer's OPEN. No effect if the peer has cancelled the OPEN.
    pub fn accept(&mut self) {
        if self.state == LanePhase::Answering {
            self.put(FrameType::Opened, 0, Bytes::new());
            self.opened();
        }
    }

    /// Refuses the peer's OPEN. No effect if the peer has cancelled the OPEN.
    pub fn refuse(&mut self, code: RefusalCode, text: &str) {
        if self.state == LanePhase::Answering {
            self.put(FrameType::Failed, 0, refusal_payload(code, text));
            self.over();
        }
    }

    /// Sends bytes of the tunnel. No effect after [`Self::fin`] and without a tunnel.
    pub fn send(&mut self, mut bytes: Bytes) {
        if !self.is_sending() {
            return;
        }
        while !bytes.is_empty() {
            let piece = bytes.split_to(bytes.len().min(DATA_BYTES_MAX));
            self.put(FrameType::Data, 0, piece);
        }
    }

    /// Sends FIN: this end sends no more data.
    pub fn fin(&mut self) {
        self.finish(0, "");
    }

    /// Closes the tunnel: this end neither sends nor takes more data. `text` is the reason unless the close is regular.
    /// Data sent before still arrives.
    pub fn close(&mut self, text: &str) {
        if let LanePhase::Open {
            sending: false,
            receiving: true,
            discarding: discarding @ false,
        } = &mut self.state
        {
            // FIN was sent before; now this end takes no more data either.
            *discarding = true;
            let payload = Bytes::copy_from_slice(cut(text).as_bytes());
            return self.put(FrameType::Fin, Header::CLOSE, payload);
        }
        self.finish(Header::CLOSE, text);
    }

    fn finish(&mut self, flags: u8, text: &str) {
        let LanePhase::Open {
            sending: true,
            receiving,
            ..
        } = self.state
        else {
            return;
        };
        let payload = Bytes::copy_from_slice(cut(text).as_bytes());
        self.put(FrameType::Fin, flags, payload);
        self.state = LanePhase::Open {
            sending: false,
            receiving,
            discarding: flags & Header::CLOSE != 0,
        };
        if !receiving {
            self.over();
        }
    }

    /// Resets the tunnel: queued and received data is discarded. If the peer may have seen the OPEN of a raw tunnel, no
    /// frame can cancel that OPEN: see [`Self::is_raw`].
    pub fn reset(&mut self, text: &str) {
        if self.state == LanePhase::Opening && self.unsend_open() {
            if self.out.set_mute(false) && self.crossed {
                // The agent would have learned this from our OPEN.
                self.put(FrameType::Failed, 0, busy());
            }
            return self.over();
        }
        match self.state {
            LanePhase::Idle | LanePhase::Resetting | LanePhase::Raw => (),
            LanePhase::Opening if self.out.is_mute() => self.state = LanePhase::Raw,
            LanePhase::Opening | LanePhase::Answering | LanePhase::Open { .. } => {
                self.discard_out();
                let payload = Bytes::copy_from_slice(cut(text).as_bytes());
                self.put(FrameType::Reset, 0, payload);
                self.state = LanePhase::Resetting;
            }
        }
    }

    /// Sends PING.
    pub fn ping(&mut self, number: u64) {
        let payload = Bytes::copy_from_slice(&number.to_be_bytes());
        self.put_lane(FrameType::Ping, payload);
    }

    /// Sends DRAIN: no further tunnels on this lane. A tunnel being opened is still served.
    pub fn drain(&mut self) {
        if !std::mem::replace(&mut self.drain_sent, true) {
            self.put_lane(FrameType::Drain, Bytes::new());
        }
    }

    fn opened(&mut self) {
        self.state = if self.raw {
            LanePhase::Raw
        } else {
            LanePhase::OPEN
        };
        self.out.set_mute(self.raw);
    }

    fn over(&mut self) {
        self.state = LanePhase::Idle;
        self.events.push_back(LaneEvent::Idle);
    }

    /// Removes a queued OPEN, which the peer has not seen; false if the peer may have seen it.
    fn unsend_open(&mut self) -> bool {
        let queued = self.out.holds_open();
        if queued {
            self.discard_out();
            if !self.crossed {
                self.sequence = self.sequence.wrapping_sub(1);
            }
        }
        queued
    }

    fn discard_out(&mut self) {
        self.out.discard(self.sequence);
    }

    fn put(&mut self, kind: FrameType, flags: u8, payload: Bytes) {
        let frame = OutFrame::new(kind, flags, self.sequence, payload);
        self.out.push(frame);
    }

    fn put_lane(&mut self, kind: FrameType, payload: Bytes) {
        self.out.push(OutFrame::new(kind, 0, 0, payload));
    }
}

impl LanePhase {
    const OPEN: Self = Self::Open {
        sending: true,
        receiving: true,
        discarding: false,
    };
}

/// Payload that refuses an agent's OPEN which crossed a server's OPEN.
fn busy() -> Bytes {
    Bytes::from_static(&[RefusalCode::Busy as u8])
}
