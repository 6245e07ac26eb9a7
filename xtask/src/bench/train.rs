//! Training steps of the GPT of `fsdp train`, in turns with the same GPT under PyTorch's FSDP2 and
//! gloo.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use super::Bench;
use crate::files::{read, remove_directory};
use crate::shell::{run, say};

/// The sizes of a model and of its global batch.
struct Shape {
    name: &'static str,
    layers: usize,
    heads: usize,
    hidden: usize,
    seq: usize,
    batch: usize,
    /// The steps of a run.
    steps: usize,
}

const SHAPES: [Shape; 3] = [
    Shape {
        name: "small",
        layers: 2,
        heads: 4,
        hidden: 64,
        seq: 64,
        batch: 12,
        steps: 60,
    },
    Shape {
        name: "medium",
        layers: 6,
        heads: 6,
        hidden: 384,
        seq: 256,
        batch: 4,
        steps: 8,
    },
    Shape {
        name: "large",
        layers: 12,
        heads: 12,
        hidden: 768,
        seq: 256,
        batch: 4,
        steps: 4,
    },
];

/// The first steps of a run, which are not counted: memory and threads are new then.
const WARM_UP: usize = 2;

/// The figures of one shape on one number of ranks. All ranks together have the threads of the
/// machine.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    shape: &'static str,
    ranks: usize,
    tokens_per_s: f64,
    torch_tokens_per_s: Option<f64>,
    ratio: Option<f64>,
    peak_mib: f64,
    torch_peak_mib: Option<f64>,
}

/// A line of `metrics.jsonl`, of either side.
#[derive(Debug, Deserialize)]
struct Step {
    tokens_per_s: f64,
    peak_memory_bytes: Option<f64>,
}

impl Bench<'_> {
    /// Trains every shape on every number of ranks, as often as asked for, and each time once with
    /// torch, if there is a Python.
    pub(super) fn train(&self) -> Result<Vec<Figures>> {
        let out = self.target.join("bench-train");
        let mut figures = Vec::new();
        for shape in &SHAPES {
            for &ranks in &self.arguments.ranks {
                if !shape.batch.is_multiple_of(ranks) {
                    continue;
                }
                let mut runs = Vec::new();
                let mut torch_runs = Vec::new();
                // In turns, so that a change of the machine's speed hits both sides.
                for _ in 0..self.arguments.runs {
                    runs.push(steps(&out, self.fsdp(shape, ranks))?);
                    if let Some(python) = &self.arguments.torch {
                        torch_runs.push(steps(&out, self.torch_training(python, shape, ranks))?);
                    }
                }
                let tokens_per_s = speed(&runs);
                let has_torch = !torch_runs.is_empty();
                let torch_tokens_per_s = has_torch.then(|| speed(&torch_runs));
                figures.push(Figures {
                    shape: shape.name,
                    ranks,
                    tokens_per_s,
                    torch_tokens_per_s,
                    ratio: torch_tokens_per_s.map(|torch| tokens_per_s / torch),
                    peak_mib: peak_mib(&runs),
                    torch_peak_mib: has_torch.then(|| peak_mib(&torch_runs)),
                });
            }
        }
        remove_directory(&out)?;
        Ok(figures)
    }

    fn fsdp(&self, shape: &Shape, ranks: usize) -> Command {
        let mut command = Command::new(self.target.join("release/fsdp"));
        command.args(["train", "--sample", "0", "--no-progress"]);
        shape.add_options(&mut command, ranks);
        command
    }

    /// Returns the command that trains the same GPT in PyTorch, with the machine's threads shared
    /// equally by the ranks.
    fn torch_training(&self, python: &Path, shape: &Shape, ranks: usize) -> Command {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = (cores / ranks).max(1).to_string();
        let mut command = Command::new(python);
        command
            .arg(self.root.join("tests/interop/gpt_fsdp.py"))
            .arg("--data")
            .arg(self.root.join("crates/fsdp-cli/data/harbour.txt"))
            .args(["--mode", "fsdp2", "--save-every", "0"])
            .args(["--threads", &threads]);
        shape.add_options(&mut command, ranks);
        command
    }
}

impl Shape {
    /// Adds the options that both sides have.
    fn add_options(&self, command: &mut Command, ranks: usize) {
        for (option, value) in [
            ("--nproc", ranks),
            ("--steps", self.steps),
            ("--layers", self.layers),
            ("--heads", self.heads),
            ("--hidden", self.hidden),
            ("--seq", self.seq),
            ("--batch", self.batch),
        ] {
            command.arg(option).arg(value.to_string());
        }
    }
}

/// Runs a training that writes to a directory, and returns its steps.
fn steps(out: &Path, mut command: Command) -> Result<Vec<Step>> {
    remove_directory(out)?;
    command.arg("--out").arg(out).stdout(Stdio::null());
    say(&format!("xtask: {command:?}"));
    run(&mut command)?;
    let path = out.join("metrics.jsonl");
    let steps: Vec<Step> = read(&path)?
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()?;
    ensure!(
        steps.len() > WARM_UP,
        "`{}` has only {} steps",
        path.display(),
        steps.len()
    );
    Ok(steps)
}

/// Returns the median over runs of the median over the steps of a run.
fn speed(runs: &[Vec<Step>]) -> f64 {
    let medians = runs.iter().map(|steps| {
        let counted = &steps[WARM_UP..];
        median(counted.iter().map(|step| step.tokens_per_s).collect())
    });
    median(medians.collect())
}

/// Returns the median over runs of the peak of all ranks' memory.
fn peak_mib(runs: &[Vec<Step>]) -> f64 {
    let peaks = runs.iter().map(|steps| {
        steps
            .iter()
            .filter_map(|step| step.peak_memory_bytes)
            .fold(f64::NAN, f64::max)
    });
    median(peaks.collect()) / f64::from(1 << 20)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
