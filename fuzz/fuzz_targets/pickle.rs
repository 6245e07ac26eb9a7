//! See `fsdp_fuzz::pickle`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fsdp_fuzz::pickle(data));
