//! `fsdp train` from outside: what it writes, how it goes on at another number of ranks, and how it
//! fails.

#![expect(
    clippy::disallowed_methods,
    reason = "the tests damage files on purpose"
)]

use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use fsdp::checkpoint::{load_whole, save};
use fsdp::prelude::*;
use fsdp_cli::exit_codes;
use predicates::prelude::*;
use predicates::str::contains;
use serde_json::Value;
use tempfile::TempDir;

use crate::common::fsdp;

/// A model and batch small enough for many runs.
pub(crate) const SMALL: [&str; 12] = [
    "--layers", "1", "--heads", "2", "--hidden", "16", "--seq", "16", "--batch", "12", "--sample",
    "8",
];

pub(crate) fn train(out: &Path, arguments: &[&str]) -> Command {
    let mut command = fsdp(&["train", "--out", out.to_str().unwrap()]);
    command.args(arguments);
    command
}

pub(crate) fn train_small(out: &Path, arguments: &[&str]) {
    train(out, &SMALL).args(arguments).assert().success();
}

fn lines(path: &Path) -> Vec<Value> {
    fs::read_to_string(path)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

pub(crate) fn losses(out: &Path) -> Vec<f64> {
    let metrics = lines(&out.join("metrics.jsonl"));
    for (step, line) in metrics.iter().enumerate() {
        assert_eq!(line["step"], step as u64);
    }
    metrics
        .iter()
        .map(|line| line["loss"].as_f64().unwrap())
        .collect()
}

pub(crate) fn assert_close(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(
            (found - expected).abs() / expected < 1e-4,
            "step {step}: {found} is not {expected}"
        );
    }
}

/// Every file below a directory with its bytes.
fn snapshot(directory: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(snapshot(&path)),
            false => found.push((path.clone(), fs::read(&path).unwrap())),
        }
    }
    found.sort();
    found
}

#[test]
fn resumed_at_other_numbers_of_ranks_a_run_goes_on_as_if_never_stopped() {
    let dir = TempDir::new().unwrap();
    let (whole, parts) = (dir.path().join("whole"), dir.path().join("parts"));
    train_small(&whole, &["--nproc", "1", "--steps", "60"]);
    train_small(
        &parts,
        &["--nproc", "4", "--steps", "20", "--save-every", "20"],
    );
    // Sizes, batch and learning rate are the checkpoint's.
    train(
        &parts,
        &["--nproc", "2", "--steps", "40", "--resume", "--flat"],
    )
    .assert()
    .success();
    train(
        &parts,
        &[
            "--nproc",
            "3",
            "--steps",
            "60",
            "--resume",
            "--strategy",
            "shard-grad-op",
        ],
    )
    .assert()
    .success();
    assert_close(&losses(&parts), &losses(&whole));
    let steps: Vec<String> = ["00000020", "00000040", "00000060"]
        .map(|step| format!("step-{step}"))
        .into();
    assert!(
        steps
            .iter()
            .all(|step| parts.join(step).join(".metadata").is_file())
    );
}

#[test]
fn a_run_cut_short_does_its_last_steps_again_and_its_metrics_have_each_step_once() {
    let dir = TempDir::new().unwrap();
    let (whole, cut) = (dir.path().join("whole"), dir.path().join("cut"));
    train_small(&whole, &["--nproc", "2", "--steps", "8"]);
    train_small(&cut, &["--nproc", "2", "--steps", "6", "--save-every", "4"]);
    // As after a kill: the newest checkpoint is behind the metrics, whose last line is torn.
    fs::remove_dir_all(cut.join("step-00000006")).unwrap();
    let metrics = fs::read(cut.join("metrics.jsonl")).unwrap();
    fs::write(cut.join("metrics.jsonl"), &metrics[..metrics.len() - 5]).unwrap();
    // And a save that did not finish.
    fs::create_dir(cut.join(".step-00000008.tmp-00000000deadbeef")).unwrap();
    train(&cut, &["--nproc", "3", "--steps", "8", "--resume"])
        .assert()
        .success();
    assert_close(&losses(&cut), &losses(&whole));
    assert!(
        !cut.join(".step-00000008.tmp-00000000deadbeef").exists(),
        "leftovers of the same step are removed"
    );
}

