//! The offline commands lose nothing, or say what they lose.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

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

fn foreign(name: &str) -> String {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fsdp-dcp/tests/fixtures");
    fixtures.join(name).to_str().unwrap().to_owned()
}

#[test]
fn opaque_values_are_named_shown_and_never_lost_without_a_word() {
    let checkpoint = foreign("obj/dc");
    fsdp(&["verify", &checkpoint]).assert().success().stdout(contains("opaque ").and(contains("objs.TrainState")));
    fsdp(&["inspect", &checkpoint]).assert().success().stdout(contains("objs.TrainState"));
    let found = fsdp(&["inspect", &checkpoint, "--json"]).assert().success().get_output().stdout.clone();
    let found: serde_json::Value = serde_json::from_slice(&found).unwrap();
    let name = found["opaque"][0]["name"].as_str().unwrap();
    fsdp(&["cat", &checkpoint, name])
        .assert()
        .success()
        .stdout(contains("\"$type\": \"objs.TrainState\"").and(contains("\n    \"step\": 3")));
    let directory = tempfile::tempdir().unwrap();
    let (file, copy) = (place(&directory, "m.safetensors"), place(&directory, "copy"));
    let convert = ["convert", &checkpoint, &file, "--to", "safetensors"];
    fsdp(&convert).assert().code(20).stderr(contains("objs.TrainState").and(contains("--drop-opaque")));
    assert!(!Path::new(&file).exists());
    let dropped = [&convert[..], &["--drop-opaque"]].concat();
    fsdp(&dropped).assert().success().stderr(contains("1 opaque value was left out").and(contains("objs.TrainState")));
    fsdp(&["reshard", &checkpoint, &copy, "--world-size", "2"]).assert().success();
    fsdp(&["diff", &checkpoint, &copy]).assert().success();
}
