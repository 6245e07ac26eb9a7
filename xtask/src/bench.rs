//! `cargo xtask bench`: all benches, one table, one JSON; PyTorch beside them where there is one.

pub(crate) mod figures;
mod table;
mod train;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};

use self::figures::{Case, Other, Results, SCHEMA};
use crate::shell::{cargo, say, target};

/// The numbers of ranks on which torch loads besides those of the bench, because resharding loads
/// lead there.
const MORE_RANKS: [usize; 1] = [5];
/// The groups of cases of `tests/examples/bench`.
const GROUPS: [&str; 6] = [
    "save",
    "load",
    "full",
    "background",
    "conversions",
    "planning",
];
/// The name of the table of the Python package.
const PLUGIN: &str = "torch.distributed.checkpoint with the Python package's storage";
/// The name of the table of conversions beside those of others.
const MERGERS: &str = "Conversions of the command beside those of PyTorch, accelerate and verl";
/// The groups among them that torch has too.
const TORCH_GROUPS: [&str; 4] = ["save", "full", "load", "conversions"];

#[derive(Debug, Clone, Args)]
pub(crate) struct BenchArguments {
    /// Sizes of the state in bytes: 16m, 256m, 2g
    #[arg(long, value_delimiter = ',', default_value = "256m,2g")]
    size: Vec<String>,
    /// Numbers of ranks
    #[arg(long, value_delimiter = ',', default_value = "1,2,4")]
    ranks: Vec<usize>,
    /// Groups of cases: save, load, full, background, conversions, planning, scale, offline,
    /// digests, optim-state-dict, overhead, collectives, plugin, mergers, train [default: all]
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Directories to write to, as NAME=DIRECTORY: one in memory, one on a disk [default:
    /// tmpfs=/dev/shm, disk=the target directory]
    #[arg(long, value_delimiter = ',')]
    place: Vec<String>,
    /// Number of times that each figure is taken
    #[arg(long, default_value = "5")]
    runs: usize,
    /// A Python with torch, which does the same work in the same run
    #[arg(long, value_name = "PYTHON")]
    torch: Option<PathBuf>,
    /// File for the JSON [default: bench.json in the target directory]
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Keep the other cases in the JSON: for a run in parts, on one machine
    #[arg(long)]
    add: bool,
    /// File for the table, as Markdown
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,
}

/// A case of `tests/interop/bench.py`.
#[derive(Debug, Deserialize)]
struct TorchCase {
    name: String,
    size: String,
    ranks: usize,
    place: String,
    seconds: f64,
}

/// The times of one case with our program or our storage, and with theirs: torch's, or that of a
/// framework.
#[derive(Debug, Serialize, Deserialize)]
struct BesideTheirs {
    case: String,
    size: String,
    ranks: usize,
    seconds: f64,
    their_seconds: f64,
    /// The speed as a multiple of theirs.
    ratio: f64,
}

impl BenchArguments {
    /// Returns `true` if a group of cases was asked for.
    fn wants(&self, group: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only == group)
    }
}

/// Runs the benches, and writes their figures.
pub(crate) fn run(root: &Path, arguments: &BenchArguments) -> Result<()> {
    let target = target(root);

    let places = if arguments.place.is_empty() {
        format!("tmpfs=/dev/shm,disk={}", target.display())
    } else {
        arguments.place.join(",")
    };
    let bench = target.join("release/examples/bench");
    if GROUPS
        .iter()
        .chain(&["scale"])
        .any(|group| arguments.wants(group))
    {
        build(root, "fsdp-tests", "bench")?;
    }
    let mut cases: Vec<Case> = Vec::new();
    for size in &arguments.size {
        let sized = GROUPS.into_iter().filter(|&group| group != "planning");
        let groups: Vec<&str> = sized.filter(|group| arguments.wants(group)).collect();
        if groups.is_empty() {
            break;
        }
        let ranks: Vec<String> = arguments.ranks.iter().map(ToString::to_string).collect();
        let runs = arguments.runs.to_string();
        // Each group runs in a process of its own, so that memory kept by the allocator does not
        // slow the next one.
        for group in &groups {
            let mut command = Command::new(&bench);
            command.args([
                "--json",
                "--size",
                size,
                "--ranks",
                &ranks.join(","),
                "--runs",
                &runs,
                "--place",
                &places,
            ]);
            let found: Vec<Case> =
                serde_json::from_slice(&output(command.args(["--only", group]))?)?;
            cases.extend(found);
        }
        let groups: Vec<&str> = groups
            .into_iter()
            .filter(|group| TORCH_GROUPS.contains(group))
            .collect();
        if let Some(python) = arguments.torch.as_ref().filter(|_| !groups.is_empty()) {
            for found in torch(root, python, arguments, size, &groups, &places)? {
                join(&mut cases, &found);
            }
        }
    }
    // What depends on the number of parameters, not on their bytes.
    for group in ["planning", "scale"]
        .into_iter()
        .filter(|group| arguments.wants(group))
    {
        let mut command = Command::new(&bench);
        command.args([
            "--json", "--only", group, "--size", "16m", "--place", &places,
        ]);
        cases.extend(serde_json::from_slice::<Vec<Case>>(&output(&mut command)?)?);
    }
    let others = others(root, &target, arguments)?;
    let mut results = Results {
        schema: SCHEMA,
        machine: machine(),
        cases,
        others,
    };
    let json = arguments
        .json
        .clone()
        .unwrap_or_else(|| target.join("bench.json"));
    if arguments.add && json.exists() {
        results = results.after(before(&json)?)?;
    }
    write(&json, &serde_json::to_string_pretty(&results)?)?;
    let text = table::markdown(&results);
    if let Some(path) = &arguments.table {
        write(path, &text)?;
    }
    show(&text);
    say(&format!("xtask: all figures are in `{}`", json.display()));
    Ok(())
}

