//! See `fsdp_fuzz::integrity`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fsdp_fuzz::integrity(data));
