//! Counts bytes, round-trip time, retransmissions and segments of the daemon's own connections.
//!
//! Hook: cgroup `sock_ops`, by bpf_link. Floor: Linux 5.8 (ring buffer, socket cookie here); tested from 6.1. Licence: any.
//! Maps, entries at most: ACCOUNT_SOCKETS 65,536, ACCOUNT_LOOKS 4,096, ACCOUNT_CLOSED 512 KiB, ACCOUNT_OUTCOMES 3. An
//! unregistered socket costs one failed lookup when it connects or listens, and nothing later. Connections inherit the
//! callback flags of their listener. Missing an entry: the connection is not counted, and its end is counted as unknown.
//! Connections are never changed.

use adit_ebpf_abi::{
    Account, CloseOutcome, Closed, FLAG_CONNECTED, FLAG_ESTABLISHED, Reading, look, look_place,
    wakes,
};
use aya_ebpf::bindings::{
    BPF_RB_AVAIL_DATA, BPF_RB_FORCE_WAKEUP, BPF_RB_NO_WAKEUP, BPF_RB_RING_SIZE,
    BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB, BPF_SOCK_OPS_RETRANS_CB, BPF_SOCK_OPS_RETRANS_CB_FLAG,
    BPF_SOCK_OPS_RTT_CB, BPF_SOCK_OPS_RTT_CB_FLAG, BPF_SOCK_OPS_STATE_CB,
    BPF_SOCK_OPS_STATE_CB_FLAG, BPF_SOCK_OPS_TCP_CONNECT_CB, BPF_SOCK_OPS_TCP_LISTEN_CB,
    BPF_TCP_CLOSE, BPF_TCP_FIN_WAIT2, BPF_TCP_SYN_RECV, BPF_TCP_SYN_SENT, bpf_sock_ops,
};
use aya_ebpf::helpers::bpf_ktime_get_ns;
use aya_ebpf::macros::sock_ops;
use aya_ebpf::programs::SockOpsContext;

use crate::account_maps::{ACCOUNT_CLOSED, ACCOUNT_LOOKS, ACCOUNT_SOCKETS, count};
use crate::context::{connection_cookie, field};

/// Callbacks for state changes, round-trip measurements (at most one per round trip) and retransmissions.
const WATCHED: u32 =
    BPF_SOCK_OPS_STATE_CB_FLAG | BPF_SOCK_OPS_RTT_CB_FLAG | BPF_SOCK_OPS_RETRANS_CB_FLAG;

#[sock_ops]
pub fn adit_account_ops(context: SockOpsContext) -> u32 {
    match context.op() {
        BPF_SOCK_OPS_TCP_CONNECT_CB | BPF_SOCK_OPS_TCP_LISTEN_CB => watch(&context),
        BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB => connected(&context),
        BPF_SOCK_OPS_RTT_CB if is_due(&context) => update(&context),
        BPF_SOCK_OPS_RETRANS_CB => update(&context),
        BPF_SOCK_OPS_STATE_CB => match context.arg(1) {
            BPF_TCP_CLOSE => close(&context),
            BPF_TCP_FIN_WAIT2 => half_close(&context),
            _ => (),
        },
        _ => (),
    }
    1
}

/// Enables callbacks for a socket of the daemon, in addition to those of other programs.
#[inline(always)]
fn watch(context: &SockOpsContext) {
    if account(context).is_some() {
        // Kernels ignore unknown flags.
        let _set = context.set_cb_flags((context.cb_flags() | WATCHED) as i32);
    }
}

/// Whether this program enabled callbacks for the socket: other programs do not enable all of these.
#[inline(always)]
fn watched(context: &SockOpsContext) -> bool {
    context.cb_flags() & WATCHED == WATCHED
}

#[inline(always)]
fn connected(context: &SockOpsContext) {
    if !watched(context) {
        return;
    }
    if let Some(account) = account(context) {
        account.flags |= FLAG_ESTABLISHED | FLAG_CONNECTED;
        account.since_ns = now();
        if full(context) {
            // The handshake was a round trip.
            account.update(&reading(context, field!(context.ops, state)));
        }
    }
}

