//! The decoder of packets: any cut gives what prost reads, re-encoding keeps the meaning, little is held.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| adit_core::wire::decode::fuzz::fuzz_entry(data));
