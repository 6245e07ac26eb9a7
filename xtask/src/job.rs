//! A job of `fsdp train` over several processes, as the tasks that disturb jobs start it and watch
//! it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::shell::cargo;

/// The time after which whatever a task waits for counts as hanging.
pub(crate) const HANG_TIMEOUT: Duration = Duration::from_secs(180);

/// The steps of a job that is ended by a signal.
pub(crate) const ENDLESS: u64 = 1_000_000_000;

/// The exit code of a job that was asked to stop, and has saved.
const STOPPED: i32 = 18;

/// The last lines of a job's output that a failed task shows.
const LINES_SHOWN: usize = 60;

/// The options of `fsdp train` for a model as small as they come.
pub(crate) const SMALL_MODEL: [&str; 12] = [
    "--layers",
    "1",
    "--heads",
    "2",
    "--hidden",
    "16",
    "--seq",
    "16",
    "--sample",
    "0",
    "--threads",
    "1",
];
/// The sequences of a step. Many numbers of ranks divide it.
const BATCH: u64 = 48;

/// The tokens of a step.
const TOKENS: f64 = BATCH as f64 * 16.0;

/// Returns the program to test: the one that was named, or else the debug build of this tree, which
/// this makes.
pub(crate) fn program(root: &Path, named: Option<&PathBuf>) -> Result<PathBuf> {
    if let Some(program) = named {
        return Ok(program.clone());
    }
    cargo(root, &["build", "--package", "fsdp-cli", "--locked"], &[])?;
    Ok(crate::shell::target(root).join("debug/fsdp"))
}

/// The work of a job. Its checkpoints have the same bits whatever happens on the way.
#[derive(Debug, Clone)]
pub(crate) struct Work {
    pub(crate) program: PathBuf,
    pub(crate) ranks: usize,
    pub(crate) steps: u64,
    pub(crate) save_every: u64,
    /// The number of checkpoints that are kept; `None` for all.
    pub(crate) keep_last: Option<u64>,
    /// The timeout of the ranks, in seconds: one that has stopped is noticed after it.
    pub(crate) timeout: u64,
    pub(crate) max_restarts: u64,
    /// The seconds for which ranks that were asked to end may go on.
    pub(crate) grace: u64,
}

impl Work {
    /// Starts the job, which writes to `out`. Its own output is appended to `output_path`.
    pub(crate) fn start(&self, out: &Path, output_path: &Path) -> Result<Job> {
        self.start_with_script(&[], out, output_path)
    }

    /// Starts the job with a script that each rank runs. The words of `fsdp train` follow those of
    /// the script.
    pub(crate) fn start_with_script(
        &self,
        script: &[&str],
        out: &Path,
        output_path: &Path,
    ) -> Result<Job> {
        let mut command = Command::new(&self.program);
        command.arg("launch");
        for (option, value) in [
            ("--grace", self.grace),
            ("--max-restarts", self.max_restarts),
            ("--nproc", self.ranks as u64),
        ] {
            command.arg(option).arg(value.to_string());
        }
        command
            .arg("--")
            .args(script)
            .arg(&self.program)
            .args(["train", "--backend", "tcp", "--resume=auto"])
            .args(SMALL_MODEL);
        for (option, value) in [
            ("--batch", Some(BATCH)),
            ("--timeout", Some(self.timeout)),
            ("--steps", Some(self.steps)),
            ("--save-every", Some(self.save_every)),
            ("--keep-last", self.keep_last),
        ] {
            if let Some(value) = value {
                command.arg(option).arg(value.to_string());
            }
        }
        // Appended, because a job that is started again goes on writing to the same file.
        let output = fs::File::options()
            .create(true)
            .append(true)
            .open(output_path)?;
        command
            .arg("--out")
            .arg(out)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output);
        match command.spawn() {
            Ok(launcher) => Ok(Job(launcher)),
            Err(error) => {
                Err(error).with_context(|| format!("failed to start `{}`", self.program.display()))
            }
        }
    }

    /// Checks that two jobs have ended with the same bits after this many steps.
    pub(crate) fn check_same(&self, out: &Path, other: &Path, steps: u64) -> Result<()> {
        let last = format!("step-{steps:08}");
        let diff = Command::new(&self.program)
            .arg("diff")
            .args([out.join(&last), other.join(&last)])
            .output()?;
        ensure!(
            diff.status.success(),
            "the job ended with other bits than the one that nobody disturbed:\n{}{}",
            String::from_utf8_lossy(&diff.stdout),
            String::from_utf8_lossy(&diff.stderr)
        );
        Ok(())
    }
}

/// A running launcher, which is ended on drop.
#[derive(Debug)]
pub(crate) struct Job(Child);

