//! See `fsdp_fuzz::torch_archive`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fsdp_fuzz::torch_archive(data));
