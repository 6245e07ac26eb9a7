//! `cargo xtask gpu --build`: everything that a machine with a GPU needs to run the tests and the
//! benches, if it has no cargo.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;

use crate::shell::{output, program, run, say};

/// The scripts, each with its name in the bundle: one that runs everything, and what it needs.
const SCRIPTS: [(&str, &str); 5] = [
    ("xtask/gpu/bench.sh", "bench.sh"),
    ("xtask/gpu/figures.py", "figures.py"),
    ("xtask/gpu/storage.py", "storage.py"),
    ("tests/interop/gpt_gpu.py", "gpt_gpu.py"),
    ("tests/interop/gpt_fsdp.py", "gpt_fsdp.py"),
];

/// The bench of the kernels, which is a program of its own.
const KERNEL_TIMES: &str = "kernel_times";

/// The most bytes of the packed bundle. It has to travel to machines that are lent for minutes.
const MOST_BYTES: u64 = 40_000_000;

/// Builds the tests and the command with the CUDA toolkit of this machine, in release, and puts the
/// stripped programs and the scripts into a directory, and all of it into an archive beside it.
/// `tests` are cargo's options that choose the tests and their features. There `bench.sh` runs
/// everything, and each test program runs on its own: `fsdp-comm-nccl --test-threads=1`.
///
/// # Errors
/// A build that fails; an archive that is too large.
pub(super) fn build(root: &Path, directory: &Path, tests: &[&str]) -> Result<()> {
    // In a directory of its own, so that neither this build nor that of the tests for CPUs undoes
    // the other. The tests are built in release too: so they share the libraries with the command,
    // which cargo builds for its tests.
    let mut command = Command::new(program());
    command
        .current_dir(root)
        .args(["test", "--release", "--no-run", "--locked"])
        .args(["--message-format", "json-render-diagnostics"])
        .args(tests)
        .args(["--bench", KERNEL_TIMES])
        .arg("--target-dir")
        .arg(root.join("target/gpu"))
        .env("CARGO_PROFILE_RELEASE_STRIP", "symbols")
        .stderr(Stdio::inherit());
    say(&format!("xtask: {command:?}"));
    let mut files: Vec<(String, PathBuf)> = programs(&output(&mut command)?);
    ensure!(!files.is_empty(), "cargo has named no program");
    for (script, name) in SCRIPTS {
        files.push((name.to_owned(), root.join(script)));
    }
    std::fs::create_dir_all(directory)
        .with_context(|| format!("failed to make `{}`", directory.display()))?;
    for (name, file) in &files {
        let to = directory.join(name);
        let bytes = std::fs::copy(file, &to)
            .with_context(|| format!("failed to copy `{}`", file.display()))?;
        say(&format!(
            "xtask: gpu: {}, {}",
            to.display(),
            megabytes(bytes)
        ));
    }
    let names: Vec<&str> = files.iter().map(|(name, _)| name.as_str()).collect();
    pack(directory, &names)
}

/// Packs files of a directory into an archive beside it.
///
/// # Errors
/// `tar` or `xz` is missing or fails; the archive is too large.
fn pack(directory: &Path, names: &[&str]) -> Result<()> {
    let mut archive = directory.as_os_str().to_owned();
    archive.push(".tar.xz");
    let archive = PathBuf::from(archive);
    run(Command::new("tar")
        .arg("--create")
        .arg("--file")
        .arg(&archive)
        // With a dictionary as long as that of level 9, what several programs have in common is
        // stored once.
        .args(["--use-compress-program", "xz -9 --threads=1"])
        .arg("--directory")
        .arg(directory)
        .args(names))?;
    let bytes = std::fs::metadata(&archive)
        .with_context(|| format!("failed to look at `{}`", archive.display()))?
        .len();
    say(&format!(
        "xtask: gpu: {}, {}",
        archive.display(),
        megabytes(bytes)
    ));
    ensure!(
        bytes <= MOST_BYTES,
        "`{}` has {}, more than {}",
        archive.display(),
        megabytes(bytes),
        megabytes(MOST_BYTES)
    );
    Ok(())
}

/// Returns a number of bytes as text.
fn megabytes(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}

/// A message of cargo about a program that it has built; other messages lack some of the fields.
#[derive(Deserialize)]
struct BuiltProgram {
    executable: PathBuf,
    manifest_path: PathBuf,
    target: BuiltTarget,
}

#[derive(Deserialize)]
struct BuiltTarget {
    name: String,
    kind: Vec<String>,
}

