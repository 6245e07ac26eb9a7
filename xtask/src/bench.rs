//! `cargo xtask bench`: all benches, one table, one JSON; PyTorch beside them where there is one.

pub(crate) mod figures;
mod room;
mod table;
mod train;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};
use clap::Args;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use self::figures::{Case, Other, Results, SCHEMA};
use self::room::Room;
use crate::files::{field, read, write};
use crate::shell::{cargo, output, say, show, target};

/// Loads on another number of ranks than saved: the ranks that saved, and those that load.
const RESHARDS: [(usize, usize); 4] = [(4, 2), (1, 4), (4, 1), (3, 5)];
/// The numbers of ranks on which torch loads besides those of the bench, because resharding loads
/// lead there.
const MORE_RANKS: [usize; 1] = [5];
/// The groups of cases of `tests/examples/bench` that depend on the size of the state.
const GROUPS: [&str; 5] = ["save", "load", "full", "background", "conversions"];
/// The smaller benches: for each its group, the name of its table, its package and its example.
const EXAMPLES: [(&str, &str, &str, &str); 5] = [
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
];
/// The name of the table of the Python package.
const PLUGIN: &str = "torch.distributed.checkpoint with the Python package's storage";
/// The name of the table of conversions beside those of others.
const MERGERS: &str = "Conversions of the command beside those of PyTorch, accelerate and verl";
/// The groups of `tests/examples/bench` that depend on the number of parameters, and not on their
/// bytes.
const UNSIZED_GROUPS: [&str; 2] = ["planning", "scale"];
/// The groups of [`GROUPS`] that torch has too.
const TORCH_GROUPS: [&str; 4] = ["save", "full", "load", "conversions"];

#[derive(Args)]
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

    /// Makes the directories to write to, if a group that was asked for writes to them, and checks
    /// that what it takes fits.
    ///
    /// # Errors
    /// A directory that cannot be made; a group that does not fit.
    fn make_room(&self, target: &Path) -> Result<Room> {
        let mut groups = GROUPS.to_vec();
        groups.extend(UNSIZED_GROUPS);
        if self.torch.is_some() {
            groups.extend(["plugin", "mergers"]);
        }
        groups.retain(|group| self.wants(group));
        if groups.is_empty() {
            return Room::new(&[]);
        }
        let room = if self.place.is_empty() {
            let disk = format!("disk={}", target.display());
            Room::new(&["tmpfs=/dev/shm".to_owned(), disk])?
        } else {
            Room::new(&self.place)?
        };
        // A full run takes more than an hour, so all of it is checked before it starts.
        for size in &self.size {
            for group in &groups {
                room.check(group, size)?;
            }
        }
        Ok(room)
    }
}

