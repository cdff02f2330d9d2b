//! Label values for lanes and for connections that are to become lanes.

use super::Label;

label! {
    /// State of a lane.
    LaneState {
        /// The lane is free for a tunnel.
        Idle = "idle",
        /// The lane carries a tunnel.
        Busy = "busy",
    }

    /// Which path a dial to an agent with lanes took.
    LaneDial {
        /// The dial went over a lane.
        Hit = "hit",
        /// No lane was idle; the dial went over the link.
        Miss = "miss",
        /// The lane did not acknowledge the dial; the dial went over the link.
        Unacknowledged = "unacknowledged",
    }

    /// Why a lane ended.
    LaneCloseReason {
        /// Closed while idle because more lanes existed than needed.
        Drained = "drained",
        /// The connection of the lane failed or was closed.
        Lost = "lost",
        /// The peer broke the protocol.
        Violation = "violation",
        /// The peer did not answer a ping, or did not release a tunnel in time.
        Silent = "silent",
        /// The link of the lane ended.
        LinkGone = "link_gone",
        /// The lane was a raw lane, which carries one tunnel.
        Used = "used",
        /// Closed while idle because file descriptors run low.
        Descriptors = "descriptors",
    }

    /// Why a connection did not become a lane.
    LaneRefusal {
        /// The peer has no link with the requested number.
        NoLink = "no_link",
        /// The peer's proof of the link secret is wrong.
        Proof = "proof",
        /// The number of lanes of the link or the process is at its limit.
        Full = "full",
        /// Too many connections wait to be bound to a link.
        Unbound = "unbound",
        /// The connection was not bound in time, was closed early, or speaks another protocol.
        Handshake = "handshake",
    }
}
