//! Training steps of the GPT of `fsdp train`, in turns with the same GPT under PyTorch's FSDP2 and
//! gloo.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::shell::say;

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

/// Trains every shape on every number of ranks, `runs` times, and once each time with torch, if
/// there is a Python.
pub(super) fn run(
    root: &Path,
    target: &Path,
    ranks: &[usize],
    runs: usize,
    torch: Option<&Path>,
) -> Result<Vec<Figures>> {
    let out = target.join("bench-train");
    let mut figures = Vec::new();
    for shape in &SHAPES {
        for &ranks in ranks
            .iter()
            .filter(|&&ranks| shape.batch.is_multiple_of(ranks))
        {
            let (mut ours, mut torchs) = (Vec::new(), Vec::new());
            for _ in 0..runs {
                ours.push(steps(&out, fsdp(target, shape, ranks, &out))?);
                if let Some(python) = torch {
                    torchs.push(steps(
                        &out,
                        torch_command(root, python, shape, ranks, &out),
                    )?);
                }
            }
            let (tokens_per_s, torch_tokens_per_s) =
                (speed(&ours), (!torchs.is_empty()).then(|| speed(&torchs)));
            figures.push(Figures {
                shape: shape.name,
                ranks,
                tokens_per_s,
                torch_tokens_per_s,
                ratio: torch_tokens_per_s.map(|torch| tokens_per_s / torch),
                peak_mib: peak_mib(&ours),
                torch_peak_mib: (!torchs.is_empty()).then(|| peak_mib(&torchs)),
            });
        }
    }
    Ok(figures)
}

fn fsdp(target: &Path, shape: &Shape, ranks: usize, out: &Path) -> Command {
    let mut command = Command::new(target.join("release/fsdp"));
    command.args(["train", "--sample", "0", "--no-progress"]);
    with_options(command, shape, ranks, out)
}

/// Returns the command that trains the same GPT in PyTorch, with the machine's threads shared
/// equally by the ranks.
fn torch_command(root: &Path, python: &Path, shape: &Shape, ranks: usize, out: &Path) -> Command {
    let threads = (std::thread::available_parallelism().map_or(1, usize::from) / ranks).max(1);
    let mut command = Command::new(python);
    command
        .arg(root.join("tests/interop/gpt_fsdp.py"))
        .arg("--data");
    command.arg(root.join("crates/fsdp-cli/data/harbour.txt"));
    command.args([
        "--mode",
        "fsdp2",
        "--save-every",
        "0",
        "--threads",
        &threads.to_string(),
    ]);
    with_options(command, shape, ranks, out)
}

/// Adds the options that both sides have.
fn with_options(mut command: Command, shape: &Shape, ranks: usize, out: &Path) -> Command {
    for (option, value) in [
        ("--nproc", ranks),
        ("--steps", shape.steps),
        ("--layers", shape.layers),
        ("--heads", shape.heads),
        ("--hidden", shape.hidden),
        ("--seq", shape.seq),
        ("--batch", shape.batch),
    ] {
        command.arg(option).arg(value.to_string());
    }
    command.arg("--out").arg(out);
    command
}

/// Runs a training, and returns its steps.
#[expect(
    clippy::disallowed_methods,
    reason = "a bench's directory is no checkpoint"
)]
fn steps(out: &Path, mut command: Command) -> Result<Vec<Step>> {
    if out.exists() {
        std::fs::remove_dir_all(out)
            .with_context(|| format!("failed to remove `{}`", out.display()))?;
    }
    say(&format!("xtask: {command:?}"));
    let status = command
        .stdout(Stdio::null())
        .stderr(Stdio::inherit())
        .status();
    let status = status.with_context(|| format!("failed to start {command:?}"))?;
    ensure!(status.success(), "{command:?} failed: {status}");
    let path = out.join("metrics.jsonl");
    let text = std::fs::read_to_string(&path)
        .with_context(|| format!("failed to read `{}`", path.display()))?;
    let steps: Vec<Step> = text
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
    let of_run = |steps: &Vec<Step>| {
        median(
            steps[WARM_UP..]
                .iter()
                .map(|step| step.tokens_per_s)
                .collect(),
        )
    };
    median(runs.iter().map(of_run).collect())
}

/// Returns the median over runs of the peak of all ranks' memory.
fn peak_mib(runs: &[Vec<Step>]) -> f64 {
    let of_run = |steps: &Vec<Step>| {
        steps
            .iter()
            .filter_map(|step| step.peak_memory_bytes)
            .fold(f64::NAN, f64::max)
    };
    median(runs.iter().map(of_run).collect()) / f64::from(1 << 20)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
