//! Wiring: the only modules that know all others.

mod account;
pub mod admin;
pub mod agent;
mod budgets;
pub mod check;
pub mod demo;
mod descriptors;
mod kubernetes;
mod listeners;
mod memory;
mod node;
mod node_redirect;
mod privileges;
pub mod probes;
mod redirect;
mod redirect_netns;
mod redirect_origin;
mod redirect_rules;
mod redirect_table;
mod redirect_view;
mod redirect_watch;
mod relay;
pub mod run;
pub mod server;
pub mod signals;
pub mod status;
mod top;