/// Reads the results of an earlier part of the run.
fn before(json: &Path) -> Result<Results> {
    let text =
        std::fs::read(json).with_context(|| format!("failed to read `{}`", json.display()))?;
    serde_json::from_slice(&text)
        .with_context(|| format!("`{}` has no figures of this bench", json.display()))
}

/// Runs the smaller benches, each of which belongs to a crate.
fn others(root: &Path, target: &Path, arguments: &BenchArguments) -> Result<Vec<Other>> {
    let mut others = Vec::new();
    for (group, name, package, example) in [
        ("offline", "Offline commands", "fsdp-tools", "offline"),
        (
            "digests",
            "Digests in a save and a load of one rank",
            "fsdp-tools",
            "digest_cost",
        ),
        (
            "optim-state-dict",
            "Optimizer state, 4 ranks",
            "fsdp-nn",
            "optim_state_dict",
        ),
        (
            "overhead",
            "A step on one rank beside plain candle",
            "fsdp-cli",
            "overhead",
        ),
        ("collectives", "Collectives", "fsdp-comm", "collectives"),
    ] {
        if !arguments.wants(group) {
            continue;
        }
        build(root, package, example)?;
        let mut command = Command::new(target.join("release/examples").join(example));
        command.arg("--json");
        if group == "offline" {
            build_command(root)?;
            command.arg("--binary").arg(target.join("release/fsdp"));
        }
        if let Some(python) = arguments.torch.as_ref().filter(|_| group == "collectives") {
            command.arg("--torch").arg(python);
        }
        let figures = serde_json::from_slice(&output(&mut command)?)?;
        others.push(Other {
            name: name.to_owned(),
            figures,
        });
    }
    if let Some(python) = arguments
        .torch
        .as_ref()
        .filter(|_| arguments.wants("plugin"))
    {
        let figures = plugin(root, python, arguments)?;
        others.push(Other {
            name: PLUGIN.to_owned(),
            figures: serde_json::to_value(figures)?,
        });
    }
    if let Some(python) = arguments
        .torch
        .as_ref()
        .filter(|_| arguments.wants("mergers"))
    {
        build_command(root)?;
        let figures = mergers(root, target, python, arguments)?;
        others.push(Other {
            name: MERGERS.to_owned(),
            figures: serde_json::to_value(figures)?,
        });
    }
    if arguments.wants("train") {
        build_command(root)?;
        let figures = train::run(
            root,
            target,
            &arguments.ranks,
            arguments.runs,
            arguments.torch.as_deref(),
        )?;
        others.push(Other {
            name: "Training steps".to_owned(),
            figures: serde_json::to_value(figures)?,
        });
    }
    Ok(others)
}

/// Saves and loads of torch.distributed.checkpoint with the Python package's storage, in turns with
/// torch's own.
fn plugin(root: &Path, python: &Path, arguments: &BenchArguments) -> Result<Vec<BesideTheirs>> {
    let mut figures = Vec::new();
    let place = arguments
        .place
        .first()
        .map_or("tmpfs=/dev/shm", String::as_str);
    for (size, &ranks) in arguments
        .size
        .iter()
        .flat_map(|size| arguments.ranks.iter().map(move |ranks| (size, ranks)))
    {
        let mut command = Command::new(python);
        command
            .arg("-W")
            .arg("ignore")
            .arg(root.join("tests/interop/bench.py"));
        command.args([
            size,
            &ranks.to_string(),
            "plugin",
            place,
            &arguments.runs.to_string(),
        ]);
        let output = output(&mut command)
            .context("is the wheel of `cargo xtask wheel` installed in that Python?")?;
        let cases: Vec<TorchCase> = serde_json::from_slice(&output)?;
        // Each of ours is followed by torch's.
        for pair in cases.chunks_exact(2) {
            let (seconds, their_seconds) = (pair[0].seconds, pair[1].seconds);
            let (case, size) = (pair[1].name.clone(), size.clone());
            figures.push(BesideTheirs {
                case,
                size,
                ranks,
                seconds,
                their_seconds,
                ratio: their_seconds / seconds,
            });
        }
    }
    Ok(figures)
}

