//! One file for each part of the kernel side.

mod account;
mod load;
