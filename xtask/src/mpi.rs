//! The `mpi` backend's tests, where there is an MPI to run them with.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Result, ensure};

use crate::{cargo, say};

/// Set where MPI must be there.
const REQUIRED: &str = "FSDP_REQUIRE_MPI";

/// The programs by which an MPI installation shows, and that of a compiler's headers.
const PROGRAMS: [&str; 2] = ["mpicc", "mpirun"];

/// The conformance suite under `mpirun`; with `train`, `fsdp train` too, for which the whole workspace is built again.
pub(crate) fn run(root: &Path, train: bool) -> Result<()> {
    let starts = |program: &&str| {
        let status = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    };
    if let Some(missing) = PROGRAMS.iter().find(|program| !starts(program)) {
        ensure!(std::env::var_os(REQUIRED).is_none(), "there is no `{missing}`, and {REQUIRED} is set");
        say(&format!(
            "xtask: mpi was skipped: there is no `{missing}` (Debian: libopenmpi-dev, openmpi-bin and libclang-dev)"
        ));
        return Ok(());
    }
    let test = |package: &str| {
        let arguments = ["test", "--package", package, "--features", "mpi", "--test", "mpi", "--locked"];
        cargo(root, &arguments, &[])
    };
    test("fsdp-comm")?;
    if train { test("fsdp") } else { Ok(()) }
}
