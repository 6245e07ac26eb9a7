//! The CUDA kernels of `fsdp-ops`, compiled for the CPU, with which its tests run them.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use anyhow::{Context as _, Result, ensure};

use crate::shell::{output, say};

/// The variable that tells the tests where the kernels are.
pub(crate) const FOLDER: &str = "FSDP_OPS_KERNELS";

/// The folder of the kernels' sources.
const SOURCES: &str = "crates/fsdp-ops/cuda";
/// The stand-in for CUDA's compiler, which compiles them for the CPU.
const COMPILER: &str = "xtask/cuda-stand-in/bin/nvcc";

/// Compiles all kernels, and returns the folder that they are in. Returns `None` if this machine
/// has no C++ compiler, after saying so.
pub(crate) fn build(root: &Path) -> Result<Option<PathBuf>> {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    if output(Command::new(&compiler).arg("--version")).is_err() {
        say(&format!(
            "xtask: the CUDA kernels are not tested: there is no C++ compiler `{compiler}`"
        ));
        return Ok(None);
    }
    let folder = root.join("target/kernels");
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("failed to make `{}`", folder.display()))?;
    let mut sources: Vec<PathBuf> = std::fs::read_dir(root.join(SOURCES))?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_>>()?;
    sources.retain(|path| path.extension().is_some_and(|extension| extension == "cu"));
    sources.sort();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    for sources in sources.chunks(cores) {
        let compilers = sources
            .iter()
            .map(|source| Ok((source, start(root, source, &folder)?)))
            .collect::<Result<Vec<_>>>()?;
        // Wait for all of them, so that none is left behind by an error.
        let ends: Vec<_> = compilers
            .into_iter()
            .map(|(source, mut compiler)| (source, compiler.wait()))
            .collect();
        for (source, status) in ends {
            ensure!(
                status?.success(),
                "`{}` cannot be compiled for the CPU",
                source.display()
            );
        }
    }
    Ok(Some(folder))
}

/// Starts to compile a file of kernels.
fn start(root: &Path, source: &Path, folder: &Path) -> Result<Child> {
    let name = source.with_extension("so");
    let library = folder.join(name.file_name().context("a source has a name")?);
    Command::new(root.join(COMPILER))
        .args(["-std=c++17", "-fatbin"])
        .arg(source)
        .arg("-o")
        .arg(library)
        .spawn()
        .with_context(|| format!("failed to start `{COMPILER}`"))
}
