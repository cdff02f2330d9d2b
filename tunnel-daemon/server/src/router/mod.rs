//! Chooses the agent and the link for a dial, and retries when a dial fails.

mod dial;
mod handle;
mod route;

pub use dial::AskedAgents;
pub use handle::{LinkHandle, LinkInfo};
pub use route::{DialLimits, LinkGuard, OpenTunnel, RegisteredLink, Router, TooManyLinks};

#[cfg(test)]
mod tests;
