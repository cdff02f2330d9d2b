//! Listeners that speak one dialect each to clients.

pub mod client_limits;
mod establish;
pub mod events;
pub mod grpc;
pub mod http_connect;
mod pending_dial;
pub mod transparent;
