//! A lane's frames in any order and cut anywhere: no panic, the same events however they are cut, bounded answers.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| adit_core::lane::fuzz::fuzz_entry(data));
