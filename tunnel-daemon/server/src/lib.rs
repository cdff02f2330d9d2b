//! The server: frontends for clients, the agent listener, and the router between them.
//!
//! Owns admission of agents and clients and the choice of a link. Refuses to know flags, files and Kubernetes: the binary hands
//! it settings and trait objects.
#![deny(unsafe_code)]

pub mod backend;
pub mod frontend;
pub mod router;
