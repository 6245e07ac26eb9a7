//! Runs the simulation of a seed, and compares what is on the disk with what programs were told.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, Result, ensure};
use fsdp_checkpoint::{Location, list_checkpoints, step_name};
use fsdp_formats::checkpoint::open;
use fsdp_formats::reader::OpenOptions;
use fsdp_formats::storage::Durable;
use fsdp_tools::verify::{Level, VerifyOptions, verify};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::disk::Disk;
use super::files::{Machine, Moment, Strike, Trouble};
use super::flaw::Flaw;
use super::job::{FINAL, Job, RUN, Shared};
use super::schedule::Schedule;
use super::state::version_in;

/// The facts about a simulation in which nothing was violated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Summary {
    /// The number of operations on the disk.
    pub(crate) operations: u64,
    /// The number of files that were linked and not written again.
    pub(crate) links: u64,
    /// The number of jobs that were struck.
    pub(crate) struck: u64,
    /// A hash of all operations in order.
    pub(crate) trace: u64,
}

/// Locks a mutex, also one that a thread held when it panicked.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs the simulation of a seed, with a disk that has a flaw or none. An error tells what was
/// violated.
pub(crate) fn simulate(seed: u64, flaw: Option<Flaw>) -> Result<Summary> {
    let mut random = StdRng::seed_from_u64(seed);
    let machine = Arc::new(Machine {
        disk: Mutex::new(Disk::new()),
        schedule: Mutex::new(Arc::new(Schedule::new(0, 0))),
        trouble: Mutex::new(Trouble::none()),
        exchanges: random.random_bool(0.7),
        flaw,
        late: Mutex::default(),
    });
    let shared = Shared::new(machine.clone());
    let mut summary = Summary::default();
    let jobs = random.random_range(1..=3);
    let (overwrite, incremental) = (random.random_bool(0.6), random.random_bool(0.5));
    for number in 0..=jobs {
        let is_last = number == jobs;
        let ranks = [1, 2, 2, 3, 4][random.random_range(0..5)];
        let strikes = [Strike::Rank, Strike::Job, Strike::Power, Strike::Power];
        let strike = strikes[random.random_range(0..strikes.len())];
        let moment = if random.random() {
            Moment::Operation(random.random_range(1..=(250 + 120 * ranks as u64)))
        } else {
            Moment::Rename {
                number: random.random_range(1..=8),
                after: random.random_range(0..=4),
            }
        };
        let is_struck = !is_last && random.random_bool(0.8);
        let failures = if is_last || random.random_bool(0.6) {
            0.0
        } else {
            0.004
        };
        let trouble = Trouble {
            random: StdRng::seed_from_u64(random.random()),
            strike: is_struck.then_some((moment, strike)),
            failures,
            ..Trouble::none()
        };
        *locked(&machine.trouble) = trouble;
        let job = Job {
            ranks,
            seed: random.random(),
            first_version: 1 + number * 100,
            saves: if is_last {
                2
            } else {
                random.random_range(1..=4)
            },
            overwrite: overwrite || is_last,
            incremental,
            keep_last: random.random_range(1..=3),
            is_quiet: !is_struck && failures == 0.0,
            is_last,
            has_rivals: !is_last && random.random_bool(0.2),
        };
        tracing::trace!("{job:?}, {moment:?}");
        shared.run(job);
        let was_struck = {
            let trouble = locked(&machine.trouble);
            summary.operations += trouble.operations;
            summary.links += trouble.links;
            summary.struck += u64::from(trouble.was_struck);
            summary.trace = summary.trace.rotate_left(1) ^ trouble.trace;
            trouble.was_struck
        };
        let mut has_lost_power = was_struck && strike == Strike::Power;
        // A machine may also lose its power when a job has ended well.
        if !is_last && !was_struck && random.random_bool(0.5) {
            locked(&machine.disk).lose_power(random.random());
            has_lost_power = true;
        }
        check(&shared, has_lost_power).with_context(|| format!("after job {number}: {job:?}"))?;
        if let Some(violation) = locked(&shared.violations).first() {
            anyhow::bail!("in job {number}: {violation}; {job:?}");
        }
        if is_last {
            check_leftovers(&machine)?;
        }
    }
    Ok(summary)
}

/// Compares what is on the disk with what programs were told.
fn check(shared: &Shared, has_lost_power: bool) -> Result<()> {
    let run = Location::within(shared.machine.files(None), RUN);
    let mut journal = locked(&shared.journal);
    let listed = if run.exists()? {
        list_checkpoints(&run)?
    } else {
        Vec::new()
    };
    let mut names = journal.names();
    names.extend(listed.iter().map(|checkpoint| step_name(checkpoint.step)));
    names.sort();
    names.dedup();
    for name in names {
        let path = run.join(&name);
        // Where directories cannot be exchanged, the next save would put the old checkpoint back.
        if !shared.machine.exchanges && run.exists()? {
            Durable::new().prepare(&path, true)?;
        }
        let found = path.exists()?.then(|| whole(&path)).transpose()?;
        journal.check(&name, found)?;
        if has_lost_power {
            journal.settle(&name, found);
        }
    }
    Ok(())
}

/// Opens and verifies a checkpoint, and returns the version that it holds.
fn whole(path: &Location) -> Result<u64> {
    let checkpoint =
        open(path, OpenOptions::default()).with_context(|| format!("`{path}` cannot be opened"))?;
    let report = verify(
        &*checkpoint,
        Level::Deep,
        VerifyOptions {
            threads: Some(1),
            progress: None,
        },
    )?;
    ensure!(
        report.is_ok() && report.has_integrity,
        "`{path}` is not whole: {:?}",
        report.problems
    );
    version_in(&*checkpoint)
        .with_context(|| format!("`{path}` holds other bits than were saved, and verifies"))
}

/// Checks that the last job has removed what others left.
fn check_leftovers(machine: &Arc<Machine>) -> Result<()> {
    let run = Location::within(machine.files(None), RUN);
    let newest = list_checkpoints(&run)?
        .pop()
        .map_or(0, |newest| newest.step);
    for name in run
        .names()?
        .iter()
        .filter_map(|name| name.strip_prefix('.'))
    {
        let of = name.split('.').next().unwrap_or_default();
        let step = of
            .strip_prefix("step-")
            .and_then(|step| step.parse::<u64>().ok());
        ensure!(
            of != FINAL && step.is_none_or(|step| step > newest),
            "`.{name}` was left"
        );
    }
    Ok(())
}
