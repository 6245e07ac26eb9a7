//! The command, as the tests start it.

use std::path::PathBuf;

use assert_cmd::Command;

pub(crate) const FSDP: &str = env!("CARGO_BIN_EXE_fsdp");

/// Returns the command's path: beside this program, which may have been copied to another machine,
/// or else where cargo has put it.
pub(crate) fn program() -> PathBuf {
    let own = std::env::current_exe().ok();
    own.and_then(|own| Some(own.parent()?.join("fsdp")))
        .filter(|beside| beside.is_file())
        .unwrap_or_else(|| PathBuf::from(FSDP))
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
