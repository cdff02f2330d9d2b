//! The state that a server or agent reports on its admin socket, and how `adit status`, `adit top` and `adit links` show it.

mod announced;
pub mod answer;
mod client;
mod collect;
pub mod fleet;
pub mod links;
pub mod model;
pub mod print;
pub(super) mod tables;
#[cfg(test)]
pub(crate) mod tests;
pub(super) mod text;

pub(super) use announced::Announced;
pub(super) use answer::service;
pub use client::{AskError, Socket};
pub(super) use collect::{AgentSource, Common, ServerSource};
