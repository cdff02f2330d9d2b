//! Adit: a Konnectivity data plane. Server, agent and demo behind one binary.
//!
//! Modules use only rows before their own: core, {config, telemetry}, ebpf, net, lane, hub, {frontend, backend, agent}, app.
#![deny(unsafe_code)]

pub mod agent;
pub mod app;
pub mod backend;
pub mod config;
pub mod ebpf;
pub mod frontend;
pub mod hub;
pub mod lane;
pub mod net;
#[cfg(test)]
mod reference;
pub mod telemetry;
