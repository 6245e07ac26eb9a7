//! The metrics that `fsdp train` has written.

use std::fs;
use std::path::Path;

use serde_json::Value;

/// The loss of each step.
pub(crate) fn losses(out: &Path) -> Vec<f64> {
    let metrics = fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let lines = metrics
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.map(|line| line["loss"].as_f64().unwrap()).collect()
}
