//! The maps of the accounting. The daemon registers its sockets with their label class; the program counts.

use adit_ebpf_abi::{
    ACCOUNTS_MAX, Account, CLOSE_OUTCOMES, CLOSED_RING_BYTES, CloseOutcome, LOOKS,
};
use aya_ebpf::macros::map;
use aya_ebpf::maps::{Array, LruHashMap, PerCpuArray, RingBuf};

/// Connections and listeners of the daemon, by socket cookie.
#[map]
pub static ACCOUNT_SOCKETS: LruHashMap<u64, Account> =
    LruHashMap::with_max_entries(ACCOUNTS_MAX, 0);

/// When connections were last updated, by a part of their cookie.
#[map]
pub static ACCOUNT_LOOKS: Array<u64> = Array::with_max_entries(LOOKS, 0);

/// Connections that ended.
#[map]
pub static ACCOUNT_CLOSED: RingBuf = RingBuf::with_byte_size(CLOSED_RING_BYTES, 0);

/// End events by outcome.
#[map]
pub static ACCOUNT_OUTCOMES: PerCpuArray<u64> =
    PerCpuArray::with_max_entries(CLOSE_OUTCOMES.len() as u32, 0);

/// Counts an end event.
#[inline(always)]
pub fn count(outcome: CloseOutcome) {
    if let Some(counter) = ACCOUNT_OUTCOMES.get_ptr_mut(outcome as u32) {
        // SAFETY: the map returns a pointer to this CPU's own value. If a program of this hook interrupts another one on the
        // CPU, at most one count is lost.
        unsafe { *counter += 1 }
    }
}
