//! The `fsdp` binary. The code is in the library, where tests and benches reach parts of it.

fn main() -> std::process::ExitCode {
    fsdp_cli::main()
}
