//! All eBPF programs of Adit in one object: one file per program, each with its hook, floor and maps on top.
//!
//! Programs read only what the kernel promises to user space (contexts and helpers), never a kernel struct. What they
//! decide is in `adit-ebpf-abi`, where it is tested.
#![no_std]
#![no_main]

mod account_maps;
mod account_ops;
mod context;
mod redirect_connect;
mod redirect_established;
mod redirect_peername;
mod tables;

/// No helper that is used here asks for a licence compatible with the GPL, so the object says what the project says.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 11] = *b"Apache-2.0\0";

#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    // The verifier sees that nothing leads here.
    loop {}
}
