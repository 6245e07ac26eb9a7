//! `cargo xtask soak`: ranks that are killed or stopped at random moments of training and saving,
//! over and over.
//!
//! Each run launches `fsdp train --backend tcp` on a few processes and hits one of them. Then every
//! other rank must end with an error in time, no process may be left, and the newest committed
//! checkpoint must verify and resume.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use rustix::process::{Pid, Signal, kill_process};

use crate::job::{self, SMALL_MODEL, is_alive, newest};
use crate::shell::say;

/// The number of ranks of a run.
const RANKS: usize = 3;
/// The number of ranks that resume it.
const RESUMED: usize = 2;
/// The deadline of the ranks.
const DEADLINE: Duration = Duration::from_secs(4);
/// The time after the deadline within which they must have ended.
const LATE: Duration = Duration::from_secs(2);
/// The latest time after their start at which ranks are hit.
const LONGEST_LIFE: Duration = Duration::from_millis(2500);
/// The time after which a step counts as hanging.
const HANG: Duration = Duration::from_secs(60);

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

/// The options of `fsdp train` for a run that saves after every step until it is killed.
const ENDLESS: [&str; 6] = ["--batch", "12", "--steps", "1000000", "--save-every", "1"];

/// The outcome of a run.
#[derive(Debug, Default)]
struct Outcome {
    /// The step of the newest checkpoint, if there was one.
    resumed_from: Option<u64>,
    /// The time until the last survivor had ended.
    slowest: Duration,
}

