//! The maps of the redirect. The daemon writes rules, listeners and exempt sockets; the programs write the other maps.

use adit_ebpf_abi::{
    ARRIVALS_MAX, Arrival, ArrivalKey, CALL_OUTCOMES, CallOutcome, EXEMPT_MAX, LISTENERS_MAX,
    Listener, ListenerKey, ORIGINS_MAX, Origin, PROCESSES_MAX, RULES_MAX, Rule, RuleKey,
};
use aya_ebpf::macros::map;
use aya_ebpf::maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray};

/// Rules: which destinations are redirected to which listener.
#[map]
pub static REDIRECT_RULES: LpmTrie<RuleKey, Rule> = LpmTrie::with_max_entries(RULES_MAX, 0);

/// Generation of the active rule set: one entry.
#[map]
pub static REDIRECT_GENERATION: Array<u32> = Array::with_max_entries(1, 0);

/// Addresses of listeners, by network namespace.
#[map]
pub static REDIRECT_LISTENERS: HashMap<ListenerKey, Listener> =
    HashMap::with_max_entries(LISTENERS_MAX, 0);

/// Socket cookies of the tunnel's own sockets.
#[map]
pub static REDIRECT_EXEMPT: LruHashMap<u64, u8> = LruHashMap::with_max_entries(EXEMPT_MAX, 0);

/// Process ids of processes that are part of the tunnel.
#[map]
pub static REDIRECT_PROCESSES: LruHashMap<u32, u8> = LruHashMap::with_max_entries(PROCESSES_MAX, 0);

/// Destinations of redirected sockets, by socket cookie.
#[map]
pub static REDIRECT_ORIGINS: LruHashMap<u64, Origin> = LruHashMap::with_max_entries(ORIGINS_MAX, 0);

/// Destinations of redirected connections, by the peer address that their listener sees.
#[map]
pub static REDIRECT_ARRIVALS: LruHashMap<ArrivalKey, Arrival> =
    LruHashMap::with_max_entries(ARRIVALS_MAX, 0);

/// Calls by outcome.
#[map]
pub static REDIRECT_CALLS: PerCpuArray<u64> =
    PerCpuArray::with_max_entries(CALL_OUTCOMES.len() as u32, 0);

/// Counts a call.
#[inline(always)]
pub fn count(outcome: CallOutcome) {
    if let Some(counter) = REDIRECT_CALLS.get_ptr_mut(outcome as u32) {
        // SAFETY: the map returns a pointer to this CPU's own value. If a program of these hooks interrupts another one
        // on the CPU, at most one count is lost.
        unsafe { *counter += 1 }
    }
}
