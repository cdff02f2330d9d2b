//! Accounting in the kernel for the connections of this process: which sockets, by what labels, and what came of them.
//!
//! The numbers stand beside those of the engines, which stay authoritative. Nothing here is on the way of a byte: a socket is
//! named to the kernel once, when it is made.

mod attach;
mod classes;
mod counted;
mod reader;
mod sockets;

pub(super) use attach::PROGRAM;
pub use attach::{Options, start};
pub use classes::Labels;
pub use reader::Reader;
pub use sockets::{Accounts, Live};
