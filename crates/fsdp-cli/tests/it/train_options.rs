//! Options of `fsdp train` that change how a step is computed: batches, precision, recomputation,
//! algorithms.

#![expect(clippy::disallowed_methods, reason = "a test writes a text of its own")]

use std::fs;

use fsdp_cli::exit_codes;
use predicates::str::contains;
use serde_json::Value;
use tempfile::TempDir;

use crate::common::fsdp;
use crate::train::{SMALL, assert_close, losses, train, train_small};

#[test]
fn a_resumed_run_with_another_batch_size_reads_the_rows_after_those_already_read() {
    let dir = TempDir::new().unwrap();
    let (whole, parts) = (dir.path().join("whole"), dir.path().join("parts"));
    // Nothing is learned, so the loss of a step depends on its rows only.
    let still = ["--lr", "0", "--optimizer", "sgd", "--nproc", "2"];
    train_small(
        &whole,
        &[&still[..], &["--batch", "6", "--steps", "8"]].concat(),
    );
    train_small(
        &parts,
        &[&still[..], &["--batch", "12", "--steps", "2"]].concat(),
    );
    train(
        &parts,
        &["--resume", "--batch", "6", "--steps", "4", "--sample", "0"],
    )
    .assert()
    .success();
    train(
        &parts,
        &["--resume", "--batch", "12", "--steps", "5", "--sample", "0"],
    )
    .assert()
    .success();
    let (whole, parts_losses) = (losses(&whole), losses(&parts));
    let mean = |at: usize| (whole[at] + whole[at + 1]) / 2.0;
    assert_close(
        &parts_losses,
        &[mean(0), mean(2), whole[4], whole[5], mean(6)],
    );
    let last = parts.join("step-00000005");
    fsdp(&["cat", last.to_str().unwrap(), "train.rows"])
        .assert()
        .success()
        .stdout("48\n");
    let log = fsdp(&["log", parts.to_str().unwrap(), "--json"])
        .assert()
        .success()
        .get_output()
        .stdout
        .clone();
    let log: Value = serde_json::from_slice(&log).unwrap();
    let positions: Vec<&Value> = log["checkpoints"]
        .as_array()
        .unwrap()
        .iter()
        .map(|link| &link["lineage"]["data"]["position"])
        .collect();
    assert_eq!(positions, [48, 36, 24]);
}

/// Nothing is written, and the message says how to get what is missing.
#[test]
fn gpus_that_cannot_be_used_are_a_usage_error() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("run");
    let refused = |arguments: &[&str], message: &str| {
        train(&out, arguments)
            .assert()
            .code(i32::from(exit_codes::USAGE))
            .stderr(contains(message));
        assert!(!out.exists());
    };
    if cfg!(feature = "nccl") {
        refused(&["--backend", "nccl", "--device", "cpu"], "`--device cpu`");
    } else {
        refused(&["--backend", "nccl"], "--features nccl");
    }
    if cfg!(not(feature = "cuda")) {
        refused(&["--device", "cuda"], "--features cuda");
    }
}

/// candle sizes its pool by the machine unless it is told before first use, so it is counted from
/// outside.
#[cfg(target_os = "linux")]
#[test]
fn candles_pool_has_the_threads_of_one_rank() {
    // Large enough for candle to use its pool.
    let large = [
        "--layers", "1", "--hidden", "256", "--steps", "2", "--nproc", "2", "--sample", "0",
    ];
    let dir = TempDir::new().unwrap();
    for (threads, expected) in [("1", 0), ("3", 2)] {
        let mut command = std::process::Command::new(crate::common::FSDP);
        command
            .args(["train", "--out"])
            .arg(dir.path().join(threads))
            .args(large)
            .args(["--threads", threads]);
        let mut run = command.stderr(std::process::Stdio::null()).spawn().unwrap();
        let mut most = 0;
        while run.try_wait().unwrap().is_none() {
            most = most.max(threads_named(run.id(), "candle-bp-"));
        }
        assert!(run.wait().unwrap().success());
        assert_eq!(most, expected, "--threads {threads}");
    }
}

/// Counts the threads of a process whose names start like this.
#[cfg(target_os = "linux")]
fn threads_named(process: u32, prefix: &str) -> usize {
    let Ok(tasks) = fs::read_dir(format!("/proc/{process}/task")) else {
        return 0;
    };
    let name =
        |task: fs::DirEntry| fs::read_to_string(task.path().join("comm")).unwrap_or_default();
    tasks
        .flatten()
        .map(name)
        .filter(|name| name.starts_with(prefix))
        .count()
}

#[test]
fn activations_that_are_computed_again_change_no_bit_of_the_losses() {
    let dir = TempDir::new().unwrap();
    let (kept, again) = (dir.path().join("kept"), dir.path().join("again"));
    train_small(&kept, &["--nproc", "2", "--steps", "6"]);
    train_small(
        &again,
        &["--nproc", "2", "--steps", "6", "--activation-checkpointing"],
    );
    assert_eq!(losses(&again), losses(&kept));
}

