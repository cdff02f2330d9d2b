//! Label values for lanes and for connections that are to become lanes.

use super::Label;

label! {
    /// State of a lane.
    LaneState {
        /// Free for a tunnel.
        Idle = "idle",
        /// Carries a tunnel.
        Busy = "busy",
    }
}

label! {
    /// Which path a dial to an agent with lanes took.
    LaneDial {
        /// The dial went over a lane.
        Hit = "hit",
        /// No lane was idle; the dial went over the link.
        Miss = "miss",
        /// The dial was not acknowledged on the lane, and went over the link.
        Unacknowledged = "unacknowledged",
    }
}

label! {
    /// Why a lane ended.
    LaneEnd {
        /// Closed while idle, because there were more than needed.
        Drained = "drained",
        /// Its connection failed or was closed.
        Lost = "lost",
        /// The peer broke the protocol.
        Violation = "violation",
        /// The peer did not answer a ping, or did not let go of a tunnel in time.
        Silent = "silent",
        /// Its link is gone.
        LinkGone = "link_gone",
        /// It was a raw lane, which carries one tunnel.
        Used = "used",
        /// Given up while idle, because file descriptors run low.
        Descriptors = "descriptors",
    }
}

label! {
    /// Why a connection did not become a lane.
    LaneRefusal {
        /// No link of this peer has that number.
        NoLink = "no_link",
        /// The proof is wrong.
        Proof = "proof",
        /// The number of lanes of the link or the process is at its limit.
        Full = "full",
        /// Too many connections wait to be bound.
        Unbound = "unbound",
        /// Not bound in time, closed before, or not the protocol.
        Handshake = "handshake",
    }
}
