//! Events of a lane's end.

use bytes::Bytes;

use super::growth::Want;
use super::payload::{OpenRequest, RefusalCode};

/// An event; events are delivered in order.
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
        /// The peer's text.
        text: String,
    },
    /// Bytes of the tunnel.
    Data(Bytes),
    /// The peer sends no more data; this end may.
    PeerFin,
    /// The peer closed the tunnel. Data received before is valid. [`LaneEvent::Idle`] follows.
    PeerClosed {
        /// The reason; empty if the close was regular.
        text: String,
    },
    /// The peer reset the tunnel. [`LaneEvent::Idle`] follows.
    PeerReset {
        /// The reason.
        text: String,
    },
    /// The tunnel is over and the lane is free.
    Idle,
    /// An answer to a ping.
    Pong(u64),
    /// Agent: the server asks for lanes.
    Want(Want),
    /// The peer accepts no further tunnels on this lane.
    Draining,
}
