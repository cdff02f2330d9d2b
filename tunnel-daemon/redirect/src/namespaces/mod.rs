//! Listening sockets in other network namespaces.
//!
//! Entering one takes CAP_SYS_ADMIN, which the daemon does not want to hold for its life. So a small process does it: the same
//! program once more, started before privileges are dropped, which keeps that capability and almost nothing else. What it may
//! open is said on its command line, not by its requests. A daemon that is taken over gains no other namespace from it, unless
//! it may write where the command line points: below `/run/netns`, or the captured cgroup. It ends when the daemon's end of their socket closes, however that happens.
//!
//! A process and not a thread: threads share memory, so whoever takes over one has the capabilities of all.

mod client;
mod find;
pub mod helper;
mod wire;

pub use client::{Helper, HelperError, Look, Opened, start_by};
pub use find::{FOLDERS_MAX, PROCESSES_MAX};
pub use wire::Asked;
