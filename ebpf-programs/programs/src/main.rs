//! All eBPF programs of Adit in one object: one file per program, with its hook, minimum kernel ("floor") and maps at the top.
//!
//! Programs use only the kernel's stable interface (contexts and helpers), never kernel structs. Their decisions are in
//! `adit-ebpf-abi`, which has the tests.
#![no_std]
#![no_main]

mod account_maps;
mod account_ops;
mod context;
mod redirect_connect;
mod redirect_established;
mod redirect_peername;
mod tables;

/// No helper used here requires a GPL-compatible licence, so the object has the project's licence.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 11] = *b"Apache-2.0\0";

#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    // Unreachable, as the verifier checks.
    loop {}
}
