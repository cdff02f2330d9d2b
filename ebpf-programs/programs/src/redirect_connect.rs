//! Redirects chosen TCP connections to a listener.
//!
//! Hooks: cgroup `connect4` and `connect6`, by bpf_link. Floor: Linux 5.10 (network namespace cookie in these hooks, socket
//! lookup, links); tested from 6.1. Licence: any. Maps, entries at most: REDIRECT_RULES 16,384, REDIRECT_GENERATION 1,
//! REDIRECT_LISTENERS 1,024, REDIRECT_EXEMPT 65,536, REDIRECT_PROCESSES 4,096, REDIRECT_ORIGINS 65,536. Missing anything
//! (rule, listener in this network namespace, a listening socket, room): the call is unchanged and counted in REDIRECT_CALLS.
//! Only with a rule's deny flag the call fails.

use core::mem::MaybeUninit;

use adit_ebpf_abi::{
    AF_INET, Call, Decision, Endpoint, Listener, ListenerKey, NODE_COOKIE, Origin, Rule, RuleKey,
    SCOPE_BITS, Surroundings, decide,
};
use aya_ebpf::EbpfContext as _;
use aya_ebpf::bindings::{BPF_F_CURRENT_NETNS, bpf_sock_tuple};
use aya_ebpf::helpers::generated::{bpf_sk_lookup_tcp, bpf_sk_release};
use aya_ebpf::macros::cgroup_sock_addr;
use aya_ebpf::maps::lpm_trie::Key;
use aya_ebpf::programs::SockAddrContext;

use crate::context::{
    called4, called6, field, netns_cookie, set_called4, set_called6, socket_cookie,
};
use crate::tables::{
    REDIRECT_EXEMPT, REDIRECT_GENERATION, REDIRECT_LISTENERS, REDIRECT_ORIGINS, REDIRECT_PROCESSES,
    REDIRECT_RULES, count,
};

const SOCK_STREAM: u32 = 1;
const IPPROTO_TCP: u32 = 6;
/// State of a listening socket.
const TCP_LISTEN: u32 = 10;
/// Bytes of the two forms of a socket tuple.
const TUPLE4_BYTES: u32 = 12;
const TUPLE6_BYTES: u32 = 36;
/// Words of the longer form.
const TUPLE_WORDS: usize = 9;
/// Return values of these programs: proceed, or fail with EPERM.
const PROCEED: i32 = 1;
const FAIL: i32 = 0;

#[cgroup_sock_addr(connect4)]
pub fn adit_connect4(context: SockAddrContext) -> i32 {
    let (decision, caller) = judge(&context, called4(&context));
    count(decision.outcome());
    match decision {
        Decision::Leave(_) => PROCEED,
        Decision::Deny => FAIL,
        Decision::Redirect(via) => {
            set_called4(&caller, &via);
            PROCEED
        }
    }
}

#[cgroup_sock_addr(connect6)]
pub fn adit_connect6(context: SockAddrContext) -> i32 {
    let (decision, caller) = judge(&context, called6(&context));
    count(decision.outcome());
    match decision {
        Decision::Leave(_) => PROCEED,
        Decision::Deny => FAIL,
        Decision::Redirect(via) => {
            set_called6(&caller, &via);
            PROCEED
        }
    }
}

#[inline(always)]
fn judge(context: &SockAddrContext, destination: Endpoint) -> (Decision, SockAddrContext) {
    let caller = Caller {
        context,
        cookie: socket_cookie(context),
    };
    // Removes the entry of an earlier call of this socket, which may have another destination now.
    let _none = REDIRECT_ORIGINS.remove(&caller.cookie);
    let call = Call {
        is_tcp: field!(context.sock_addr, type_) == SOCK_STREAM
            && field!(context.sock_addr, protocol) == IPPROTO_TCP,
        destination,
    };
    (
        decide(&call, &caller),
        SockAddrContext::new(context.sock_addr),
    )
}

/// The calling socket, with access to kernel and maps.
struct Caller<'a> {
    context: &'a SockAddrContext,
    cookie: u64,
}

