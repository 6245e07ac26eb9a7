//! `cargo xtask gpu`: the tests that need a GPU, on the GPUs of this machine; with `--stand-in`, on
//! a stand-in for them; with `--check`, the checks of GPU code that need neither a GPU nor a CUDA
//! toolkit; with `--build`, everything for another machine.

mod bundle;

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use clap::Args;

use crate::shell::{STAND_IN, cargo, say};

/// Options of `cargo xtask gpu`.
#[derive(Args)]
pub(crate) struct GpuArguments {
    /// Run clippy on the code for GPUs instead; this needs neither a GPU nor a CUDA toolkit
    #[arg(long)]
    check: bool,
    /// Run the tests with a stand-in for NVIDIA's libraries, which needs neither a GPU nor a CUDA
    /// toolkit
    #[arg(long, conflicts_with = "check")]
    stand_in: bool,
    /// Build the tests, the bench of the kernels and `fsdp`, and put the stripped programs,
    /// `bench.sh` and the scripts that it needs into DIR and into DIR.tar.xz, to be copied to a
    /// machine with a GPU. This needs a CUDA toolkit
    #[arg(long, value_name = "DIR", conflicts_with_all = ["check", "stand_in"])]
    build: Option<PathBuf>,
}

/// Runs the part that was asked for.
pub(crate) fn run(root: &Path, arguments: &GpuArguments) -> Result<()> {
    match arguments {
        GpuArguments { check: true, .. } => check(root),
        GpuArguments { stand_in: true, .. } => stand_in(root),
        GpuArguments {
            build: Some(directory),
            ..
        } => {
            let features = ["--features", FEATURES];
            let tests = [&features[..], &all_packages(), &all_tests()].concat();
            bundle::build(root, directory, &tests)
        }
        _ => test(root),
    }
}

/// The result of looking for GPUs: their number, or the reason that there are none.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    Gpus(usize),
    Nothing(String),
}

/// The features of all code for GPUs.
const FEATURES: &str =
    "fsdp-cli/nccl,fsdp-checkpoint/nccl,fsdp-nn/nccl,fsdp-flat/cuda,fsdp-ops/cuda,fsdp-comm/nccl";

/// The packages with tests for GPUs, but for that of the collectives, and the names of those tests.
const PACKAGES: [&str; 12] = [
    "--package",
    "fsdp-flat",
    "--package",
    "fsdp-state",
    "--package",
    "fsdp-ops",
    "--package",
    "fsdp-nn",
    "--package",
    "fsdp-checkpoint",
    "--package",
    "fsdp-cli",
];
const TESTS: [&str; 6] = ["--test", "cuda", "--test", "gpu", "--test", "overlap"];

/// The package of the collectives, and its test.
const COLLECTIVES: [&str; 2] = ["--package", "fsdp-comm"];
const TEST_OF_COLLECTIVES: [&str; 2] = ["--test", "nccl"];

/// Returns the packages with tests for GPUs.
fn all_packages() -> Vec<&'static str> {
    [&PACKAGES[..], &COLLECTIVES].concat()
}

/// Returns the names of all tests for GPUs.
fn all_tests() -> Vec<&'static str> {
    [&TESTS[..], &TEST_OF_COLLECTIVES].concat()
}

/// The variable that tells the tests of `nccl` how many ranks to start, if not one for each GPU.
const RANKS: &str = "FSDP_TEST_RANKS";

