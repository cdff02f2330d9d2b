//! The host, and this process on it: kernel, mounts, cgroups, memory, capabilities, interfaces; files and work that may block.
//!
//! Refuses to know what the facts and the files are for.
#![deny(unsafe_code)]

pub mod blocking;
pub mod capabilities;
pub mod cgroup;
pub mod descriptors;
pub mod files;
pub mod interfaces;
pub mod memory;
pub mod mounts;
pub mod privileges;
pub mod release;
pub mod rtnetlink;
pub mod wait;
