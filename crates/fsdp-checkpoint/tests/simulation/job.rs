//! A job: ranks that resume a run, save it, and remove what is old, with the code that real jobs
//! run.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex};

use anyhow::{Result, anyhow, ensure};
use fsdp_checkpoint::{
    CheckpointError, Checkpointer, CheckpointerOptions, LoadOptions, Location, Retention,
    SaveOptions, list_checkpoints, step_name,
};
use fsdp_comm::{LocalRanks, ProcessGroup};
use fsdp_formats::checkpoint::{Checkpoint, open};
use fsdp_formats::reader::OpenOptions;
use fsdp_formats::writer::WriteOptions;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::files::Machine;
use super::journal::Journal;
use super::schedule::{Killed, Schedule};
use super::simulate::locked;
use super::state::{part, version_in, version_of};

/// The directory of the run.
pub(crate) const RUN: &str = "/run";
/// The name of a checkpoint that is overwritten again and again.
pub(crate) const FINAL: &str = "final";
/// The stack of a rank.
const STACK_BYTES: usize = 1 << 20;

/// The plan of one job.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Job {
    pub(crate) ranks: usize,
    /// The seed of all that its ranks decide.
    pub(crate) seed: u64,
    /// The number of its first version: no other job has it.
    pub(crate) first_version: u64,
    pub(crate) saves: usize,
    pub(crate) overwrite: bool,
    pub(crate) incremental: bool,
    pub(crate) keep_last: usize,
    /// `true` if nothing goes wrong in it, so that every call must succeed.
    pub(crate) is_quiet: bool,
    /// `true` if it saves everything once and removes all leftovers: the last job of a simulation.
    pub(crate) is_last: bool,
    /// `true` if its ranks also save to one place without knowing of each other.
    pub(crate) has_rivals: bool,
}

/// The facts that all ranks of a job share with the checker.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) machine: Arc<Machine>,
    pub(crate) journal: Mutex<Journal>,
    pub(crate) violations: Mutex<Vec<String>>,
    /// The outcomes of each save of the job that runs, by its number.
    outcomes: Mutex<Vec<Vec<bool>>>,
    /// The versions of the ranks whose save to the same place has succeeded.
    pub(crate) winners: Mutex<Vec<u64>>,
}

impl Shared {
    pub(crate) fn new(machine: Arc<Machine>) -> Self {
        Shared {
            machine,
            journal: Mutex::default(),
            violations: Mutex::default(),
            outcomes: Mutex::default(),
            winners: Mutex::default(),
        }
    }

    /// Notes something that must not happen.
    pub(crate) fn violation(&self, text: impl Into<String>) {
        locked(&self.violations).push(text.into());
    }

    /// Runs a job to its end, or until it is struck.
    pub(crate) fn run(&self, job: Job) {
        let schedule = Arc::new(Schedule::new(job.ranks, job.seed));
        *locked(&self.machine.schedule) = schedule.clone();
        *locked(&self.outcomes) = vec![Vec::new(); job.saves];
        locked(&self.winners).clear();
        let ranks = LocalRanks {
            world_size: job.ranks,
            stack_bytes: STACK_BYTES,
            turns: Some(schedule.clone()),
            ..LocalRanks::default()
        };
        let ended = ranks.run(|group| {
            let rank = group.rank();
            let done = catch_unwind(AssertUnwindSafe(|| self.rank(job, group)));
            match done {
                Ok(Ok(())) => {}
                Ok(Err(error)) if job.is_quiet => {
                    self.violation(format!("rank {rank} of a quiet job: {error:#}"))
                }
                // Something went wrong, and the rank was told: a real one would end with this
                // error.
                Ok(Err(_)) => {}
                Err(panic) if panic.is::<Killed>() => {}
                Err(panic) => resume_unwind(panic),
            }
        });
        if let Err(error) = ended {
            self.violation(format!("a rank panicked: {error}"));
        }
        self.check_rivals(job);
        if schedule.has_hung() {
            self.violation("all ranks waited for each other");
        }
        let is_whole = (0..job.ranks).all(|rank| !schedule.is_killed(rank));
        for (number, outcomes) in locked(&self.outcomes).iter().enumerate() {
            let is_one = outcomes.iter().all(|outcome| *outcome == outcomes[0]);
            if is_whole && !is_one {
                self.violation(format!(
                    "save {number} failed on some ranks and not on others: {outcomes:?}"
                ));
            }
        }
    }

