//! `cargo xtask soak`: ranks that are killed or stopped at random moments of training and saving,
//! over and over.
//!
//! Each run launches `fsdp train --backend tcp` on a few processes and hits one of them. Then every
//! other rank must end with an error in time, no process may be left, and the newest committed
//! checkpoint must verify and resume.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use rustix::process::{Pid, Signal, kill_process};

use crate::job::{self, ENDLESS, HANG_TIMEOUT, Job, Work, is_alive, last_lines, newest};
use crate::shell::{output, say};

/// Options of `cargo xtask soak`.
#[derive(Args)]
pub(crate) struct SoakArguments {
    /// The number of runs
    #[arg(long, value_name = "N", default_value_t = 200)]
    runs: u64,
    /// The seed of the first run [default: random]
    #[arg(long, value_name = "Z")]
    seed: Option<u64>,
    /// The `fsdp` to test [default: the debug build of this tree]
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
}

/// The number of ranks of a run.
const RANKS: usize = 3;
/// The number of ranks that resume it.
const RESUMED: usize = 2;
/// The deadline of the ranks.
const JOB_TIMEOUT: Duration = Duration::from_secs(4);
/// The time after the deadline within which they must have ended.
const LATE_TIMEOUT: Duration = Duration::from_secs(2);
/// The time between two looks at a run.
const RETRY_INTERVAL: Duration = Duration::from_millis(2);
/// The latest time after their start at which ranks are hit.
const LONGEST_LIFE: Duration = Duration::from_millis(2500);
/// The exit code of a rank that has lost another one.
const LOST_A_RANK: &str = "16";

/// The script that each rank runs, with `train` as its child. The launcher ends all ranks when one
/// ends, so the script waits until all survivors have ended by themselves. `$1` is the directory,
/// `$2` the rank that is hit.
const RANK: &str = r#"
dir=$1; victim=$2; shift 2
"$@" & echo $! > "$dir/pid-$RANK.new"; mv "$dir/pid-$RANK.new" "$dir/pid-$RANK"
wait $!; code=$?
echo $code > "$dir/code-$RANK.new"; mv "$dir/code-$RANK.new" "$dir/code-$RANK"
rank=0
while [ $rank -lt $WORLD_SIZE ]; do
    while [ $rank != $victim ] && ! [ -e "$dir/code-$rank" ]; do sleep 0.02; done
    rank=$((rank + 1))
done
exit $code
"#;

/// The outcome of a run.
#[derive(Debug, Default)]
struct Outcome {
    /// `true` if there was a checkpoint to resume from.
    resumed: bool,
    /// The time until the last survivor had ended.
    slowest: Duration,
}

/// Runs as often as was asked for.
pub(crate) fn run(root: &Path, arguments: &SoakArguments) -> Result<()> {
    let work = Work {
        program: job::program(root, arguments.program.as_ref())?,
        ranks: RANKS,
        steps: ENDLESS,
        save_every: 1,
        keep_last: None,
        timeout: JOB_TIMEOUT.as_secs(),
        max_restarts: 0,
        grace: 1,
    };
    let runs = arguments.runs;
    let first_seed = arguments.seed.unwrap_or_else(rand::random);
    say(&format!(
        "soak: {runs} runs of {RANKS} ranks, deadline {JOB_TIMEOUT:?}; \
         the first has `--seed {first_seed}`"
    ));
    let mut slowest = Duration::ZERO;
    let mut resumed = 0;
    let mut failures = Vec::new();
    for number in 1..=runs {
        let seed = first_seed.wrapping_add(number - 1);
        match run_once(&work, seed) {
            Ok(outcome) => {
                slowest = slowest.max(outcome.slowest);
                resumed += u64::from(outcome.resumed);
            }
            Err(error) => {
                say(&format!("soak: `--runs 1 --seed {seed}` failed: {error:#}"));
                failures.push(seed);
            }
        }
        if number % 10 == 0 {
            say(&format!(
                "soak: {number} of {runs} runs, {} failed; {resumed} resumed, \
                 the slowest survivor took {:.2} s",
                failures.len(),
                slowest.as_secs_f64()
            ));
        }
    }
    ensure!(
        failures.is_empty(),
        "{} of {runs} runs failed; their seeds: {failures:?}",
        failures.len()
    );
    Ok(())
}

