//! One end of one lane: which tunnel it carries, what may be sent, what a frame means.

mod raw;

use std::collections::VecDeque;

use bytes::Bytes;

use super::event::LaneEvent;
use super::frame::{DATA_BYTES_MAX, FrameType, Header, LaneViolation, OutFrame, Piece};
use super::out::Outgoing;
use super::payload::{
    OpenRequest, RefusalCode, cut, open_flags, open_payload, read_open, read_refusal, read_u64,
    refusal_payload,
};

/// Answers to pings that may wait; a peer that sends pings and reads nothing gets no more.
const PONGS_MAX: usize = 16;
/// Frames but DATA that may wait while more come in. A peer by the rules has a few under way.
const CONTROLS_MAX: usize = 64;

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

    /// Takes a piece of the peer's stream.
    ///
    /// # Errors
    /// The lane cannot go on: close it. A tunnel on it is lost.
    pub fn handle(&mut self, piece: Piece) -> Result<(), LaneViolation> {
        match piece {
            Piece::Unknown(_) => Ok(()),
            Piece::Data { sequence, bytes } => self.handle_data(sequence, bytes),
            Piece::Frame(header, payload) => self.handle_frame(header, payload),
        }
    }

    fn handle_data(&mut self, sequence: u16, bytes: Bytes) -> Result<(), LaneViolation> {
        if !self.is_current(sequence, FrameType::Data)? {
            return Ok(());
        }
        match self.state {
            State::Open {
                receiving: true,
                discarding,
                ..
            } => {
                if !discarding {
                    self.events.push_back(LaneEvent::Data(bytes));
                }
                Ok(())
            }
            State::Resetting => Ok(()),
            _ => Err(LaneViolation::OutOfTurn(FrameType::Data)),
        }
    }

    fn handle_frame(&mut self, header: Header, payload: Bytes) -> Result<(), LaneViolation> {
        let kind = header.kind;
        if self.out.controls() > CONTROLS_MAX {
            return Err(LaneViolation::Unread(CONTROLS_MAX));
        }
        if self.state == State::Raw {
            return Err(LaneViolation::OutOfTurn(kind));
        }
        match kind {
            FrameType::Ping => return self.handle_ping(payload),
            FrameType::Pong => {
                let number = read_u64(&payload).ok_or(LaneViolation::Unreadable(kind))?;
                self.events.push_back(LaneEvent::Pong(number));
                return Ok(());
            }
            FrameType::Want if self.role == LaneRole::Agent => {
                let bytes = <[u8; 4]>::try_from(&payload[..]);
                let bytes = bytes.map_err(|_bad| LaneViolation::Unreadable(kind))?;
                let want = u32::from_be_bytes(bytes);
                self.events.push_back(LaneEvent::Want(want));
                return Ok(());
            }
            FrameType::Drain => {
                if !std::mem::replace(&mut self.draining, true) {
                    self.events.push_back(LaneEvent::Draining);
                }
                return Ok(());
            }
            FrameType::Open => return self.handle_open(header, payload),
            FrameType::Want | FrameType::Hello | FrameType::Bind | FrameType::Ready => {
                return Err(LaneViolation::OutOfTurn(kind));
            }
            _ => (),
        }
        if !self.is_current(header.sequence, kind)? {
            if kind == FrameType::Reset {
                self.acknowledge(header.sequence);
            }
            return Ok(());
        }
        match (kind, self.state) {
            (FrameType::Opened, State::Opening) => {
                self.raw &= header.flags & Header::FRAMED == 0;
                self.opened();
                self.events.push_back(LaneEvent::Opened);
            }
            (FrameType::Failed, State::Opening) => {
                self.out.set_mute(false);
                let (code, text) = read_refusal(payload)?;
                self.events.push_back(LaneEvent::Failed { code, text });
                self.over();
            }
            // Crossed our own FIN, which had ended the tunnel.
            (FrameType::Fin, State::Idle) if header.flags & Header::CLOSE != 0 => (),
            // It had said before that it sends no more.
            (
                FrameType::Fin,
                State::Open {
                    sending: true,
                    receiving: false,
                    ..
                },
            ) if header.flags & Header::CLOSE != 0 => self.handle_fin(true, false, true, &payload),
            // The server's word that its own OPEN stands, which we have seen by then.
            (FrameType::Failed, State::Answering | State::Open { .. } | State::Idle)
                if self.role == LaneRole::Agent && payload.first() == Some(&1) => {}
            (
                FrameType::Fin,
                State::Open {
                    sending,
                    receiving: true,
                    discarding,
                },
            ) => {
                let closes = header.flags & Header::CLOSE != 0;
                self.handle_fin(sending, discarding, closes, &payload);
            }
            (FrameType::Reset, _) => self.handle_reset(&payload),
            (FrameType::ResetAck, State::Resetting) => self.over(),
            // What was on its way when we cut the tunnel off.
            (FrameType::Opened | FrameType::Failed | FrameType::Fin, State::Resetting) => (),
            _ => return Err(LaneViolation::OutOfTurn(kind)),
        }
        Ok(())
    }

    fn handle_ping(&mut self, payload: Bytes) -> Result<(), LaneViolation> {
        if payload.len() != 8 {
            return Err(LaneViolation::Unreadable(FrameType::Ping));
        }
        if self.out.pongs() < PONGS_MAX {
            self.put_lane(FrameType::Pong, payload);
        }
        Ok(())
    }

    fn handle_open(&mut self, header: Header, payload: Bytes) -> Result<(), LaneViolation> {
        let out_of_turn = LaneViolation::OutOfTurn(FrameType::Open);
        if self.state == State::Opening && header.sequence == self.sequence {
            // Both opened at once, and both counted the same tunnel.
            return match self.role {
                LaneRole::Server if self.crossed => Err(out_of_turn),
                LaneRole::Server => {
                    self.crossed = true;
                    self.put(FrameType::Failed, 0, busy());
                    Ok(())
                }
                LaneRole::Agent => {
                    let request = read_open(header, payload)?;
                    let (code, text) = (RefusalCode::Busy, String::new());
                    self.discard_out();
                    self.events.push_back(LaneEvent::Failed { code, text });
                    self.events.push_back(LaneEvent::Idle);
                    self.asked(request);
                    Ok(())
                }
            };
        }
        if self.state == State::Resetting && header.sequence == self.sequence {
            // The same, and ours was given up at once; a server's OPEN finds our RESET instead of an answer.
            return Ok(());
        }
        if header.sequence != self.sequence.wrapping_add(1) {
            return Err(out_of_turn);
        }
        match self.state {
            State::Idle => (),
            // The peer had finished the tunnel before our RESET reached it: nothing is left to acknowledge.
            State::Resetting => self.over(),
            State::Opening | State::Answering | State::Open { .. } | State::Raw => {
                return Err(out_of_turn);
            }
        }
        self.sequence = header.sequence;
        self.asked(read_open(header, payload)?);
        Ok(())
    }

    fn asked(&mut self, request: OpenRequest) {
        self.state = State::Answering;
        self.raw = request.raw;
        self.out.set_mute(false);
        self.events.push_back(LaneEvent::Open(request));
    }

    fn handle_fin(&mut self, sending: bool, discarding: bool, closes: bool, text: &[u8]) {
        if !closes {
            if !discarding {
                self.events.push_back(LaneEvent::PeerFin);
            }
            if sending {
                self.state = State::Open {
                    sending,
                    receiving: false,
                    discarding,
                };
            } else {
                self.over();
            }
            return;
        }
        if !discarding {
            let text = String::from_utf8_lossy(text).into_owned();
            self.events.push_back(LaneEvent::PeerClosed { text });
        }
        if sending {
            // Nobody waits for what we had to say.
            self.discard_out();
            self.put(FrameType::Fin, 0, Bytes::new());
        }
        self.over();
    }

    fn handle_reset(&mut self, text: &[u8]) {
        match self.state {
            // It crossed our own, which is still to be acknowledged; or the peer had not seen yet that all was over.
            State::Resetting | State::Idle => return self.acknowledge(self.sequence),
            // Not a frame: see `handle_frame`.
            State::Raw => return,
            State::Open {
                discarding: true, ..
            } => (),
            State::Opening | State::Answering | State::Open { .. } => {
                let text = String::from_utf8_lossy(text).into_owned();
                self.events.push_back(LaneEvent::PeerReset { text });
            }
        }
        // The peer has not gone raw and will not.
        self.out.set_mute(false);
        self.discard_out();
        self.acknowledge(self.sequence);
        self.over();
    }

    fn opened(&mut self) {
        self.state = if self.raw { State::Raw } else { State::OPEN };
        self.out.set_mute(self.raw);
    }

    /// Answers a RESET. The one of a tunnel before is answered, too: our next OPEN may never leave.
    fn acknowledge(&mut self, sequence: u16) {
        let frame = OutFrame::new(FrameType::ResetAck, 0, sequence, Bytes::new());
        self.out.push_once(frame);
    }

    /// Whether a frame is about the tunnel of now (or the last one): frames of older ones are late and void.
    fn is_current(&self, sequence: u16, kind: FrameType) -> Result<bool, LaneViolation> {
        let ahead = sequence.wrapping_sub(self.sequence);
        if ahead == 0 {
            Ok(true)
        } else if ahead < 1 << 15 {
            Err(LaneViolation::OutOfTurn(kind))
        } else {
            Ok(false)
        }
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
