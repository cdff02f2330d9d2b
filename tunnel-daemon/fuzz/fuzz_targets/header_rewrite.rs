//! The `:authority` filter: any cut gives the same output, and a second filter finds nothing left to do.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| adit_core::http2::fuzz_entry(data));