/// Starts a run in a directory of its own, hits a random rank at a random moment, and checks what
/// follows.
fn run_once(work: &Work, seed: u64) -> Result<Outcome> {
    let mut random = StdRng::seed_from_u64(seed);
    let victim = random.random_range(0..RANKS);
    let signal = if random.random_bool(0.5) {
        Signal::KILL
    } else {
        Signal::STOP
    };
    let life = LONGEST_LIFE.mul_f64(random.random());
    let temporary = tempfile::tempdir()?;
    let directory = temporary.path();
    let path = directory.to_str().context("a path is no text")?;
    let out = directory.join("out");
    let output_path = directory.join("said");

    let script = ["sh", "-c", RANK, "rank", path, &victim.to_string()];
    let mut job = work.start_with_script(&script, &out, &output_path)?;
    let what = format!("rank {victim} gets {signal:?} after {life:?}");
    let slowest = fail_ranks(&mut job, directory, victim, signal, life)
        .with_context(|| format!("{what}\n{}", last_lines(&output_path)))?;
    let newest = newest(&out)?;
    if newest > 0 {
        resume(work, &out, newest).context(what)?;
    }
    Ok(Outcome {
        resumed: newest > 0,
        slowest,
    })
}

/// Kills or stops a rank some time after the start. The other ranks must end in time, and as ranks
/// that have lost one, and no process may be left behind. Returns the time until they had ended.
fn fail_ranks(
    job: &mut Job,
    directory: &Path,
    victim: usize,
    signal: Signal,
    life: Duration,
) -> Result<Duration> {
    // The life of a run begins when all its ranks do, because a slow start is no test.
    let ranks = started_ranks(directory)?;
    thread::sleep(life);
    let failed_at = Instant::now();
    if kill_process(ranks[victim], signal).is_err() {
        bail!("rank {victim} had ended before");
    }
    for rank in (0..RANKS).filter(|&rank| rank != victim) {
        let code = wait_for_file(
            &directory.join(format!("code-{rank}")),
            JOB_TIMEOUT + LATE_TIMEOUT,
        )
        .with_context(|| format!("rank {rank} still runs {:?} later", failed_at.elapsed()))?;
        ensure!(
            code.trim() == LOST_A_RANK,
            "rank {rank} ended with code {}, not {LOST_A_RANK}",
            code.trim()
        );
    }
    let slowest = failed_at.elapsed();
    ensure!(
        slowest < JOB_TIMEOUT + LATE_TIMEOUT,
        "the last rank ended {slowest:?} later"
    );
    // The scripts have ended with their ranks by now, but a stopped rank is the launcher's to kill.
    ensure!(
        job.wait_for_end(HANG_TIMEOUT)?.is_some(),
        "the launcher hangs"
    );
    for (rank, &process) in ranks.iter().enumerate() {
        let deadline = Instant::now() + LATE_TIMEOUT;
        while is_alive(process) {
            ensure!(Instant::now() < deadline, "rank {rank} was left behind");
            thread::sleep(RETRY_INTERVAL);
        }
    }
    Ok(slowest)
}

/// Waits for the ranks to start, and returns their processes.
fn started_ranks(directory: &Path) -> Result<Vec<Pid>> {
    let mut ranks = Vec::new();
    for rank in 0..RANKS {
        let text = wait_for_file(&directory.join(format!("pid-{rank}")), HANG_TIMEOUT)
            .with_context(|| format!("rank {rank} did not start"))?;
        ranks.push(Pid::from_raw(text.trim().parse()?).context("a process has no number")?);
    }
    Ok(ranks)
}

/// Waits until a rank's script has written a file, and returns its text.
fn wait_for_file(path: &Path, timeout: Duration) -> Result<String> {
    let deadline = Instant::now() + timeout;
    while !path.exists() {
        ensure!(Instant::now() < deadline, "it took more than {timeout:?}");
        thread::sleep(RETRY_INTERVAL);
    }
    Ok(fs::read_to_string(path)?)
}

/// Checks that the newest checkpoint is whole, and that other ranks resume from it.
fn resume(work: &Work, out: &Path, newest_step: u64) -> Result<()> {
    let checkpoint = out.join(format!("step-{newest_step:08}"));
    output(Command::new(&work.program).arg("verify").arg(checkpoint))?;
    let next_step = newest_step + 1;
    output(
        Command::new(&work.program)
            .args(["train", "--resume"])
            .args(["--nproc", &RESUMED.to_string()])
            .args(["--steps", &next_step.to_string()])
            .arg("--out")
            .arg(out),
    )?;
    ensure!(newest(out)? == next_step, "the resumed run saved nothing");
    Ok(())
}
