//! The agent listener: agent streams as links of the hub.

mod admission;
mod deny;
mod lanes;
mod link;
mod node;
mod service;

pub use admission::Admission;
pub use deny::{Denied, DenyFileError};
pub use link::LinkSettings;
pub use node::{DIAL_TIMEOUT, Destinations, NodeDoor, NodeSettings};
pub use service::{Backend, BackendSettings};
