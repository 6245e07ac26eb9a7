//! The command, as the tests start it.

use std::path::PathBuf;

use assert_cmd::Command;

pub(crate) const FSDP: &str = env!("CARGO_BIN_EXE_fsdp");

/// Returns the command's path: where cargo has put it, or beside this program, which may have been
/// copied to another machine.
pub(crate) fn program() -> PathBuf {
    let beside = || {
        std::env::current_exe()
            .ok()?
            .parent()
            .map(|directory| directory.join("fsdp"))
    };
    let built = PathBuf::from(FSDP);
    if built.exists() {
        built
    } else {
        beside().unwrap_or(built)
    }
}

/// Without the variables of whoever runs the tests.
pub(crate) fn fsdp(arguments: &[&str]) -> Command {
    let mut command = Command::new(program());
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["FSDP_", "OMPI_", "SLURM_"]
            .iter()
            .any(|prefix| text.starts_with(prefix))
            || ["RANK", "RAYON_NUM_THREADS"].contains(&&*text)
        {
            command.env_remove(&name);
        }
    }
    command.args(arguments);
    command
}
