//! `fsdp train --init-from`, and runs beside files of other programs.

#![expect(
    clippy::disallowed_methods,
    reason = "the tests damage files on purpose"
)]

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use candle_core::Tensor;
use fsdp::checkpoint::{LoadOptions, load_whole};
use fsdp::formats::internals::ArchiveLayout;
use fsdp::formats::metadata::{BytesEntry, Entry, StorageInfo, decode, encode};
use fsdp_cli::exit_codes;
use predicates::prelude::PredicateBooleanExt as _;
use predicates::str::contains;
use tempfile::TempDir;

use crate::common::fsdp;
use crate::train::{assert_close, losses_by_step, train, train_small};

#[test]
fn a_run_starts_from_any_checkpoint_of_the_same_model_as_far_as_it_goes() {
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    let path = |name: &str| at(name).to_str().unwrap().to_owned();
    train_small(
        &at("whole"),
        &["--nproc", "2", "--steps", "20", "--save-every", "10"],
    );
    let whole = losses_by_step(&at("whole"));
    let saved = path("whole/step-00000010");

    // Model, optimizer and step, from another number of ranks.
    fsdp(&["reshard", &saved, &path("resharded"), "--world-size", "3"])
        .assert()
        .success();
    let options = ["--nproc", "2", "--steps", "20", "--init-from"];
    train(&at("went-on"), &options)
        .arg(path("resharded"))
        .assert()
        .success();
    let went_on = losses_by_step(&at("went-on"));
    assert_eq!(went_on.first().map(|(step, _)| *step), Some(10));
    let loss = |losses: &[(u64, f64)]| losses.iter().map(|(_, loss)| *loss).collect::<Vec<_>>();
    assert_close(&loss(&went_on), &loss(&whole[10..]));
    // The place is taken now.
    train(&at("went-on"), &options)
        .arg(path("resharded"))
        .assert()
        .code(i32::from(exit_codes::USAGE));

    // Model, optimizer and `train.step` alone, as a program saves them that keeps no settings.
    let keep = [
        "--include",
        "model.*",
        "--include",
        "optim.*",
        "--include",
        "train.step",
    ];
    fsdp(&["convert", &saved, &path("bare"), "--to", "dcp"])
        .args(keep)
        .assert()
        .success();
    let settings = ["--heads", "2", "--batch", "12"];
    train(&at("from-bare"), &options)
        .arg(path("bare"))
        .args(settings)
        .assert()
        .success();
    assert_close(
        &loss(&losses_by_step(&at("from-bare"))),
        &loss(&whole[10..]),
    );

    // No shape tells the number of heads, and a guess would be another model.
    train(&at("guessed"), &options)
        .arg(path("bare"))
        .assert()
        .code(i32::from(exit_codes::USAGE))
        .stderr(contains("give it with `--heads`"));
    // `--steps` counts the steps of the checkpoint too, so there is nothing left to train.
    train(&at("done"), &["--steps", "10", "--init-from"])
        .arg(path("resharded"))
        .assert()
        .code(i32::from(exit_codes::USAGE))
        .stderr(contains("is at step 10 already"));
    assert!(!at("guessed").exists() && !at("done").exists());
    // A run that died before its first checkpoint has left its metrics and events.
    train_small(&at("again"), &["--steps", "3", "--save-every", "100"]);
    fs::remove_dir_all(at("again/step-00000003")).unwrap();
    train(&at("again"), &options)
        .arg(path("resharded"))
        .assert()
        .success();
    let steps: Vec<u64> = losses_by_step(&at("again"))
        .iter()
        .map(|(step, _)| *step)
        .collect();
    assert_eq!(steps, (10..20).collect::<Vec<u64>>());
    let events = fs::read_to_string(at("again/events.jsonl")).unwrap();
    assert_eq!(events.matches("\"start\"").count(), 1, "{events}");

    // Only a model: its sizes are those of its tensors.
    fsdp(&[
        "convert",
        &saved,
        &path("model"),
        "--to",
        "dcp",
        "--include",
        "model.*",
    ])
    .assert()
    .success();
    let mut command = train(
        &at("anew"),
        &[
            "--nproc",
            "2",
            "--steps",
            "2",
            "--init-from",
            &path("model"),
        ],
    );
    command
        .args(settings)
        .assert()
        .success()
        .stderr(contains("only a model"));
    let anew = losses_by_step(&at("anew"));
    assert_eq!(anew.first().map(|(step, _)| *step), Some(0));
    assert!(
        anew[0].1 < whole[0].1,
        "{} is that of a fresh model, {}",
        anew[0].1,
        whole[0].1
    );

    // Any other format does as well: one file, several, torch's.
    for (name, format) in [
        ("one.safetensors", &["safetensors"][..]),
        ("several", &["hf", "--max-shard-size", "20KB"]),
        ("state.pt", &["torch"]),
    ] {
        fsdp(&["convert", &saved, &path(name), "--to"])
            .args(format)
            .assert()
            .success();
        let out = at(&format!("from-{name}"));
        train(&out, &options).arg(path(name)).assert().success();
        assert_eq!(losses_by_step(&out), went_on, "{name}");
    }
    // A model's names may stand alone, as Hugging Face's do; one of a tied parameter's names is
    // enough.
    let names = [
        "--include",
        "model.*",
        "--exclude",
        "model.lm_head.weight",
        "--rename",
        "model.=",
        "--to",
        "safetensors",
    ];
    fsdp(&["convert", &saved, &path("names.safetensors")])
        .args(names)
        .assert()
        .success();
    let mut command = train(
        &at("from-names"),
        &[
            "--nproc",
            "3",
            "--steps",
            "2",
            "--init-from",
            &path("names.safetensors"),
        ],
    );
    command
        .args(settings)
        .assert()
        .success()
        .stderr(contains("only a model"));
    assert_close(&loss(&losses_by_step(&at("from-names"))), &loss(&anew));
    // A file that is not a checkpoint, and a checkpoint of another model, are refused.
    fs::write(at("text"), "no checkpoint").unwrap();
    train(&at("none"), &["--init-from", &path("text")])
        .assert()
        .failure()
        .stderr(contains("text"));
    let other = ["--hidden", "32", "--init-from", &saved];
    train(&at("none"), &other)
        .assert()
        .code(i32::from(exit_codes::DIFFERENCE));
    assert!(!at("none").exists());
}

