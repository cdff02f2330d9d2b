//! Servers of one installation that forward dials to each other: what they say of a dial, and of themselves.

mod forward;

pub use forward::{Forward, ForwardError};
pub(crate) use forward::{strategy_number, strategy_of};

/// The application protocol of a peer's TLS connection; its number is the major version of the protocol.
pub const ALPN: &str = "adit-peer/1";
/// Longest name of an installation, bytes.
pub const GROUP_LEN_MAX: usize = 64;
/// Most peers of a server.
pub const PEERS_MAX: usize = 64;
