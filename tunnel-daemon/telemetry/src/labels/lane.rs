//! Values of lanes and of the connections that would become lanes.

use super::Label;

label! {
    /// What a lane does.
    LaneState {
        /// Waits for a tunnel.
        Idle = "idle",
        /// Carries one.
        Busy = "busy",
    }
}

label! {
    /// How a dial to an agent with lanes went.
    LaneDial {
        /// A lane took it.
        Hit = "hit",
        /// No lane was idle: it went over the link.
        Miss = "miss",
        /// The lane did not get it across: it went over the link.
        Unacknowledged = "unacknowledged",
    }
}

label! {
    /// Why a lane is no more.
    LaneEnd {
        /// Nobody needed it.
        Drained = "drained",
        /// Its connection failed or was closed.
        Lost = "lost",
        /// The peer broke the protocol.
        Violation = "violation",
        /// The peer did not answer a ping, or did not let go of a tunnel in time.
        Silent = "silent",
        /// Its link is gone.
        LinkGone = "link_gone",
        /// It carried a tunnel without frames, after which there is no other.
        Used = "used",
        /// Given up while idle, because file descriptors run low.
        Descriptors = "descriptors",
    }
}

label! {
    /// Why a connection did not become a lane.
    LaneRefusal {
        /// No link of that number takes lanes of this peer.
        NoLink = "no_link",
        /// The proof is wrong.
        Proof = "proof",
        /// The link, or this process, has as many lanes as it may.
        Full = "full",
        /// Too many connections wait to be bound.
        Unbound = "unbound",
        /// Not bound in time, closed before, or not the protocol.
        Handshake = "handshake",
    }
}
