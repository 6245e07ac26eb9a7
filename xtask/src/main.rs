//! The project's own tasks: `cargo xtask ci` is what CI runs.
fn main() {}
