//! The server: frontends for clients, links and lanes of agents, and the router between them.
//!
//! Owns admission of agents and clients and the choice of a link. Takes checked plans and accepted streams. Knows neither flags
//! nor listening sockets, nor how a target is dialled.
#![deny(unsafe_code)]

pub mod backend;
pub mod followed;
pub mod frontend;
mod owner;
pub mod router;

pub use owner::owner_hash;
