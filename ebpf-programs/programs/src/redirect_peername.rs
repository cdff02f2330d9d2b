//! Makes `getpeername` return the original destination to redirected programs.
//!
//! Hooks: cgroup `getpeername4` and `getpeername6`, by bpf_link. Floor: Linux 5.8; tested from 6.1. Licence: any. Map, entries
//! at most: REDIRECT_ORIGINS 65,536. Missing an entry, or if the peer is not the listener: the result is unchanged.

use adit_ebpf_abi::{Endpoint, shown_peer};
use aya_ebpf::macros::cgroup_sock_addr;
use aya_ebpf::programs::SockAddrContext;

use crate::context::{called4, called6, set_called4, set_called6, socket_cookie};
use crate::tables::REDIRECT_ORIGINS;

/// The only return value of these hooks.
const PROCEED: i32 = 1;

#[cgroup_sock_addr(getpeername4)]
pub fn adit_getpeername4(context: SockAddrContext) -> i32 {
    if let Some(peer) = asked_for(&context, &called4(&context)) {
        set_called4(&context, &peer);
    }
    PROCEED
}

#[cgroup_sock_addr(getpeername6)]
pub fn adit_getpeername6(context: SockAddrContext) -> i32 {
    if let Some(peer) = asked_for(&context, &called6(&context)) {
        set_called6(&context, &peer);
    }
    PROCEED
}

#[inline(always)]
fn asked_for(context: &SockAddrContext, shown: &Endpoint) -> Option<Endpoint> {
    let cookie = socket_cookie(context);
    // SAFETY: copied at once; the entry belongs to this socket.
    let origin = unsafe { REDIRECT_ORIGINS.get(&cookie) }?;
    shown_peer(shown, origin)
}
