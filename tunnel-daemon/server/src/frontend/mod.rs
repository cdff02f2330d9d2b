//! Listeners for clients, each with one dialect.

mod checked_socket;
pub mod client_limits;
mod establish;
pub mod events;
pub mod grpc;
pub mod http_connect;
pub mod http_proxy;
mod pending_dial;
mod pipe;
pub mod socks5;
pub mod transparent;
pub mod users;

#[cfg(test)]
mod tests;
