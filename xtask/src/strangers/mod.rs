//! `cargo xtask strangers`: strangers at both ports of jobs, for a given time. The jobs must not
//! notice.
//!
//! A job has two kinds of ports. That of the store, on rank 0, is open for as long as the job runs.
//! In jobs of at most 32 ranks, each rank's own is open until all ranks have met. So there are two
//! jobs at a time: one that runs all the time, and beside it, one after another, jobs that meet.
//! The last rank of each of these comes late, and until then its other ranks wait at their open
//! ports. Ranks of one host send their tensors through shared memory, but they meet over sockets
//! like ranks of many hosts.
//!
//! The strangers are threads. One of the ranks of the running job reaches its store through a
//! [recorder], and the strangers send what it said: whole, in part, with flipped bits, slowly. They
//! also send noise, claims of much to come, the other side's own answers, or nothing. A
//! [seed](StrangersArguments::seed) fixes all that they choose, but not the times.
//!
//! Each check was seen to fail:
//!
//! | check | seen to fail with |
//! |---|---|
//! | no rank grows by more than `--growth` MiB over its level before the strangers came | `--growth 0` |
//! | no rank ends | a `kill` of a rank by hand |
//! | each job ends with the bits of one that nobody disturbed | another seed of the job |
//! | both kinds of ports have answered strangers who said the right greeting | a recording of zeros |

mod attack;
mod memory;
mod ports;
mod recorder;

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use rustix::process::Pid;

use self::attack::{Field, bother};
use self::memory::Levels;
use self::ports::{PortKind, store_of, targets};
use self::recorder::{Recorder, Recording};
use crate::files::{remove_directory, write};
use crate::job::{ENDLESS, HANG_TIMEOUT, Job, Work, done, last_lines, newest, program};
use crate::shell::say;

/// The options of `cargo xtask strangers`.
#[derive(Args)]
pub(crate) struct StrangersArguments {
    /// The time for which strangers come
    #[arg(long, value_name = "N", default_value_t = 60)]
    seconds: u64,
    /// The number of ranks of each job
    #[arg(long, value_name = "N", default_value_t = 4)]
    #[arg(value_parser = clap::value_parser!(u16).range(2..))]
    ranks: u16,
    /// The number of strangers at a time
    #[arg(long, value_name = "N", default_value_t = 4)]
    strangers: u64,
    /// The most MiB that a rank may grow by
    #[arg(long, value_name = "MIB", default_value_t = 64)]
    growth: u64,
    /// The seed of all choices [default: random]
    #[arg(long, value_name = "Z")]
    seed: Option<u64>,
    /// The `fsdp` to test [default: the debug build of this tree]
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
}

/// The steps of a job that meets.
const STEPS: u64 = 20;
/// The steps between two saves.
const SAVE_EVERY: u64 = 20;
/// The checkpoints of the running job before its level of memory is taken.
const WARM: u64 = 5;
/// The time for which a rank is late.
const LATE_DELAY: Duration = Duration::from_secs(10);
/// The time between two looks at the jobs.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// The time between two reports.
const REPORT_INTERVAL: Duration = Duration::from_secs(30);

// The places of the jobs' ports in the field.
const RUNNING: usize = 0;
const MEETING: usize = 1;

/// The script of a rank whose last one may be late: it waits until the file `$1` is there. That
/// file may name the port at which it is to look for the store. `fsdp train` follows.
const LATE_RANK: &str = r#"
come=$1; shift
if [ "$RANK" = $((WORLD_SIZE - 1)) ]; then
    while ! [ -e "$come" ]; do sleep 0.05; done
    port=$(cat "$come"); MASTER_PORT=${port:-$MASTER_PORT}
fi
exec "$@"
"#;

/// The task itself.
struct Strangers<'a> {
    work: Work,
    field: Field,
    dir: &'a Path,
    /// The most bytes that a rank may grow by.
    growth: u64,
}

/// Lets strangers come, and checks that the jobs have not noticed.
pub(crate) fn run(root: &Path, arguments: &StrangersArguments) -> Result<()> {
    let seed = arguments.seed.unwrap_or_else(rand::random);
    say(&format!("strangers: seed {seed}"));
    let dir = tempfile::tempdir()?;
    let work = Work {
        program: program(root, arguments.program.as_ref())?,
        ranks: arguments.ranks.into(),
        steps: STEPS,
        save_every: SAVE_EVERY,
        keep_last: Some(2),
        timeout: 60,
        max_restarts: 0,
        grace: 10,
    };
    let task = Strangers {
        work,
        field: Field::default(),
        dir: dir.path(),
        growth: arguments.growth << 20,
    };
    task.run(arguments, seed).with_context(|| {
        let outputs = ["running", "meeting"]
            .map(|job| format!("the {job} job:\n{}", last_lines(&task.output_path(job))));
        format!("seed {seed}\n{}", outputs.join("\n"))
    })
}

