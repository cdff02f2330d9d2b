//! What the threads of a relay share with those who submit: flags, queues and the bell. `cargo xtask loom` puts types in
//! their place whose interleavings it tries out, and runs `loom_models`; no other build contains either.

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
