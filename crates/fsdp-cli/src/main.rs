//! The `fsdp` binary. The code is in the library, where tests and benches reach parts of it.

use std::process::ExitCode;

/// It keeps the memory that a step of training frees for the next one. glibc's gives large blocks
/// back to the system as soon as they are free, and memory that is taken anew costs a page fault
/// and zeroing for every page.
#[cfg(feature = "mimalloc")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    ExitCode::from(fsdp_cli::run(std::env::args_os()))
}