/// Runs the tests for GPUs on those of this machine. Tests that this machine cannot run are
/// reported, and are no failure.
fn test(root: &Path) -> Result<()> {
    let gpus = match found() {
        Found::Gpus(gpus) => gpus,
        Found::Nothing(reason) => {
            say(&format!(
                "xtask: gpu: everything is skipped, as there is no GPU here: {reason}"
            ));
            return Ok(());
        }
    };
    say(&format!(
        "xtask: gpu: {gpus} found: NCCL with one rank a GPU, \
         and several ranks that share one through the host"
    ));
    if Command::new("nvcc").arg("--version").output().is_err() {
        say("xtask: gpu: there is no `nvcc`: \
             without a CUDA toolkit only the collectives can be built");
    }
    // The tests of the collectives come first: they need no CUDA toolkit, and soon show if NCCL
    // works. The tests share the GPUs, so they run one at a time.
    let one_by_one = ["--", "--test-threads=1"];
    let comm = [
        "test",
        "--package",
        "fsdp-comm",
        "--features",
        "nccl",
        "--locked",
        "--lib",
        "--test",
        "nccl",
    ];
    cargo(root, &[&comm[..], &one_by_one].concat(), &[])?;
    if gpus == 1 {
        for ranks in ["2", "4"] {
            say(&format!(
                "xtask: gpu: once more with {ranks} ranks on the one GPU"
            ));
            cargo(root, &[&comm[..], &one_by_one].concat(), &[(RANKS, ranks)])?;
        }
    }
    // All other tests are built together, because candle's kernels take long to compile.
    let others = ["test", "--features", FEATURES, "--locked"];
    cargo(
        root,
        &[&others[..], &PACKAGES, &TESTS, &one_by_one].concat(),
        &[],
    )
}

/// Returns the directory for clippy, and for builds with the stand-in for CUDA's compiler.
///
/// The kernels that the stand-in makes must not be linked into programs for real GPUs, so it has a
/// directory of its own. Clippy uses it for all code, with and without the code for GPUs, because
/// most crates are then checked only once.
pub(crate) fn check_target(root: &Path) -> PathBuf {
    root.join("target/check")
}

/// Returns the variables for a build with the stand-in for CUDA's compiler.
fn stand_in_toolkit(root: &Path) -> Vec<(&'static str, String)> {
    let toolkit = root
        .join("xtask/cuda-stand-in")
        .to_string_lossy()
        .into_owned();
    let path = format!(
        "{toolkit}/bin:{}",
        std::env::var("PATH").unwrap_or_default()
    );
    let compiler = format!("{toolkit}/bin/nvcc");
    vec![
        ("CUDA_HOME", toolkit),
        ("NVCC", compiler),
        ("CUDA_COMPUTE_CAP", "90".to_owned()),
        ("PATH", path),
    ]
}

/// Runs clippy on all code of the features `cuda` and `nccl`.
fn check(root: &Path) -> Result<()> {
    let target = check_target(root);
    let clippy = [
        "clippy",
        "--workspace",
        "--all-targets",
        "--locked",
        "--features",
        FEATURES,
        "--target-dir",
        &*target.to_string_lossy(),
        "--",
        "-D",
        "warnings",
    ];
    cargo(root, &clippy, &borrowed(&stand_in_toolkit(root)))
}

/// The names of NVIDIA's libraries that candle links to, and those that are loaded at run time.
const LIBRARIES: [&str; 8] = [
    "libcuda.so",
    "libnvrtc.so",
    "libcurand.so",
    "libcublas.so",
    "libcublasLt.so",
    "libcudart.so",
    "libcuda.so.1",
    "libnccl.so.2",
];

