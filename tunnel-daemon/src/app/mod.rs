//! Wiring: the only modules that know all others.

mod account;
pub mod admin;
pub mod agent;
pub mod demo;
mod descriptors;
mod listeners;
mod memory;
pub mod probes;
mod relay;
pub mod run;
pub mod server;
pub mod signals;
