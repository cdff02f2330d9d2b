//! What an end does about a pipe on a lane that is encrypted.

use bytes::Bytes;

use super::{LaneEnd, State};
use crate::lane::frame::{FrameType, Header};

impl LaneEnd {
    /// Whether the next frame may be the last one on this lane.
    #[must_use]
    pub fn may_turn_raw(&self) -> bool {
        self.raw && self.state == State::Opening
    }

    /// As [`Self::accept`], but the tunnel has frames, also where the peer would do without. For lanes whose greeting has
    /// agreed on kernel TLS: other peers do not expect it.
    pub fn accept_framed(&mut self) {
        if self.state == State::Answering {
            let flags = if self.raw { Header::FRAMED } else { 0 };
            self.raw = false;
            self.put(FrameType::Opened, flags, Bytes::new());
            self.opened();
        }
    }
}
