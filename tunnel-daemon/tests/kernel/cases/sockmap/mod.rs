//! What kernels do with a sockmap as the mover of a relay: each deduction of ADR 0017 and 0023 as a test.
//!
//! Tests assert what the decision rests on, the flaws included, so that a kernel without one is noticed. What they saw is
//! printed with the kernel's name.

mod ends;
mod guard;
mod insertion;
mod loss;
mod memory;
mod message;
mod reset;
mod speed;

pub(crate) use loss::play;
pub(crate) use memory::play as play_memory;

use adit_ebpf_abi::{EMPTY_PASS, Grant};

/// Kernel memory is not worth more to a test: far beyond all buffers of a crossing, together below 2 MiB.
const GROWTH: u64 = 24 << 20;
/// What a crossing holds at most where TCP's own windows bound it.
const BOUND: u64 = 6 << 20;

/// Terms without a guard.
const UNGUARDED: Grant = Grant {
    peer: 0,
    on_empty: EMPTY_PASS,
    limit_bytes: u64::MAX,
    limit_packets: u64::MAX,
    drained_bytes: 0,
    drained_packets: 0,
    consumed_bytes: 0,
};

/// Terms with one.
const fn limited(bytes: u64) -> Grant {
    Grant {
        limit_bytes: bytes,
        ..UNGUARDED
    }
}
