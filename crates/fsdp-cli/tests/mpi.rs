//! `fsdp train` under `mpirun`: the losses of threads, and checkpoints that cross.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod metrics;

use std::path::Path;
use std::process::Command;

use metrics::losses;
use tempfile::TempDir;

const FSDP: &str = env!("CARGO_BIN_EXE_fsdp");
const SMALL: [&str; 12] = [
    "--layers", "1", "--heads", "2", "--hidden", "16", "--seq", "16", "--batch", "12", "--sample",
    "0",
];

fn run(mut command: Command, out: &Path, arguments: &[&str]) {
    for (name, _) in
        std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("FSDP_"))
    {
        command.env_remove(name);
    }
    let output = command
        .args(arguments)
        .arg("--out")
        .arg(out)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

fn threads(ranks: &str, out: &Path, arguments: &[&str]) {
    let mut command = Command::new(FSDP);
    command.args(["train", "--nproc", ranks]);
    run(command, out, arguments);
}

fn mpi(ranks: &str, out: &Path, arguments: &[&str]) {
    let mut command = Command::new("mpirun");
    // More ranks than processors, in a container's root too: Open MPI's words for it, which others
    // do not hear.
    command
        .env("OMPI_MCA_rmaps_base_oversubscribe", "1")
        .env("OMPI_MCA_hwloc_base_binding_policy", "none");
    command
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    command.args(["-n", ranks, FSDP, "train", "--backend", "mpi"]);
    run(command, out, arguments);
}

#[test]
fn processes_under_mpirun_get_the_losses_of_threads_bit_for_bit_and_checkpoints_cross() {
    let dir = TempDir::new().unwrap();
    for ranks in ["2", "3", "4"] {
        let (local, launched) = (
            dir.path().join(format!("local-{ranks}")),
            dir.path().join(format!("mpi-{ranks}")),
        );
        threads(ranks, &local, &[&SMALL[..], &["--steps", "4"]].concat());
        mpi(ranks, &launched, &[&SMALL[..], &["--steps", "4"]].concat());
        assert_eq!(losses(&local), losses(&launched));
        // Each goes on from the other's checkpoint, at other numbers of ranks.
        mpi("2", &local, &["--steps", "6", "--resume"]);
        threads("2", &launched, &["--steps", "6", "--resume"]);
        assert_eq!(losses(&local), losses(&launched));
        assert_eq!(losses(&local).len(), 6);
    }
}