#[test]
fn units_that_are_gathered_ahead_change_no_bit_of_the_losses() {
    let dir = TempDir::new().unwrap();
    let out = |name: &str| dir.path().join(name);
    let run = ["--nproc", "3", "--steps", "6"];
    train_small(&out("on-demand"), &run);
    let expected = losses(&out("on-demand"));
    for (name, prefetch) in [
        (
            "pre",
            &["--backward-prefetch", "pre", "--forward-prefetch"][..],
        ),
        (
            "post",
            &[
                "--backward-prefetch",
                "post",
                "--limit-all-gathers",
                "false",
            ],
        ),
        (
            "forward",
            &[
                "--backward-prefetch",
                "none",
                "--forward-prefetch",
                "--limit-all-gathers",
                "true",
            ],
        ),
    ] {
        train_small(&out(name), &[&run[..], prefetch].concat());
        assert_eq!(losses(&out(name)), expected, "{name}");
    }
}

#[test]
fn a_run_that_goes_on_in_f16_begins_with_a_scale_of_its_own() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("run");
    train_small(&out, &["--nproc", "2", "--steps", "3"]);
    train(
        &out,
        &[
            "--nproc",
            "2",
            "--steps",
            "6",
            "--mixed-precision",
            "f16",
            "--resume",
        ],
    )
    .assert()
    .success();
    let scale = |step: &str| {
        fsdp(&["cat", out.join(step).to_str().unwrap(), "scaler.scale"])
            .output()
            .unwrap()
    };
    assert!(!scale("step-00000003").status.success());
    assert!(scale("step-00000006").status.success());
    // And back: what is not needed any more is left out.
    train(&out, &["--nproc", "2", "--steps", "7", "--resume"])
        .assert()
        .success();
    assert!(!scale("step-00000007").status.success());
}

#[test]
fn half_precision_trains_as_far_and_its_scale_goes_on() {
    let dir = TempDir::new().unwrap();
    let out = |name: &str| dir.path().join(name);
    train_small(&out("f32"), &["--nproc", "2", "--steps", "20"]);
    let expected = losses(&out("f32"))[19];
    for half in ["bf16", "f16"] {
        let half_out = out(half);
        train_small(
            &half_out,
            &[
                "--nproc",
                "2",
                "--steps",
                "10",
                "--mixed-precision",
                half,
                "--cpu-offload",
            ],
        );
        let resumed = [
            "--nproc",
            "3",
            "--steps",
            "20",
            "--mixed-precision",
            half,
            "--resume",
        ];
        train(&half_out, &resumed).assert().success();
        let found = *losses(&half_out).last().unwrap();
        assert!(
            (found - expected).abs() < 0.02 * expected,
            "{half}: {found} is not {expected}"
        );
        let inspected = fsdp(&[
            "cat",
            half_out.join("step-00000020").to_str().unwrap(),
            "scaler.scale",
        ])
        .output()
        .unwrap();
        assert_eq!(
            inspected.status.success(),
            half == "f16",
            "{half}: the scale is in the checkpoint"
        );
    }
}

#[test]
fn muon_and_schedule_free_runs_go_on_at_other_numbers_of_ranks() {
    let dir = TempDir::new().unwrap();
    for optimizer in ["muon", "adafactor", "schedule-free"] {
        let (whole, parts) = (
            dir.path().join(format!("{optimizer}-whole")),
            dir.path().join(optimizer),
        );
        let saved = [
            "--save-every",
            "8",
            "--optimizer",
            optimizer,
            "--lr",
            "0.02",
        ];
        train(&whole, &SMALL)
            .args(["--nproc", "1", "--steps", "24"])
            .args(saved)
            .assert()
            .success();
        train(&parts, &SMALL)
            .args(["--nproc", "4", "--steps", "8"])
            .args(saved)
            .assert()
            .success();
        train(&parts, &["--nproc", "2", "--steps", "16", "--resume"])
            .assert()
            .success();
        train(&parts, &["--nproc", "3", "--steps", "24", "--resume"])
            .assert()
            .success();
        let (found, expected) = (losses(&parts), losses(&whole));
        for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert!(
                (found - expected).abs() < 1e-2 * expected,
                "{optimizer}, step {step}: {found} is not {expected}"
            );
        }
        assert!(
            expected[23] < 0.95 * expected[0],
            "{optimizer}: {expected:?}"
        );
    }
}

/// A resumed run could not find it.
#[test]
#[cfg(unix)]
fn a_text_whose_name_is_not_utf_8_is_refused() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;

    let dir = TempDir::new().unwrap();
    let text = dir.path().join(OsStr::from_bytes(b"te\xffxt.txt"));
    fs::write(&text, "a text of a few words, over and over. ".repeat(99)).unwrap();
    let out = dir.path().join("out");
    train(&out, &["--steps", "1", "--data"])
        .arg(&text)
        .assert()
        .code(i32::from(exit_codes::USAGE))
        .stderr(contains("is not UTF-8"));
    assert!(!out.exists());
}
