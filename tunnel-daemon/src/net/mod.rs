//! Sockets, TLS, listeners and bounded tasks.

pub mod accept;
pub mod authority;
pub mod blocks;
pub mod buffered;
mod ca;
mod cipher;
pub mod clear;
pub mod descriptors;
mod gather;
pub mod grpc;
pub mod handshake;
mod identity;
pub mod listen;
pub mod outbox;
mod pem;
pub mod principal;
pub mod records;
pub mod reload;
pub mod selfsigned;
pub mod services;
pub mod socket;
pub mod stream;
pub mod tasks;
pub mod tls;
mod tls_error;
pub mod together;
pub mod unix;
