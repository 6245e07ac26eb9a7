//! The files that `fsdp train` leaves for `fsdp report`, and the text that it prints.

#![expect(
    clippy::disallowed_methods,
    reason = "the tests write files of their own"
)]

use std::fs;
use std::path::Path;

use fsdp_cli::exit_codes;
use serde_json::Value;
use tempfile::TempDir;

use crate::common::fsdp;

/// A model so small that a step takes no time.
const TINY: [&str; 12] = [
    "--layers",
    "1",
    "--heads",
    "1",
    "--hidden",
    "16",
    "--seq",
    "16",
    "--batch",
    "4",
    "--threads",
    "1",
];

fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[test]
fn a_run_keeps_its_starts_saves_and_ends_for_its_report() {
    let directory = TempDir::new().unwrap();
    let out = directory.path().join("run");
    let train = |more: &[&str]| {
        fsdp(&["train", "--out"])
            .arg(&out)
            .args(TINY)
            .args(["--sample", "0", "--nproc", "2"])
            .args(more)
            .assert()
            .success();
    };
    train(&["--steps", "4", "--save-every", "2"]);
    // A kill has left half a line.
    let events = out.join("events.jsonl");
    let torn = format!("{}{{\"event\":\"chec", fs::read_to_string(&events).unwrap());
    fs::write(&events, torn).unwrap();
    train(&["--steps", "6", "--resume"]);

    let text = fs::read_to_string(&events).unwrap();
    let found: Vec<Value> = text
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect();
    let kinds: Vec<&str> = found
        .iter()
        .map(|event| event["event"].as_str().unwrap())
        .collect();
    assert_eq!(
        kinds,
        [
            "start",
            "checkpoint",
            "checkpoint",
            "end",
            "start",
            "checkpoint",
            "end"
        ]
    );
    assert!(
        found
            .iter()
            .all(|event| event["time"].as_f64().unwrap() > 1.7e9)
    );
    assert_eq!(
        (&found[4]["step"], &found[4]["ranks"]),
        (&Value::from(4), &Value::from(2))
    );
    let metrics = lines(&out.join("metrics.jsonl"));
    let times: Vec<f64> = metrics
        .iter()
        .map(|line| line["time"].as_f64().unwrap())
        .collect();
    assert!(times.len() == 6 && times.is_sorted() && times[0] > 1.7e9);

    fsdp(&["report"]).arg(&out).assert().success();
    let page = fs::read_to_string(out.join("report.html")).unwrap();
    for wanted in [
        "step-00000006",
        "<th>parent</th>",
        "2, of which 1 resumed",
        "Tokens per second",
        "Learning rate",
    ] {
        assert!(page.contains(wanted), "{wanted}");
    }
}

#[test]
fn the_text_that_a_model_writes_cannot_act_on_a_terminal() {
    let directory = TempDir::new().unwrap();
    let text = directory.path().join("text");
    fs::write(&text, "\u{1b}[31m\u{7}".repeat(100)).unwrap();
    let output = fsdp(&["train", "--out"])
        .arg(directory.path().join("run"))
        .arg("--data")
        .arg(&text)
        .args(TINY)
        .args(["--steps", "60", "--lr", "0.02", "--sample", "40"])
        .assert()
        .success();
    let sample = String::from_utf8_lossy(&output.get_output().stdout).into_owned();
    assert!(
        sample.contains("\\u{1b}"),
        "the model has not learned its text: {sample:?}"
    );
    assert!(
        !sample.contains(|c: char| c.is_control() && c != '\n'),
        "{sample:?}"
    );
}

#[test]
fn the_options_of_train_come_in_groups() {
    let output = fsdp(&["train", "--help"]).assert().success();
    let help = String::from_utf8_lossy(&output.get_output().stdout).into_owned();
    let at: Vec<usize> = [
        "Run:",
        "Ranks:",
        "Checkpoints:",
        "Model and batch:",
        "Optimizer:",
        "Sharding and precision:",
        "Output:",
    ]
    .iter()
    .map(|heading| {
        help.find(&format!("\n{heading}\n"))
            .unwrap_or_else(|| panic!("no {heading}"))
    })
    .collect();
    assert!(at.is_sorted(), "{at:?}");
}

#[test]
fn a_damaged_checkpoint_stands_where_its_step_belongs() {
    let run = tempfile::tempdir().unwrap();
    let out = run.path().to_str().unwrap();
    fsdp(&["train", "--out", out, "--steps", "6", "--save-every", "2"])
        .args(["--sample", "0"])
        .args(TINY)
        .assert()
        .success();
    fs::write(run.path().join("step-00000006/.metadata"), "nonsense").unwrap();
    let log = fsdp(&["log", out, "--json"])
        .assert()
        .code(i32::from(exit_codes::CORRUPT))
        .get_output()
        .stdout
        .clone();
    let log: Value = serde_json::from_slice(&log).unwrap();
    let names: Vec<&str> = log["checkpoints"]
        .as_array()
        .unwrap()
        .iter()
        .map(|checkpoint| checkpoint["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["step-00000006", "step-00000004", "step-00000002"]);
    let page = run.path().join("report.html");
    fsdp(&["report", out, "--html", page.to_str().unwrap()])
        .assert()
        .success();
    let page = fs::read_to_string(page).unwrap();
    assert!(
        page.contains("<span class=\"bad\">cannot be opened"),
        "{page}"
    );
}
