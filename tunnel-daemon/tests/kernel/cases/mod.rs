//! One file for each part of the kernel side.

mod account;
mod account_tunnels;
mod load;
