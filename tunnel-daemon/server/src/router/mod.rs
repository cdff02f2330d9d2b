//! Which agent and which of its links serves a dial, and what is done when one fails.

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