/// Returns the programs that cargo's messages name, each with a name of its own: that of its
/// target, and for tests the name of the package in front of it.
fn programs(messages: &str) -> Vec<(String, PathBuf)> {
    let mut programs = Vec::new();
    for line in messages.lines() {
        let Ok(built) = serde_json::from_str::<BuiltProgram>(line) else {
            continue;
        };
        // Several packages have tests of one name.
        let mut name = built.target.name;
        if built.target.kind == ["test"]
            && let Some(package) = built.manifest_path.iter().rev().nth(1)
        {
            name = format!("{}-{name}", package.display());
        }
        programs.push((name, built.executable));
    }
    programs
}

#[cfg(test)]
#[expect(
    clippy::disallowed_methods,
    reason = "what a test makes need not be durable"
)]
mod tests {
    use super::*;

    #[test]
    fn programs_get_names_that_differ() {
        let message = |package: &str, target: &str, kind: &str| {
            format!(
                r#"{{"manifest_path":"p/{package}/Cargo.toml","target":{{"name":"{target}","kind":["{kind}"]}},"executable":"x/{target}"}}"#
            )
        };
        let lines = [
            message("a", "gpu", "test"),
            message("b", "gpu", "test"),
            message("c", "fsdp", "bin"),
            message("c", KERNEL_TIMES, "bench"),
            "{}".to_owned(),
        ];
        let found: Vec<String> = programs(&lines.join("\n"))
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        assert_eq!(found, ["a-gpu", "b-gpu", "fsdp", KERNEL_TIMES]);
    }

    #[test]
    fn the_scripts_of_the_bundle_are_there() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        for (script, _) in SCRIPTS {
            assert!(root.join(script).is_file(), "{script}");
        }
    }

    /// Runs some parts of the bench in a directory, where each program is a script. Returns what it
    /// prints, and `true` if it succeeds.
    fn bench(programs: &[(&str, &str)], parts: &[&str]) -> (String, bool) {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let directory = tempfile::tempdir().unwrap();
        for (script, name) in SCRIPTS {
            std::fs::copy(root.join(script), directory.path().join(name)).unwrap();
        }
        for (name, text) in programs {
            let path = directory.path().join(name);
            std::fs::copy(directory.path().join("bench.sh"), &path).unwrap();
            std::fs::write(path, format!("#!/bin/sh\n{text}\n")).unwrap();
        }
        let output = Command::new(directory.path().join("bench.sh"))
            .args(parts)
            .env("OUT", directory.path().join("out"))
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        (text, output.status.success())
    }

    #[test]
    fn the_bench_says_what_is_missing_and_goes_on_after_a_failure() {
        let (text, is_success) = bench(&[], &[]);
        assert!(text.starts_with("FAILED all: there is no"), "{text}");
        assert!(!is_success);

        let programs = [
            ("fsdp", "[ $1 = --version ] || { echo it breaks; exit 3; }"),
            ("fsdp-a-cuda", "echo 'test result: ok'"),
            ("fsdp-b-gpu", "echo 'test result: FAILED'; exit 101"),
            (KERNEL_TIMES, "echo 'KERNEL softmax: 1 us'"),
        ];
        let (text, is_success) = bench(&programs, &["tests", "steps", "saves", "kernels"]);
        for line in [
            "TEST fsdp-a-cuda",
            "FAILED test fsdp-b-gpu: status 101: test result: FAILED",
            "FAILED ours small-f32: status 3: it breaks",
            "FAILED torch big-tf32",
            "FAILED ours big-saves: status 3",
            "FAILED ours big-load: status 3",
            "KERNEL softmax: 1 us",
        ] {
            assert!(text.contains(line), "no `{line}` in {text}");
        }
        assert!(!text.contains("FAILED test fsdp-a-cuda"), "{text}");
        assert!(!is_success);
    }

    #[test]
    fn files_are_packed_beside_their_directory() {
        let parent = tempfile::tempdir().unwrap();
        let directory = parent.path().join("bundle");
        std::fs::create_dir(&directory).unwrap();
        std::fs::write(directory.join("a"), "x").unwrap();
        pack(&directory, &["a"]).unwrap();
        let archive = parent.path().join("bundle.tar.xz");
        let listed = output(Command::new("tar").arg("--list").arg("--file").arg(archive)).unwrap();
        assert_eq!(listed, "a\n");
        assert!(pack(&directory, &["b"]).is_err());
    }
}