/// Runs `runs` times, starting with this seed, or a random one.
pub(crate) fn run(
    root: &Path,
    runs: u64,
    seed: Option<u64>,
    program: Option<PathBuf>,
) -> Result<()> {
    let program = job::program(root, program.as_ref())?;
    let seed = seed.unwrap_or_else(rand::random);
    say(&format!(
        "soak: {runs} runs of {RANKS} ranks, deadline {DEADLINE:?}; the first has `--seed {seed}`"
    ));
    let (mut slowest, mut resumed) = (Duration::ZERO, 0);
    let mut failures = Vec::new();
    for number in 0..runs {
        let seed = seed.wrapping_add(number);
        match once(&program, seed) {
            Ok(outcome) => {
                slowest = slowest.max(outcome.slowest);
                resumed += u64::from(outcome.resumed_from.is_some());
            }
            Err(error) => {
                say(&format!("soak: `--runs 1 --seed {seed}` failed: {error:#}"));
                failures.push(seed);
            }
        }
        if (number + 1) % 10 == 0 {
            let seconds = slowest.as_secs_f64();
            say(&format!(
                "soak: {} of {runs} runs, {} failed; {resumed} resumed, the slowest survivor took {seconds:.2} s",
                number + 1,
                failures.len()
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

/// Starts a run, kills or freezes a random rank at a random moment, and checks what follows: the
/// survivors must end in time with exit code 16, no process may be left behind, and the newest
/// checkpoint must be whole and resumable.
fn once(program: &Path, seed: u64) -> Result<Outcome> {
    let mut random = StdRng::seed_from_u64(seed);
    let dir = tempfile::tempdir()?;
    let (dir, out) = (dir.path(), dir.path().join("out"));
    let victim = random.random_range(0..RANKS);
    let signal = if random.random_bool(0.5) {
        Signal::KILL
    } else {
        Signal::STOP
    };
    let life = LONGEST_LIFE.mul_f64(random.random());
    let mut launch = Launch::start(program, dir, &out, victim)?;
    let pids = launch.pids(dir)?;
    thread::sleep(life);
    let hit = Instant::now();
    if kill_process(pids[victim], signal).is_err() {
        bail!(
            "rank {victim} had ended before it was hit after {life:?}\n{}",
            launch.said(dir)
        );
    }
    let what = format!("rank {victim} got {signal:?} after {life:?}");

    let survivors = (0..RANKS).filter(|&rank| rank != victim);
    let mut slowest = Duration::ZERO;
    for rank in survivors {
        let path = dir.join(format!("code-{rank}"));
        while !path.exists() {
            ensure!(
                hit.elapsed() < DEADLINE + LATE,
                "rank {rank} still runs {:?} later; {what}\n{}",
                hit.elapsed(),
                launch.said(dir)
            );
            thread::sleep(Duration::from_millis(5));
        }
        slowest = slowest.max(hit.elapsed());
        let code = fs::read_to_string(&path)?;
        ensure!(
            code.trim() == "16",
            "rank {rank} ended with code {}, not 16; {what}\n{}",
            code.trim(),
            launch.said(dir)
        );
    }
    launch.end()?;
    for (rank, &pid) in pids.iter().enumerate() {
        let until = Instant::now() + LATE;
        while is_alive(pid) {
            ensure!(
                Instant::now() < until,
                "rank {rank} was left behind; {what}"
            );
            thread::sleep(Duration::from_millis(5));
        }
    }
    let resumed_from = Some(newest(&out)?).filter(|step| *step > 0);
    if let Some(step) = resumed_from {
        let checkpoint = out.join(format!("step-{step:08}"));
        finish(Command::new(program).arg("verify").arg(&checkpoint))
            .with_context(|| what.clone())?;
        let steps = (step + 1).to_string();
        let mut resume = Command::new(program);
        resume
            .args([
                "train",
                "--resume",
                "--nproc",
                &RESUMED.to_string(),
                "--steps",
                &steps,
                "--out",
            ])
            .arg(&out);
        finish(&mut resume).with_context(|| what.clone())?;
        ensure!(
            newest(&out)? == step + 1,
            "the resumed run saved nothing; {what}"
        );
    }
    Ok(Outcome {
        resumed_from,
        slowest,
    })
}

/// A running launcher, which is ended on drop.
struct Launch(Child);

impl Launch {
    /// Starts ranks that run [`RANK`], which wait for all but `victim`. Their output goes to the
    /// file `said`.
    fn start(program: &Path, dir: &Path, out: &Path, victim: usize) -> Result<Launch> {
        let mut command = Command::new(program);
        command.args([
            "launch",
            "--grace",
            "1",
            "--nproc",
            &RANKS.to_string(),
            "--",
            "sh",
            "-c",
            RANK,
            "rank",
        ]);
        command
            .arg(dir)
            .arg(victim.to_string())
            .arg(program)
            .args(["train", "--backend", "tcp"]);
        command
            .args(["--timeout", &DEADLINE.as_secs().to_string(), "--out"])
            .arg(out)
            .args(SMALL_MODEL)
            .args(ENDLESS);
        let said = fs::File::options()
            .create(true)
            .append(true)
            .open(dir.join("said"))?;
        command
            .stdin(Stdio::null())
            .stdout(said.try_clone()?)
            .stderr(said);
        Ok(Launch(command.spawn().with_context(|| {
            format!("failed to start `{}`", program.display())
        })?))
    }

    /// Waits for the ranks to start, and returns their processes.
    fn pids(&mut self, dir: &Path) -> Result<Vec<Pid>> {
        let until = Instant::now() + HANG;
        let pid = |rank: usize| loop {
            if let Ok(text) = fs::read_to_string(dir.join(format!("pid-{rank}"))) {
                return Pid::from_raw(text.trim().parse()?).context("a process has no number");
            }
            ensure!(Instant::now() < until, "rank {rank} did not start");
            thread::sleep(Duration::from_millis(2));
        };
        (0..RANKS).map(pid).collect()
    }

    /// Waits until the launcher has ended all that is left.
    fn end(&mut self) -> Result<()> {
        let until = Instant::now() + HANG;
        while self.0.try_wait()?.is_none() {
            ensure!(Instant::now() < until, "the launcher hangs");
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn said(&self, dir: &Path) -> String {
        fs::read_to_string(dir.join("said")).unwrap_or_default()
    }
}

impl Drop for Launch {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            // The launcher passes the signal on, and kills ranks that ignore it.
            kill_process(Pid::from_child(&self.0), Signal::TERM).ok();
            self.0.wait().ok();
        }
    }
}

fn finish(command: &mut Command) -> Result<()> {
    let output = command.stdin(Stdio::null()).output()?;
    if !output.status.success() {
        bail!(
            "{command:?}: {}\n{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(())
}
