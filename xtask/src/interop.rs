//! `cargo xtask interop`: an environment with PyTorch, and the two-way tests against it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::files::remove_directory;
use crate::python::{environment, install};
use crate::shell::{cargo, program, run, target};

/// The packages that the tests import.
const PACKAGES: [&str; 8] = [
    "torch>=2.6",
    "numpy",
    "safetensors",
    "transformers>=5",
    "peft",
    "model-signing>=1.1",
    "pyopenssl",
    "torch_checkpointing>=0.1.1",
];

/// The variable that names a Python with these packages, so that they need not be installed.
const PYTHON_VARIABLE: &str = "FSDP_INTEROP_PYTHON";

/// Builds the command, and runs the tests of `tests/interop` with it.
pub(crate) fn test(root: &Path) -> Result<()> {
    let python = match std::env::var(PYTHON_VARIABLE) {
        Ok(python) => PathBuf::from(python),
        Err(_) => {
            let python = environment(&root.join("target/interop-python"), false)?;
            // pip runs every time, because the list may be longer than when the environment was
            // made.
            install(&python, &PACKAGES)?;
            python
        }
    };
    cargo(
        root,
        &["build", "--release", "--package", "fsdp-cli", "--locked"],
        &[],
    )?;
    let work = target(root).join("interop");
    remove_directory(&work)?;
    std::fs::create_dir_all(&work)
        .with_context(|| format!("failed to create `{}`", work.display()))?;

    let fixtures = root.join("tests/fixtures");
    let data = root.join("crates/fsdp-cli/data/harbour.txt");
    for (script, input, output) in [
        ("formats.py", &fixtures, work.join("formats")),
        ("experts.py", &fixtures, work.join("experts")),
        ("rank_files.py", &fixtures, work.join("rank_files")),
        ("signing.py", &fixtures, work.join("signing")),
        ("interop.py", &data, work.clone()),
        ("torchrun.py", &data, work.join("torchrun")),
    ] {
        run(Command::new(&python)
            .arg(root.join("tests/interop").join(script))
            .arg(target(root).join("release/fsdp"))
            .args([input, &output])
            .current_dir(root))?;
    }

    // The examples that continue from each other's checkpoints, with their Python half.
    let pair = [
        "test",
        "--package",
        "fsdp-examples",
        "--test",
        "run",
        "--locked",
        "both_halves",
    ];
    run(Command::new(program())
        .args(pair)
        .env(PYTHON_VARIABLE, &python)
        .current_dir(root))
}
