//! What an end makes of what comes in.

use bytes::Bytes;

use super::{LaneEnd, LaneRole, State, busy};
use crate::lane::event::LaneEvent;
use crate::lane::frame::{FrameType, Header, LaneViolation, OutFrame, Piece};
use crate::lane::payload::{
    OpenRequest, RefusalCode, read_open, read_refusal, read_text, read_u64,
};

/// Answers to pings that may wait; a peer that sends pings and reads nothing gets no more.
const PONGS_MAX: usize = 16;
/// Frames but DATA that may wait while more come in. A peer by the rules has a few under way.
const CONTROLS_MAX: usize = 64;

impl LaneEnd {
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
            let text = read_text(text);
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
                let text = read_text(text);
                self.events.push_back(LaneEvent::PeerReset { text });
            }
        }
        // The peer has not gone raw and will not.
        self.out.set_mute(false);
        self.discard_out();
        self.acknowledge(self.sequence);
        self.over();
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
}
