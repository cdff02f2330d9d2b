//! One end of one lane: which tunnel it carries, what may be sent, what a frame means.

mod incoming;
mod raw;

use std::collections::VecDeque;

use bytes::Bytes;

use super::event::LaneEvent;
use super::frame::{DATA_BYTES_MAX, FrameType, Header, OutFrame};
use super::out::Outgoing;
use super::payload::{OpenRequest, RefusalCode, cut, open_flags, open_payload, refusal_payload};

/// Which end this is; decides who yields when both open at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LaneRole {
    /// Its OPEN wins.
    Server,
    /// Its OPEN yields.
    Agent,
}

/// The lane carries a tunnel, or may carry none any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the lane is not free for a tunnel")]
pub struct NotIdle;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Idle,
    /// Our OPEN has no answer yet.
    Opening,
    /// The peer's OPEN has no answer yet.
    Answering,
    Open {
        sending: bool,
        receiving: bool,
        /// We have closed: what comes is void.
        discarding: bool,
    },
    /// Our RESET has no answer yet.
    Resetting,
    /// Frames are over on this lane.
    Raw,
}

/// One end of a lane that is bound.
#[derive(Debug)]
pub struct LaneEnd {
    role: LaneRole,
    state: State,
    sequence: u16,
    /// What is being opened is to become a pipe of bytes.
    raw: bool,
    /// The peer opened this very tunnel, too, and was told that ours stands.
    crossed: bool,
    draining: bool,
    drain_sent: bool,
    /// Mute once the peer may read what we send as bytes of the tunnel.
    out: Outgoing,
    events: VecDeque<LaneEvent>,
}

impl LaneEnd {
    /// A lane without a tunnel.
    #[must_use]
    pub fn new(role: LaneRole) -> Self {
        Self {
            role,
            state: State::Idle,
            sequence: 0,
            raw: false,
            crossed: false,
            draining: false,
            drain_sent: false,
            out: Outgoing::default(),
            events: VecDeque::new(),
        }
    }

