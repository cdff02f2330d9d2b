//! Raw tunnels on encrypted lanes.

use bytes::Bytes;

use super::{LaneEnd, LanePhase};
use crate::lane::frame::{FrameType, Header};

impl LaneEnd {
    /// Whether the next received frame may be the lane's last one: an OPENED that makes the lane raw.
    #[must_use]
    pub fn may_turn_raw(&self) -> bool {
        self.raw && self.state == LanePhase::Opening
    }

    /// As [`Self::accept`], but the tunnel is framed even if the peer asked for a raw tunnel. Only for lanes whose
    /// greeting agreed on kTLS: other peers do not expect this answer.
    pub fn accept_framed(&mut self) {
        if self.state == LanePhase::Answering {
            let flags = if self.raw { Header::FRAMED } else { 0 };
            self.raw = false;
            self.put(FrameType::Opened, flags, Bytes::new());
            self.opened();
        }
    }
}
