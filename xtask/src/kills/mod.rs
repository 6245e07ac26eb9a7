//! `cargo xtask kills`: a run whose ranks and launchers are killed and stopped over and over must
//! end with the bits of one that nobody disturbed.
//!
//! Without `--every` these are many short runs, hit at random moments. With it, it is one long run
//! with a failure after each such time, and its [effective time](effective_share) is told. In
//! both, each failure may lose the steps since the last save at most, and the ranks that it leaves
//! must end within a step and the timeout.

mod disturb;
mod effective;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use rand::SeedableRng as _;
use rand::rngs::StdRng;

use self::disturb::{DisturbanceCounts, DisturbedRun, Pace};
use self::effective::effective_share;
use crate::files::remove_directory;
use crate::job::{ENDLESS, HANG_TIMEOUT, Work, last_lines, newest, program, step_seconds};
use crate::shell::say;

/// The options of `cargo xtask kills`.
#[derive(Args)]
pub(crate) struct KillsArguments {
    /// The number of failures: processes, or halves of all ranks, to kill or stop
    #[arg(long, value_name = "N", default_value_t = 100)]
    kills: u64,
    /// The number of ranks
    #[arg(long, value_name = "N", default_value_t = 8)]
    ranks: usize,
    /// The seed of all choices [default: random]
    #[arg(long, value_name = "Z")]
    seed: Option<u64>,
    /// The steps between two saves: no more may be lost
    #[arg(long, value_name = "K", default_value_t = 3)]
    save_every: u64,
    /// The deadline of the ranks: a stopped one is noticed after it
    #[arg(long, value_name = "SECONDS", default_value_t = 5)]
    timeout: u64,
    /// The time between two failures of one long run, which would take N such times undisturbed
    /// [default: short runs, hit at random moments]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    every: Option<u32>,
    /// The least effective time of that run: the time of its steps undisturbed, as a part of the
    /// time that it took
    #[arg(long, value_name = "SHARE", requires = "every")]
    effective: Option<f64>,
    /// The `fsdp` to test [default: the debug build of this tree]
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
}

/// The steps of a short run.
const STEPS: u64 = 150;
/// The longest time between two failures of a short run, in times of one that nobody disturbs: most
/// runs must live to see one.
const LONGEST_LIFE: f64 = 0.5;
/// The failures of a short run at most: it must end some time.
const KILLS_OF_A_RUN: u64 = 25;
/// The checkpoints that a long run keeps.
const KEPT: u64 = 3;

/// Disturbs as many runs as it takes, and compares each with one that nobody disturbed.
pub(crate) fn run(root: &Path, arguments: &KillsArguments) -> Result<()> {
    let seed = arguments.seed.unwrap_or_else(rand::random);
    let work = Work {
        program: program(root, arguments.program.as_ref())?,
        ranks: arguments.ranks,
        steps: STEPS,
        save_every: arguments.save_every,
        keep_last: None,
        timeout: arguments.timeout,
        max_restarts: 100_000,
        grace: 2,
    };
    let dir = tempfile::tempdir()?;
    say(&format!("kills: seed {seed}"));
    let mut random = StdRng::seed_from_u64(seed);
    match arguments.every {
        Some(seconds) => {
            let every = Duration::from_secs(seconds.into());
            one_long_run(work, dir.path(), every, arguments, &mut random)
        }
        None => many_short_runs(&work, dir.path(), arguments.kills, &mut random),
    }
    .with_context(|| format!("seed {seed}\n{}", last_lines(&dir.path().join("said"))))
}

