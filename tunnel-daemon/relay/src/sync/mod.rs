//! Types shared by relay threads and submitters: flags, queues and the waker. `cargo xtask loom` replaces them with types
//! whose interleavings loom explores, and runs `loom_models`; no other build contains these.

#[cfg(all(test, loom))]
mod tests;
mod waker;

pub(crate) use waker::Waker;

#[cfg(all(test, loom))]
pub(crate) use tests::modelled::{
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
