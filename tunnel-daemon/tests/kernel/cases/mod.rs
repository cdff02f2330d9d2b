//! One file for each part of the kernel side.

mod account;
mod account_tunnels;
mod alone;
pub(crate) mod exempt;
mod load;
mod node_redirect;
pub(crate) mod packet_filter;
mod redirect;
pub(crate) mod sockmap;
