//! `cargo xtask gpu`: the tests that need a GPU, on the GPUs of this machine; with `--check`, the checks of GPU code that
//! need neither a GPU nor a CUDA toolkit.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::shell::{cargo, say};

/// The result of looking for GPUs: their number, or the reason that there are none.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    Gpus(usize),
    Nothing(String),
}

/// The features of all code for GPUs.
const FEATURES: &str = "fsdp-cli/nccl,fsdp-checkpoint/nccl,fsdp-flat/cuda";

/// Runs the tests of the feature `nccl`. Tests that this machine cannot run are reported, and are no failure.
pub(crate) fn run(root: &Path) -> Result<()> {
    let gpus = match found() {
        Found::Gpus(gpus) => gpus,
        Found::Nothing(reason) => {
            say(&format!("xtask: gpu: everything is skipped, as there is no GPU here: {reason}"));
            return Ok(());
        }
    };
    say(&format!(
        "xtask: gpu: {gpus} found: NCCL with one rank a GPU, and several ranks that share one through the host"
    ));
    if gpus == 1 {
        say("xtask: gpu: what takes several GPUs is skipped: bytes between GPUs, and a rank that dies within NCCL");
    }
    if Command::new("nvcc").arg("--version").output().is_err() {
        say("xtask: gpu: there is no `nvcc`: without a CUDA toolkit only the collectives can be built");
    }
    // The tests of the collectives come first: they need no CUDA toolkit, and soon show if NCCL works. The tests share
    // the GPUs, so they run one at a time.
    let one_by_one = ["--", "--test-threads=1"];
    let comm = ["test", "--package", "fsdp-comm", "--features", "nccl", "--locked", "--lib", "--test", "nccl"];
    cargo(root, &[&comm[..], &one_by_one].concat(), &[])?;
    // All other tests are built together, because candle's kernels take long to compile.
    let mut all = vec!["test", "--features", FEATURES, "--locked"];
    all.extend(["--package", "fsdp-flat", "--package", "fsdp-checkpoint", "--package", "fsdp-cli"]);
    all.extend(["--test", "cuda", "--test", "gpu"]);
    cargo(root, &[&all[..], &one_by_one].concat(), &[])
}

/// Runs clippy on all code of the features `cuda` and `nccl`, with a stand-in for CUDA's compiler: it gives empty files for
/// kernels, as nothing runs that is only checked.
pub(crate) fn check(root: &Path) -> Result<()> {
    // Other features and another compiler than elsewhere: in a directory of its own, neither build undoes the other.
    let target = root.join("target/gpu-check");
    let toolkit = root.join("xtask/cuda-stand-in");
    let (compiler, toolkit) = (toolkit.join("bin/nvcc"), toolkit.to_string_lossy().into_owned());
    let compiler = compiler.to_string_lossy();
    let environment = [("CUDA_HOME", &*toolkit), ("NVCC", &*compiler), ("CUDA_COMPUTE_CAP", "90")];
    let path = format!("{toolkit}/bin:{}", std::env::var("PATH").unwrap_or_default());
    let environment = [&environment[..], &[("PATH", &*path)]].concat();
    let target = target.to_string_lossy();
    let arguments = ["clippy", "--workspace", "--all-targets", "--locked", "--features", FEATURES];
    cargo(root, &[&arguments[..], &["--target-dir", &*target, "--", "-D", "warnings"]].concat(), &environment)
}

/// Looks for GPUs with `nvidia-smi`. It comes with the driver, so without it there is no usable GPU.
fn found() -> Found {
    match Command::new("nvidia-smi").arg("--list-gpus").output() {
        Ok(output) if output.status.success() => count(&String::from_utf8_lossy(&output.stdout)),
        Ok(output) => Found::Nothing(format!("`nvidia-smi` ended with {}", output.status)),
        Err(error) => Found::Nothing(format!("`nvidia-smi` cannot be started ({error}), so there is no driver")),
    }
}

/// Counts the GPUs in the output of `nvidia-smi --list-gpus`: lines such as `GPU 0: NVIDIA H200 (UUID: GPU-…)`.
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
