//! `cargo xtask kills`: a run whose ranks and launchers are killed and stopped over and over must end with the bits of one
//! that nobody disturbed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use rustix::process::{Pid, Signal, kill_process};

use crate::shell::{cargo, say};

/// The options of `cargo xtask kills`.
#[derive(Args, Clone)]
pub(crate) struct KillsArguments {
    /// The number of processes to kill or stop
    #[arg(long, value_name = "N", default_value_t = 100)]
    kills: u64,
    /// The number of ranks
    #[arg(long, value_name = "N", default_value_t = 8)]
    ranks: usize,
    /// The seed of all choices [default: random]
    #[arg(long, value_name = "Z")]
    seed: Option<u64>,
    /// The `fsdp` to test [default: the debug build of this tree]
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
}

/// The deadline of the ranks, in seconds: a stopped one is noticed after it.
const TIMEOUT: &str = "5";
/// The steps of a run.
const STEPS: &str = "150";
/// The steps between two saves: no more may be lost.
const SAVE_EVERY: &str = "3";
/// The longest time between two kills, in times of a run that nobody disturbs: most runs must live to see one.
const LONGEST_LIFE: f64 = 0.5;
/// The longest time for which a launcher is stopped.
const LONGEST_STOP: Duration = Duration::from_secs(2);
/// The time after which a run counts as hanging.
const HANG: Duration = Duration::from_secs(180);
/// The kills of one run at most: it must end some time.
const KILLS_OF_A_RUN: u64 = 25;

/// A model as small as they come.
const TRAIN: [&str; 18] = [
    "--layers",
    "1",
    "--heads",
    "2",
    "--hidden",
    "16",
    "--seq",
    "16",
    "--batch",
    "16",
    "--sample",
    "0",
    "--steps",
    STEPS,
    "--save-every",
    SAVE_EVERY,
    "--threads",
    "1",
];

/// The count of what was done to processes.
#[derive(Debug, Default)]
struct Counts {
    killed_ranks: u64,
    stopped_ranks: u64,
    killed_launchers: u64,
    stopped_launchers: u64,
    /// Half of the ranks at once, as if their host had failed.
    killed_hosts: u64,
    stopped_hosts: u64,
    /// The most steps that were done before a kill and again after it.
    lost: u64,
    /// The longest time from a kill until the run had saved another step.
    slowest: Duration,
}

impl Counts {
    fn all(&self) -> u64 {
        let killed = self.killed_ranks + self.killed_launchers + self.killed_hosts;
        killed + self.stopped_ranks + self.stopped_launchers + self.stopped_hosts
    }
}

/// Disturbs as many runs as it takes, and compares each with one that nobody disturbed.
#[expect(clippy::disallowed_methods, reason = "a run that was compared is not needed any more")]
pub(crate) fn run(root: &Path, arguments: &KillsArguments) -> Result<()> {
    let program = match &arguments.program {
        Some(program) => program.clone(),
        None => {
            cargo(root, &["build", "--package", "fsdp-cli", "--locked"], &[])?;
            root.join("target/debug/fsdp")
        }
    };
    let seed = arguments.seed.unwrap_or_else(rand::random);
    let mut random = StdRng::seed_from_u64(seed);
    let dir = tempfile::tempdir()?;
    let quiet = dir.path().join("quiet");
    let start = Instant::now();
    let mut launch = Launch::start(&program, &quiet, arguments.ranks, &dir.path().join("said"))?;
    ensure!(launch.wait(HANG)?, "the run that nobody disturbs failed\n{}", said(dir.path()));
    let undisturbed = start.elapsed();
    say(&format!("kills: seed {seed}; a run of {STEPS} steps on {} ranks takes {undisturbed:.1?}", arguments.ranks));
    let mut counts = Counts::default();
    let (mut runs, mut disturbed) = (0, Duration::ZERO);
    while counts.all() < arguments.kills {
        let out = dir.path().join(format!("run-{runs}"));
        let start = Instant::now();
        disturb(&program, &out, arguments, undisturbed.mul_f64(LONGEST_LIFE), &mut random, &mut counts)
            .with_context(|| format!("run {runs} of seed {seed}\n{}", said(dir.path())))?;
        disturbed += start.elapsed();
        runs += 1;
        // Every bit of the state after the last step is the same.
        let last = format!("step-{:0>8}", STEPS);
        let same = Command::new(&program).arg("diff").args([quiet.join(&last), out.join(&last)]).output()?;
        let told = String::from_utf8_lossy(&same.stdout).into_owned();
        ensure!(same.status.success(), "run {runs} of seed {seed} ended with other bits:\n{told}");
        fs::remove_file(dir.path().join("said")).ok();
        // A thousand kills take many runs.
        fs::remove_dir_all(&out)?;
        say(&format!("kills: {} in {runs} runs, no wrong bit; {counts:?}; {disturbed:.0?} in all", counts.all()));
    }
    Ok(())
}

