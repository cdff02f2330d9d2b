//! Opened TLS 1.3 records in any order and cut anywhere: no panic, bounded memory, the same meaning however they are cut.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| adit_core::tls13::fuzz::fuzz_entry(data));