#[test]
fn what_others_keep_beside_a_run_is_left_alone_and_state_that_lacks_is_told() {
    let dir = TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    train_small(&dir.path().join("whole"), &["--nproc", "2", "--steps", "2"]);
    let saved = path("whole/step-00000002");
    let start = |from: &str, out: &str| {
        train(
            &dir.path().join(out),
            &["--nproc", "2", "--steps", "4", "--init-from", &path(from)],
        )
        .assert()
    };
    // A tensor that is no part of the model: one of the names of tied weights, elsewhere.
    let rename = [
        "--to",
        "dcp",
        "--rename",
        "model.lm_head.weight=extra.weight",
    ];
    fsdp(&["convert", &saved, &path("extra")])
        .args(rename)
        .assert()
        .success();
    start("extra", "from-extra").success();
    let exclude = [
        "--to",
        "dcp",
        "--exclude",
        "optim.state.transformer.ln_f.weight.*",
    ];
    fsdp(&["convert", &saved, &path("lacks")])
        .args(exclude)
        .assert()
        .success();
    let refused = start("lacks", "from-lacks").code(i32::from(exit_codes::DIFFERENCE));
    refused.stderr(contains("missing key(s) `state.transformer.ln_f.weight`"));
    assert!(!dir.path().join("from-lacks").exists());
}

/// Adds a value to a checkpoint that only another program could make: a pickle of an object.
fn add_object(checkpoint: &Path, key: &str) {
    let pickle = b"\x80\x02cargparse\nNamespace\n)R.";
    let archive = ArchiveLayout::new("archive", pickle.to_vec(), &[]);
    let item = [archive.head(0), archive.tail(&[])].concat();
    fs::write(checkpoint.join("__9_0.distcp"), &item).unwrap();
    let mut metadata = decode(&fs::read(checkpoint.join(".metadata")).unwrap()).unwrap();
    let length = item.len() as u64;
    let stored = StorageInfo {
        relative_path: "__9_0.distcp".to_owned(),
        offset: 0,
        length,
        transforms: Vec::new(),
    };
    metadata.entries.insert(
        key.to_owned(),
        Entry::Bytes(BytesEntry {
            stored: Some(stored),
        }),
    );
    fs::write(checkpoint.join(".metadata"), encode(&metadata)).unwrap();
    fs::remove_file(checkpoint.join(".integrity")).unwrap();
}