fn said(dir: &Path) -> String {
    let text = fs::read_to_string(dir.join("said")).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(60)..].join("\n")
}

/// Runs one job to its end, and kills and stops its processes on the way.
fn disturb(
    program: &Path,
    out: &Path,
    arguments: &KillsArguments,
    longest_life: Duration,
    random: &mut StdRng,
    counts: &mut Counts,
) -> Result<()> {
    let said = out.with_file_name("said");
    let (before, last) = (counts.all(), STEPS.parse::<u64>()?);
    let mut launch = Launch::start(program, out, arguments.ranks, &said)?;
    while counts.all() < arguments.kills && counts.all() < before + KILLS_OF_A_RUN {
        if launch.wait(longest_life.mul_f64(random.random()))? {
            return Ok(());
        }
        let ranks = launch.ranks()?;
        if ranks.is_empty() {
            continue;
        }
        let (saved, begun) = (newest(out)?, starts(out)?.len());
        let victim = ranks[random.random_range(0..ranks.len())];
        let host = &ranks[..ranks.len() / 2];
        let hit = Instant::now();
        match random.random_range(0..20) {
            0..8 => {
                signal(&[victim], Signal::KILL);
                counts.killed_ranks += 1;
            }
            8..11 => {
                signal(&[victim], Signal::STOP);
                counts.stopped_ranks += 1;
            }
            11..14 => {
                signal(host, Signal::KILL);
                counts.killed_hosts += 1;
            }
            14..16 => {
                signal(host, Signal::STOP);
                counts.stopped_hosts += 1;
            }
            16..18 => {
                let launcher = Pid::from_child(&launch.0);
                signal(&[launcher], Signal::STOP);
                thread::sleep(LONGEST_STOP.mul_f64(random.random()));
                signal(&[launcher], Signal::CONT);
                counts.stopped_launchers += 1;
                // The ranks have gone on meanwhile, and nothing is lost.
                continue;
            }
            _ => {
                launch.kill()?;
                counts.killed_launchers += 1;
                // Its ranks end with it: those that are left would write beside the new ones.
                gone(&ranks)?;
                launch = Launch::start(program, out, arguments.ranks, &said)?;
            }
        }
        let steps = done(out)?;
        // The run goes on: it resumes from the newest checkpoint, and saves another one.
        while newest(out)? <= saved {
            if launch.wait(Duration::from_millis(50))? {
                return Ok(());
            }
            if saved == last {
                // A rank that was stopped after its last step may go on at any time, so the launcher waits for it.
                signal(&ranks, Signal::CONT);
            }
            ensure!(hit.elapsed() < HANG, "no step within {HANG:?} of a kill");
        }
        counts.slowest = counts.slowest.max(hit.elapsed());
        // A kill in the last moment of a save may find the new checkpoint there: then the run is yet to start again.
        if let Some(start) = starts(out)?.get(begun) {
            let lost = steps.saturating_sub(*start);
            ensure!(lost <= SAVE_EVERY.parse()?, "of {steps} steps {lost} were lost: the run began at {start}");
            counts.lost = counts.lost.max(lost);
        }
    }
    ensure!(launch.wait(HANG)?, "the run does not end");
    Ok(())
}

/// Sends a signal to processes, some of which may have ended.
fn signal(processes: &[Pid], signal: Signal) {
    for process in processes {
        kill_process(*process, signal).ok();
    }
}

