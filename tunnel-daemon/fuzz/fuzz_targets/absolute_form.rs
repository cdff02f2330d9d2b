//! Requests to the HTTP proxy: a target gets one request that reads one way.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| adit_proxy::http::fuzz_entry(data));
