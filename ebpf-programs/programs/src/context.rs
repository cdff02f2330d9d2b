//! Fields of contexts, each accessed as four bytes.
//!
//! The verifier refuses wider or merged accesses to most fields, so all accesses are volatile.

use core::ptr::addr_of_mut;

use adit_ebpf_abi::Endpoint;
use aya_ebpf::EbpfContext as _;
use aya_ebpf::bindings::bpf_sock_ops;
use aya_ebpf::helpers::generated::{bpf_get_netns_cookie, bpf_get_socket_cookie};
use aya_ebpf::programs::{SockAddrContext, SockOpsContext};

/// Reads a field of a context.
macro_rules! field {
    ($pointer:expr, $($name:tt)+) => {
        // SAFETY: the kernel passes a valid context to the program and the verifier checks the offset.
        unsafe { core::ptr::read_volatile(core::ptr::addr_of!((*$pointer).$($name)+)) }
    };
}
pub(crate) use field;

/// The destination of a call on an IPv4 socket.
#[inline(always)]
pub fn called4(context: &SockAddrContext) -> Endpoint {
    Endpoint::from_word(field!(context.sock_addr, user_ip4), called_port(context))
}

/// The destination of a call on an IPv6 socket.
#[inline(always)]
pub fn called6(context: &SockAddrContext) -> Endpoint {
    let words = [
        field!(context.sock_addr, user_ip6[0]),
        field!(context.sock_addr, user_ip6[1]),
        field!(context.sock_addr, user_ip6[2]),
        field!(context.sock_addr, user_ip6[3]),
    ];
    Endpoint::from_words(words, called_port(context))
}

#[inline(always)]
fn called_port(context: &SockAddrContext) -> u16 {
    // Network order in the lower half.
    u16::from_be(field!(context.sock_addr, user_port) as u16)
}

/// Writes the destination of a call on an IPv4 socket.
#[inline(always)]
pub fn set_called4(context: &SockAddrContext, to: &Endpoint) {
    // SAFETY: as in `field`; these fields may be written at these hooks.
    unsafe {
        addr_of_mut!((*context.sock_addr).user_ip4).write_volatile(to.word());
    }
    set_called_port(context, to.port);
}

/// Writes the destination of a call on an IPv6 socket.
#[inline(always)]
pub fn set_called6(context: &SockAddrContext, to: &Endpoint) {
    let [a, b, c, d] = to.words();
    // SAFETY: as in `field`; these fields may be written at these hooks.
    unsafe {
        addr_of_mut!((*context.sock_addr).user_ip6[0]).write_volatile(a);
        addr_of_mut!((*context.sock_addr).user_ip6[1]).write_volatile(b);
        addr_of_mut!((*context.sock_addr).user_ip6[2]).write_volatile(c);
        addr_of_mut!((*context.sock_addr).user_ip6[3]).write_volatile(d);
    }
    set_called_port(context, to.port);
}

#[inline(always)]
fn set_called_port(context: &SockAddrContext, port: u16) {
    // SAFETY: as in `field`; this field may be written at these hooks.
    unsafe {
        addr_of_mut!((*context.sock_addr).user_port).write_volatile(u32::from(port.to_be()));
    }
}

/// The cookie of the calling socket.
#[inline(always)]
pub fn socket_cookie(context: &SockAddrContext) -> u64 {
    // SAFETY: the helper takes any context of this kind.
    unsafe { bpf_get_socket_cookie(context.as_ptr()) }
}

/// The cookie of the calling socket's network namespace.
#[inline(always)]
pub fn netns_cookie(context: &SockAddrContext) -> u64 {
    // SAFETY: the helper takes any context of this kind.
    unsafe { bpf_get_netns_cookie(context.as_ptr()) }
}

/// The cookie of a connection's socket.
#[inline(always)]
pub fn connection_cookie(context: &SockOpsContext) -> u64 {
    // SAFETY: the helper takes any context of this kind.
    unsafe { bpf_get_socket_cookie(context.as_ptr()) }
}

/// The cookie of a connection's network namespace.
#[inline(always)]
pub fn connection_netns(context: &SockOpsContext) -> u64 {
    // SAFETY: the helper takes any context of this kind.
    unsafe { bpf_get_netns_cookie(context.as_ptr()) }
}

/// The local address of a connection.
#[inline(always)]
pub fn local(context: &SockOpsContext) -> Endpoint {
    let ops: *mut bpf_sock_ops = context.ops;
    // Host order, as the kernel keeps it.
    let port = field!(ops, local_port) as u16;
    if field!(ops, family) == u32::from(adit_ebpf_abi::AF_INET) {
        return Endpoint::from_word(field!(ops, local_ip4), port);
    }
    let words = [
        field!(ops, local_ip6[0]),
        field!(ops, local_ip6[1]),
        field!(ops, local_ip6[2]),
        field!(ops, local_ip6[3]),
    ];
    Endpoint::from_words(words, port)
}

/// The remote address of a connection.
#[inline(always)]
pub fn remote(context: &SockOpsContext) -> Endpoint {
    let ops: *mut bpf_sock_ops = context.ops;
    // Network order in the upper half of the word as the CPU sees it.
    let port = u16::from_be((field!(ops, remote_port) >> 16) as u16);
    if field!(ops, family) == u32::from(adit_ebpf_abi::AF_INET) {
        return Endpoint::from_word(field!(ops, remote_ip4), port);
    }
    let words = [
        field!(ops, remote_ip6[0]),
        field!(ops, remote_ip6[1]),
        field!(ops, remote_ip6[2]),
        field!(ops, remote_ip6[3]),
    ];
    Endpoint::from_words(words, port)
}