/// Returns the number of steps that a run has done, of those that its metrics tell.
fn done(out: &Path) -> Result<u64> {
    let steps = numbers(&out.join("metrics.jsonl"), |line| line["step"].as_u64())?;
    Ok(steps.last().map_or(0, |step| step + 1))
}

/// Returns the steps that a run has begun at, each time that it was started.
fn starts(out: &Path) -> Result<Vec<u64>> {
    numbers(&out.join("events.jsonl"), |line| line["step"].as_u64().filter(|_| line["event"] == "start"))
}

/// Reads the numbers that lines of JSON have. The last line may be half written.
fn numbers(file: &Path, number: impl Fn(&serde_json::Value) -> Option<u64>) -> Result<Vec<u64>> {
    if !file.exists() {
        return Ok(Vec::new());
    }
    let text = fs::read_to_string(file)?;
    Ok(text.lines().filter_map(|line| number(&serde_json::from_str(line).ok()?)).collect())
}

/// Waits until these processes have ended.
fn gone(processes: &[Pid]) -> Result<()> {
    let until = Instant::now() + HANG;
    for process in processes {
        while is_alive(*process) {
            ensure!(Instant::now() < until, "a rank outlives its launcher");
            thread::sleep(Duration::from_millis(10));
        }
    }
    Ok(())
}

fn is_alive(process: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", process.as_raw_nonzero()));
    stat.is_ok_and(|stat| !stat.contains(") Z "))
}

/// Returns the step of the newest committed checkpoint, and 0 if there is none.
fn newest(out: &Path) -> Result<u64> {
    let Ok(list) = fs::read_dir(out) else { return Ok(0) };
    let mut newest = 0;
    for entry in list {
        let path = entry?.path();
        let step = path.file_name().and_then(|name| name.to_str()?.strip_prefix("step-")?.parse().ok());
        if path.join(".metadata").exists() {
            newest = newest.max(step.unwrap_or(0));
        }
    }
    Ok(newest)
}

/// A running launcher, which is ended on drop.
struct Launch(Child);

impl Launch {
    fn start(program: &Path, out: &Path, ranks: usize, said: &Path) -> Result<Launch> {
        let mut command = Command::new(program);
        command.args(["launch", "--grace", "2", "--max-restarts", "100000", "--nproc", &ranks.to_string(), "--"]);
        command
            .arg(program)
            .args(["train", "--backend", "tcp", "--resume=auto", "--timeout", TIMEOUT, "--out"])
            .arg(out);
        command.args(TRAIN);
        let said = fs::File::options().create(true).append(true).open(said)?;
        command.stdin(Stdio::null()).stdout(said.try_clone()?).stderr(said);
        Ok(Launch(command.spawn().with_context(|| format!("failed to start `{}`", program.display()))?))
    }

    /// Waits for the launcher to end, or for some time. Returns `true` if it has ended well.
    fn wait(&mut self, time: Duration) -> Result<bool> {
        let until = Instant::now() + time;
        loop {
            match self.0.try_wait()? {
                Some(status) if status.success() => return Ok(true),
                Some(status) => bail!("the launcher gave up: {status}"),
                None if Instant::now() >= until => return Ok(false),
                None => thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// Returns the processes of its ranks.
    fn ranks(&self) -> Result<Vec<Pid>> {
        let id = self.0.id();
        let mut ranks = Vec::new();
        for entry in fs::read_dir(format!("/proc/{id}/task"))? {
            // A thread may end meanwhile.
            let Ok(children) = fs::read_to_string(entry?.path().join("children")) else { continue };
            for child in children.split_whitespace() {
                let words = fs::read(format!("/proc/{child}/cmdline")).unwrap_or_default();
                if words.split(|byte| *byte == 0).any(|word| word == b"train") {
                    ranks.extend(Pid::from_raw(child.parse()?));
                }
            }
        }
        Ok(ranks)
    }

    fn kill(&mut self) -> Result<()> {
        self.0.kill()?;
        self.0.wait()?;
        Ok(())
    }
}

impl Drop for Launch {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            kill_process(Pid::from_child(&self.0), Signal::TERM).ok();
            self.0.wait().ok();
        }
    }
}
