//! The messages of a SOCKS5 client: any cut gives the same outcome.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| adit_core::socks5::fuzz_entry(data));