/// Conversions of the command, in turns with the programs of torch and of frameworks that do the
/// same.
fn mergers(
    root: &Path,
    target: &Path,
    python: &Path,
    arguments: &BenchArguments,
) -> Result<Vec<BesideTheirs>> {
    let mut figures: Vec<BesideTheirs> = Vec::new();
    let place = arguments.place.first().map_or("/dev/shm", |place| {
        place.split_once('=').map_or("", |(_, path)| path)
    });
    for size in &arguments.size {
        let mut command = Command::new(python);
        command
            .arg("-W")
            .arg("ignore")
            .arg(root.join("tests/interop/mergers.py"))
            .arg(target.join("release/fsdp"));
        command.args([place, size, &arguments.runs.to_string()]);
        figures.extend(serde_json::from_slice::<Vec<BesideTheirs>>(&output(
            &mut command,
        )?)?);
    }
    Ok(figures)
}

fn torch(
    root: &Path,
    python: &Path,
    arguments: &BenchArguments,
    size: &str,
    groups: &[&str],
    places: &str,
) -> Result<Vec<TorchCase>> {
    let mut found = Vec::new();
    let mut call = |ranks: usize, groups: &[&str]| -> Result<()> {
        let mut command = Command::new(python);
        command
            .arg("-W")
            .arg("ignore")
            .arg(root.join("tests/interop/bench.py"));
        command.args([
            size,
            &ranks.to_string(),
            &groups.join(","),
            places,
            &arguments.runs.to_string(),
        ]);
        found.extend(serde_json::from_slice::<Vec<TorchCase>>(&output(
            &mut command,
        )?)?);
        Ok(())
    };
    let many: Vec<&str> = groups
        .iter()
        .copied()
        .filter(|&group| group != "conversions")
        .collect();
    if groups.contains(&"conversions") {
        call(1, &["conversions"])?;
    }
    if !many.is_empty() {
        arguments
            .ranks
            .iter()
            .try_for_each(|&ranks| call(ranks, &many))?;
    }
    if groups.contains(&"load") {
        MORE_RANKS
            .iter()
            .try_for_each(|&ranks| call(ranks, &["load"]))?;
    }
    Ok(found)
}

/// Puts torch's time beside ours for the same work. Its loads are in place, and are compared with
/// both of ours.
fn join(cases: &mut [Case], torch: &TorchCase) {
    for case in cases {
        let name = case.name.replacen("load in place", "load", 1);
        if (&name, &case.size, case.ranks, &case.place)
            == (&torch.name, &torch.size, torch.ranks, &torch.place)
        {
            case.torch_seconds = Some(torch.seconds);
        }
    }
}

/// Describes the machine, on which all figures depend.
fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let model = field("/proc/cpuinfo", "model name");
    let memory = field("/proc/meminfo", "MemTotal")
        .trim_end_matches(" kB")
        .parse()
        .unwrap_or(0u64)
        >> 20;
    format!("{cores} cores of {model}, {memory} GiB")
}

/// Reads a field of a file of `NAME: VALUE` lines; empty if there is none.
fn field(file: &str, name: &str) -> String {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let line = text
        .lines()
        .find(|line| line.starts_with(name))
        .unwrap_or_default();
    line.split_once(':')
        .map_or_else(String::new, |(_, value)| value.trim().to_owned())
}

/// Builds the command for release.
fn build_command(root: &Path) -> Result<()> {
    cargo(
        root,
        &["build", "--release", "--locked", "--package", "fsdp-cli"],
        &[],
    )
}

/// Builds an example for release.
fn build(root: &Path, package: &str, example: &str) -> Result<()> {
    cargo(
        root,
        &[
            "build",
            "--release",
            "--locked",
            "--package",
            package,
            "--example",
            example,
        ],
        &[],
    )
}

/// Runs a command whose stdout is data.
fn output(command: &mut Command) -> Result<Vec<u8>> {
    let name = OsString::from(command.get_program());
    say(&format!("xtask: {command:?}"));
    let output = command.stderr(Stdio::inherit()).output();
    let output = output.with_context(|| format!("failed to start `{}`", name.display()))?;
    ensure!(
        output.status.success(),
        "`{}` failed with {}",
        name.display(),
        output.status
    );
    Ok(output.stdout)
}

#[expect(clippy::disallowed_methods, reason = "figures are no checkpoint")]
fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("failed to write `{}`", path.display()))
}

#[expect(clippy::print_stdout, reason = "the table is what was asked for")]
fn show(text: &str) {
    println!("{text}");
}
