//! Stream headers and agent identifiers: whatever is read survives the way to a peer, errors are short.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| adit_core::wire::metadata::fuzz::fuzz_entry(data));
