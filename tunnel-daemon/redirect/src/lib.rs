//! The kernel side: what this host allows, the embedded object, attachments that end with the process, typed maps, capture of
//! connections and the network namespaces they come from.
//!
//! Refuses to know tunnels and protocols. Nothing here may keep the daemon from starting: a missing feature is a reason in
//! words.
#![deny(unsafe_code)]

pub mod attach;
pub mod caps;
mod command;
mod generations;
pub mod load_probe;
pub mod maps;
pub mod namespaces;
pub mod netns;
pub mod object;
pub mod other_programs;
pub mod pins;
pub mod processes;
pub mod redirect;
