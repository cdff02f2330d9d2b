//! Tunnels between endpoints: the link's driver, channels, bidirectional copy, drain, lanes and their pool, and raw lanes.
//!
//! A link is one task that owns its session machine and its stream. An endpoint and its link share a channel: two queues
//! without locks. This package owns how bytes move between endpoints. It does not know which agent serves a dial, nor how a
//! target is dialled.
#![deny(unsafe_code)]

mod bridge;
pub mod channel;
pub mod clock;
mod closing;
mod copy;
mod drain;
mod driver;
pub mod endpoint;
mod incoming;
pub mod lane;
mod lane_path;
mod link_path;
mod opening;
mod pace;
mod path_state;
pub mod pool;
mod progress_timer;
mod raw_lanes;
mod server_path;
mod target;
pub mod task;
mod tunnel_slot;
mod until_answered;
mod watch;

pub use bridge::{BridgeOutcome, bridge};
pub use channel::{Channel, DirtyList, ENDPOINT_END_WAITS};
pub use clock::moment;
pub use closing::{Closing, close_gracefully, reset_on_close};
pub use copy::{CopyEnd, CopyOutcome, copy_bidirectional};
pub use drain::{DrainError, drain};
pub use driver::LinkDriver;
pub use endpoint::{Carrier, Endpoint, EndpointWatch};
pub use incoming::Incoming;
pub use lane_path::LaneOwner;
pub use opening::{OpenAnswer, open_tunnel};
pub use pool::{AgentOpen, AgentOpens, LanePlaces, LanePool, PoolSettings};
pub use raw_lanes::{RawLaneEnd, RawLaneOutcome, RawLaneRelay, driver_label, reason_label};
pub use server_path::ServerConnection;
pub use target::serve_target;
pub use task::{Command, DialOutcome, Dialed, LinkExit, LinkHooks, LinkStreams};
pub use until_answered::until_answered;
pub use watch::LaneWatch;