fn many_short_runs(work: &Work, dir: &Path, kills: u64, random: &mut StdRng) -> Result<()> {
    let quiet = dir.join("quiet");
    let output_path = dir.join("said");
    let start = Instant::now();
    ensure!(
        work.start(&quiet, &output_path)?.wait(HANG_TIMEOUT)?,
        "the run that nobody disturbs takes more than {HANG_TIMEOUT:?}"
    );
    let undisturbed = start.elapsed();
    say(&format!(
        "kills: a run of {STEPS} steps on {} ranks takes {undisturbed:.1?}",
        work.ranks
    ));
    let longest_step = longest_duration(&step_seconds(&quiet)?);
    let mut counts = DisturbanceCounts::default();
    let mut runs = 0;
    let mut disturbed = Duration::ZERO;
    while counts.all() < kills {
        let out = dir.join(format!("run-{runs}"));
        let start = Instant::now();
        let longest = undisturbed.mul_f64(LONGEST_LIFE);
        let pace = Pace::Random {
            longest,
            in_all: kills,
            of_a_run: KILLS_OF_A_RUN,
        };
        let run = DisturbedRun {
            work,
            out: &out,
            output_path: &output_path,
            pace,
            longest_step,
        };
        run.disturb(random, &mut counts)
            .with_context(|| format!("run {runs}"))?;
        disturbed += start.elapsed();
        runs += 1;
        // Every bit of the state after the last step is the same.
        work.check_same(&quiet, &out, STEPS)
            .with_context(|| format!("run {runs}"))?;
        fs::remove_file(&output_path).ok();
        // A thousand kills take many runs.
        remove_directory(&out)?;
        say(&format!(
            "kills: {} in {runs} runs, no wrong bit; {counts:?}; {disturbed:.0?} in all",
            counts.all()
        ));
    }
    Ok(())
}

/// Disturbs one run at a fixed pace, and tells its effective time.
fn one_long_run(
    work: Work,
    dir: &Path,
    every: Duration,
    arguments: &KillsArguments,
    random: &mut StdRng,
) -> Result<()> {
    let quiet = dir.join("quiet");
    let out = dir.join("disturbed");
    let output_path = dir.join("said");
    // Step 1: nobody disturbs a run that takes as long. It tells how many steps there are to do,
    // their bits, and their time.
    let length = every.mul_f64(arguments.kills as f64);
    say(&format!(
        "kills: a run that nobody disturbs takes {length:.0?}"
    ));
    let start = Instant::now();
    let endless = Work {
        steps: ENDLESS,
        keep_last: Some(KEPT),
        ..work
    };
    let mut job = endless.start(&quiet, &output_path)?;
    ensure!(
        !job.wait(length)?,
        "the run that nobody disturbs ended too soon"
    );
    job.stop()?;
    let undisturbed = start.elapsed();
    let steps = newest(&quiet)?;
    let seconds = step_seconds(&quiet)?;
    let alone = effective_share(&seconds, undisturbed)
        .context("the run that nobody disturbs has done no step")?;
    say(&format!(
        "kills: {steps} steps of {:.1} ms on {} ranks; \
         undisturbed, with saves, they took {undisturbed:.1?}: effective time {alone:.3}",
        seconds.iter().sum::<f64>() * 1e3 / seconds.len() as f64,
        work.ranks
    ));
    // Step 2: the same number of steps, with failures.
    let work = Work { steps, ..endless };
    let mut counts = DisturbanceCounts::default();
    let start = Instant::now();
    let run = DisturbedRun {
        work: &work,
        out: &out,
        output_path: &output_path,
        pace: Pace::Every(every),
        longest_step: longest_duration(&seconds),
    };
    run.disturb(random, &mut counts)?;
    let disturbed = start.elapsed();
    // Step 3: compare.
    work.check_same(&quiet, &out, steps)?;
    let share = effective_share(&seconds, disturbed).context("the run took no time")?;
    say(&format!(
        "kills: {} failures, one every {every:?}, no wrong bit; {counts:?}; \
         {steps} steps took {disturbed:.1?}: effective time {share:.3}",
        counts.all()
    ));
    let limit = arguments.effective.unwrap_or(0.0);
    ensure!(
        share >= limit,
        "the effective time is {share:.3}, less than {limit}"
    );
    Ok(())
}

/// Returns the longest of some steps.
fn longest_duration(seconds: &[f64]) -> Duration {
    Duration::from_secs_f64(seconds.iter().copied().fold(0.0, f64::max))
}
