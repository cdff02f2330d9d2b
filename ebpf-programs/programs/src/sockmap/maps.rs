//! The maps of the experiment. Tests write grants and routes, programs write counts.

use adit_ebpf_abi::{Grant, Moved, Route, SOCKMAP_SOCKETS_MAX};
use aya_ebpf::macros::map;
use aya_ebpf::maps::{HashMap, SockMap};

/// Sockets whose segments the verdict program sees.
#[map]
pub static SOCKMAP_SOURCES: SockMap = SockMap::with_max_entries(SOCKMAP_SOCKETS_MAX, 0);

/// Sockets that segments are sent on by. No program is attached to it.
#[map]
pub static SOCKMAP_SINKS: SockMap = SockMap::with_max_entries(SOCKMAP_SOCKETS_MAX, 0);

/// Sockets whose writes the message program sees.
#[map]
pub static SOCKMAP_WRITERS: SockMap = SockMap::with_max_entries(SOCKMAP_SOCKETS_MAX, 0);

/// By cookie of a source.
#[map]
pub static SOCKMAP_GRANTS: HashMap<u64, Grant> = HashMap::with_max_entries(SOCKMAP_SOCKETS_MAX, 0);

/// By cookie of a source. User space makes the entries.
#[map]
pub static SOCKMAP_MOVED: HashMap<u64, Moved> = HashMap::with_max_entries(SOCKMAP_SOCKETS_MAX, 0);

/// By own port of a writer.
#[map]
pub static SOCKMAP_ROUTES: HashMap<u32, Route> = HashMap::with_max_entries(SOCKMAP_SOCKETS_MAX, 0);
