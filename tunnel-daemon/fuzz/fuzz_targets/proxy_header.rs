//! The PROXY headers that balancers write.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| adit_core::proxy_header::fuzz_entry(data));
