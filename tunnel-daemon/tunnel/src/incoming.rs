//! What a path hands to its endpoint.

use adit_core::session::TunnelEnd;
use bytes::Bytes;

/// What an endpoint may receive, in this order per tunnel: data, at most one `PeerFin`, one `Ended`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Incoming {
    /// Bytes for this side. Report them with [`crate::Endpoint::drained`] once the socket or stream has taken them.
    Data(Bytes),
    /// The other side has sent EOF; this side may still send.
    PeerFin,
    /// The tunnel is over. Repeats on every later call.
    Ended(TunnelEnd),
}
