//! Tunnels between legs and links: who carries a dial, and how bytes get from one to the other.
//!
//! A link is one task that owns its session machine and its stream. A leg and its link share a conduit:
//! two queues without locks. Frontends and targets see legs only.

mod asked;
mod clock;
mod closing;
mod conduit;
mod dial;
mod driver;
mod endpoint;
mod handle;
mod lane_way;
mod leg;
mod link_way;
mod pace;
mod pipes;
mod pool;
mod pump;
mod route;
mod seat;
mod settle;
mod task;
mod watch;

pub use asked::until_answered;
pub use clock::{Clock, moment};
pub use closing::{Closing, part};
pub use conduit::{Conduit, Mailbox};
pub use dial::AskedAgents;
pub use driver::LinkDriver;
pub use endpoint::{reset_on_close, serve_target};
pub use handle::LinkHandle;
pub use lane_way::LaneHome;
pub use leg::{Carrier, Incoming, Leg, LegWatch};
pub use pipes::{PipeEnd, PipeOutcome, PipeRelay};
pub use pool::{AgentOpen, AgentOpens, LanePool, PoolSettings};
pub use pump::{PumpEnd, PumpOutcome, pump};
pub use route::{DialLimits, Entered, Hub, LinkGuard, LinkInfo, OpenTunnel, TooManyLinks};
pub use settle::{Unsettled, settle};
pub use task::{Command, DialOutcome, Dialed, LinkHooks, LinkOver, LinkStreams};
pub use watch::LaneWatch;

#[cfg(test)]
mod tests;
