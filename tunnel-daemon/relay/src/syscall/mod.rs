//! The system calls of the byte path, each behind a safe signature. Only `pages`, [`ring`], [`tcp`] and [`tls`] contain
//! unsafe code.
//!
//! A splice into a socket whose peer is gone raises SIGPIPE, which no flag prevents. Rust programs ignore SIGPIPE by
//! default; a program that does not must ignore it before it starts a relay.

#[expect(unsafe_code, reason = "pages of the program's own code")]
mod pages;
pub(crate) mod pipe;
#[expect(unsafe_code, reason = "submission entries of io_uring")]
pub(crate) mod ring;
pub(crate) mod socket;
#[expect(unsafe_code, reason = "TCP_INFO and SIOCOUTQ")]
mod tcp;
#[expect(unsafe_code, reason = "keys and control messages of kernel TLS")]
pub(crate) mod tls;

pub use pages::give_back_program_pages;
pub use tcp::{TcpState, tcp_state, unacknowledged_bytes};
pub(crate) use tcp::{lock_buffers, set_window_clamp};
