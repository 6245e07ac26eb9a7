//! The command, as the tests start it.

use assert_cmd::Command;

pub(crate) const FSDP: &str = env!("CARGO_BIN_EXE_fsdp");

/// Without the variables of whoever runs the tests.
pub(crate) fn fsdp(arguments: &[&str]) -> Command {
    let mut command = Command::new(FSDP);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["FSDP_", "OMPI_", "SLURM_"].iter().any(|prefix| text.starts_with(prefix))
            || ["RANK", "RAYON_NUM_THREADS"].contains(&&*text)
        {
            command.env_remove(&name);
        }
    }
    command.args(arguments);
    command
}
