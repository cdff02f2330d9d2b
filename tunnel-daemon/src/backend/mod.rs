//! The agent listener: agent streams as links of the hub.

mod lanes;
mod link;
mod service;

pub use link::LinkSettings;
pub use service::{Backend, BackendSettings};
