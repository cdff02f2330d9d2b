//! End-to-end tier: a real control plane (etcd, kube-apiserver, kubectl) that uses our server for egress, with agents that
//! authenticate by its tokens.
//!
//! `cargo xtask e2e` builds the programs and runs these tests; without it each test is skipped. They need root for network
//! namespaces that only the tunnel reaches.

mod admission;
mod aggregated;
mod balance;
mod bootstrap;
mod charts;
mod client;
mod clients_of_nodes;
mod cluster;
mod components;
mod credentials;
mod crowds;
mod fleet;
mod hidden_server;
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
mod prometheus;
mod server;
mod tunnels;

use adit_testkit::{blocking as wait, cgroup, go, ports, process};
