//! Bytes, lifetimes and round-trip times of connections as the kernel counts them, and whether its programs load here.
//!
//! Owns the accounting program, its maps and its labels. Refuses to know what a label means to a tunnel.
#![deny(unsafe_code)]

mod attach;
mod classes;
mod counted;
mod reader;
mod sockets;

pub use attach::{Options, start};
pub use reader::Reader;
pub use sockets::{Live, SocketTable};
