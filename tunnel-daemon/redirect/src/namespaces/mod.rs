//! Listening sockets in other network namespaces.
//!
//! Entering a namespace takes CAP_SYS_ADMIN, which the daemon should not hold for its life. A helper process does it: the
//! same program, started before privileges are dropped, which keeps that capability and almost nothing else. The helper's
//! command line, not its requests, says what it may open. An attacker who takes over the daemon gains no other namespace
//! from it, unless the daemon may write where the command line points: below `/run/netns`, or the captured cgroup. The
//! helper ends when the daemon's end of their socket closes, however that happens.
//!
//! A process and not a thread: threads share memory, so taking over one thread gives the capabilities of all.

mod client;
mod find;
pub mod helper;
mod wire;

pub use client::{Helper, HelperError, Look, Opened, start_by};
pub use find::{FOLDERS_MAX, PROCESSES_MAX};
pub use wire::Asked;