    /// Whether the lane carries no tunnel and nothing of one is on its way.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.state == State::Idle
    }

    /// Whether a tunnel was cut off at this end and the other has not acknowledged it.
    #[must_use]
    pub fn is_resetting(&self) -> bool {
        self.state == State::Resetting
    }

    /// Whether a tunnel may be opened.
    #[must_use]
    pub fn can_open(&self) -> bool {
        self.is_idle() && !self.draining && !self.drain_sent
    }

    /// Whether either end wants no further tunnel on this lane.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.draining || self.drain_sent
    }

    /// Whether frames are over on this lane: its bytes are the tunnel's. After a dial that was given up they are nobody's,
    /// and only closing the connection tells the peer.
    #[must_use]
    pub fn is_raw(&self) -> bool {
        self.state == State::Raw
    }

    /// Whether the tunnel is open and this end may still send on it.
    #[must_use]
    pub fn is_sending(&self) -> bool {
        matches!(self.state, State::Open { sending: true, .. })
    }

    /// Whether exactly one end has said that it sends no more.
    #[must_use]
    pub fn is_half_closed(&self) -> bool {
        matches!(self.state, State::Open { sending, receiving, .. } if sending != receiving)
    }

    /// Server: the agent opened this very tunnel, too, and was told that ours stands.
    #[must_use]
    pub fn has_crossed(&self) -> bool {
        self.crossed
    }

    /// Frames not yet taken by [`Self::poll_frame`].
    #[must_use]
    pub fn queued_frames(&self) -> usize {
        self.out.frames()
    }

    /// The tunnel now, or the one before.
    #[must_use]
    pub fn sequence(&self) -> u16 {
        self.sequence
    }

    /// Payload bytes given and not yet taken by [`Self::poll_frame`].
    #[must_use]
    pub fn queued_bytes(&self) -> usize {
        self.out.bytes()
    }

    /// The next frame to write.
    pub fn poll_frame(&mut self) -> Option<OutFrame> {
        self.out.pop()
    }

    /// Gives memory back that is not in use, before a wait that may be long.
    pub fn rest(&mut self) {
        self.out.rest();
        if self.events.is_empty() {
            self.events = VecDeque::new();
        }
    }

    /// Whether [`Self::poll_frame`] has one.
    #[must_use]
    pub fn has_frames(&self) -> bool {
        self.out.frames() > 0
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<LaneEvent> {
        self.events.pop_front()
    }

    /// What [`Self::poll_event`] would give.
    #[must_use]
    pub fn peek_event(&self) -> Option<&LaneEvent> {
        self.events.front()
    }

    /// Opens a tunnel. `want`: lanes the server would like beside it.
    ///
    /// # Errors
    /// The lane is not free.
    pub fn open(&mut self, request: &OpenRequest, want: u32) -> Result<(), NotIdle> {
        if !self.can_open() {
            return Err(NotIdle);
        }
        if want > 0 {
            let payload = Bytes::copy_from_slice(&want.to_be_bytes());
            self.put_lane(FrameType::Want, payload);
        }
        self.sequence = self.sequence.wrapping_add(1);
        self.crossed = false;
        self.state = State::Opening;
        self.put(FrameType::Open, open_flags(request), open_payload(request));
        self.raw = request.raw;
        self.out.set_mute(request.raw);
        Ok(())
    }

    /// Answers the peer's OPEN: the tunnel is open. Does nothing when the peer has given up.
    pub fn accept(&mut self) {
        if self.state == State::Answering {
            self.put(FrameType::Opened, 0, Bytes::new());
            self.opened();
        }
    }

    /// Answers the peer's OPEN: there is no tunnel. Does nothing when the peer has given up.
    pub fn refuse(&mut self, code: RefusalCode, text: &str) {
        if self.state == State::Answering {
            self.put(FrameType::Failed, 0, refusal_payload(code, text));
            self.over();
        }
    }

    /// Sends bytes of the tunnel. Void after [`Self::fin`] and when there is no tunnel.
    pub fn send(&mut self, mut bytes: Bytes) {
        if !self.is_sending() {
            return;
        }
        while !bytes.is_empty() {
            let piece = bytes.split_to(bytes.len().min(DATA_BYTES_MAX));
            self.put(FrameType::Data, 0, piece);
        }
    }

    /// This end sends no more.
    pub fn fin(&mut self) {
        self.finish(0, "");
    }

    /// This end neither sends nor takes more; `text` says why, if it is not in order. What was sent still arrives.
    pub fn close(&mut self, text: &str) {
        if let State::Open {
            sending: false,
            receiving: true,
            discarding: discarding @ false,
        } = &mut self.state
        {
            // Said before that it sends no more; now it takes no more, either.
            *discarding = true;
            let payload = Bytes::copy_from_slice(cut(text).as_bytes());
            return self.put(FrameType::Fin, Header::CLOSE, payload);
        }
        self.finish(Header::CLOSE, text);
    }

    fn finish(&mut self, flags: u8, text: &str) {
        let State::Open {
            sending: true,
            receiving,
            ..
        } = self.state
        else {
            return;
        };
        let payload = Bytes::copy_from_slice(cut(text).as_bytes());
        self.put(FrameType::Fin, flags, payload);
        self.state = State::Open {
            sending: false,
            receiving,
            discarding: flags & Header::CLOSE != 0,
        };
        if !receiving {
            self.over();
        }
    }

    /// Cuts the tunnel off: nothing given before leaves any more, nothing received counts. An OPEN of a raw tunnel that
    /// the peer may have seen cannot be taken back by a frame: see [`Self::is_raw`].
    pub fn reset(&mut self, text: &str) {
        if self.state == State::Opening && self.unsend_open() {
            if self.out.set_mute(false) && self.crossed {
                // It would have heard so by our OPEN.
                self.put(FrameType::Failed, 0, busy());
            }
            return self.over();
        }
        match self.state {
            State::Idle | State::Resetting | State::Raw => (),
            State::Opening if self.out.is_mute() => self.state = State::Raw,
            State::Opening | State::Answering | State::Open { .. } => {
                self.discard_out();
                let payload = Bytes::copy_from_slice(cut(text).as_bytes());
                self.put(FrameType::Reset, 0, payload);
                self.state = State::Resetting;
            }
        }
    }

    /// Asks the peer for a sign of life.
    pub fn ping(&mut self, number: u64) {
        let payload = Bytes::copy_from_slice(&number.to_be_bytes());
        self.put_lane(FrameType::Ping, payload);
    }

    /// Wants no further tunnel on this lane. One that is being opened is still served.
    pub fn drain(&mut self) {
        if !std::mem::replace(&mut self.drain_sent, true) {
            self.put_lane(FrameType::Drain, Bytes::new());
        }
    }

    fn opened(&mut self) {
        self.state = if self.raw { State::Raw } else { State::OPEN };
        self.out.set_mute(self.raw);
    }

    fn over(&mut self) {
        self.state = State::Idle;
        self.events.push_back(LaneEvent::Idle);
    }

    /// Takes an OPEN back that the peer has not seen; false if it may have.
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

impl State {
    const OPEN: Self = Self::Open {
        sending: true,
        receiving: true,
        discarding: false,
    };
}

/// Why an OPEN that crossed a server's is refused.
fn busy() -> Bytes {
    Bytes::from_static(&[RefusalCode::Busy as u8])
}
