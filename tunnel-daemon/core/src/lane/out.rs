//! Frames on their way out of one end.

use std::collections::VecDeque;

use super::frame::{FrameType, OutFrame};

/// Frames in order, with what has to be known of them at any time.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    frames: VecDeque<OutFrame>,
    bytes: usize,
    pongs: usize,
    controls: usize,
    mute: bool,
}

impl Outgoing {
    /// Frames that wait.
    pub(super) fn frames(&self) -> usize {
        self.frames.len()
    }

    /// Payload bytes of them.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Answers to pings among them.
    pub(super) fn pongs(&self) -> usize {
        self.pongs
    }

    /// Those that are not DATA.
    pub(super) fn controls(&self) -> usize {
        self.controls
    }

    /// Whether no frame leaves, since the peer may read it as bytes of the tunnel.
    pub(super) fn is_mute(&self) -> bool {
        self.mute
    }

    /// From now on frames are dropped, or not. Returns what was before.
    pub(super) fn set_mute(&mut self, mute: bool) -> bool {
        std::mem::replace(&mut self.mute, mute)
    }

    /// Adds a frame.
    pub(super) fn push(&mut self, frame: OutFrame) {
        if !self.mute {
            self.count(&frame);
            self.frames.push_back(frame);
        }
    }

    fn count(&mut self, frame: &OutFrame) {
        self.bytes += frame.payload.len();
        self.pongs += usize::from(frame.header.kind == FrameType::Pong);
        self.controls += usize::from(frame.header.kind != FrameType::Data);
    }

    /// Adds a frame unless the very same was added last: a peer that repeats itself and reads nothing piles nothing up.
    /// While an OPEN behind which nothing may be said still waits, the frame goes right in front of it.
    pub(super) fn push_once(&mut self, frame: OutFrame) {
        let at = if self.mute {
            let Some(open) = self.open_at() else {
                return;
            };
            open
        } else {
            self.frames.len()
        };
        let last = at.checked_sub(1).and_then(|last| self.frames.get(last));
        if last != Some(&frame) {
            self.count(&frame);
            self.frames.insert(at, frame);
        }
    }

    /// The next one.
    pub(super) fn pop(&mut self) -> Option<OutFrame> {
        let frame = self.frames.pop_front()?;
        self.bytes -= frame.payload.len();
        self.pongs -= usize::from(frame.header.kind == FrameType::Pong);
        self.controls -= usize::from(frame.header.kind != FrameType::Data);
        Some(frame)
    }

    /// Whether an OPEN waits, which the peer cannot have seen then.
    pub(super) fn holds_open(&self) -> bool {
        self.open_at().is_some()
    }

    fn open_at(&self) -> Option<usize> {
        let is_open = |frame: &OutFrame| frame.header.kind == FrameType::Open;
        self.frames.iter().position(is_open)
    }

    /// Drops what belongs to the tunnel `sequence`; answers that the peer waits for and frames about the lane stay.
    pub(super) fn discard(&mut self, sequence: u16) {
        self.frames
            .retain(|frame| frame.header.sequence != sequence || outlives_tunnel(frame));
        self.bytes = self.frames.iter().map(|frame| frame.payload.len()).sum();
        let is_control = |frame: &&OutFrame| frame.header.kind != FrameType::Data;
        self.controls = self.frames.iter().filter(is_control).count();
    }

    /// Gives memory back that is not in use.
    pub(super) fn rest(&mut self) {
        if self.frames.is_empty() {
            self.frames = VecDeque::new();
        }
    }
}

fn outlives_tunnel(frame: &OutFrame) -> bool {
    use FrameType::{Drain, Failed, Ping, Pong, ResetAck, Want};
    matches!(
        frame.header.kind,
        Ping | Pong | Want | Drain | ResetAck | Failed
    )
}
