//! The agent: links to servers, dialling of targets.

pub mod dial;
pub mod lanes;
pub mod link;
pub mod reach;
pub mod resolve;
pub mod servers;
pub mod sync;
pub mod targets;
