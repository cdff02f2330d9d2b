//! What `cargo xtask` and the performance harness share: commands with deadlines, the repository, and local ports.

pub mod net;
pub mod steps;
pub mod workspace;