/// Runs the tests for GPUs with the stand-in for NVIDIA's libraries.
fn stand_in(root: &Path) -> Result<()> {
    let target = check_target(root);
    let text = target.to_string_lossy().into_owned();
    let mut variables = stand_in_toolkit(root);
    // A fault of the stand-in would look like one of what it tests, so its own tests come first.
    let library = ["--package", STAND_IN, "--locked", "--target-dir", &text];
    cargo(
        root,
        &[&["test"][..], &library].concat(),
        &borrowed(&variables),
    )?;
    cargo(
        root,
        &[&["build"][..], &library].concat(),
        &borrowed(&variables),
    )?;
    // One library under all names: the loader loads it once.
    let libraries = tempfile::tempdir().context("failed to make a directory")?;
    for name in LIBRARIES {
        symlink(
            target.join("debug/libcuda_stand_in.so"),
            libraries.path().join(name),
        )?;
    }
    // The linker looks in the first of these when programs are built, and the loader in the second
    // when they run.
    let directory = libraries.path().to_string_lossy().into_owned();
    for name in ["LIBRARY_PATH", "LD_LIBRARY_PATH"] {
        let before = std::env::var(name)
            .map(|before| format!(":{before}"))
            .unwrap_or_default();
        variables.push((name, format!("{directory}{before}")));
    }
    // Messages between ranks go through memory where that is a directory.
    let messages = tempfile::Builder::new()
        .prefix("stand-in")
        .tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())?;
    variables.push((
        "CUDA_STAND_IN_DIRECTORY",
        messages.path().to_string_lossy().into_owned(),
    ));
    let mut test = vec![
        "test",
        "--features",
        FEATURES,
        "--locked",
        "--target-dir",
        &text,
    ];
    // All packages each time, so that features stay the same and nothing is built again.
    test.extend(all_packages());
    let (all_tests, collectives) = (all_tests(), &TEST_OF_COLLECTIVES[..]);
    // With other numbers of GPUs only the collectives: the rest takes longer, and depends less on
    // their number.
    for (gpus, ranks, delay, tests) in [
        ("2", "2", "0", &all_tests[..]),
        ("2", "2", "300", collectives),
        ("1", "1", "0", collectives),
        ("4", "4", "0", collectives),
        ("1", "2", "0", collectives),
    ] {
        say(&format!(
            "xtask: gpu: {gpus} stand-ins for GPUs, {ranks} ranks, \
             {delay} us before each kernel and copy"
        ));
        let mut variables = variables.clone();
        variables.push(("CUDA_STAND_IN_DEVICES", gpus.to_owned()));
        variables.push(("CUDA_STAND_IN_DELAY_US", delay.to_owned()));
        // With a rank for each GPU the tests find the number out by themselves.
        if gpus != ranks {
            variables.push((RANKS, ranks.to_owned()));
        }
        cargo(root, &[&test[..], tests].concat(), &borrowed(&variables))?;
    }
    let left = std::fs::read_dir(messages.path())?.count();
    say(&format!(
        "xtask: gpu: {left} communicators were left by ranks that ended badly"
    ));
    Ok(())
}

/// Returns variables as [`cargo`] takes them.
fn borrowed<'v>(variables: &'v [(&'static str, String)]) -> Vec<(&'static str, &'v str)> {
    variables
        .iter()
        .map(|(name, value)| (*name, value.as_str()))
        .collect()
}

/// Looks for GPUs with `nvidia-smi`. It comes with the driver, so without it there is no usable
/// GPU.
fn found() -> Found {
    match Command::new("nvidia-smi").arg("--list-gpus").output() {
        Ok(output) if output.status.success() => count(&String::from_utf8_lossy(&output.stdout)),
        Ok(output) => Found::Nothing(format!("`nvidia-smi` ended with {}", output.status)),
        Err(error) => Found::Nothing(format!(
            "`nvidia-smi` cannot be started ({error}), so there is no driver"
        )),
    }
}

/// Counts the GPUs in the output of `nvidia-smi --list-gpus`: lines such as `GPU 0: NVIDIA H200
/// (UUID: GPU-…)`.
fn count(list: &str) -> Found {
    match list.lines().filter(|line| line.starts_with("GPU ")).count() {
        0 => Found::Nothing("`nvidia-smi` lists none".to_owned()),
        gpus => Found::Gpus(gpus),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_counted_and_their_partitions_are_not() {
        let list = "GPU 0: NVIDIA H200 (UUID: GPU-1)\n  MIG 1g.18gb Device 0: (UUID: MIG-1)\nGPU 1: NVIDIA H200 (UUID: GPU-2)\n";
        assert_eq!(count(list), Found::Gpus(2));
        assert!(matches!(count("No devices found.\n"), Found::Nothing(_)));
    }
}
