//! The server's HTTP/2: what a client's bytes mean does not depend on how they are cut.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| adit_core::http2::fuzz::fuzz_entry(data));
