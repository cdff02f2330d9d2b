//! The agent: links to servers, lanes, dialling of targets, and listeners that ask a server for a tunnel.
//!
//! Owns which servers the agent connects to and which targets may be dialled. Knows neither other agents nor a server's
//! clients.
#![deny(unsafe_code)]

pub mod connector;
pub mod context;
pub mod lanes;
pub mod link;
pub mod node;
pub mod proxy_tunnels;
pub mod servers;
pub mod sync;
pub mod target_proxy;
pub mod targets;
