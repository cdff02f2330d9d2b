//! One file for each part of the kernel side.

mod alone;
pub(crate) mod exempt;
mod load;
pub(crate) mod packet_filter;
mod redirect;