#[test]
fn stdout_is_data_stderr_is_talk_and_metrics_tell_what_each_rank_holds() {
    let dir = TempDir::new().unwrap();
    let output = train(dir.path(), &SMALL)
        .args(["--nproc", "2", "--steps", "3", "--json"])
        .output()
        .unwrap();
    assert!(output.status.success());
    assert!(
        output.stderr.is_empty(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let events: Vec<Value> = String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let kinds: Vec<&str> = events
        .iter()
        .map(|event| event["event"].as_str().unwrap())
        .collect();
    assert_eq!(
        kinds,
        ["start", "step", "step", "step", "checkpoint", "end"]
    );
    assert_eq!(events[0]["schema"], 1);
    assert!(
        events[5]["sample"]
            .as_str()
            .is_some_and(|sample| !sample.is_empty())
    );
    let parameters = events[0]["parameters"].as_u64().unwrap();
    for line in lines(&dir.path().join("metrics.jsonl")) {
        let held: Vec<u64> = line["parameter_bytes"]
            .as_array()
            .unwrap()
            .iter()
            .map(|b| b.as_u64().unwrap())
            .collect();
        assert_eq!(held.len(), 2);
        // Half each, and alignment.
        assert!(
            held.iter().all(|&bytes| bytes < 4 * parameters / 2 + 1024),
            "{held:?} of {parameters} parameters"
        );
        assert!(line["tokens_per_s"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn accumulated_gradients_and_a_loose_clip_do_not_change_the_run_but_a_tight_clip_does() {
    let dir = TempDir::new().unwrap();
    let run = |name: &str, arguments: &[&str]| {
        let out = dir.path().join(name);
        train_small(&out, &[&["--steps", "6"], arguments].concat());
        losses(&out)
    };
    let plain = run("plain", &["--nproc", "1"]);
    assert_close(
        &run(
            "accumulated",
            &[
                "--nproc",
                "2",
                "--accumulate",
                "3",
                "--clip-grad-norm",
                "1e6",
            ],
        ),
        &plain,
    );
    let sgd = run("sgd", &["--nproc", "2", "--optimizer", "sgd", "--lr", "1"]);
    let clipped = run(
        "clipped",
        &[
            "--nproc",
            "2",
            "--optimizer",
            "sgd",
            "--lr",
            "1",
            "--clip-grad-norm",
            "1e-3",
        ],
    );
    // The norm of the metrics is the one before clipping.
    let norm = |name: &str| {
        lines(&dir.path().join(name).join("metrics.jsonl"))[0]["grad_norm"]
            .as_f64()
            .unwrap()
    };
    assert_eq!(norm("sgd"), norm("clipped"));
    assert!(
        clipped[5] > sgd[5] + 0.1,
        "{clipped:?} hardly moves, {sgd:?} does"
    );
}

#[test]
fn a_schedule_goes_on_where_it_stopped_at_another_number_of_ranks() {
    let dir = TempDir::new().unwrap();
    let (whole, parts) = (dir.path().join("whole"), dir.path().join("parts"));
    let rates = |out: &Path| -> Vec<f64> {
        lines(&out.join("metrics.jsonl"))
            .iter()
            .map(|line| line["lr"].as_f64().unwrap())
            .collect()
    };
    let schedule = [
        "--schedule",
        "linear",
        "--warmup",
        "2",
        "--lr",
        "0.5",
        "--optimizer",
        "sgd",
    ];
    train_small(
        &whole,
        &[&schedule[..], &["--nproc", "2", "--steps", "6"]].concat(),
    );
    assert_eq!(rates(&whole), [0.0, 0.25, 0.5, 0.375, 0.25, 0.125]);
    train_small(
        &parts,
        &[
            &schedule[..],
            &["--nproc", "3", "--steps", "4", "--schedule-steps", "6"],
        ]
        .concat(),
    );
    train(
        &parts,
        &["--nproc", "1", "--steps", "6", "--resume", "--sample", "0"],
    )
    .assert()
    .success();
    assert_eq!(rates(&parts), rates(&whole));
    assert_close(&losses(&parts), &losses(&whole));
    // Steps at a rate of 0 would do nothing.
    let further = train(&parts, &["--steps", "9", "--resume"])
        .assert()
        .code(i32::from(exit_codes::USAGE));
    further.stderr(contains("after 6 steps").and(contains("--schedule-steps")));
    train(
        &parts,
        &[
            "--steps",
            "9",
            "--resume",
            "--schedule-steps",
            "9",
            "--sample",
            "0",
        ],
    )
    .assert()
    .success();
    assert_eq!(rates(&parts).len(), 9);
}

#[test]
fn what_cannot_be_done_is_said_before_anything_is_written() {
    let dir = TempDir::new().unwrap();
    let (out, empty, short) = (
        dir.path().join("out"),
        dir.path().join("empty"),
        dir.path().join("short"),
    );
    fs::write(&empty, "").unwrap();
    fs::write(&short, "too short").unwrap();
    let (empty, short) = (empty.to_str().unwrap(), short.to_str().unwrap());
    let cases: [(&[&str], u8, &str); 19] = [
        (
            &["--nproc", "0"],
            exit_codes::USAGE,
            "invalid value '0' for '--nproc <N>'",
        ),
        (
            &["--steps", "many"],
            exit_codes::USAGE,
            "invalid value 'many'",
        ),
        (
            &["--save-every", "0"],
            exit_codes::USAGE,
            "invalid value '0' for '--save-every <K>'",
        ),
        (&["--data", empty], exit_codes::USAGE, "is empty"),
        (
            &["--data", short],
            exit_codes::USAGE,
            "has 9 bytes, but rows of 64 tokens need at least 66",
        ),
        (
            &["--data", "no-such-file"],
            exit_codes::IO,
            "failed to read training text `no-such-file`",
        ),
        (
            &["--nproc", "13"],
            exit_codes::USAGE,
            "a batch of 12 rows has too few for 13 parts",
        ),
        (
            &["--heads", "3"],
            exit_codes::USAGE,
            "hidden width 64 cannot be shared by 3 heads",
        ),
        (
            &["--lr", "-1"],
            exit_codes::USAGE,
            "it must be a finite number that is not negative",
        ),
        (
            &["--strategy", "half-shard"],
            exit_codes::USAGE,
            "unknown strategy `half-shard`",
        ),
        (
            &["--strategy", "hybrid-shard", "--nproc", "3"],
            exit_codes::USAGE,
            "cannot divide 3 ranks into 2",
        ),
        (
            &["--replicas", "2", "--nproc", "2"],
            exit_codes::USAGE,
            "has no use for `--replicas`",
        ),
        (
            &["--schedule-steps", "9"],
            exit_codes::USAGE,
            "`--schedule-steps` would do nothing",
        ),
        (
            &["--schedule", "cosine", "--warmup", "100"],
            exit_codes::USAGE,
            "rises for 100 steps, and would fall to 0 after 100",
        ),
        (
            &["--steps", "0"],
            exit_codes::USAGE,
            "invalid value '0' for '--steps <S>'",
        ),
        (
            &["--flat", "--optimizer", "adafactor"],
            exit_codes::USAGE,
            "`--flat` joins the parameters",
        ),
        (
            &["--threads", "100000"],
            exit_codes::USAGE,
            "invalid value '100000' for '--threads <THREADS>'",
        ),
        (
            &["--threads", "0"],
            exit_codes::USAGE,
            "invalid value '0' for '--threads <THREADS>'",
        ),
        (
            &["--resume"],
            exit_codes::INCOMPLETE,
            "failed to list the checkpoints in",
        ),
    ];
    for (arguments, code, message) in cases {
        let assert = train(&out, arguments).assert().code(i32::from(code));
        assert.stderr(contains(message)).stdout("");
        assert!(!out.exists(), "{arguments:?} wrote something");
    }
}

#[test]
fn a_run_does_not_go_on_with_another_text_unless_it_is_named() {
    let dir = TempDir::new().unwrap();
    let (first, second) = (dir.path().join("first"), dir.path().join("second"));
    for (place, text) in [(&first, "alpha beta "), (&second, "OMEGA 123 ")] {
        fs::create_dir(place).unwrap();
        fs::write(place.join("book.txt"), text.repeat(400)).unwrap();
    }
    let out = dir.path().join("run");
    let train_in = |place: &Path, arguments: &[&str]| {
        let mut command = train(&out, &SMALL);
        command.args(arguments).current_dir(place);
        command
    };
    let named = ["--data", "book.txt"];
    train_in(&first, &["--steps", "2", "--data", "book.txt"])
        .assert()
        .success();
    train_in(&first, &["--steps", "4", "--resume"])
        .assert()
        .success();
    let before = snapshot(&out);
    for mode in ["--resume", "--resume=strict", "--resume=auto"] {
        train_in(&second, &["--steps", "6", mode])
            .assert()
            .code(i32::from(exit_codes::USAGE))
            .stderr(contains("the text `book.txt` is not the one that"));
    }
    assert_eq!(snapshot(&out), before);
    train_in(&second, &["--steps", "6", "--resume"])
        .args(named)
        .assert()
        .success();
}

#[test]
fn a_checkpoint_that_does_not_fit_or_is_damaged_changes_nothing() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out");
    train_small(&out, &["--nproc", "2", "--steps", "2"]);
    let check = |arguments: &[&str], code: u8, messages: &[&str]| {
        let before = snapshot(&out);
        let mut assert = train(&out, arguments)
            .assert()
            .code(i32::from(code))
            .stdout("");
        for message in messages {
            assert = assert.stderr(contains(*message));
        }
        assert!(snapshot(&out) == before, "{arguments:?} changed something");
    };
    let resume = |arguments: &[&'static str]| {
        [&["--resume", "--steps", "4", "--nproc", "2"], arguments].concat()
    };
    check(
        &["--steps", "4"],
        exit_codes::USAGE,
        &[
            "already holds a checkpoint, of step 2",
            "hint: continue from it",
        ],
    );
    check(
        &resume(&["--hidden", "32", "--layers", "2"]),
        exit_codes::DIFFERENCE,
        &[
            "is of another model",
            "`lm_head.weight`: checkpoint [256, 16], this model [256, 32]",
            "`transformer.h.1.ln_1.weight`: not in the checkpoint, this model [32]",
        ],
    );
    check(
        &resume(&["--heads", "4"]),
        exit_codes::USAGE,
        &["`--heads` cannot change from 2 to 4"],
    );
    check(
        &resume(&["--optimizer", "sgd"]),
        exit_codes::USAGE,
        &["`--optimizer` cannot change from adamw to sgd"],
    );

    let checkpoint = out.join("step-00000002");
    let file = checkpoint.join("__1_0.distcp");
    let whole = fs::read(&file).unwrap();
    let mut edited = whole.clone();
    edited[whole.len() / 2] ^= 1;
    fs::write(&file, &edited).unwrap();
    check(
        &resume(&[]),
        exit_codes::CORRUPT,
        &["__1_0.distcp", "their hash differs"],
    );
    fs::write(&file, &whole[..whole.len() / 2]).unwrap();
    check(&resume(&[]), exit_codes::CORRUPT, &["__1_0.distcp"]);
    fs::write(&file, &whole).unwrap();
    let metadata = fs::read(checkpoint.join(".metadata")).unwrap();
    fs::write(checkpoint.join(".metadata"), &metadata[..100]).unwrap();
    check(&resume(&[]), exit_codes::CORRUPT, &[".metadata"]);
    fs::remove_file(checkpoint.join(".metadata")).unwrap();
    check(
        &resume(&[]),
        exit_codes::INCOMPLETE,
        &["is not a committed checkpoint: it has no `.metadata`"],
    );
    fs::write(checkpoint.join(".metadata"), metadata).unwrap();
    train(&out, &resume(&[])).assert().success();
}

#[test]
fn options_can_be_set_by_the_environment() {
    let dir = TempDir::new().unwrap();
    let mut command = fsdp(&["train"]);
    command
        .args(SMALL)
        .env("FSDP_OUT", dir.path())
        .env("FSDP_NPROC", "3")
        .env("FSDP_STEPS", "1");
    command.assert().success().stderr(contains("on 3 ranks"));
    assert_eq!(losses(dir.path()).len(), 1);
}

#[test]
fn inspect_lists_tensors_in_natural_order_with_boxes_and_step() {
    let dir = TempDir::new().unwrap();
    train_small(
        dir.path(),
        &["--nproc", "3", "--steps", "2", "--layers", "11"],
    );
    let checkpoint = dir.path().join("step-00000002");
    let checkpoint = checkpoint.to_str().unwrap();
    let output = fsdp(&["inspect", checkpoint, "--json"]).output().unwrap();
    assert!(output.status.success());
    let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(summary["committed"], true);
    assert_eq!(summary["step"], 2);
    let tensors = summary["tensors"].as_array().unwrap();
    let names: Vec<&str> = tensors
        .iter()
        .map(|tensor| tensor["name"].as_str().unwrap())
        .collect();
    let place = |name: &str| names.iter().position(|found| *found == name).unwrap();
    assert!(place("model.transformer.h.2.ln_1.bias") < place("model.transformer.h.10.ln_1.bias"));
    assert!(
        names.contains(&"model.lm_head.weight"),
        "tied weights are listed under both names"
    );
    for tensor in tensors {
        let numbers = |value: &Value| -> u64 {
            value
                .as_array()
                .unwrap()
                .iter()
                .map(|n| n.as_u64().unwrap())
                .product()
        };
        let boxes = tensor["boxes"].as_array().unwrap();
        assert_eq!(
            boxes
                .iter()
                .map(|part| numbers(&part["sizes"]))
                .sum::<u64>(),
            numbers(&tensor["shape"]),
            "{tensor}"
        );
        assert_eq!(tensor["bytes"], 4 * numbers(&tensor["shape"]));
        assert!(
            boxes
                .iter()
                .all(|part| part["rank"].as_u64().is_some_and(|rank| rank < 3))
        );
    }
    let human = fsdp(&["inspect", checkpoint]).assert().success();
    human.stdout(
        contains("step        2")
            .and(contains("model.transformer.wte.weight"))
            .and(contains("[256, 16]")),
    );

    let nothing = dir.path().to_str().unwrap();
    let code = i32::from(exit_codes::INCOMPLETE);
    fsdp(&["inspect", nothing])
        .assert()
        .code(code)
        .stdout("")
        .stderr(contains("is not a committed checkpoint"));
    let output = fsdp(&["inspect", nothing, "--json"])
        .assert()
        .code(code)
        .get_output()
        .stdout
        .clone();
    assert_eq!(
        serde_json::from_slice::<Value>(&output).unwrap()["committed"],
        false
    );
}

/// Losses by step, wherever the run began.
pub(crate) fn losses_by_step(out: &Path) -> Vec<(u64, f64)> {
    let metrics = lines(&out.join("metrics.jsonl"));
    metrics
        .iter()
        .map(|line| {
            (
                line["step"].as_u64().unwrap(),
                line["loss"].as_f64().unwrap(),
            )
        })
        .collect()
}

#[test]
fn saves_in_the_background_are_the_same_checkpoints() {
    let dir = TempDir::new().unwrap();
    let steps = ["--nproc", "3", "--steps", "6", "--save-every", "2"];
    let (now, behind) = (dir.path().join("now"), dir.path().join("behind"));
    train_small(&now, &steps);
    let told = train(&behind, &SMALL)
        .args(steps)
        .args(["--async-save", "--json"])
        .assert()
        .success();
    assert_eq!(losses(&now), losses(&behind));
    for step in [2, 4, 6] {
        let name = format!("step-{step:08}");
        let compared = fsdp(&[
            "diff",
            now.join(&name).to_str().unwrap(),
            behind.join(&name).to_str().unwrap(),
        ]);
        { compared }.assert().success();
    }
    let events = String::from_utf8(told.get_output().stdout.clone()).unwrap();
    let events: Vec<Value> = events
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let saved: Vec<&Value> = events
        .iter()
        .filter(|event| event["event"] == "checkpoint")
        .collect();
    assert_eq!(
        saved
            .iter()
            .map(|event| event["step"].as_u64().unwrap())
            .collect::<Vec<_>>(),
        [2, 4, 6]
    );
    for event in saved {
        assert!(event["bytes"].as_u64().unwrap() > 0);
        assert!(
            event["stall_seconds"].as_f64().unwrap() >= 0.0
                && event["seconds"].as_f64().unwrap() > 0.0
        );
    }
    // It goes on from there as from any other.
    train_small(
        &behind,
        &["--nproc", "2", "--steps", "8", "--resume", "--async-save"],
    );
    train_small(&now, &["--nproc", "2", "--steps", "8", "--resume"]);
    assert_eq!(losses(&now), losses(&behind));
}

#[test]
fn a_save_in_the_background_that_fails_is_not_lost() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("run");
    fs::create_dir_all(&out).unwrap();
    // A file where the last checkpoint would be.
    fs::write(out.join("step-00000004"), b"in the way").unwrap();
    train(&out, &SMALL)
        .args([
            "--nproc",
            "2",
            "--steps",
            "4",
            "--save-every",
            "2",
            "--async-save",
        ])
        .assert()
        .failure()
        .stderr(contains("step-00000004"));
    assert!(out.join("step-00000002/.metadata").is_file());
}

#[test]
fn old_checkpoints_go_and_every_nth_stays() {
    for mode in [&[][..], &["--async-save"]] {
        let dir = TempDir::new().unwrap();
        let out = dir.path().join("run");
        let keep = ["--save-every", "1", "--keep-last", "2", "--keep-every", "3"];
        train_small(
            &out,
            &[&["--nproc", "2", "--steps", "7"][..], &keep, mode].concat(),
        );
        let steps = || {
            let mut names: Vec<_> = fs::read_dir(&out)
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            names.retain(|name| !name.ends_with(".jsonl"));
            names
        };
        assert_eq!(steps(), ["step-00000003", "step-00000006", "step-00000007"]);
        // The one that is resumed from goes too, once it has been read.
        train_small(
            &out,
            &[&["--steps", "9", "--resume"][..], &keep, mode].concat(),
        );
        assert_eq!(
            steps(),
            [
                "step-00000003",
                "step-00000006",
                "step-00000008",
                "step-00000009"
            ]
        );
    }
    let dir = TempDir::new().unwrap();
    train(dir.path(), &SMALL)
        .args(["--keep-every", "2"])
        .assert()
        .code(i32::from(exit_codes::USAGE));
}

#[test]
fn a_run_whose_checkpoints_are_elsewhere_does_not_begin_anew_while_they_are_there() {
    let dir = TempDir::new().unwrap();
    let (out, elsewhere) = (dir.path().join("out"), dir.path().join("elsewhere"));
    let steps = |steps| {
        [
            "--steps",
            steps,
            "--checkpoint-dir",
            elsewhere.to_str().unwrap(),
        ]
    };
    train_small(&out, &steps("2"));
    for mode in [&[][..], &["--resume=auto"]] {
        let begin = train(&out, &SMALL)
            .args(["--steps", "1"])
            .args(mode)
            .assert();
        begin
            .code(i32::from(exit_codes::USAGE))
            .stderr(contains("in another place").and(contains("--checkpoint-dir")));
    }
    assert_eq!(losses(&out).len(), 2);
    train(&out, &steps("3")).arg("--resume").assert().success();
    assert_eq!(losses(&out).len(), 3);
    fs::remove_dir_all(&elsewhere).unwrap();
    train_small(&out, &["--steps", "1"]);
    assert_eq!(losses(&out).len(), 1);
}

#[test]
fn a_number_of_blocks_that_would_fill_the_memory_is_refused() {
    let dir = TempDir::new().unwrap();
    let (out, many) = (dir.path().join("out"), dir.path().join("many"));
    train(&out, &["--steps", "1", "--layers", "16777216"])
        .assert()
        .code(i32::from(exit_codes::USAGE));
    train_small(&out, &["--steps", "1"]);
    let saved = out.join("step-00000001");
    let mut state = load_whole(saved.as_path(), &[], &LoadOptions::default()).unwrap();
    let Some(StateValue::Dict(train_state)) = state.get_mut("train") else {
        panic!("no `train`")
    };
    let Some(StateValue::Dict(config)) = train_state.get_mut("config") else {
        panic!("no `train.config`")
    };
    config.insert("layers", 16_777_216i64);
    run_local(1, |group| {
        save(many.as_path(), &state, &group, &SaveOptions::default()).unwrap()
    })
    .unwrap();
    let from = ["--steps", "2", "--init-from", many.to_str().unwrap()];
    train(&dir.path().join("other"), &from)
        .assert()
        .failure()
        .stderr(contains("`train.config.layers` of"));
}

#[test]
fn a_place_where_nothing_can_be_saved_is_found_before_the_first_step() {
    let dir = TempDir::new().unwrap();
    let (file, out) = (dir.path().join("file"), dir.path().join("out"));
    fs::write(&file, "not a directory").unwrap();
    let place = file.join("checkpoints");
    train(&out, &SMALL)
        .args([
            "--nproc",
            "2",
            "--steps",
            "1",
            "--checkpoint-dir",
            place.to_str().unwrap(),
        ])
        .assert()
        .code(i32::from(exit_codes::IO))
        .stderr(contains("no checkpoint can be saved in").and(contains("--checkpoint-dir")));
    assert!(!out.exists(), "nothing is written");
    let empty = train(&out, &SMALL)
        .args(["--steps", "1", "--checkpoint-dir", ""])
        .assert();
    empty
        .code(i32::from(exit_codes::USAGE))
        .stderr(contains("--checkpoint-dir"));
}

#[cfg(target_os = "linux")]
#[test]
fn a_run_may_be_in_a_directory_whose_name_is_not_utf8() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;

    let dir = TempDir::new().unwrap();
    let out = dir.path().join(OsStr::from_bytes(b"r\xfcn"));
    for (steps, resume) in [("1", "no"), ("2", "newest")] {
        let mut command = fsdp(&["train", "--nproc", "2", "--steps", steps]);
        command
            .arg(format!("--resume={resume}"))
            .arg("--out")
            .arg(&out)
            .args(SMALL)
            .assert()
            .success();
    }
    assert!(out.join("step-00000002/.metadata").is_file());
}

#[test]
fn a_trace_shows_where_time_went() {
    let dir = TempDir::new().unwrap();
    let (out, trace) = (dir.path().join("run"), dir.path().join("trace.json"));
    train_small(
        &out,
        &[
            "--nproc",
            "2",
            "--steps",
            "2",
            "--async-save",
            "--trace",
            trace.to_str().unwrap(),
        ],
    );
    let events: Value = serde_json::from_slice(&fs::read(&trace).unwrap()).unwrap();
    let events = events.as_array().unwrap();
    for name in [
        "step",
        "forward",
        "backward",
        "optimizer",
        "save",
        "plan",
        "stage",
        "write",
        "fsync",
        "commit",
    ] {
        assert!(
            events.iter().any(|event| event["name"] == name),
            "no `{name}`"
        );
    }
    let of = |name: &str, key: &str| -> Vec<u64> {
        let begun = events
            .iter()
            .filter(|event| event["name"] == name && event["ph"] == "B");
        begun
            .map(|event| event["args"][key].as_str().unwrap().parse().unwrap())
            .collect()
    };
    let mut ranks = of("write", "rank");
    ranks.sort_unstable();
    assert_eq!(ranks, [0, 1]);
    assert!(of("write", "bytes").iter().all(|&bytes| bytes > 0));
    // A file that cannot be made is told before anything is trained.
    let nowhere = dir.path().join("no/trace.json");
    let other = dir.path().join("other");
    train(&other, &SMALL)
        .args(["--trace", nowhere.to_str().unwrap()])
        .assert()
        .code(i32::from(exit_codes::IO))
        .stderr(contains("no/trace.json"));
    assert!(!other.exists());
}

#[test]
fn a_run_that_is_refused_leaves_the_trace_of_the_one_before() {
    let dir = TempDir::new().unwrap();
    let (out, trace) = (dir.path().join("run"), dir.path().join("trace.json"));
    let arguments = [
        "--nproc",
        "2",
        "--steps",
        "2",
        "--trace",
        trace.to_str().unwrap(),
    ];
    train_small(&out, &arguments);
    let before = fs::read(&trace).unwrap();
    let taken = i32::from(exit_codes::USAGE);
    train(&out, &arguments).assert().code(taken);
    assert!(fs::read(&trace).unwrap() == before);
    // Nor does it make one.
    let other = dir.path().join("other.json");
    train(&out, &["--steps", "2", "--trace", other.to_str().unwrap()])
        .assert()
        .code(taken);
    assert!(!other.exists());
    // A shorter trace takes the place of a longer one.
    fs::write(&other, "x".repeat(1 << 20)).unwrap();
    train(
        &out,
        &[
            "--resume",
            "--steps",
            "3",
            "--trace",
            other.to_str().unwrap(),
        ],
    )
    .assert()
    .success();
    serde_json::from_slice::<Value>(&fs::read(&other).unwrap()).unwrap();
    // A process that was started again keeps the trace of the attempt that failed.
    let again = [
        "--resume",
        "--steps",
        "4",
        "--trace",
        trace.to_str().unwrap(),
    ];
    train(&out, &again)
        .env("TORCHELASTIC_RESTART_COUNT", "1")
        .assert()
        .success();
    assert!(fs::read(&trace).unwrap() == before && dir.path().join("trace-restart1.json").exists());
}

#[test]
fn torchrun_does_not_continue_the_run_of_another_job_that_its_first_attempt_was_refused() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("run");
    let attempt = |job: &str, count: &str, steps: &str| {
        let mut command = train(&out, &SMALL);
        command
            .args(["--steps", steps])
            .env("TORCHELASTIC_RUN_ID", job)
            .env("TORCHELASTIC_RESTART_COUNT", count);
        command.assert()
    };
    attempt("first", "0", "2").success();
    attempt("first", "1", "4").success();
    let before = snapshot(&out);
    for count in ["0", "1", "2"] {
        attempt("second", count, "6")
            .code(i32::from(exit_codes::USAGE))
            .stderr(contains("already holds a checkpoint"));
    }
    assert!(snapshot(&out) == before);
    // A job without a name cannot be told from others.
    attempt("none", "1", "6").success();
}
