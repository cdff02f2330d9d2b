//! Tunnels between endpoints: the link's driver, channels, bidirectional copy, drain, and raw lanes.
//!
//! A link is one task that owns its session machine and its stream. An endpoint and its link share a channel: two queues without
//! locks. Owns how bytes get from one endpoint to the other. Refuses to know which agent serves a dial, who a client is and how a
//! target is dialled.
#![deny(unsafe_code)]

mod asked;
pub mod clock;
mod closing;
pub mod conduit;
mod driver;
mod endpoint;
pub mod lane;
mod lane_way;
pub mod leg;
mod link_way;
mod pace;
mod pipes;
pub mod pool;
mod pump;
mod seat;
mod settle;
pub mod task;
mod watch;

pub use asked::until_answered;
pub use clock::{Clock, moment};
pub use closing::{Closing, part};
pub use conduit::{Conduit, LEG_END_WAITS, Mailbox};
pub use driver::LinkDriver;
pub use endpoint::{reset_on_close, serve_target};
pub use lane_way::LaneHome;
pub use leg::{Carrier, Incoming, Leg, LegWatch};
pub use pipes::{PipeEnd, PipeOutcome, PipeRelay, driver_label, reason_label};
pub use pool::{AgentOpen, AgentOpens, LanePool, PoolSettings};
pub use pump::{PumpEnd, PumpOutcome, pump};
pub use settle::{Unsettled, settle};
pub use task::{Command, DialOutcome, Dialed, LinkHooks, LinkOver, LinkStreams};
pub use watch::LaneWatch;
