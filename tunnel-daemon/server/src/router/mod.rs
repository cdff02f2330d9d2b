//! Chooses the agent and the link for a dial, and retries when a dial fails.

mod dial;
mod handle;
mod route;

pub use dial::AskedAgents;
pub use handle::LinkHandle;
pub use route::{
    DialLimits, LinkGuard, LinkInfo, OpenTunnel, RegisteredLink, Router, TooManyLinks,
};

#[cfg(test)]
mod tests;