#[test]
fn objects_of_other_programs_beside_a_run_are_left_alone() {
    let dir = TempDir::new().unwrap();
    train_small(&dir.path().join("whole"), &["--nproc", "2", "--steps", "2"]);
    let checkpoint = dir.path().join("whole/step-00000002");
    add_object(&checkpoint, "arguments");
    let checkpoint = checkpoint.to_str().unwrap();
    // It is named and shown, and never made.
    fsdp(&["cat", checkpoint, "arguments"])
        .assert()
        .success()
        .stdout(contains("argparse.Namespace"));
    let out = dir.path().join("out");
    train(
        &out,
        &["--nproc", "3", "--steps", "3", "--init-from", checkpoint],
    )
    .assert()
    .success();
    assert_eq!(losses_by_step(&out).first().map(|(step, _)| *step), Some(2));
}

/// Writes weights in a safetensors file of flat names, as programs do that know nothing of runs.
fn write_weights(path: &Path, weights: &[(String, Tensor)]) {
    let weights: HashMap<String, Tensor> = weights.iter().cloned().collect();
    candle_core::safetensors::save(&weights, path).unwrap();
}

#[test]
fn a_model_is_found_under_either_name_of_its_embedding_and_any_usual_prefix() {
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    train_small(&at("whole"), &["--nproc", "2", "--steps", "2"]);
    let saved = at("whole/step-00000002");
    let loaded = load_whole(saved.as_path(), &["model"], &LoadOptions::default()).unwrap();
    let model = loaded.dict("model").unwrap();
    let weights = |prefix: &str, left_out: &str| -> Vec<(String, Tensor)> {
        let kept = model.iter().filter(|(name, _)| *name != left_out);
        kept.map(|(name, value)| {
            let tensor = value.as_tensor().unwrap().clone();
            (format!("{prefix}{name}"), tensor)
        })
        .collect()
    };
    let start = |from: &Path, out: &str| {
        let options = [
            "--nproc",
            "2",
            "--steps",
            "2",
            "--heads",
            "2",
            "--init-from",
        ];
        train(&at(out), &options).arg(from).assert()
    };
    let mut all_losses = Vec::new();
    for (prefix, left_out) in [
        ("", "transformer.wte.weight"),
        ("", "lm_head.weight"),
        ("model.", "transformer.wte.weight"),
        ("model.", "lm_head.weight"),
        ("model.", "nothing"),
    ] {
        let name = format!("from-{prefix}{left_out}");
        let file = at(&format!("{name}.safetensors"));
        write_weights(&file, &weights(prefix, left_out));
        start(&file, &name).success();
        all_losses.push(losses_by_step(&at(&name)));
        // A file of torch with the same flat names.
        let torch = at(&format!("{name}.pt"));
        let paths = [&file, &torch].map(|path| path.to_str().unwrap());
        fsdp(&["convert", paths[0], paths[1], "--to", "torch"])
            .assert()
            .success();
        start(&torch, &format!("{name}-pt")).success();
        all_losses.push(losses_by_step(&at(&format!("{name}-pt"))));
    }
    for losses in &all_losses {
        assert_eq!(losses, &all_losses[0]);
    }
    // Another prefix is told, with the command that removes it.
    let file = at("module.safetensors");
    write_weights(&file, &weights("module.", "nothing"));
    start(&file, "none")
        .code(i32::from(exit_codes::DIFFERENCE))
        .stderr(contains("--rename module.="));
    // Two names with different values are told, and so is what to do.
    let mut untied = weights("", "nothing");
    for (name, value) in &mut untied {
        if name == "lm_head.weight" {
            *value = (&*value + 1.0).unwrap();
        }
    }
    let file = at("untied.safetensors");
    write_weights(&file, &untied);
    start(&file, "none")
        .code(i32::from(exit_codes::DIFFERENCE))
        .stderr(contains("`lm_head.weight`").and(contains("`transformer.wte.weight`")))
        .stderr(contains("fsdp convert --exclude"));
    // A model of other sizes is told in one line.
    let mut other = weights("", "nothing");
    other.retain(|(name, _)| !name.contains(".h.0."));
    let file = at("other.safetensors");
    write_weights(&file, &other);
    start(&file, "none")
        .code(i32::from(exit_codes::DIFFERENCE))
        .stderr(contains("is of another model").and(contains("\\n").not()));
    assert!(!at("none").exists());
}
