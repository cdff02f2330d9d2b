//! The Konnectivity protocol without I/O: packets, sessions, agent registry, limits.
//!
//! Nothing here opens a socket, reads a clock, spawns a task or contains unsafe code. Time and random
//! draws are arguments, so every race is a row in a table and every simulation is repeatable.
#![forbid(unsafe_code)]

pub mod connect;
pub mod destination;
pub mod dial;
pub mod failure;
pub mod grant;
pub mod http2;
pub mod ids;
pub mod lane;
pub mod proxy_header;
pub mod registry;
pub mod session;
pub mod target;
pub mod text;
pub mod tls13;
pub mod wire;
