//! Sends what a socket receives on by another one, within what user space granted.
//!
//! Hook: `sk_skb` stream verdict without a parser, attached to the map SOCKMAP_SOURCES by descriptor: it ends with the map.
//! Floor: Linux 5.10; tried from 6.1. Licence: any. Maps, entries at most: SOCKMAP_SOURCES and SOCKMAP_SINKS 64 sockets,
//! SOCKMAP_GRANTS and SOCKMAP_MOVED 64. Missing a grant, a count or the peer: the segment is left to user space. Nothing is
//! dropped, unless a test asks for that.

use adit_ebpf_abi::{Verdict, verdict};
use aya_ebpf::EbpfContext as _;
use aya_ebpf::bindings::sk_action::{SK_DROP, SK_PASS};
use aya_ebpf::helpers::generated::bpf_get_socket_cookie;
use aya_ebpf::macros::stream_verdict;
use aya_ebpf::programs::SkBuffContext;

use crate::maps::{SOCKMAP_GRANTS, SOCKMAP_MOVED, SOCKMAP_SINKS};

#[stream_verdict]
pub fn adit_sockmap_verdict(context: SkBuffContext) -> u32 {
    // SAFETY: the helper takes any context of this kind.
    let cookie = unsafe { bpf_get_socket_cookie(context.as_ptr()) };
    let Some(moved) = SOCKMAP_MOVED.get_ptr_mut(&cookie) else {
        return SK_PASS;
    };
    // SAFETY: the map gives a valid pointer, and only this program writes through it, for one socket, whose lock is held.
    let moved = unsafe { &mut *moved };
    // SAFETY: read at once; user space replaces a grant as a whole.
    let grant = unsafe { SOCKMAP_GRANTS.get(&cookie) };
    let length = u64::from(context.len());
    let mut chosen = verdict(length, grant, moved);
    if let (Verdict::Redirect, Some(grant)) = (chosen, grant) {
        // SAFETY: the helper takes any context of this kind.
        let answer = unsafe { SOCKMAP_SINKS.redirect_skb(&context, grant.peer as u32, 0) };
        if answer != i64::from(SK_PASS) {
            chosen = Verdict::Pass;
        }
    }
    moved.count(length, chosen);
    match chosen {
        Verdict::Redirect | Verdict::Pass => SK_PASS,
        Verdict::Drop => SK_DROP,
    }
}
