//! `fsdp plan`: the checkpoints of jobs that no test machine has.

use predicates::str::contains;
use serde_json::Value;
use tempfile::TempDir;

use crate::common::fsdp;

fn fixture(name: &str) -> String {
    format!("{}/../../tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"))
}

fn json(arguments: &[&str]) -> Value {
    let all = [&["plan", "--json"], arguments].concat();
    let output = fsdp(&all).assert().success().get_output().stdout.clone();
    serde_json::from_slice(&output).unwrap()
}

fn lines(arguments: &[&str]) -> Vec<String> {
    let all = [&["plan"], arguments].concat();
    let output = fsdp(&all).assert().success().get_output().stdout.clone();
    String::from_utf8(output)
        .unwrap()
        .lines()
        .map(str::to_owned)
        .collect()
}

#[test]
fn tables_fit_eighty_columns() {
    let single = lines(&["--model", "llama-8b", "--ranks", "64", "--replicas", "8"]);
    assert!(single[0].starts_with("job"), "{single:?}");
    let several = lines(&["--model", "gpt2-124m", "--sweep", "8,64,128"]);
    assert_eq!(several.len(), 4);
    for line in single.iter().chain(&several) {
        assert!(line.chars().count() <= 80, "{line}");
    }
}

/// The plan for as many ranks as have saved a checkpoint is the checkpoint that they have saved.
#[test]
fn the_plan_of_a_checkpoint_is_what_reshard_writes() {
    let directory = TempDir::new().unwrap();
    // torch notes strides in its metadata, which a job of ours would not.
    let source = directory.path().join("plain.safetensors");
    let source = source.to_str().unwrap();
    fsdp(&[
        "convert",
        &fixture("fsdp2_adamw_ws2/dcp"),
        source,
        "--to",
        "safetensors",
    ])
    .assert()
    .success();
    for ranks in ["1", "3"] {
        let target = directory.path().join(ranks);
        let target = target.to_str().unwrap();
        fsdp(&["reshard", source, target, "--world-size", ranks])
            .assert()
            .success();
        let planned = json(&["--like", target, "--ranks", ranks, "--layout", "rows"]);
        let output = fsdp(&["inspect", target, "--json"])
            .assert()
            .success()
            .get_output()
            .stdout
            .clone();
        let written: Value = serde_json::from_slice(&output).unwrap();
        assert_eq!(planned["bytes"], written["bytes"]);
        let tensors = written["tensors"].as_array().unwrap();
        assert_eq!(planned["tensors"], tensors.len());
        let boxes: usize = tensors
            .iter()
            .map(|tensor| tensor["boxes"].as_array().unwrap().len())
            .sum();
        assert_eq!(planned["boxes"], boxes);
        let metadata = std::fs::metadata(format!("{target}/.metadata"))
            .unwrap()
            .len();
        assert_eq!(planned["metadata_bytes"], metadata, "{ranks} ranks");
        assert_eq!(planned["files"], std::fs::read_dir(target).unwrap().count());
        assert_eq!(planned["parameters"], Value::Null);
    }
}

#[test]
fn faster_machines_and_rarer_failures_raise_the_effective_time() {
    let arguments = ["--model", "llama-8b", "--ranks", "64", "--storage", "1"];
    let effective = |more: &[&str]| {
        json(&[&arguments, more].concat())["failures"]["effective"]
            .as_f64()
            .unwrap()
    };
    let slow = effective(&["--mtbf", "100"]);
    assert!((0.0..1.0).contains(&slow));
    assert!(effective(&["--mtbf", "10000"]) > slow);
    assert!(effective(&["--mtbf", "100", "--staging", "1000", "--restart", "1"]) > slow);
    let plan = json(&[&arguments[..], &["--mtbf", "800"]].concat());
    assert_eq!(plan["failures"]["hosts"], 8);
    assert_eq!(plan["failures"]["mtbf_seconds"], 360_000.0);
}

#[test]
fn the_memory_of_one_plan_is_not_that_of_the_one_before_it() {
    let plans = json(&["--model", "gpt2-124m", "--sweep", "64,8"]);
    let plans = plans["plans"].as_array().unwrap();
    assert!(
        plans.len() == 2
            && plans
                .iter()
                .all(|plan| plan["planner"]["peak_bytes"].is_null()),
        "{plans:?}"
    );
}

#[test]
fn a_plot_is_a_new_file() {
    let directory = TempDir::new().unwrap();
    let plot = directory.path().join("interval.svg");
    let plot = plot.to_str().unwrap();
    let arguments = [
        "plan",
        "--model",
        "gpt2-124m",
        "--ranks",
        "8",
        "--plot",
        plot,
    ];
    fsdp(&arguments).assert().success();
    let svg = std::fs::read_to_string(plot).unwrap();
    assert!(
        svg.starts_with("<svg ") && svg.ends_with("</svg>\n"),
        "{svg}"
    );
    assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    fsdp(&arguments)
        .assert()
        .code(2)
        .stderr(contains("exists already"));
}

#[test]
fn what_cannot_be_planned_is_an_error_with_advice() {
    let plan = |arguments: &[&str]| fsdp(&[&["plan"], arguments].concat()).assert().code(2);
    plan(&["--model", "llama-9b", "--ranks", "8"]).stderr(contains("llama-8b"));
    plan(&["--model", "llama-8b"]).stderr(contains("--ranks"));
    plan(&["--ranks", "8"]).stderr(contains("--model"));
    plan(&["--model", "llama-8b", "--ranks", "0"]).stderr(contains("0 is not in"));
    plan(&["--model", "llama-8b", "--ranks", "8", "--storage", "nan"]).stderr(contains("above 0"));
    plan(&["--model", "llama-8b", "--ranks", "10", "--replicas", "4"])
        .stderr(contains("multiple of `--replicas`"));
    plan(&[
        "--model",
        "gpt2-124m",
        "--sweep",
        "8,64,100",
        "--replicas",
        "8",
    ])
    .stderr(contains("100 ranks cannot"));
    plan(&["--like", "somewhere", "--ranks", "8", "--optimizer", "sgd"])
        .stderr(contains("cannot be used with"));
    fsdp(&["plan", "--like", "nothing-here", "--ranks", "8"])
        .assert()
        .code(11)
        .stderr(contains("nothing-here"));
}
