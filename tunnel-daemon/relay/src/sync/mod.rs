//! Types shared by relay threads and submitters: flags, queues and the bell. `cargo xtask loom` replaces them with types
//! whose interleavings loom explores, and runs `loom_models`; no other build contains these.

mod bell;
#[cfg(test)]
#[cfg(loom)]
mod loom_models;
#[cfg(all(test, loom))]
mod modelled;

pub(crate) use bell::Bell;

#[cfg(all(test, loom))]
pub(crate) use modelled::{
    ArrayQueue, AtomicBool, AtomicUsize, OnceLock, SegQueue, pass_on_findings,
};

#[cfg(not(all(test, loom)))]
pub(crate) use {
    crossbeam::queue::{ArrayQueue, SegQueue},
    std::sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicUsize},
    },
};