/// Runs the benches, and writes their figures.
pub(crate) fn run(root: &Path, arguments: &BenchArguments) -> Result<()> {
    let target = target(root);
    let room = arguments.make_room(&target)?;
    let bench = Bench {
        root,
        target: &target,
        arguments,
        room: &room,
    };
    let mut results = Results {
        schema: SCHEMA,
        machine: machine(),
        cases: bench.cases()?,
        others: bench.others()?,
    };
    let json = match &arguments.json {
        Some(json) => json.clone(),
        None => target.join("bench.json"),
    };
    // A run in parts keeps what earlier parts have measured.
    if arguments.add && json.exists() {
        let before: Results = serde_json::from_str(&read(&json)?)
            .with_context(|| format!("`{}` has no figures of this bench", json.display()))?;
        results = results.merge_into(before)?;
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

/// One run of the task.
struct Bench<'a> {
    root: &'a Path,
    /// The directory that cargo builds in.
    target: &'a Path,
    arguments: &'a BenchArguments,
    room: &'a Room,
}

impl Bench<'_> {
    /// Measures the cases of `tests/examples/bench`.
    fn cases(&self) -> Result<Vec<Case>> {
        let arguments = self.arguments;
        let mut sized = GROUPS.to_vec();
        sized.retain(|group| arguments.wants(group));
        let mut unsized_groups = UNSIZED_GROUPS.to_vec();
        unsized_groups.retain(|group| arguments.wants(group));
        // Nothing is built for a run of the smaller benches only.
        if !sized.is_empty() || !unsized_groups.is_empty() {
            self.build("fsdp-tests", "bench")?;
        }

        let mut cases: Vec<Case> = Vec::new();
        for size in &arguments.size {
            for group in &sized {
                for (saved_on, ranks) in self.programs(group) {
                    let mut command = self.bench_command(group, size);
                    command
                        .args(["--ranks", &ranks.to_string()])
                        .args(["--saved-on", &saved_on.to_string()])
                        .args(["--runs", &arguments.runs.to_string()]);
                    let found: Vec<Case> = json(&mut command)?;
                    cases.extend(found);
                }
            }
            if let Some(python) = &arguments.torch {
                let mut groups = sized.clone();
                groups.retain(|group| TORCH_GROUPS.contains(group));
                for found in self.torch(python, size, &groups)? {
                    join(&mut cases, &found);
                }
            }
        }
        for group in unsized_groups {
            let found: Vec<Case> = json(&mut self.bench_command(group, "16m"))?;
            cases.extend(found);
        }
        Ok(cases)
    }

    /// Returns the ranks that save and the ranks of each program of a group. Each is a process of
    /// its own, so that memory kept by the allocator neither slows the next one nor adds to it.
    fn programs(&self, group: &str) -> Vec<(usize, usize)> {
        let ranks = self.arguments.ranks.iter();
        let mut programs: Vec<(usize, usize)> = ranks.map(|&ranks| (ranks, ranks)).collect();
        match group {
            "load" => programs.extend(RESHARDS),
            // A conversion is one process, whatever number of ranks saved.
            "conversions" => programs.truncate(1),
            _ => {}
        }
        programs
    }

    /// Returns the command that measures a group of cases.
    fn bench_command(&self, group: &str, size: &str) -> Command {
        let mut command = Command::new(self.target.join("release/examples/bench"));
        command
            .args(["--json", "--only", group, "--size", size])
            .args(["--place", &self.room.places()]);
        command
    }

    /// Runs the smaller benches, each of which belongs to a crate.
    fn others(&self) -> Result<Vec<Other>> {
        let arguments = self.arguments;
        let torch = arguments.torch.as_deref();
        let mut others = Vec::new();
        for (group, name, package, example) in EXAMPLES {
            if !arguments.wants(group) {
                continue;
            }
            self.build(package, example)?;
            let mut command = Command::new(self.target.join("release/examples").join(example));
            command.arg("--json");
            if group == "offline" {
                self.build_command()?;
                command
                    .arg("--binary")
                    .arg(self.target.join("release/fsdp"));
            }
            if let Some(python) = torch
                && group == "collectives"
            {
                command.arg("--torch").arg(python);
            }
            others.push(Other {
                name: name.to_owned(),
                figures: json(&mut command)?,
            });
        }
        if let Some(python) = torch
            && arguments.wants("plugin")
        {
            others.push(Other::new(PLUGIN, self.plugin(python)?)?);
        }
        if let Some(python) = torch
            && arguments.wants("mergers")
        {
            self.build_command()?;
            others.push(Other::new(MERGERS, self.mergers(python)?)?);
        }
        if arguments.wants("train") {
            self.build_command()?;
            others.push(Other::new("Training steps", self.train()?)?);
        }
        Ok(others)
    }

    /// Saves and loads of torch.distributed.checkpoint with the Python package's storage, in turns
    /// with torch's own.
    fn plugin(&self, python: &Path) -> Result<Vec<BesideTheirs>> {
        let (place, _) = self.room.first()?;
        let runs = self.arguments.runs.to_string();
        let mut figures = Vec::new();
        for size in &self.arguments.size {
            for &ranks in &self.arguments.ranks {
                let mut command = self.python_command(python, "bench.py");
                command.args([size, &ranks.to_string(), "plugin", &place, &runs]);
                let cases: Vec<TorchCase> = json(&mut command)
                    .context("is the wheel of `cargo xtask wheel` installed in that Python?")?;
                // Each of ours is followed by torch's.
                for pair in cases.chunks_exact(2) {
                    let [ours, theirs] = pair else {
                        unreachable!("a chunk has two cases")
                    };
                    figures.push(BesideTheirs {
                        case: theirs.name.clone(),
                        size: size.clone(),
                        ranks,
                        seconds: ours.seconds,
                        their_seconds: theirs.seconds,
                        ratio: theirs.seconds / ours.seconds,
                    });
                }
            }
        }
        Ok(figures)
    }

    /// Conversions of the command, in turns with the programs of torch and of frameworks that do
    /// the same.
    fn mergers(&self, python: &Path) -> Result<Vec<BesideTheirs>> {
        let (_, directory) = self.room.first()?;
        let mut figures = Vec::new();
        for size in &self.arguments.size {
            let found: Vec<BesideTheirs> = json(
                self.python_command(python, "mergers.py")
                    .arg(self.target.join("release/fsdp"))
                    .arg(directory)
                    .args([size, &self.arguments.runs.to_string()]),
            )?;
            figures.extend(found);
        }
        Ok(figures)
    }

    /// Measures torch on the same work.
    fn torch(&self, python: &Path, size: &str, groups: &[&str]) -> Result<Vec<TorchCase>> {
        let mut on_all_ranks = groups.to_vec();
        on_all_ranks.retain(|&group| group != "conversions");
        let many = on_all_ranks.join(",");
        let mut calls: Vec<(usize, &str)> = Vec::new();
        // A conversion is one process, whatever number of ranks saved.
        if groups.contains(&"conversions") {
            calls.push((1, "conversions"));
        }
        if !many.is_empty() {
            calls.extend(self.arguments.ranks.iter().map(|&ranks| (ranks, &*many)));
        }
        if groups.contains(&"load") {
            calls.extend(MORE_RANKS.map(|ranks| (ranks, "load")));
        }

        let places = self.room.places();
        let runs = self.arguments.runs.to_string();
        let mut found = Vec::new();
        for (ranks, groups) in calls {
            let mut command = self.python_command(python, "bench.py");
            command.args([size, &ranks.to_string(), groups, &places, &runs]);
            let cases: Vec<TorchCase> = json(&mut command)?;
            found.extend(cases);
        }
        Ok(found)
    }

    /// Returns the command that runs a script of `tests/interop`.
    fn python_command(&self, python: &Path, script: &str) -> Command {
        let mut command = Command::new(python);
        command
            .args(["-W", "ignore"])
            .arg(self.root.join("tests/interop").join(script));
        command
    }

    /// Builds the command for release.
    fn build_command(&self) -> Result<()> {
        let build = ["build", "--release", "--locked", "--package", "fsdp-cli"];
        cargo(self.root, &build, &[])
    }

    /// Builds an example for release.
    fn build(&self, package: &str, example: &str) -> Result<()> {
        let build = ["build", "--release", "--locked", "--package", package];
        cargo(
            self.root,
            &[&build[..], &["--example", example]].concat(),
            &[],
        )
    }
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

/// Runs a command whose stdout is JSON, and whose stderr is its progress.
fn json<T: DeserializeOwned>(command: &mut Command) -> Result<T> {
    say(&format!("xtask: {command:?}"));
    let text = output(command.stderr(Stdio::inherit()))?;
    Ok(serde_json::from_str(&text)?)
}
