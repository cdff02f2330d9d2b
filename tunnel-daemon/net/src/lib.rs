//! Sockets outside TLS: listening, accepting, dialling, name lookup, HTTP/2 glue and bounded tasks.
//!
//! Owns listeners, dials of names and their order, and slots. Knows which socket options links and lanes need.
//! Refuses to know tunnels, agents and eBPF programs: the packages above pass it bytes and hooks.
#![deny(unsafe_code)]

pub mod accept;
pub mod accounts;
pub mod buffer_growth;
mod call_pace;
pub mod call_windows;
pub mod calls;
pub mod dial;
pub mod direct;
pub mod grpc;
pub mod handshakes;
pub mod happy_eyeballs;
pub mod inherited;
pub mod listen;
pub mod original_dst;
pub mod peer;
pub mod poll_set;
pub mod resolve;
pub mod self_listeners;
pub mod self_sockets;
pub mod socket;
pub mod source_filter;
pub mod source_quota;
pub mod tasks;
pub mod unix;
mod write_coalescer;
