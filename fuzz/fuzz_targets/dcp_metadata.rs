//! See `fsdp_fuzz::dcp_metadata`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fsdp_fuzz::dcp_metadata(data));
