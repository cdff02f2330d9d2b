//! Tunnels between legs and links: who carries a dial, and how bytes get from one to the other.
//!
//! A link is one task that owns its session machine and its stream. A leg and its link share a conduit:
//! two queues without locks. Frontends and targets see legs only.

mod clock;
mod conduit;
mod driver;
mod leg;
mod pace;
mod pump;
mod route;
mod task;

pub use clock::{Clock, moment};
pub use conduit::{Conduit, LEG_QUEUE_BYTES, Mailbox};
pub use driver::LinkDriver;
pub use leg::{Incoming, Leg, LegWatch};
pub use pump::{PumpEnd, PumpOutcome, pump};
pub use route::{
    DialLimits, Entered, Hub, LinkGuard, LinkHandle, LinkInfo, OpenTunnel, TooManyLinks,
};
pub use task::{Command, DialOutcome, Dialed, LinkHooks, LinkOver, LinkStreams};

#[cfg(test)]
mod tests;
