//! Handling of received frames.

use bytes::Bytes;

use super::{LaneEnd, LanePhase, LaneRole, busy};
use crate::lane::event::LaneEvent;
use crate::lane::frame::{FrameType, Header, LaneViolation, OutFrame, Piece};
use crate::lane::growth::Want;
use crate::lane::payload::{
    OpenRequest, RefusalCode, read_open, read_refusal, read_text, read_u64,
};

/// Most queued PONGs: a peer that sends pings and does not read gets no more.
const PONGS_MAX: usize = 16;
/// Most queued non-DATA frames while the peer keeps sending. A conforming peer causes a few.
const CONTROLS_MAX: usize = 64;

impl LaneEnd {
    /// Handles a piece of the peer's stream.
    ///
    /// # Errors
    /// A protocol violation: close the lane. Its tunnel is lost.
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
            LanePhase::Open {
                receiving: true,
                discarding,
                ..
            } => {
                if !discarding {
                    self.events.push_back(LaneEvent::Data(bytes));
                }
                Ok(())
            }
            LanePhase::Resetting => Ok(()),
            _ => Err(LaneViolation::OutOfTurn(FrameType::Data)),
        }
    }

    fn handle_frame(&mut self, header: Header, payload: Bytes) -> Result<(), LaneViolation> {
        let kind = header.kind;
        if self.out.controls() > CONTROLS_MAX {
            return Err(LaneViolation::Unread(CONTROLS_MAX));
        }
        if self.state == LanePhase::Raw {
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
                let lanes = u32::from_be_bytes(bytes);
                let want = if header.flags & Header::KEEP == 0 {
                    Want::Open(lanes)
                } else {
                    Want::Keep(lanes)
                };
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
            (FrameType::Opened, LanePhase::Opening) => {
                self.raw &= header.flags & Header::FRAMED == 0;
                self.opened();
                self.events.push_back(LaneEvent::Opened);
            }
            (FrameType::Failed, LanePhase::Opening) => {
                self.out.set_mute(false);
                let (code, text) = read_refusal(payload)?;
                self.events.push_back(LaneEvent::Failed { code, text });
                self.over();
            }
            // The close crossed our FIN, which had ended the tunnel.
            (FrameType::Fin, LanePhase::Idle) if header.flags & Header::CLOSE != 0 => (),
            // The peer had sent FIN before.
            (
                FrameType::Fin,
                LanePhase::Open {
                    sending: true,
                    receiving: false,
                    ..
                },
            ) if header.flags & Header::CLOSE != 0 => self.handle_fin(true, false, true, &payload),
            // The server's notice that its OPEN wins; this end has seen that OPEN by now.
            (
                FrameType::Failed,
                LanePhase::Answering | LanePhase::Open { .. } | LanePhase::Idle,
            ) if self.role == LaneRole::Agent && payload.first() == Some(&1) => {}
            (
                FrameType::Fin,
                LanePhase::Open {
                    sending,
                    receiving: true,
                    discarding,
                },
            ) => {
                let closes = header.flags & Header::CLOSE != 0;
                self.handle_fin(sending, discarding, closes, &payload);
            }
            (FrameType::Reset, _) => self.handle_reset(&payload),
            (FrameType::ResetAck, LanePhase::Resetting) => self.over(),
            // Frames in flight when this end reset the tunnel.
            (FrameType::Opened | FrameType::Failed | FrameType::Fin, LanePhase::Resetting) => (),
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
        if self.state == LanePhase::Opening && header.sequence == self.sequence {
            // Both ends opened at once, with the same sequence.
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
                    self.peer_opens(request);
                    Ok(())
                }
            };
        }
        if self.state == LanePhase::Resetting && header.sequence == self.sequence {
            // Both ends opened at once and this end has reset its OPEN; our RESET answers the peer's OPEN.
            return Ok(());
        }
        if header.sequence != self.sequence.wrapping_add(1) {
            return Err(out_of_turn);
        }
        match self.state {
            LanePhase::Idle => (),
            // The peer had finished the tunnel before our RESET arrived, so no RESET_ACK follows.
            LanePhase::Resetting => self.over(),
            LanePhase::Opening | LanePhase::Answering | LanePhase::Open { .. } | LanePhase::Raw => {
                return Err(out_of_turn);
            }
        }
        self.sequence = header.sequence;
        self.peer_opens(read_open(header, payload)?);
        Ok(())
    }

    fn peer_opens(&mut self, request: OpenRequest) {
        self.state = LanePhase::Answering;
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
                self.state = LanePhase::Open {
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
            // The peer takes no more data.
            self.discard_out();
            self.put(FrameType::Fin, 0, Bytes::new());
        }
        self.over();
    }

    fn handle_reset(&mut self, text: &[u8]) {
        match self.state {
            // The RESET crossed our RESET, whose RESET_ACK is due; or the peer had not seen yet that the tunnel was over.
            LanePhase::Resetting | LanePhase::Idle => return self.acknowledge(self.sequence),
            // Unreachable: `handle_frame` accepts no frame of a raw lane.
            LanePhase::Raw => return,
            LanePhase::Open {
                discarding: true, ..
            } => (),
            LanePhase::Opening | LanePhase::Answering | LanePhase::Open { .. } => {
                let text = read_text(text);
                self.events.push_back(LaneEvent::PeerReset { text });
            }
        }
        // The peer has not switched to raw and will not.
        self.out.set_mute(false);
        self.discard_out();
        self.acknowledge(self.sequence);
        self.over();
    }

    /// Answers a RESET, also of an earlier tunnel: our next OPEN may never be sent.
    fn acknowledge(&mut self, sequence: u16) {
        let frame = OutFrame::new(FrameType::ResetAck, 0, sequence, Bytes::new());
        self.out.push_once(frame);
    }

    /// Whether a frame belongs to the current (or last) tunnel. Frames of earlier tunnels are late and ignored.
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
