//! Adit: a Konnectivity data plane. Server, agent and demo behind one binary: the wiring of all other packages.
#![deny(unsafe_code)]

mod account;
pub mod admin;
pub mod agent;
mod answer_deadline;
mod budgets;
mod certificates;
pub mod check;
pub mod controls;
#[cfg(feature = "demo")]
pub mod demo;
mod descriptors;
#[cfg_attr(not(feature = "ebpf"), path = "no_ebpf.rs")]
mod ebpf;
mod ebpf_flags;
mod kubernetes;
mod listeners;
mod log_options;
mod memory_pressure;
#[cfg(test)]
mod messages;
mod node;
pub mod node_interface;
mod peers;
mod pki;
pub mod probes;
mod process;
pub mod proxy;
#[cfg_attr(
    not(any(feature = "ebpf", test)),
    expect(dead_code, reason = "the redirect alone writes most of it")
)]
mod redirect_view;
mod relay;
pub mod run;
pub mod server;
mod service_manager;
pub mod signals;
mod start_files;
pub mod status;
mod top;
mod transparent;
