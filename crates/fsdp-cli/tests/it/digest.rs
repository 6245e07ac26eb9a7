//! `fsdp digest`: one number for the same state, whatever wrote it.

#![expect(
    clippy::disallowed_methods,
    reason = "the tests damage files on purpose"
)]

use std::fs;
use std::path::Path;

use predicates::prelude::PredicateBooleanExt as _;
use predicates::str::contains;
use serde_json::Value;
use tempfile::TempDir;

use crate::common::fsdp;

fn fixture(name: &str) -> String {
    format!("{}/../../tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Returns all digests of a checkpoint: `digest`, and by name in `each`.
fn digests(path: &str, more: &[&str]) -> Value {
    let arguments = [&["digest", path, "--json"], more].concat();
    let output = fsdp(&arguments)
        .assert()
        .success()
        .get_output()
        .stdout
        .clone();
    serde_json::from_slice(&output).unwrap()
}

#[test]
fn one_state_has_one_digest_in_every_format_layout_and_number_of_ranks() {
    let directory = TempDir::new().unwrap();
    for name in [
        "fsdp2_adamw_ws3/dcp",
        "fsdp2_bf16_adamw_ws2/dcp",
        "hsdp2_adamw_ws4/dcp",
        "dtypes/dcp",
    ] {
        let source = fixture(name);
        if !Path::new(&source).exists() {
            continue;
        }
        let expected = digests(&source, &[]);
        assert_eq!(
            digests(&source, &["--threads", "7"])["digest"],
            expected["digest"]
        );
        let resharded = directory
            .path()
            .join(format!("{}-5", name.replace('/', "-")));
        let resharded = resharded.to_str().unwrap();
        fsdp(&["reshard", &source, resharded, "--world-size", "5"])
            .assert()
            .success();
        assert_eq!(
            digests(resharded, &[]),
            replaced_path(&expected, resharded),
            "{name} on 5 ranks"
        );
        let converted = format!("{resharded}.safetensors");
        fsdp(&["convert", &source, &converted, "--to", "safetensors"])
            .assert()
            .success();
        let converted = digests(&converted, &[]);
        for (key, digest) in expected["each"].as_object().unwrap() {
            // Formats that hold lists whole have other keys for values in them, but the same for
            // tensors.
            if let Some(found) = converted["each"].get(key) {
                assert_eq!(found, digest, "{name}: {key}");
            }
        }
        assert!(
            converted["each"].as_object().unwrap().len()
                >= expected["each"].as_object().unwrap().len() / 2
        );
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
    fsdp(&[
        "convert",
        &fixture("fsdp2_adamw_ws2/dcp"),
        first,
        "--to",
        "safetensors",
    ])
    .assert()
    .success();
    let before = digests(first, &[]);
    let mut bytes = fs::read(first).unwrap();
    // The last byte of the file is one of the last tensor's.
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(first, bytes).unwrap();
    let after = digests(first, &[]);
    assert_ne!(before["digest"], after["digest"]);
    let before = before["each"].as_object().unwrap();
    let differing: Vec<_> = before
        .iter()
        .filter(|(key, digest)| after["each"][key.as_str()] != **digest)
        .collect();
    assert_eq!(differing.len(), 1);
}

#[test]
fn people_see_the_digest_and_the_path_and_if_asked_for_each_tensor() {
    let path = fixture("fsdp2_adamw_ws2/dcp");
    let all = digests(&path, &[]);
    let root = all["digest"].as_str().unwrap();
    fsdp(&["digest", &path])
        .assert()
        .success()
        .stdout(format!("{root}  {path}\n"));
    let each = all["each"].as_object().unwrap();
    let (name, digest) = each.iter().next().unwrap();
    let line = format!("{}  {name}\n", digest.as_str().unwrap());
    let output = fsdp(&["digest", &path, "--each"])
        .assert()
        .success()
        .stdout(contains(line));
    let lines = String::from_utf8(output.get_output().stdout.clone())
        .unwrap()
        .lines()
        .count();
    assert_eq!(lines, each.len() + 1);
    fsdp(&["digest", "nothing-here"])
        .assert()
        .failure()
        .stderr(contains("nothing-here"));
}

#[test]
fn diff_names_what_differs_by_digests_alone_where_both_have_them() {
    let directory = TempDir::new().unwrap();
    let place = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let source = fixture("fsdp2_adamw_ws2/dcp");
    let (first, second) = (place("first"), place("second.safetensors"));
    fsdp(&["reshard", &source, &first, "--world-size", "3"])
        .assert()
        .success();
    fsdp(&["convert", &source, &second, "--to", "safetensors"])
        .assert()
        .success();
    assert_eq!(
        digests(&first, &["--recorded"])["digest"],
        digests(&first, &[])["digest"]
    );
    // The files of both hold no elements any more: none is read.
    let lost = place("first/__0_0.distcp");
    let bytes = fs::read(&lost).unwrap();
    fs::write(&lost, vec![0; bytes.len()]).unwrap();
    fsdp(&["diff", &first, &second])
        .assert()
        .success()
        .stderr(contains("no data was read"));
    fsdp(&["diff", &first, &second, "--full"])
        .assert()
        .failure();
    fsdp(&["diff", &first, &second, "--tolerance", "1"])
        .assert()
        .failure();
    fs::write(&lost, bytes).unwrap();
    fsdp(&["diff", &first, &second, "--full"])
        .assert()
        .success();
    // One with other weights.
    let third = place("third");
    let name = digests(&first, &[])["each"]
        .as_object()
        .unwrap()
        .keys()
        .find(|key| key.ends_with("weight"))
        .unwrap()
        .clone();
    fsdp(&[
        "convert",
        &first,
        &third,
        "--to",
        "dcp",
        "--dtype",
        "bf16",
        "--include",
        &name,
    ])
    .assert()
    .success();
    let found = fsdp(&["diff", &first, &third, "--json"])
        .assert()
        .failure()
        .get_output()
        .stdout
        .clone();
    let found: Value = serde_json::from_slice(&found).unwrap();
    assert_eq!(found["by"], "digests");
    let of_weight = found["differences"]
        .as_array()
        .unwrap()
        .iter()
        .find(|row| row["name"] == name.as_str())
        .unwrap();
    assert_eq!(of_weight["kind"], "dtype");
    // Checkpoints of other programs have no digests.
    fsdp(&["digest", &source, "--recorded"])
        .assert()
        .code(2)
        .stderr(contains("has no recorded digests"));
    let found = fsdp(&["diff", &first, &source, "--json"])
        .assert()
        .success()
        .get_output()
        .stdout
        .clone();
    assert_eq!(
        serde_json::from_slice::<Value>(&found).unwrap()["by"],
        "elements"
    );
}

#[test]
fn other_elements_have_other_digests() {
    let directory = TempDir::new().unwrap();
    let place = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let (plain, changed) = (place("a.safetensors"), place("b.safetensors"));
    fsdp(&[
        "convert",
        &fixture("fsdp2_adamw_ws2/dcp"),
        &plain,
        "--to",
        "safetensors",
    ])
    .assert()
    .success();
    let mut bytes = fs::read(&plain).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&changed, bytes).unwrap();
    fs::copy(place("a.values.json"), place("b.values.json")).unwrap();
    // The header still has the digests of before: only data tells.
    fsdp(&["diff", &plain, &changed]).assert().success();
    fsdp(&["diff", &plain, &changed, "--full"])
        .assert()
        .code(17)
        .stdout(contains("1 element differs"));
    fsdp(&["verify", &changed, "--level", "deep"])
        .assert()
        .code(10)
        .stdout(contains("not the recorded digest"));
    // A command that would write it again, under a new digest, refuses.
    let error = fsdp(&["convert", &changed, &place("c"), "--to", "dcp"])
        .assert()
        .code(10);
    error.stderr(contains("are not those that were saved"));
    assert!(!Path::new(&place("c")).exists());
}

#[test]
fn a_damaged_source_is_not_cast_mapped_or_merged() {
    let directory = TempDir::new().unwrap();
    let place = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let (plain, changed) = (place("a.safetensors"), place("b.safetensors"));
    let source = fixture("fsdp2_adamw_ws2/dcp");
    fsdp(&["convert", &source, &plain, "--to", "safetensors"])
        .args(["--include", "model.*"])
        .assert()
        .success();
    let mut bytes = fs::read(&plain).unwrap();
    // The last tensor of the file has the last byte.
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&changed, bytes).unwrap();
    let rules = place("rules.map");
    fs::write(&rules, "model.{rest*} -> {rest*}\n").unwrap();
    let commands: [(&str, Vec<&str>); 3] = [
        ("convert", vec![&changed, "--dtype", "bfloat16"]),
        ("merge", vec!["--from", &plain, "--from", &changed]),
        (
            "convert",
            vec![&changed, "--dtype", "float16", "--map", &rules],
        ),
    ];
    for (number, (command, arguments)) in commands.iter().enumerate() {
        for to in ["dcp", "safetensors", "hf", "torch", "torch-checkpointing"] {
            let destination = place(&format!("{to}-{number}"));
            let error = fsdp(&[command])
                .args(arguments)
                .args([&destination, "--to", to])
                .assert()
                .code(10);
            error.stderr(contains("`b.safetensors`").or(contains("are not those that were saved")));
            assert!(!Path::new(&destination).exists(), "{command} {to}");
        }
    }
    // Damage to a tensor that is left out does not matter.
    let listed = fsdp(&["verify", &changed, "--level", "deep", "--json"])
        .assert()
        .code(10)
        .get_output()
        .stdout
        .clone();
    let listed: Value = serde_json::from_slice(&listed).unwrap();
    let damaged = listed["problems"][0]["name"].as_str().unwrap();
    fsdp(&["convert", &changed, &place("rest"), "--to", "dcp"])
        .args(["--dtype", "bfloat16", "--exclude", damaged])
        .assert()
        .success();
}

/// Trains a small model, and returns the lines of `fsdp log --json`.
#[cfg(feature = "train")]
fn train_and_log(out: &str, more: &[&str]) -> Vec<Value> {
    let small = [
        "--layers", "1", "--hidden", "16", "--heads", "2", "--seq", "16", "--batch", "4",
        "--sample", "0",
    ];
    let arguments = [
        &["train", "--nproc", "2", "--save-every", "2", "--out", out][..],
        &small,
        more,
    ]
    .concat();
    fsdp(&arguments).assert().success();
    log(out)
}

#[cfg(feature = "train")]
fn log(out: &str) -> Vec<Value> {
    let output = fsdp(&["log", out, "--json"]).output().unwrap();
    let log: Value = serde_json::from_slice(&output.stdout).unwrap();
    log["checkpoints"].as_array().unwrap().clone()
}

#[test]
#[cfg(feature = "train")]
fn every_checkpoint_of_a_run_names_its_parent_and_a_broken_chain_is_seen() {
    let directory = TempDir::new().unwrap();
    let out = directory.path().join("run").to_str().unwrap().to_owned();
    let rows = train_and_log(&out, &["--steps", "6", "--check-replicas", "2"]);
    let steps: Vec<_> = rows
        .iter()
        .map(|row| row["lineage"]["step"].as_u64().unwrap())
        .collect();
    assert_eq!(steps, [6, 4, 2]);
    for (child, parent) in rows.iter().zip(&rows[1..]) {
        assert_eq!(child["lineage"]["parent"]["digest"], parent["digest"]);
        assert_eq!(child["lineage"]["config"], parent["lineage"]["config"]);
    }
    assert_eq!(rows[2]["lineage"].get("parent"), None);
    assert_eq!(rows[0]["lineage"]["data"]["position"], 24);
    assert!(
        rows.iter()
            .all(|row| row["notes"] == Value::Array(Vec::new())),
        "{rows:?}"
    );
    // A resume goes on with the chain; saves in the background are part of it.
    let rows = train_and_log(&out, &["--steps", "10", "--resume", "--async-save"]);
    assert_eq!(rows.len(), 5);
    assert!(
        rows.iter()
            .all(|row| row["notes"] == Value::Array(Vec::new())),
        "{rows:?}"
    );
    fsdp(&["log", &out])
        .assert()
        .success()
        .stdout(contains("begins the run"));
    let steps = |step: u64| format!("{out}/step-{step:08}");
    // A file of another program beside a checkpoint's own has no part in the chain.
    let beside = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../fsdp-tools/tests/fixtures/lightning/meta.pt"
    );
    fs::copy(beside, format!("{}/meta.pt", steps(4))).unwrap();
    assert_eq!(log(&out), rows);
    // Another state takes the place of step 4.
    fs::remove_dir_all(steps(4)).unwrap();
    fsdp(&["log", &out])
        .assert()
        .success()
        .stdout(contains("its parent is not here"));
    let other = directory.path().join("other").to_str().unwrap().to_owned();
    train_and_log(&other, &["--steps", "4", "--seed", "9"]);
    fs::rename(format!("{other}/step-00000004"), steps(4)).unwrap();
    fsdp(&["log", &out]).assert().code(17).stdout(contains(
        "broken: the checkpoint with its parent's step has other state",
    ));
    // A copy that is resharded keeps its place.
    let copy = directory.path().join("copy").to_str().unwrap().to_owned();
    fsdp(&["reshard", &steps(6), &copy, "--world-size", "3"])
        .assert()
        .success();
    fs::remove_dir_all(steps(6)).unwrap();
    fs::rename(&copy, steps(6)).unwrap();
    let row = log(&out)
        .into_iter()
        .find(|row| row["lineage"]["step"] == 8)
        .unwrap();
    assert_eq!(row["notes"], Value::Array(Vec::new()));
}
