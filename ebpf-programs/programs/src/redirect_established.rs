//! Stores the original destination of a redirected connection for its listener, before the listener can accept the connection.
//!
//! Hook: cgroup `sock_ops`, by bpf_link. Floor: Linux 5.15 (network namespace cookie in this hook); tested from 6.1.
//! Licence: any. Maps, entries at most: REDIRECT_ORIGINS 65,536, REDIRECT_ARRIVALS 16,384. Missing anything: nothing is
//! stored, and the listener refuses the connection, because it finds no destination.

use adit_ebpf_abi::{ArrivalKey, Established, established};
use aya_ebpf::bindings::{
    BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB, BPF_SOCK_OPS_STATE_CB, BPF_SOCK_OPS_STATE_CB_FLAG,
    BPF_SOCK_OPS_TCP_CONNECT_CB, BPF_TCP_CLOSE,
};
use aya_ebpf::helpers::bpf_ktime_get_ns;
use aya_ebpf::macros::sock_ops;
use aya_ebpf::programs::SockOpsContext;

use crate::context::{connection_cookie, connection_netns, local, remote};
use crate::tables::{REDIRECT_ARRIVALS, REDIRECT_ORIGINS};

#[sock_ops]
pub fn adit_redirect_ops(context: SockOpsContext) -> u32 {
    match context.op() {
        BPF_SOCK_OPS_TCP_CONNECT_CB => watch(&context),
        BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB => note(&context),
        BPF_SOCK_OPS_STATE_CB if context.arg(1) == BPF_TCP_CLOSE => forget(&context),
        _ => (),
    }
    1
}

/// Enables state callbacks for redirected connections, to notice their end even if they are never established.
#[inline(always)]
fn watch(context: &SockOpsContext) {
    let cookie = connection_cookie(context);
    // SAFETY: the value is not read.
    if unsafe { REDIRECT_ORIGINS.get(&cookie) }.is_some() {
        let flags = context.cb_flags() | BPF_SOCK_OPS_STATE_CB_FLAG;
        // Without the callback, entries are evicted as least recently used.
        let _set = context.set_cb_flags(flags as i32);
    }
}

#[inline(always)]
fn note(context: &SockOpsContext) {
    let cookie = connection_cookie(context);
    // SAFETY: read before the entry can change: the entry belongs to this socket.
    let Some(origin) = (unsafe { REDIRECT_ORIGINS.get(&cookie) }) else {
        return;
    };
    let connection = Established {
        netns_cookie: connection_netns(context),
        local: local(context),
        remote: remote(context),
        // SAFETY: the helper takes no arguments.
        now_ns: unsafe { bpf_ktime_get_ns() },
        cookie,
    };
    if let Some((key, arrival)) = established(&connection, origin) {
        // Without room the listener refuses the connection.
        let _noted = REDIRECT_ARRIVALS.insert(&key, &arrival, 0);
    }
}

/// Removes the entries of a connection that has ended, established or not.
#[inline(always)]
fn forget(context: &SockOpsContext) {
    let cookie = connection_cookie(context);
    // SAFETY: read before the entry can change: the entry belongs to this socket.
    let Some(origin) = (unsafe { REDIRECT_ORIGINS.get(&cookie) }) else {
        return;
    };
    let key = ArrivalKey {
        netns_cookie: origin.asked_under(connection_netns(context)),
        client: local(context),
        reserved: 0,
    };
    // The listener has usually taken the entry, and a new connection with the same address may have stored its own.
    // SAFETY: read at once.
    let is_ours =
        unsafe { REDIRECT_ARRIVALS.get(&key) }.is_some_and(|arrival| arrival.cookie == cookie);
    if is_ours {
        let _gone = REDIRECT_ARRIVALS.remove(&key);
    }
    let _gone = REDIRECT_ORIGINS.remove(&cookie);
}
