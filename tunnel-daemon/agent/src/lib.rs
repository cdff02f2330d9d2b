//! The agent: links to servers, lanes, dialling of targets, and listeners that ask a server for a tunnel.
//!
//! Owns which servers it is connected to and which targets may be dialled. Refuses to know other agents and the clients of a server.
#![deny(unsafe_code)]

pub mod connector;
pub mod context;
pub mod lanes;
pub mod link;
pub mod node;
pub mod servers;
pub mod sync;
pub mod targets;
