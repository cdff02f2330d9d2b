//! The kernel side: what this host allows, the embedded object, attachments that end with the process, typed maps.
//!
//! Knows no tunnel and no protocol. Nothing here may keep the daemon from starting: whatever is missing is a reason in words.

pub mod account;
pub mod attach;
pub mod caps;
pub mod cgroup;
mod command;
pub mod exempt;
mod generations;
pub mod maps;
pub mod mounts;
pub mod neighbours;
pub mod netns;
pub mod object;
pub mod pins;
pub mod processes;
pub mod redirect;
pub(crate) mod release;
pub mod tried;
