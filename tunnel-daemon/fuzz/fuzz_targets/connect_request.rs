//! The HTTP-CONNECT request head: any cut gives the same outcome.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| adit_core::connect::fuzz_entry(data));
