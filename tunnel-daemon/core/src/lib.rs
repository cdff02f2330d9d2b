//! The Konnectivity protocol without I/O: packets, sessions, agent registry, limits.
//!
//! This crate opens no sockets, reads no clock, spawns no tasks and contains no unsafe code. Time and random draws are
//! arguments, so tests can enumerate races and simulations are repeatable.
#![forbid(unsafe_code)]

pub mod connect;
pub mod destination;
pub mod dial;
pub mod failure;
pub mod grant;
pub mod http2;
pub mod ids;
pub mod lane;
pub mod peer;
pub mod proxy_header;
pub mod registry;
pub mod session;
pub mod socks5;
pub mod target;
pub mod text;
pub mod tls13;
pub mod wire;