impl Surroundings for Caller<'_> {
    #[inline(always)]
    fn is_exempt(&self) -> bool {
        // SAFETY: the value is not read.
        let socket = unsafe { REDIRECT_EXEMPT.get(&self.cookie) }.is_some();
        // SAFETY: the value is not read.
        socket || unsafe { REDIRECT_PROCESSES.get(&self.context.tgid()) }.is_some()
    }

    #[inline(always)]
    fn is_bound(&self) -> bool {
        let own = field!(self.context.sock_addr, __bindgen_anon_1.sk);
        !own.is_null() && field!(own, bound_dev_if) != 0
    }

    #[inline(always)]
    fn is_noted(&self, number: u32) -> bool {
        let key = ListenerKey {
            netns_cookie: netns_cookie(self.context),
            listener: number,
            reserved: 0,
        };
        // SAFETY: the value is not read.
        unsafe { REDIRECT_LISTENERS.get(&key) }.is_some()
    }

    #[inline(always)]
    fn join(&self) {
        // An LRU map evicts to make room, so inserts do not fail.
        let _joined = REDIRECT_PROCESSES.insert(&self.context.tgid(), &1, 0);
    }

    #[inline(always)]
    fn rule(&self, key: &RuleKey) -> Option<&Rule> {
        REDIRECT_RULES.get(&Key::new(SCOPE_BITS + 128, *key))
    }

    #[inline(always)]
    fn generation(&self) -> u8 {
        REDIRECT_GENERATION
            .get(0)
            .map_or(0, |generation| *generation as u8)
    }

    #[inline(always)]
    fn listener(&self, number: u32) -> Option<Listener> {
        noted(netns_cookie(self.context), number)
    }

    #[inline(always)]
    fn node_listener(&self, number: u32) -> Option<Listener> {
        noted(NODE_COOKIE, number)
    }

    #[inline(always)]
    fn listens(&self, at: &Endpoint, mark: u32) -> bool {
        let mut tuple = MaybeUninit::<[u32; TUPLE_WORDS]>::uninit();
        let bytes = write_tuple(tuple.as_mut_ptr().cast(), at);
        // SAFETY: the context and the tuple outlive the call; a returned socket is released below.
        let socket = unsafe {
            bpf_sk_lookup_tcp(
                self.context.as_ptr(),
                tuple.as_mut_ptr().cast::<bpf_sock_tuple>(),
                bytes,
                BPF_F_CURRENT_NETNS as i64 as u64,
                0,
            )
        };
        if socket.is_null() {
            return false;
        }
        let state = field!(socket, state);
        let found = field!(socket, mark);
        // SAFETY: the socket came from the lookup and is not used after this.
        unsafe { bpf_sk_release(socket.cast()) };
        state == TCP_LISTEN && (mark == 0 || mark == found)
    }

    #[inline(always)]
    fn remember(&self, origin: &Origin) -> bool {
        REDIRECT_ORIGINS.insert(&self.cookie, origin, 0).is_ok()
    }
}

#[inline(always)]
fn noted(netns_cookie: u64, listener: u32) -> Option<Listener> {
    let key = ListenerKey {
        netns_cookie,
        listener,
        reserved: 0,
    };
    // SAFETY: copied at once. The daemon replaces whole values.
    unsafe { REDIRECT_LISTENERS.get(&key) }.copied()
}

/// Writes the socket tuple for the lookup helper and returns its length. Word by word: without CAP_PERFMON the verifier
/// refuses the loop that a compiler generates to zero the array.
#[inline(always)]
fn write_tuple(tuple: *mut u32, at: &Endpoint) -> u32 {
    // Ports in network order: the source port, which is any (0), then the destination port.
    let ports = u32::from(at.port.to_be()) << 16;
    // SAFETY: the words written are within the array behind the pointer, which has nine.
    unsafe {
        if at.family == AF_INET {
            tuple.write_volatile(0);
            tuple.add(1).write_volatile(at.word());
            tuple.add(2).write_volatile(ports);
            return TUPLE4_BYTES;
        }
        let [a, b, c, d] = at.words();
        tuple.write_volatile(0);
        tuple.add(1).write_volatile(0);
        tuple.add(2).write_volatile(0);
        tuple.add(3).write_volatile(0);
        tuple.add(4).write_volatile(a);
        tuple.add(5).write_volatile(b);
        tuple.add(6).write_volatile(c);
        tuple.add(7).write_volatile(d);
        tuple.add(8).write_volatile(ports);
    }
    TUPLE6_BYTES
}