impl Strangers<'_> {
    fn run(&self, arguments: &StrangersArguments, seed: u64) -> Result<()> {
        // Step 1: the bits of the jobs that meet.
        let quiet = self.dir.join("quiet");
        ensure!(
            self.work
                .start(&quiet, &self.output_path("meeting"))?
                .wait(HANG_TIMEOUT)?,
            "a job takes more than {HANG_TIMEOUT:?}"
        );
        // Step 2: a job that runs, and whose last rank is overheard while it joins.
        let out = self.dir.join("running");
        let endless = Work {
            steps: ENDLESS,
            ..self.work.clone()
        };
        let (mut job, recording) = self.overhear(&endless, &out)?;
        self.warm_up(&mut job, &out)?;
        // Step 3: strangers come.
        let seconds = Duration::from_secs(arguments.seconds);
        let (grown, meetings) = thread::scope(|scope| {
            let field = &self.field;
            let recording = &recording;
            for number in 0..arguments.strangers {
                scope.spawn(move || bother(field, recording, seed.wrapping_add(number)));
            }
            // A meeting that fails ends all the rest, instead of being told only at the end.
            let meetings = scope.spawn(|| self.meet(&quiet).inspect_err(|_| field.end()));
            let grown = self.watch(&mut job, &out, seconds);
            field.end();
            match meetings.join() {
                Ok(meetings) => Ok((grown?, meetings?)),
                Err(_) => bail!("the thread of the meetings panicked"),
            }
        })?;
        for (kind, visits) in [
            ("the store", &self.field.store),
            ("a rank", &self.field.rank),
        ] {
            let answered = visits.answered.load(Ordering::Relaxed);
            ensure!(
                answered > 0,
                "no stranger got an answer at the port of {kind}, so none was tested"
            );
        }
        // Step 4: as many steps, and nobody disturbs them. Only now is their number known.
        job.stop()?;
        let steps = newest(&out)?;
        say(&format!(
            "strangers: they are gone; now {steps} steps that nobody disturbs"
        ));
        let alone = self.dir.join("alone");
        let undisturbed = Work {
            steps,
            ..self.work.clone()
        };
        let limit = 3 * seconds + HANG_TIMEOUT;
        ensure!(
            undisturbed
                .start(&alone, &self.output_path("running"))?
                .wait(limit)?,
            "{steps} steps take more than {limit:?}"
        );
        undisturbed.check_same(&alone, &out, steps)?;
        say(&format!(
            "strangers: {}; no rank ended, none grew by more than {:.1} MiB, \
             {steps} steps and {meetings} meetings have the bits of undisturbed ones",
            self.summary_text(),
            mebibytes(grown)
        ));
        Ok(())
    }

    /// Returns the file to which a job writes what it says.
    fn output_path(&self, job: &str) -> PathBuf {
        self.dir.join(format!("said-{job}"))
    }

    /// Starts a job whose last rank reaches the store through a recorder, and returns it with what
    /// that rank has said.
    fn overhear(&self, work: &Work, out: &Path) -> Result<(Job, Recording)> {
        let recorder = Recorder::open()?;
        let come = self.dir.join("come");
        write(&come, &recorder.port()?.to_string())?;
        let mut job = start_with_late_rank(work, &come, out, &self.output_path("running"))?;
        let deadline = Instant::now() + HANG_TIMEOUT;
        let mut leads = false;
        while newest(out)? == 0 {
            if !leads && let Some(rank) = job.ranks()?.first() {
                // Its variables are those of the launcher until it runs its own program.
                if let Ok(store) = store_of(*rank) {
                    recorder.lead_to(store)?;
                    leads = true;
                }
            }
            ensure!(!job.wait(Duration::from_millis(20))?, "the job has ended");
            ensure!(Instant::now() < deadline, "the job does not begin");
        }
        // Strangers who have nothing to replay would test nothing.
        let recording = recorder.recording();
        let Recording { greeting, all } = &recording;
        ensure!(
            !greeting.is_empty() && all.len() > greeting.len(),
            "nothing was overheard"
        );
        say(&format!(
            "strangers: overheard {} bytes, the first {} of them a greeting",
            all.len(),
            greeting.len()
        ));
        Ok((job, recording))
    }

    /// Waits until the running job's memory has reached its level.
    fn warm_up(&self, job: &mut Job, out: &Path) -> Result<()> {
        let deadline = Instant::now() + HANG_TIMEOUT;
        while newest(out)? < WARM * SAVE_EVERY {
            ensure!(!job.wait(CHECK_INTERVAL)?, "the job has ended");
            ensure!(Instant::now() < deadline, "the job does not begin");
        }
        Ok(())
    }

    /// Watches the running job for some time, and returns the largest growth of a rank.
    fn watch(&self, job: &mut Job, out: &Path, duration: Duration) -> Result<u64> {
        let ranks = job.ranks()?;
        let levels = Levels::measure(&ranks)?;
        let begin = Instant::now();
        let mut reported = Instant::now();
        let mut grown = 0;
        let before = done(out)?;
        self.field.set_targets(RUNNING, targets(&ranks));
        while begin.elapsed() < duration && !self.field.has_ended() {
            ensure!(!job.wait(CHECK_INTERVAL)?, "the running job has ended");
            ensure!(job.ranks()? == ranks, "a rank of the running job has ended");
            grown = grown.max(levels.check(self.growth)?);
            if reported.elapsed() > REPORT_INTERVAL {
                reported = Instant::now();
                say(&format!(
                    "strangers: {} s; {}; the most growth is {:.1} MiB",
                    begin.elapsed().as_secs(),
                    self.summary_text(),
                    mebibytes(grown)
                ));
            }
        }
        // The job is about to stop, so strangers must not take its ports for those of another.
        self.field.set_targets(RUNNING, Vec::new());
        let steps = done(out)? - before;
        say(&format!(
            "strangers: the running job did {steps} steps in {:.0?}",
            begin.elapsed()
        ));
        ensure!(
            steps > 0 || self.field.has_ended(),
            "the running job did no step in {duration:?}"
        );
        Ok(grown)
    }

    /// Lets one job after another meet until the end, and returns their number.
    fn meet(&self, quiet: &Path) -> Result<u64> {
        let out = self.dir.join("meeting");
        let mut meetings = 0;
        while !self.field.has_ended() {
            let come = self.dir.join(format!("come-{meetings}"));
            self.meet_once(&out, &come)
                .and_then(|()| self.work.check_same(quiet, &out, STEPS))
                .with_context(|| format!("meeting {meetings}"))?;
            remove_directory(&out)?;
            meetings += 1;
        }
        Ok(meetings)
    }

    /// Runs a job whose last rank is late. Until it comes, the ports of the others are open.
    fn meet_once(&self, out: &Path, come: &Path) -> Result<()> {
        let mut job = start_with_late_rank(&self.work, come, out, &self.output_path("meeting"))?;
        // The late rank has no port yet, and its memory says nothing: it is still a shell.
        let mut waiting = self.wait_for_ports(&mut job)?;
        waiting.retain(|&rank| !targets(&[rank]).is_empty());
        let levels = Levels::measure(&waiting)?;
        let begin = Instant::now();
        while begin.elapsed() < LATE_DELAY && !self.field.has_ended() {
            ensure!(
                !job.wait(CHECK_INTERVAL)?,
                "it has ended before its last rank came"
            );
            levels.check(self.growth)?;
        }
        write(come, "")?;
        // Strangers come to each port for as long as it is open.
        while !job.wait(CHECK_INTERVAL)? {
            self.field.set_targets(MEETING, targets(&job.ranks()?));
            ensure!(begin.elapsed() < HANG_TIMEOUT, "it does not end");
        }
        self.field.set_targets(MEETING, Vec::new());
        Ok(())
    }

    /// Waits until the ports of the store and of all ranks but the last are open, and lets
    /// strangers come to them. Returns the processes of the ranks.
    fn wait_for_ports(&self, job: &mut Job) -> Result<Vec<Pid>> {
        let deadline = Instant::now() + HANG_TIMEOUT;
        loop {
            let ranks = job.ranks()?;
            let open = targets(&ranks);
            let stores = open
                .iter()
                .filter(|target| target.kind == PortKind::Store)
                .count();
            if stores == 1 && open.len() == self.work.ranks {
                self.field.set_targets(MEETING, open);
                return Ok(ranks);
            }
            ensure!(!job.wait(CHECK_INTERVAL)?, "the job has ended");
            ensure!(Instant::now() < deadline, "its ports do not open: {open:?}");
        }
    }

    /// Returns what strangers did so far, as a text.
    fn summary_text(&self) -> String {
        format!(
            "{} to stores, {} to ranks",
            self.field.store.summary_text(),
            self.field.rank.summary_text()
        )
    }
}

/// Starts a job whose last rank does not come before the file `come` is there.
fn start_with_late_rank(work: &Work, come: &Path, out: &Path, output_path: &Path) -> Result<Job> {
    let come = come.to_str().context("a path is no text")?;
    work.start_with_script(&["sh", "-c", LATE_RANK, "rank", come], out, output_path)
}

fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
