//! Listeners that speak one dialect each to clients.

mod client;
pub mod client_limits;
pub mod events;
pub mod grpc;
pub mod http_connect;
mod pending_dial;
pub mod transparent;
