//! The agent listener: agent streams as links of the hub.

mod admission;
mod judge;
mod lanes;
mod link;
mod linkless;
mod node;
mod service;

pub use admission::Admission;
pub use judge::{DenyFileError, Judge, check_deny_list};
pub use link::LinkSettings;
pub use node::{DIAL_TIMEOUT, Destinations, NodeDoor, NodeSettings};
pub use service::{Backend, BackendSettings};
