//! The queue of frames to send.

use std::collections::VecDeque;

use super::frame::{FrameType, OutFrame};

/// Frames in order, with running counts.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    frames: VecDeque<OutFrame>,
    bytes: usize,
    pongs: usize,
    controls: usize,
    mute: bool,
}

impl Outgoing {
    /// Queued frames.
    pub(super) fn frames(&self) -> usize {
        self.frames.len()
    }

    /// Queued payload bytes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Queued PONGs.
    pub(super) fn pongs(&self) -> usize {
        self.pongs
    }

    /// Queued frames other than DATA.
    pub(super) fn controls(&self) -> usize {
        self.controls
    }

    /// Whether new frames are dropped, because the peer might read them as bytes of a raw tunnel.
    pub(super) fn is_mute(&self) -> bool {
        self.mute
    }

    /// Sets whether new frames are dropped. Returns the previous setting.
    pub(super) fn set_mute(&mut self, mute: bool) -> bool {
        std::mem::replace(&mut self.mute, mute)
    }

    /// Queues a frame unless mute.
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

    /// Queues a frame unless an equal frame is last, so a peer that repeats frames and does not read cannot grow the
    /// queue. While mute, the frame is inserted right before the queued OPEN; without one the frame is dropped.
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

    /// The next frame.
    pub(super) fn pop(&mut self) -> Option<OutFrame> {
        let frame = self.frames.pop_front()?;
        self.bytes -= frame.payload.len();
        self.pongs -= usize::from(frame.header.kind == FrameType::Pong);
        self.controls -= usize::from(frame.header.kind != FrameType::Data);
        Some(frame)
    }

    /// Whether an OPEN is queued, so that the peer cannot have seen it.
    pub(super) fn holds_open(&self) -> bool {
        self.open_at().is_some()
    }

    fn open_at(&self) -> Option<usize> {
        let is_open = |frame: &OutFrame| frame.header.kind == FrameType::Open;
        self.frames.iter().position(is_open)
    }

    /// Drops frames of the tunnel `sequence`. Answers that the peer waits for and frames about the lane stay.
    pub(super) fn discard(&mut self, sequence: u16) {
        self.frames
            .retain(|frame| frame.header.sequence != sequence || outlives_tunnel(frame));
        self.bytes = self.frames.iter().map(|frame| frame.payload.len()).sum();
        let is_control = |frame: &&OutFrame| frame.header.kind != FrameType::Data;
        self.controls = self.frames.iter().filter(is_control).count();
    }

    /// Frees unused memory.
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
