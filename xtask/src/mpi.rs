//! The tests of the `mpi` backend, if an MPI is installed.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};

use crate::shell::{BESIDE_A_LIBRARY, cargo, output, say};

/// The variable that makes it an error if no MPI is installed.
const REQUIRED: &str = "FSDP_REQUIRE_MPI";

/// The programs that an MPI installation has: the launcher, and the compiler that comes with the
/// headers.
const PROGRAMS: [&str; 2] = ["mpicc", "mpirun"];

/// Runs the conformance suite under `mpirun`; with `train`, `fsdp train` too, for which the whole
/// workspace is built again.
pub(crate) fn run(root: &Path, train: bool) -> Result<()> {
    let missing = PROGRAMS
        .iter()
        .find(|program| output(Command::new(program).arg("--version")).is_err());
    if let Some(missing) = missing {
        ensure!(
            std::env::var_os(REQUIRED).is_none(),
            "there is no `{missing}`, and {REQUIRED} is set"
        );
        say(&format!(
            "xtask: mpi was skipped: there is no `{missing}` \
             (Debian: libopenmpi-dev, openmpi-bin and libclang-dev)"
        ));
        return Ok(());
    }
    test(root, "fsdp-comm")?;
    if train {
        test(root, "fsdp-cli")
    } else {
        Ok(())
    }
}

/// Runs the tests of a package that need MPI.
fn test(root: &Path, package: &str) -> Result<()> {
    let features = format!("{package}/mpi");
    let arguments = [
        "test",
        "--package",
        package,
        "--features",
        &features,
        "--test",
        "mpi",
        "--locked",
    ];
    cargo(root, &[&arguments, BESIDE_A_LIBRARY].concat(), &[])
}
