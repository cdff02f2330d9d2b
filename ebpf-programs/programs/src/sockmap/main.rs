//! The programs of an experiment: a sockmap as the mover of a relay. They are an object of their own, which the tests of
//! the kernel tier load and the daemon does not contain ([ADR 0017](../../../../docs/adr/0017-sockmap.md)).
#![no_std]
#![no_main]

mod maps;
mod message;
mod verdict;

/// No helper that is used here asks for a licence compatible with the GPL, so the object says what the project says.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 11] = *b"Apache-2.0\0";

#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    // The verifier sees that nothing leads here.
    loop {}
}
