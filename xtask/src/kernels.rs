//! The CUDA kernels of `fsdp-ops`: compiled for the CPU, with which the tests run them; and
//! `cargo xtask kernels`, which compares what a GPU needs for them with a table.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use anyhow::{Context as _, Result, ensure};
use clap::Args;

use crate::files;
use crate::shell::{output, say};

/// The variable that tells the tests where the kernels are.
pub(crate) const FOLDER: &str = "FSDP_OPS_KERNELS";

/// The folder of the kernels' sources.
const SOURCES: &str = "crates/fsdp-ops/cuda";
/// The table of what the kernels need, beside their sources.
const TABLE: &str = "crates/fsdp-ops/cuda/resources.txt";
/// The stand-in for CUDA's compiler, which compiles them for the CPU.
const COMPILER: &str = "xtask/cuda-stand-in/bin/nvcc";

/// Options of `cargo xtask kernels`.
#[derive(Args)]
pub(crate) struct KernelsArguments {
    /// Write the table anew
    #[arg(long)]
    bless: bool,
}

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
    let sources = sources(root)?;
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

/// Returns the files with kernels in them.
fn sources(root: &Path) -> Result<Vec<PathBuf>> {
    let mut sources: Vec<PathBuf> = std::fs::read_dir(root.join(SOURCES))?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_>>()?;
    sources.retain(|path| path.extension().is_some_and(|extension| extension == "cu"));
    sources.sort();
    Ok(sources)
}

/// Starts to compile a file of kernels for the CPU.
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

/// Compiles all kernels with `nvcc`, and compares the registers, spills and shared memory of each
/// with the table; with `bless`, writes the table. Without `nvcc` nothing is done, which is said.
pub(crate) fn compare(root: &Path, arguments: &KernelsArguments) -> Result<()> {
    let Ok(version) = output(Command::new("nvcc").arg("--version")) else {
        say("xtask: kernels were not compared with their table: there is no `nvcc`");
        return Ok(());
    };
    let mut lines = BTreeMap::new();
    for source in sources(root)? {
        let compiled = Command::new("nvcc")
            .args(["-std=c++17", "-cubin", "-arch=sm_90", "-Xptxas", "-v"])
            .arg(&source)
            .args(["-o", "/dev/null"])
            .output()
            .context("failed to start `nvcc`")?;
        let report = String::from_utf8_lossy(&compiled.stderr).into_owned();
        ensure!(
            compiled.status.success(),
            "`{}` cannot be compiled: {report}",
            source.display()
        );
        lines.extend(resources(&report));
    }
    let mut table = format!("{} for sm_90\n", release(&version));
    for (kernel, needs) in lines {
        writeln!(table, "{kernel}: {needs}")?;
    }
    let path = root.join(TABLE);
    if arguments.bless {
        return files::write(&path, &table);
    }
    let written = std::fs::read_to_string(&path).context("there is no table: use `--bless`")?;
    let differences: Vec<&str> = table
        .lines()
        .filter(|line| !written.lines().any(|before| before == *line))
        .collect();
    ensure!(
        differences.is_empty() && written.lines().count() == table.lines().count(),
        "`{TABLE}` says something else of some kernels (`--bless` writes it anew):\n{}",
        differences.join("\n")
    );
    Ok(())
}

/// Returns the version in what `nvcc` says of itself.
fn release(version: &str) -> &str {
    let line = version.lines().find(|line| line.contains("release"));
    line.unwrap_or("an unknown version of nvcc").trim()
}

/// Returns what each kernel in a report of `ptxas` needs: `32 registers, 0 bytes spilled, 128 bytes
/// of shared memory`.
fn resources(report: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let (mut kernel, mut spilled) = ("", 0);
    for line in report.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            kernel = rest.split('\'').next().unwrap_or_default();
        } else if line.contains("bytes spill stores") {
            spilled = number_before(line, " bytes spill stores")
                + number_before(line, " bytes spill loads");
        } else if line.contains("registers") {
            let needs = format!(
                "{} registers, {spilled} bytes spilled, {} bytes of shared memory",
                number_before(line, " registers"),
                number_before(line, " bytes smem"),
            );
            found.push((kernel.to_owned(), needs));
        }
    }
    found
}

/// Returns the number that stands before a unit in a line; 0 if it does not.
fn number_before(line: &str, unit: &str) -> u64 {
    let before = line.split_once(unit).map_or("", |(before, _)| before);
    let digits = before.rsplit(' ').next().unwrap_or_default();
    digits.parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_of_the_compiler_are_read() {
        let report = "ptxas info    : Compiling entry function 'rope_f16' for 'sm_90'\n\
            ptxas info    : Function properties for rope_f16\n    \
            8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n\
            ptxas info    : Used 39 registers, used 1 barriers, 9216 bytes smem\n\
            ptxas info    : Compiling entry function 'rope_f32' for 'sm_90'\n    \
            0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
            ptxas info    : Used 20 registers, used 0 barriers\n";
        let found = resources(report);
        assert_eq!(
            found[0],
            (
                "rope_f16".to_owned(),
                "39 registers, 16 bytes spilled, 9216 bytes of shared memory".to_owned()
            )
        );
        assert_eq!(
            found[1].1,
            "20 registers, 0 bytes spilled, 0 bytes of shared memory"
        );
    }
}
