//! Sessions of one link: dials, tunnels, credit, budgets. Packets and endpoint events in, actions out.
//!
//! [`Link`] is the same machine on both ends; [`Role`] decides who dials and who answers. It owns the
//! bytes waiting for the peer; bytes for an endpoint leave at once as [`Action::Deliver`] and stay accounted
//! here until the endpoint says they are gone. It never waits and never refuses input for lack of room:
//! what does not fit ends the tunnel that is to blame.

mod budget;
mod cancelled;
mod closing;
mod deliver;
mod holders;
mod link;
mod role;
mod sizer;
mod slab;
mod sweep;
mod transmit;
mod tunnel;

pub use budget::{MemoryPressure, ProcessBudget, QUEUE_MAX_BYTES, QUEUE_MIN_BYTES, Queued};
pub use link::{Action, CancelledDial, DialRequest, Event, Link, LinkConfig, LinkFailure, Role};
pub use sizer::{CLIENT_PACKET_MAX_BYTES, CLIENT_PACKET_MIN_BYTES, PacketSizer};
pub use transmit::Transmit;
pub use tunnel::TunnelEnd;

use std::time::Duration;

/// A point in time, as the time since an epoch the driver chose (monotonic).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Moment(pub Duration);

impl Moment {
    /// This moment and `by` more.
    #[must_use]
    pub fn after(self, by: Duration) -> Self {
        Self(self.0.saturating_add(by))
    }

    /// Time since `earlier`; zero if that is later.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

/// What one tunnel may cost the others. All are flags; the defaults are the design's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Isolation {
    /// Bytes a tunnel owns while its reader pauses (capped by the agent budget over its tunnels).
    pub tunnel_share_bytes: u64,
    /// Bytes held for all tunnels of one link.
    pub link_budget_bytes: u64,
    /// A tunnel over its share without progress for this long is closed.
    pub stall_timeout: Duration,
    /// A half-closed tunnel without a byte for this long is reset.
    pub half_closed_timeout: Duration,
    /// After a close, bytes still on their way may take this long without progress.
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

/// Credit a tunnel starts with while the link's credit budget lasts, bytes.
pub const WINDOW_START_BYTES: u64 = 256 << 10;
/// Credit a tunnel starts with, and falls back to, when the budget is short, bytes.
pub const WINDOW_MIN_BYTES: u64 = 16 << 10;
/// Most credit outstanding for one tunnel, bytes.
pub const WINDOW_MAX_BYTES: u64 = 16 << 20;
/// A window refilled again this soon, for an endpoint that waits for more, is doubled. Where the window limits, that is once in a
/// round trip: no tunnel is kept small on a path of half a second.
const WINDOW_GROWS_WITHIN: Duration = Duration::from_millis(500);
/// A peer that may be waiting for credit hears of drained bytes after this long, half a window or not:
/// its own linger time judges a slow reader by this progress.
const WINDOW_AT_LEAST_EVERY: Duration = Duration::from_secs(5);
/// An endpoint that took nothing for longer than this, with bytes waiting for it, does not read.
const READS_WITHIN: Duration = Duration::from_millis(500);
/// How often the slow clauses (stalls, lingering, half-closed) are looked at.
const SWEEP_EVERY: Duration = Duration::from_secs(1);
/// How long a link that asked another one to give does not look again who has to.
const DEFERS_FOR: Duration = Duration::from_millis(100);
/// How long a close waits for the peer's confirmation before the tunnel is forgotten.
const CLOSE_CONFIRM_TIMEOUT: Duration = Duration::from_secs(10);
/// Ids of connections this link answered with a close, remembered to answer each only once.
const FORGOTTEN_IDS_MAX: usize = 4096;

const _: () =
    assert!(WINDOW_MIN_BYTES < WINDOW_START_BYTES && WINDOW_START_BYTES < WINDOW_MAX_BYTES);

#[cfg(test)]
mod tests;
