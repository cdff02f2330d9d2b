//! End-to-end tier: a real control plane (etcd, kube-apiserver, kubectl) that uses our server for egress, with agents that
//! authenticate by its tokens.
//!
//! `cargo xtask e2e` builds the programs and runs these tests; without it each test is skipped. They need root for network
//! namespaces that only the tunnel reaches.

mod admission;
mod balance;
mod bootstrap;
#[path = "../kernel/support/cgroup.rs"]
#[expect(dead_code, reason = "other tests have more uses for it")]
mod cgroup;
mod charts;
mod client;
mod cluster;
mod credentials;
mod crowds;
mod fleet;
#[path = "../interop/support/go.rs"]
#[expect(dead_code, reason = "other tests have more uses for it")]
mod go;
mod inside;
mod jwt;
mod kubectl;
mod leases;
mod load;
mod manifests;
mod namespace;
mod objects;
mod pages;
mod platforms;
mod pods;
#[path = "../interop/support/ports.rs"]
mod ports;
#[path = "../interop/support/process.rs"]
#[expect(dead_code, reason = "other tests have more uses for it")]
mod process;
mod server;
mod tunnels;
#[path = "../interop/support/wait.rs"]
#[expect(dead_code, reason = "other tests have more uses for it")]
mod wait;