    /// Runs one rank of a job: it resumes, saves several times, and removes what is old. All ranks
    /// take their decisions from the same seed, so they take the same ones.
    fn rank(&self, job: Job, group: ProcessGroup) -> Result<()> {
        let rank = group.rank();
        let run = Location::within(self.machine.files(Some(rank)), RUN);
        let options = CheckpointerOptions {
            retention: Retention::default(),
            save: SaveOptions {
                overwrite: job.overwrite,
                incremental: job.incremental,
                write: WriteOptions {
                    threads: Some(1),
                    ..WriteOptions::default()
                },
                ..SaveOptions::default()
            },
            load: LoadOptions {
                threads: Some(1),
                ..LoadOptions::default()
            },
            memory_tier: None,
            pinned_bytes: None,
        };
        let mut checkpointer = Checkpointer::new(&run, &group, options)?;
        let mut random = StdRng::seed_from_u64(job.seed);
        let mut step = self.resume(&mut checkpointer, &group)?;
        if job.has_rivals {
            self.save_alone(job, &group, &run)?;
        }
        // One rank reads the newest checkpoint for as long as the job runs.
        let reader = random.random_range(0..2 * job.ranks);
        let reading = if reader == rank && step > 0 {
            self.start_reading(&run, step)
        } else {
            None
        };
        for number in 0..job.saves {
            // Overwrite the final checkpoint or that of the last step now and then; otherwise save
            // a new step.
            let name = match random.random_range(0..10) {
                0..3 if job.overwrite => FINAL.to_owned(),
                3 if job.overwrite && step > 0 => step_name(step),
                _ => {
                    step += 1;
                    step_name(step)
                }
            };
            let name = if job.is_last && number == 0 {
                FINAL.to_owned()
            } else {
                name
            };
            let version = job.first_version + number as u64;
            let saved = self.save(&mut checkpointer, &group, &run, &name, version);
            locked(&self.outcomes)[number].push(saved.is_ok());
            // A program may well continue with the next step after a save has failed.
            if saved.is_err() && (job.is_quiet || random.random_bool(0.5)) {
                return saved;
            }
            if job.is_last || random.random_bool(0.4) {
                self.prune(job, &group, &run)?;
            }
        }
        self.end_reading(job, reading)?;
        if job.is_last {
            group.barrier()?;
            self.prune(job, &group, &run)?;
        }
        Ok(())
    }

    /// Loads the newest checkpoint, and returns its step; 0 if there is none.
    fn resume(&self, checkpointer: &mut Checkpointer, group: &ProcessGroup) -> Result<u64> {
        let mut state = part(None, group.rank(), group.world_size())?;
        let loaded = checkpointer.load_latest(&mut state)?;
        let newest = locked(&self.journal).newest().map(str::to_owned);
        let name = loaded.as_ref().map(|(latest, _)| step_name(latest.step));
        if newest > name {
            self.violation(format!(
                "the run resumed from {name:?}, and {newest:?} was saved"
            ));
        }
        let Some((latest, _)) = loaded else {
            return Ok(0);
        };
        let judged = version_of(&state, group.rank(), group.world_size()).and_then(|version| {
            locked(&self.journal).check(&step_name(latest.step), Some(version))
        });
        if let Err(error) = judged {
            self.violation(format!(
                "rank {} resumed with wrong state: {error:#}",
                group.rank()
            ));
        }
        Ok(latest.step)
    }

    /// Saves a version as a step, or under another name, and tells the journal.
    fn save(
        &self,
        checkpointer: &mut Checkpointer,
        group: &ProcessGroup,
        run: &Location,
        name: &str,
        version: u64,
    ) -> Result<()> {
        let state = part(Some(version), group.rank(), group.world_size())?;
        if group.rank() == 0 {
            locked(&self.journal).begin(name, version);
        }
        match name
            .strip_prefix("step-")
            .and_then(|step| step.parse::<u64>().ok())
        {
            Some(step) => checkpointer.save(step, &state)?,
            None => checkpointer.save(run.join(name), &state)?,
        };
        locked(&self.journal).confirm(name, version);
        Ok(())
    }

    /// Removes old checkpoints, on rank 0, as a checkpointer does after a save.
    fn prune(&self, job: Job, group: &ProcessGroup, run: &Location) -> Result<()> {
        if group.rank() > 0 {
            return Ok(());
        }
        let retention = Retention {
            keep_last: job.keep_last.try_into().ok(),
            keep_every: None,
        };
        // Nobody saves meanwhile, so this is what the removal will find.
        let all = list_checkpoints(Location::within(self.machine.files(None), RUN))?;
        let expired = retention.expired(&all);
        let mut journal = locked(&self.journal);
        for checkpoint in expired {
            journal.begin_removal(&step_name(checkpoint.step));
        }
        drop(journal);
        match fsdp_checkpoint::prune(run.clone(), &retention) {
            Ok(_) => Ok(()),
            Err(error) if job.is_quiet => Err(error.into()),
            // A removal that fails does not end the run: a checkpointer only warns of it.
            Err(_) => Ok(()),
        }
    }

    /// Opens the checkpoint of a step to read it later.
    fn start_reading(&self, run: &Location, step: u64) -> Option<(String, Box<dyn Checkpoint>)> {
        let name = step_name(step);
        let checkpoint = open(run.join(&name), OpenOptions::default()).ok()?;
        Some((name, checkpoint))
    }

    /// Reads the checkpoint that was opened before others have replaced or removed it.
    fn end_reading(&self, job: Job, reading: Option<(String, Box<dyn Checkpoint>)>) -> Result<()> {
        let Some((name, checkpoint)) = reading else {
            return Ok(());
        };
        match version_in(&*checkpoint) {
            Ok(_) => Ok(()),
            Err(error) if job.is_quiet => {
                Err(anyhow!("`{name}` changed while it was read: {error:#}"))
            }
            Err(error) => {
                // The checkpoint may be unreadable, because files fail in this job, but wrong bits
                // must be an error of their own.
                ensure!(
                    error.chain().any(|cause| cause.is::<std::io::Error>()) || is_damage(&error),
                    "{error:#}"
                );
                Ok(())
            }
        }
    }
}

/// Returns `true` if an error says that a checkpoint cannot be read.
fn is_damage(error: &anyhow::Error) -> bool {
    error.is::<fsdp_formats::FileError>() || error.is::<CheckpointError>()
}
