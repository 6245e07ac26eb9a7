//! See `fsdp_fuzz::safetensors_directory`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fsdp_fuzz::safetensors_directory(data));