impl Job {
    pub(crate) fn launcher(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    /// Waits for the launcher to end, at most for `timeout`. Returns its status if it has ended.
    pub(crate) fn wait_for_end(&mut self, timeout: Duration) -> Result<Option<ExitStatus>> {
        let deadline = Instant::now() + timeout;
        loop {
            let status = self.0.try_wait()?;
            if status.is_some() || Instant::now() >= deadline {
                return Ok(status);
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits for the launcher to end well, at most for `timeout`. Returns `true` if it has ended.
    pub(crate) fn wait(&mut self, timeout: Duration) -> Result<bool> {
        match self.wait_for_end(timeout)? {
            Some(status) if status.success() => Ok(true),
            Some(status) => bail!("the launcher gave up: {status}"),
            None => Ok(false),
        }
    }

    /// Asks the job to stop, and waits until it has saved and ended.
    pub(crate) fn stop(&mut self) -> Result<()> {
        ensure!(
            !self.wait(Duration::ZERO)?,
            "the job had ended before it was asked to stop"
        );
        kill_process(self.launcher(), Signal::TERM)?;
        match self.wait_for_end(HANG_TIMEOUT)? {
            Some(status) if status.code() == Some(STOPPED) => Ok(()),
            Some(status) => bail!("the job was asked to stop: {status}"),
            None => bail!("the job does not stop"),
        }
    }

    /// Kills the launcher, and nothing else.
    pub(crate) fn kill(&mut self) -> Result<()> {
        self.0.kill()?;
        self.0.wait()?;
        Ok(())
    }

    /// Returns the processes of its ranks.
    pub(crate) fn ranks(&self) -> Result<Vec<Pid>> {
        // The ranks are children of whichever thread of the launcher has started them. Those that
        // have not become the program yet are no ranks yet.
        let id = self.0.id();
        let mut ranks = Vec::new();
        for entry in fs::read_dir(format!("/proc/{id}/task"))? {
            // A thread may end meanwhile.
            let Ok(children) = fs::read_to_string(entry?.path().join("children")) else {
                continue;
            };
            for child in children.split_whitespace() {
                let words = fs::read(format!("/proc/{child}/cmdline")).unwrap_or_default();
                if words.split(|byte| *byte == 0).any(|word| word == b"train") {
                    ranks.extend(Pid::from_raw(child.parse()?));
                }
            }
        }
        Ok(ranks)
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            // The launcher passes the signal on, and kills ranks that ignore it.
            kill_process(self.launcher(), Signal::TERM).ok();
            self.0.wait().ok();
        }
    }
}

/// Returns the last lines of the file to which jobs have written what they said.
pub(crate) fn last_lines(output_path: &Path) -> String {
    let text = fs::read_to_string(output_path).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES_SHOWN)..].join("\n")
}

/// Returns `true` if a process runs, or is stopped. One that has ended stays in the list until its
/// parent has noticed.
pub(crate) fn is_alive(process: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", process.as_raw_nonzero()));
    stat.is_ok_and(|stat| !stat.contains(") Z "))
}

/// Returns the step of the newest committed checkpoint, and 0 if there is none.
pub(crate) fn newest(out: &Path) -> Result<u64> {
    let Ok(list) = fs::read_dir(out) else {
        return Ok(0);
    };
    let mut newest = 0;
    for entry in list {
        let entry = entry?;
        let name = entry.file_name();
        let step: Option<u64> = name
            .to_str()
            .and_then(|name| name.strip_prefix("step-")?.parse().ok());
        // Only a committed checkpoint has its metadata.
        if let Some(step) = step
            && entry.path().join(".metadata").exists()
        {
            newest = newest.max(step);
        }
    }
    Ok(newest)
}

/// Returns the number of steps that a run has done, of those that its metrics tell.
pub(crate) fn done(out: &Path) -> Result<u64> {
    let steps = numbers(&out.join("metrics.jsonl"), |line| line["step"].as_u64())?;
    Ok(steps.last().map_or(0, |step| step + 1))
}

/// Returns the steps that a run has begun at, each time that it was started.
pub(crate) fn starts(out: &Path) -> Result<Vec<u64>> {
    numbers(&out.join("events.jsonl"), |line| {
        line["step"].as_u64().filter(|_| line["event"] == "start")
    })
}

/// Returns the seconds that each step of a run has taken, without saves.
pub(crate) fn step_seconds(out: &Path) -> Result<Vec<f64>> {
    numbers(&out.join("metrics.jsonl"), |line| {
        Some(TOKENS / line["tokens_per_s"].as_f64()?)
    })
}

/// Reads the numbers that lines of JSON have. The last line may be half written.
fn numbers<T>(file: &Path, number: impl Fn(&serde_json::Value) -> Option<T>) -> Result<Vec<T>> {
    if !file.exists() {
        return Ok(Vec::new());
    }
    let text = fs::read_to_string(file)?;
    Ok(text
        .lines()
        .filter_map(|line| number(&serde_json::from_str(line).ok()?))
        .collect())
}
