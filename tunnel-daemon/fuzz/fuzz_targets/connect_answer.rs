//! The answers of a server or proxy to CONNECT: any cut gives the same outcome.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| adit_proxy::connect::fuzz_entry(data));
