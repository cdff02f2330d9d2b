//! Sessions of one link: dials, tunnels, credit, budgets. Packets and endpoint events in, actions out.
//!
//! [`Link`] is the same state machine on both ends; [`Role`] decides which end dials and which answers. The link owns
//! bytes queued for the peer. Bytes for an endpoint leave at once as [`Action::Deliver`] and stay counted until the
//! endpoint has drained them. The link never waits and never refuses input for lack of memory: bytes that exceed a
//! budget end the responsible tunnel.

mod budget;
mod cancelled;
mod closing;
mod control_pool;
mod control_queue;
mod deliver;
mod forgotten;
mod holders;
mod link;
mod promise;
mod role;
mod sizer;
mod slab;
mod sweep;
mod transmit;
mod tunnel;

pub use budget::{
    MemoryBounds, MemoryPressure, ProcessBudget, QUEUE_MAX_BYTES, QUEUE_MIN_BYTES, Queued,
};
pub use control_pool::{ControlShare, QueuedFrame};
pub use link::{Action, CancelledDial, DialRequest, Event, Link, LinkConfig, LinkFailure};
pub use promise::{
    BOUNDED_CALL_BUFFER_BYTES, BOUNDED_CALL_WINDOW_BYTES, Growth, Promise, TunnelKind,
};
pub use sizer::{CLIENT_PACKET_MAX_BYTES, CLIENT_PACKET_MIN_BYTES, PacketSizer};
pub use transmit::Transmit;
pub use tunnel::TunnelEnd;

use std::time::Duration;

/// A point in time, as the time since an epoch the driver chose (monotonic).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Moment(pub Duration);

impl Moment {
    /// The moment `by` after this one.
    #[must_use]
    pub fn after(self, by: Duration) -> Self {
        Self(self.0.saturating_add(by))
    }

    /// Time since `earlier`; zero if `earlier` is later than this moment.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

/// Which end of the link this is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Dials; its endpoints are clients.
    Server,
    /// Answers dials; its endpoints are targets.
    Agent,
}

/// Limits that isolate tunnels from each other. All are flags.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Isolation {
    /// Bytes guaranteed to a tunnel while its reader pauses, capped by the link budget divided by its tunnels.
    pub tunnel_share_bytes: u64,
    /// Bytes held for all tunnels of one link.
    pub link_budget_bytes: u64,
    /// A tunnel that exceeds its share without progress for this long is closed.
    pub stall_timeout: Duration,
    /// A half-closed tunnel without a byte for this long is reset.
    pub half_closed_timeout: Duration,
    /// After a close, pending bytes may be without progress for this long.
    pub linger_timeout: Duration,
}

impl Default for Isolation {
    fn default() -> Self {
        Self {
            tunnel_share_bytes: 4 << 20,
            link_budget_bytes: 64 << 20,
            stall_timeout: Duration::from_secs(300),
            half_closed_timeout: Duration::from_secs(300),
            linger_timeout: Duration::from_secs(30),
        }
    }
}

/// Initial credit of a tunnel while the link's credit budget lasts, bytes.
pub const WINDOW_START_BYTES: u64 = 256 << 10;
/// Initial and smallest credit of a tunnel when the budget is short, bytes.
pub const WINDOW_MIN_BYTES: u64 = 16 << 10;
/// Most credit outstanding for one tunnel, bytes.
pub const WINDOW_MAX_BYTES: u64 = 16 << 20;
/// A window refilled again within this time, for an endpoint that waits for more bytes, is doubled. A limiting window is
/// refilled once per round trip, so windows grow on paths of up to half a second.
const WINDOW_GROWS_WITHIN: Duration = Duration::from_millis(500);
/// A peer that may be waiting for credit gets the drained bytes as credit after this time, even below half a window:
/// its linger timeout measures a slow reader by this progress.
const WINDOW_AT_LEAST_EVERY: Duration = Duration::from_secs(5);
/// An endpoint that has taken no bytes for this long while bytes wait counts as not reading.
const READS_WITHIN: Duration = Duration::from_millis(500);
/// Interval of the checks for stalled, lingering and half-closed tunnels.
const SWEEP_EVERY: Duration = Duration::from_secs(1);
/// After asking another link to end tunnels, a link does not compare all links again for this long.
const DEFERS_FOR: Duration = Duration::from_millis(100);
/// How long a close waits for the peer's confirmation before the tunnel is forgotten.
const CLOSE_CONFIRM_TIMEOUT: Duration = Duration::from_secs(10);

const _: () =
    assert!(WINDOW_MIN_BYTES < WINDOW_START_BYTES && WINDOW_START_BYTES < WINDOW_MAX_BYTES);

#[cfg(test)]
mod tests;
