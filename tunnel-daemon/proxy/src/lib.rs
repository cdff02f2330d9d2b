//! The HTTP proxy that clients see, whoever opens the tunnels: what a request asks for, what its target gets, and what the
//! client is answered (RFC 9110, RFC 9112).
#![forbid(unsafe_code)]

pub mod connect;
pub mod http;
pub mod users;