/// Whether to update the counts at a round-trip measurement. Most measurements only cost this check.
#[inline(always)]
fn is_due(context: &SockOpsContext) -> bool {
    // The handshake's measurement comes before [`FLAG_CONNECTED`] is set, so our SYN would count as payload.
    if matches!(
        field!(context.ops, state),
        BPF_TCP_SYN_SENT | BPF_TCP_SYN_RECV
    ) {
        return false;
    }
    let cookie = connection_cookie(context);
    let Some(place) = ACCOUNT_LOOKS.get_ptr_mut(look_place(cookie)) else {
        return false;
    };
    // SAFETY: the map returns a valid pointer. Another socket that shares the entry may write at the same time; then one
    // of the two is updated once more or once less.
    let held = unsafe { place.read_volatile() };
    let Some(next) = look(held, cookie, now()) else {
        return false;
    };
    // SAFETY: as above.
    unsafe { place.write_volatile(next) };
    true
}

#[inline(always)]
fn update(context: &SockOpsContext) {
    if !full(context) {
        return;
    }
    if let Some(account) = account(context) {
        account.update(&reading(context, field!(context.ops, state)));
    }
}

#[inline(always)]
fn half_close(context: &SockOpsContext) {
    if !full(context) {
        return;
    }
    if let Some(account) = account(context) {
        account.half_closed(&reading(context, BPF_TCP_FIN_WAIT2));
    }
}

#[inline(always)]
fn close(context: &SockOpsContext) {
    let cookie = connection_cookie(context);
    let Some(account) = account(context) else {
        // Other programs may have enabled state callbacks for this socket.
        if watched(context) {
            count(CloseOutcome::Unknown);
        }
        return;
    };
    // Listeners and connections that were never established are removed without an end event.
    if !full(context) || account.flags & FLAG_ESTABLISHED == 0 {
        let _gone = ACCOUNT_SOCKETS.remove(&cookie);
        return;
    }
    account.update(&reading(context, context.arg(0)));
    let closed = Closed {
        cookie,
        closed_ns: now(),
        account: *account,
    };
    // Before the end event, so that a reader of the event does not find the connection among the live ones.
    let _gone = ACCOUNT_SOCKETS.remove(&cookie);
    count(match ACCOUNT_CLOSED.reserve::<Closed>(0) {
        None => CloseOutcome::RingFull,
        Some(mut entry) => {
            entry.write(closed);
            entry.submit(wake_up());
            CloseOutcome::Told
        }
    });
}

/// The daemon reads the ring periodically and is woken only if the ring might fill before that.
#[inline(always)]
fn wake_up() -> u64 {
    let waiting = ACCOUNT_CLOSED.query(u64::from(BPF_RB_AVAIL_DATA));
    let size = ACCOUNT_CLOSED.query(u64::from(BPF_RB_RING_SIZE));
    u64::from(if wakes(waiting, size) {
        BPF_RB_FORCE_WAKEUP
    } else {
        BPF_RB_NO_WAKEUP
    })
}

/// The entry of the socket, if the daemon registered it.
#[inline(always)]
fn account(context: &SockOpsContext) -> Option<&mut Account> {
    let entry = ACCOUNT_SOCKETS.get_ptr_mut(&connection_cookie(context))?;
    // SAFETY: the map returns a valid pointer. Only callbacks of this socket write through it, and they hold the socket's lock.
    Some(unsafe { &mut *entry })
}

/// Whether the context is of a full socket, so that its counts are valid.
#[inline(always)]
fn full(context: &SockOpsContext) -> bool {
    field!(context.ops, is_fullsock) == 1
}

#[inline(always)]
fn now() -> u64 {
    // SAFETY: the helper takes no arguments.
    unsafe { bpf_ktime_get_ns() }
}

#[inline(always)]
fn reading(context: &SockOpsContext, state: u32) -> Reading {
    let ops: *mut bpf_sock_ops = context.ops;
    Reading {
        state,
        bytes_acked: field!(ops, bytes_acked),
        bytes_received: field!(ops, bytes_received),
        snd_una: field!(ops, snd_una),
        snd_nxt: field!(ops, snd_nxt),
        srtt: field!(ops, srtt_us),
        retransmits: field!(ops, total_retrans),
        segments_out: field!(ops, segs_out),
        segments_in: field!(ops, segs_in),
    }
}
