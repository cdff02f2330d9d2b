//! One file for each part of the kernel side.

mod account;
mod account_captured;
mod account_tunnels;
mod alone;
pub(crate) mod exempt;
mod load;
mod namespaces;
mod netns_helper;
mod node_redirect;
pub(crate) mod packet_filter;
mod privileges;
mod redirect;
mod rules;
pub(crate) mod sockmap;
