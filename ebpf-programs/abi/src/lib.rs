//! The ABI between the eBPF programs and the daemon: keys and values of maps, and the decisions about calls.
//!
//! No kernel, no I/O, no unsafe code: the programs do the lookups and write addresses, this crate decides. So decisions are
//! tested on the build machine, although no kernel test harness can run these programs. Sizes are asserted here once for
//! both sides.
#![no_std]
#![forbid(unsafe_code)]

mod account;
mod connect;
mod counters;
mod endpoint;
mod established;
mod peername;
mod tables;

pub use account::{
    ACCOUNT_BYTES, Account, CLOSE_OUTCOMES, CLOSED_BYTES, CloseOutcome, Closed, FLAG_CONNECTED,
    FLAG_ESTABLISHED, LOOKS, RING_READ_EVERY_MS, Reading, look, look_place, wakes,
};
pub use connect::{Call, Decision, Surroundings, decide};
pub use counters::{CALL_OUTCOMES, CallOutcome};
pub use endpoint::{AF_INET, AF_INET6, ENDPOINT_BYTES, Endpoint};
pub use established::{Established, established};
pub use peername::shown_peer;
pub use tables::{
    ACTION_JOIN, ACTION_LEAVE, ACTION_REDIRECT, ARRIVAL_BYTES, ARRIVAL_KEY_BYTES, Arrival,
    ArrivalKey, FLAG_DENY, FLAG_HOME, LISTENER_BYTES, LISTENER_KEY_BYTES, Listener, ListenerKey,
    NODE_COOKIE, ORIGIN_BYTES, ORIGIN_TO_NODE, Origin, RULE_BYTES, RULE_KEY_BYTES, Rule, RuleKey,
    SCOPE_BITS,
};

/// Sockets that are never redirected, by socket cookie.
pub const EXEMPT_MAX: u32 = 65_536;
/// Processes that are part of the tunnel, by process id of the initial namespace; the least recently used is evicted first.
pub const PROCESSES_MAX: u32 = 4_096;
/// Rules and exclusions of all listeners, for two generations: the active one, and the next or previous one.
pub const RULES_MAX: u32 = 16_384;
/// Listeners in all network namespaces.
pub const LISTENERS_MAX: u32 = 1_024;
/// Redirected sockets whose destination is stored, by socket cookie; the least recently used is evicted first.
pub const ORIGINS_MAX: u32 = 65_536;
/// Redirected connections not yet accepted; the least recently used is evicted first.
pub const ARRIVALS_MAX: u32 = 16_384;
/// How long a redirected connection may wait to be accepted, nanoseconds. After that its destination is no longer used.
pub const ARRIVAL_AGE_MAX_NS: u64 = 10_000_000_000;

/// Connections accounted for at once, by socket cookie; the least recently used is evicted first.
pub const ACCOUNTS_MAX: u32 = 65_536;
/// Bytes of the ring buffer of ended connections: about 6,500 entries.
pub const CLOSED_RING_BYTES: u32 = 512 * 1024;
