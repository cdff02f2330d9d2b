//! Lanes as connections: frames over TLS, and the greeting that binds a new one to its link.

mod bind;
mod connection;
mod room;

pub use bind::{BindError, BindTo, LinkSecret, bind_to_server, greet_agent};
pub use connection::{Lane, LaneFailure, Pipe, Slot};
pub use room::LaneRoom;
