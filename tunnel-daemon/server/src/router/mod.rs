//! Chooses the agent and the link for a dial, and retries when a dial fails.

mod asked;
mod counted_attempt;
mod dial;
mod forwarded;
mod handle;
mod peers;
mod route;

pub use asked::AskedAgents;
pub use forwarded::NotForwarded;
pub use handle::{LinkHandle, LinkInfo};
pub use peers::{
    Asking, ExpectedPeer, PeerAnswer, PeerHandle, PeerOpener, RegisteredPeer, TooManyPeers,
};
pub use route::{DialLimits, LinkGuard, OpenTunnel, RegisteredLink, Router, TooManyLinks};

#[cfg(test)]
mod tests;
