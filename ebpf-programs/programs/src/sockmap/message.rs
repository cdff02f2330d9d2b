//! Puts what one socket writes where another one receives or sends.
//!
//! Hook: `sk_msg`, attached to the map SOCKMAP_WRITERS by descriptor: it ends with the map. Floor: Linux 4.20; tried from
//! 6.1. Licence: any. Maps, entries at most: SOCKMAP_WRITERS 64 sockets, SOCKMAP_ROUTES 64. Missing a route or the peer: the
//! write goes its ordinary way.

use aya_ebpf::bindings::BPF_F_INGRESS;
use aya_ebpf::bindings::sk_action::SK_PASS;
use aya_ebpf::macros::sk_msg;
use aya_ebpf::programs::SkMsgContext;

use crate::maps::{SOCKMAP_ROUTES, SOCKMAP_WRITERS};

#[sk_msg]
pub fn adit_sockmap_message(context: SkMsgContext) -> u32 {
    // SAFETY: the kernel hands a valid context to the program and the verifier checks the offset.
    let port = unsafe { core::ptr::read_volatile(&raw const (*context.msg).local_port) };
    // SAFETY: read at once; user space replaces a route as a whole.
    if let Some(route) = unsafe { SOCKMAP_ROUTES.get(&port) } {
        let flags = if route.is_ingress == 0 {
            0
        } else {
            u64::from(BPF_F_INGRESS)
        };
        // Without the peer nothing is chosen, and the answer is not needed.
        // SAFETY: the helper takes any context of this kind.
        let _answer = unsafe { SOCKMAP_WRITERS.redirect_msg(&context, route.peer as u32, flags) };
    }
    SK_PASS
}
