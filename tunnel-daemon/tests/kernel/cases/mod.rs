//! One file for each part of the kernel side.

mod account;
mod account_captured;
mod account_ring;
mod account_times;
mod account_tunnels;
mod alone;
mod clock;
pub(crate) mod exempt;
mod exempt_processes;
mod families;
mod kep2025;
mod late_arrivals;
mod least_privilege;
mod load;
mod mptcp;
mod namespaces;
mod netns_helper;
mod node_redirect;
pub(crate) mod packet_filter;
mod privileges;
mod proxy_header;
mod redirect;
mod redirect_spaces;
mod redirect_v6;
mod rules;
pub(crate) mod sockmap;
