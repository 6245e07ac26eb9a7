//! The offline commands lose nothing, or say what they lose.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::disallowed_methods, reason = "the tests make checkpoints by hand")]

mod common;

use std::fs;
use std::path::Path;

use common::fsdp;
use predicates::prelude::*;
use predicates::str::contains;
use tempfile::TempDir;

fn fixture(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name).to_str().unwrap().to_owned()
}

/// The path of a new file or directory of the test's own.
fn place(directory: &TempDir, name: &str) -> String {
    directory.path().join(name).to_str().unwrap().to_owned()
}

#[test]
fn a_flag_beats_the_environment() {
    let checkpoint = fixture("fsdp1_orig_adamw_ws2/dcp");
    let mut inspect = fsdp(&["inspect", &checkpoint, "--tree"]);
    inspect.env("FSDP_JSON", "true").assert().success().stdout(contains("  model (").and(contains("{").not()));
    fsdp(&["inspect", &checkpoint, "--tree", "--json"]).assert().code(2);
    let directory = tempfile::tempdir().unwrap();
    let (plain, hindered) = (place(&directory, "plain.safetensors"), place(&directory, "hindered.safetensors"));
    fsdp(&["convert", &checkpoint, &plain, "--to", "safetensors"]).assert().success();
    let mut convert = fsdp(&["convert", &checkpoint, &hindered, "--to", "safetensors"]);
    for (name, value) in
        [("INCLUDE", "model.*"), ("EXCLUDE", "*"), ("DTYPE", "bfloat16"), ("PREFIX", "x."), ("DRY_RUN", "true")]
    {
        convert.env(format!("FSDP_{name}"), value);
    }
    convert.assert().success();
    assert_eq!(fs::read(plain).unwrap(), fs::read(hindered).unwrap());
}
