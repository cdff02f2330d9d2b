//! Bytes, lifetimes and round-trip times of connections, counted by an eBPF program.
//!
//! Owns the accounting program, its maps and its labels, but does not interpret labels.
#![deny(unsafe_code)]

mod attach;
mod classes;
mod counted;
mod reader;
mod sockets;

pub use attach::{Options, start};
pub use reader::Reader;
pub use sockets::{Live, SocketTable};
