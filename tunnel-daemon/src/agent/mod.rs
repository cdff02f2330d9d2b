//! The agent: links to servers, dialling of targets.

pub mod lanes;
pub mod link;
pub mod node;
pub mod reach;
pub mod servers;
pub mod sync;
pub mod targets;
