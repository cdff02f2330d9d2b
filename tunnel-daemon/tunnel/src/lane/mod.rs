//! Lanes as connections: frames over TLS, and the greeting that binds a new one to its link.

mod bind;
mod connection;
mod raw;
mod room;
mod transport;

pub use bind::{BindError, BindTo, LinkSecret, bind_to_server, greet_agent};
pub use connection::{Lane, LaneFailure};
pub use raw::{LaneRights, RawLane};
pub(crate) use room::WarmShare;
pub use room::{LaneRoom, Slot};
