//! What a lane's end tells its owner.

use bytes::Bytes;

use super::payload::{OpenRequest, RefusalCode};

/// What happened, in order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LaneEvent {
    /// The peer opens a tunnel: answer with [`super::LaneEnd::accept`] or [`super::LaneEnd::refuse`].
    Open(OpenRequest),
    /// Our tunnel is open.
    Opened,
    /// Our tunnel did not open. [`LaneEvent::Idle`] follows.
    Failed {
        /// Kind of refusal.
        code: RefusalCode,
        /// The peer's words.
        text: String,
    },
    /// Bytes of the tunnel.
    Data(Bytes),
    /// The peer sends no more; this end may.
    PeerFin,
    /// The peer closed the tunnel: what came before is still good. [`LaneEvent::Idle`] follows.
    PeerClosed {
        /// Why, if it was not in order.
        text: String,
    },
    /// The peer cut the tunnel off. [`LaneEvent::Idle`] follows.
    PeerReset {
        /// Why.
        text: String,
    },
    /// The tunnel of before is over and the lane is clean.
    Idle,
    /// An answer to a ping.
    Pong(u64),
    /// Agent: the server would use so many more lanes.
    Want(u32),
    /// The peer wants no further tunnel on this lane.
    Draining,
}
