//! The `fsdp` binary. The code is in the library, where tests and benches reach parts of it.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(fsdp_cli::run(std::env::args_os()))
}
