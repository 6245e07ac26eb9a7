//! `cargo xtask wheel`: builds the Python wheel, installs it in fresh environments, and runs its
//! tests there: without torch, and with several versions of it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use clap::Args;

use crate::files::{remove_directory, write};
use crate::python::{environment, install, reinstall};
use crate::shell::{output, run, say, target};

/// The package that builds wheels.
const MATURIN: &str = "maturin>=1.9,<2";

/// The packages that the tests import, besides torch.
const PACKAGES: [&str; 2] = ["numpy", "pytest"];

/// The newest torch, and the packages that the samples of the book import.
const WITH_TORCH: [&str; 7] = [
    "torch>=2.6",
    "transformers>=5",
    "peft",
    "pandas",
    "matplotlib",
    "tensorboard",
    "wandb",
];

/// The versions of torch that the wheel is tested with besides the newest: the oldest that
/// `pyproject.toml` promises, and the oldest that has `torch_checkpointing`.
const OLDER_TORCHES: [&str; 2] = ["2.6.0", "2.11.0"];

/// The name of the newest version.
const NEWEST: &str = "newest";

/// The library for whose storage the wheel has a plug-in, and what its own tests import.
const CHECKPOINTING: [&str; 3] = ["torch_checkpointing==0.1.1", "safetensors", "expecttest"];

/// The tests of that library that are about what a storage does, whichever it is. The others of the
/// first file are about how its own storage calls the operating system.
const ITS_TESTS: [&str; 6] = [
    "test_local_filesystem.py::TestStorage",
    "test_checkpoint_manager.py",
    "test_checkpoint_reader.py",
    "test_checkpoint_writer.py",
    "test_checkpoint_loader.py",
    "test_hf_loading.py",
];

/// All of them but one that counts the files of a checkpoint, and knows nothing of hashes.
const BUT_ONE: &str = "not test_write_with_barrier_commits_into_empty_final_dir";

/// The variable that names a Python with torch, so that it need not be installed.
const PYTHON_VARIABLE: &str = "FSDP_INTEROP_PYTHON";

/// Options of `cargo xtask wheel`.
#[derive(Args)]
pub(crate) struct WheelArguments {
    /// Build with the dev profile, which is quicker
    #[arg(long)]
    dev: bool,
    /// Only build
    #[arg(long)]
    no_test: bool,
    /// Test with this version of torch, such as 2.6.0, or with the `newest`; by default with three
    #[arg(long, value_name = "VERSION")]
    torch: Vec<String>,
}

/// Builds the wheel in `target/wheels`, and tests it.
pub(crate) fn build(root: &Path, arguments: &WheelArguments) -> Result<()> {
    let target = target(root);
    let package = root.join("crates/fsdp-python");
    let wheel = build_wheel(&target, &package, arguments.dev)?;
    if arguments.no_test {
        return Ok(());
    }
    // A fresh environment, so that what the wheel needs and does not name is missed.
    let python = environment(&target.join("wheel-python"), true)?;
    install(&python, &[&[&*wheel], &PACKAGES[..]].concat())?;
    // First without torch: the tests that need it are skipped, and everything else has to work.
    run(&mut tests(&package, &python))?;
    let mut versions: Vec<&str> = arguments.torch.iter().map(String::as_str).collect();
    if versions.is_empty() {
        versions.extend(OLDER_TORCHES);
        versions.push(NEWEST);
    }
    for version in versions {
        say(&format!("xtask: the wheel with torch {version}"));
        if version == NEWEST {
            add_newest_torch(&python)?;
            run(&mut tests(&package, &python))?;
            run_tests_of_checkpointing(&target, &package, &python)?;
            continue;
        }
        // torch takes gigabytes, so this environment is kept.
        let python = environment(&target.join(format!("wheel-torch-{version}")), false)?;
        let torch = format!("torch=={version}");
        install(&python, &[&[&*torch], &PACKAGES[..]].concat())?;
        reinstall(&python, &wheel)?;
        // The oldest torch lacks what the library needs, and its tests are skipped.
        let has_checkpointing = version != OLDER_TORCHES[0];
        if has_checkpointing {
            install(&python, &CHECKPOINTING)?;
        }
        run(&mut tests(&package, &python))?;
        if has_checkpointing {
            run_tests_of_checkpointing(&target, &package, &python)?;
        }
    }
    Ok(())
}

/// Builds the wheel, and returns its path.
fn build_wheel(target: &Path, package: &Path, is_dev: bool) -> Result<String> {
    let tools = environment(&target.join("wheel-tools"), false)?;
    install(&tools, &[MATURIN])?;
    let wheels = target.join("wheels");
    remove_directory(&wheels)?;
    let mut build = Command::new(&tools);
    build
        .args(["-m", "maturin", "build", "--locked", "--out"])
        .arg(&wheels)
        .current_dir(package);
    if !is_dev {
        build.arg("--release");
    }
    run(&mut build)?;
    let wheel = fs::read_dir(&wheels)?
        .next()
        .context("maturin built no wheel")??
        .path();
    say(&format!(
        "xtask: {} is {} KiB",
        wheel.display(),
        wheel.metadata()?.len() / 1024
    ));
    Ok(wheel.to_string_lossy().into_owned())
}

/// Returns the command that runs the wheel's tests.
fn tests(package: &Path, python: &Path) -> Command {
    let mut tests = Command::new(python);
    tests
        .args(["-m", "pytest", "-q", "-p", "no:cacheprovider"])
        .arg(package.join("tests"));
    tests
}

/// Adds the newest torch to an environment, and the packages beside it: those of the Python that
/// [`PYTHON_VARIABLE`] names, or from the registry.
fn add_newest_torch(python: &Path) -> Result<()> {
    match std::env::var_os(PYTHON_VARIABLE) {
        Some(with_torch) => {
            borrow(Path::new(&with_torch), python)?;
            install(python, &[&["--no-deps"], &CHECKPOINTING[..]].concat())
        }
        None => install(python, &[&WITH_TORCH[..], &CHECKPOINTING[..]].concat()),
    }
}

/// Runs the tests that `torch_checkpointing` has of its storage on ours. They are in its source
/// package.
fn run_tests_of_checkpointing(target: &Path, package: &Path, python: &Path) -> Result<()> {
    let [library, ..] = CHECKPOINTING;
    let sources = target.join("wheel-checkpointing");
    let name = library.replace("==", "-");
    let folder = sources.join(&name);
    if !folder.exists() {
        run(Command::new(python)
            .args(["-m", "pip", "download", "--quiet", "--no-deps"])
            .args(["--no-binary", ":all:", "--dest"])
            .arg(&sources)
            .arg(library))?;
        run(Command::new(python)
            .args(["-m", "tarfile", "-e"])
            .arg(sources.join(format!("{name}.tar.gz")))
            .arg(&sources))?;
    }
    run(Command::new(python)
        .args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p"])
        .arg("in_place_of_its_storage")
        .args(ITS_TESTS)
        .args(["-k", BUT_ONE])
        .env("PYTHONPATH", package.join("tests"))
        .current_dir(folder.join("tests")))
}

/// Lets `python` import the packages that another Python has.
fn borrow(from: &Path, python: &Path) -> Result<()> {
    let file = PathBuf::from(site_packages(python)?).join("borrowed.pth");
    write(&file, &format!("{}\n", site_packages(from)?))
}

/// Returns the directory in which a Python keeps its packages.
fn site_packages(python: &Path) -> Result<String> {
    let code = "import sysconfig; print(sysconfig.get_paths()['purelib'])";
    Ok(output(Command::new(python).args(["-c", code]))?
        .trim()
        .to_owned())
}
