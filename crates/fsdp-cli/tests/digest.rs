//! `fsdp digest`: one number for the same state, whatever wrote it.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::disallowed_methods, reason = "the tests damage files on purpose")]

mod common;

use std::fs;
use std::path::Path;

use common::fsdp;
use predicates::str::contains;
use serde_json::Value;
use tempfile::TempDir;

fn fixture(name: &str) -> String {
    format!("{}/../../tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Returns all digests of a checkpoint: `digest`, and by name in `each`.
fn digests(path: &str, more: &[&str]) -> Value {
    let arguments = [&["digest", path, "--json"], more].concat();
    let output = fsdp(&arguments).assert().success().get_output().stdout.clone();
    serde_json::from_slice(&output).unwrap()
}

#[test]
fn one_state_has_one_digest_in_every_format_layout_and_number_of_ranks() {
    let directory = TempDir::new().unwrap();
    for name in ["fsdp2_adamw_ws3/dcp", "fsdp2_bf16_adamw_ws2/dcp", "hsdp2_adamw_ws4/dcp", "dtypes/dcp"] {
        let source = fixture(name);
        if !Path::new(&source).exists() {
            continue;
        }
        let expected = digests(&source, &[]);
        assert_eq!(digests(&source, &["--threads", "7"])["digest"], expected["digest"]);
        let resharded = directory.path().join(format!("{}-5", name.replace('/', "-")));
        let resharded = resharded.to_str().unwrap();
        fsdp(&["reshard", &source, resharded, "--world-size", "5"]).assert().success();
        assert_eq!(digests(resharded, &[]), replaced_path(&expected, resharded), "{name} on 5 ranks");
        let converted = format!("{resharded}.safetensors");
        fsdp(&["convert", &source, &converted, "--to", "safetensors"]).assert().success();
        let converted = digests(&converted, &[]);
        for (key, digest) in expected["each"].as_object().unwrap() {
            // Formats that hold lists whole have other keys for values in them, but the same for tensors.
            if let Some(found) = converted["each"].get(key) {
                assert_eq!(found, digest, "{name}: {key}");
            }
        }
        assert!(converted["each"].as_object().unwrap().len() >= expected["each"].as_object().unwrap().len() / 2);
    }
}

/// Returns the same digests of a checkpoint elsewhere.
fn replaced_path(digests: &Value, path: &str) -> Value {
    let mut digests = digests.clone();
    digests["path"] = path.into();
    digests
}

#[test]
fn one_flipped_bit_changes_the_digest_of_its_tensor_alone() {
    let directory = TempDir::new().unwrap();
    let first = directory.path().join("first.safetensors");
    let first = first.to_str().unwrap();
    fsdp(&["convert", &fixture("fsdp2_adamw_ws2/dcp"), first, "--to", "safetensors"]).assert().success();
    let before = digests(first, &[]);
    let mut bytes = fs::read(first).unwrap();
    // The last byte of the file is one of the last tensor's.
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(first, bytes).unwrap();
    let after = digests(first, &[]);
    assert_ne!(before["digest"], after["digest"]);
    let before = before["each"].as_object().unwrap();
    let differing: Vec<_> = before.iter().filter(|(key, digest)| after["each"][key.as_str()] != **digest).collect();
    assert_eq!(differing.len(), 1);
}

#[test]
fn people_see_the_digest_and_the_path_and_if_asked_for_each_tensor() {
    let path = fixture("fsdp2_adamw_ws2/dcp");
    let all = digests(&path, &[]);
    let root = all["digest"].as_str().unwrap();
    fsdp(&["digest", &path]).assert().success().stdout(format!("{root}  {path}\n"));
    let each = all["each"].as_object().unwrap();
    let (name, digest) = each.iter().next().unwrap();
    let line = format!("{}  {name}\n", digest.as_str().unwrap());
    let output = fsdp(&["digest", &path, "--each"]).assert().success().stdout(contains(line));
    let lines = String::from_utf8(output.get_output().stdout.clone()).unwrap().lines().count();
    assert_eq!(lines, each.len() + 1);
    fsdp(&["digest", "nothing-here"]).assert().failure().stderr(contains("nothing-here"));
}
