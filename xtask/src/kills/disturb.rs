//! One run whose ranks and launchers are killed and stopped until it ends, and the limits that it
//! keeps on the way.

use std::collections::BTreeMap;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rand::RngExt as _;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rustix::process::{Pid, Signal, kill_process};

use crate::job::{HANG_TIMEOUT, Job, Work, done, is_alive, newest, starts};
use crate::shell::say;

/// The longest time for which a launcher is stopped.
const LONGEST_STOP: Duration = Duration::from_secs(2);
/// The time that a rank may take to end once it knows of a failure, on a machine that has fewer
/// cores than ranks.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// The moments of the failures of a run.
#[derive(Debug, Clone, Copy)]
pub(super) enum Pace {
    /// At random moments, with no more than `longest` between two, until there were so many
    /// failures in all runs, or so many in this one.
    Random {
        longest: Duration,
        in_all: u64,
        of_a_run: u64,
    },
    /// One after each such time, for as long as the run takes.
    Every(Duration),
}

/// A way to disturb a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Disturbance {
    KillRank,
    StopRank,
    /// Half of the ranks at once, as if their host had failed.
    KillHost,
    StopHost,
    KillLauncher,
    /// For a while.
    StopLauncher,
}

/// The ways to disturb a run, each with its share of all.
const DISTURBANCES: [(Disturbance, u32); 6] = [
    (Disturbance::KillRank, 8),
    (Disturbance::StopRank, 3),
    (Disturbance::KillHost, 3),
    (Disturbance::StopHost, 2),
    (Disturbance::KillLauncher, 2),
    (Disturbance::StopLauncher, 2),
];

/// The count of what was done to processes, and what it has cost.
#[derive(Debug, Default)]
pub(super) struct DisturbanceCounts {
    disturbances: BTreeMap<Disturbance, u64>,
    /// The most steps that were done before a failure and again after it.
    lost: u64,
    /// The longest time from a failure until all ranks that it has left had ended.
    waited: Duration,
    /// The longest time from a failure until the run had saved another step.
    slowest: Duration,
}

impl DisturbanceCounts {
    pub(super) fn all(&self) -> u64 {
        self.disturbances.values().sum()
    }
}

/// A run to disturb.
pub(super) struct DisturbedRun<'a> {
    pub(super) work: &'a Work,
    pub(super) out: &'a Path,
    pub(super) output_path: &'a Path,
    pub(super) pace: Pace,
    /// The longest step of the run that nobody disturbs.
    pub(super) longest_step: Duration,
}

impl DisturbedRun<'_> {
    /// Runs the job to its end, and kills and stops its processes on the way.
    pub(super) fn disturb(
        &self,
        random: &mut StdRng,
        counts: &mut DisturbanceCounts,
    ) -> Result<()> {
        let before = counts.all();
        let begin = Instant::now();
        let mut job = self.work.start(self.out, self.output_path)?;
        while let Some(pause) = self.time_until_next(counts, before, begin, random) {
            if job.wait(pause)? {
                return Ok(());
            }
            let ranks = job.ranks()?;
            if ranks.is_empty() {
                // It is about to start again.
                thread::sleep(Duration::from_millis(10));
                continue;
            }
            // The newest checkpoint and the starts before the failure, to compare with afterwards.
            let saved = newest(self.out)?;
            let begun = starts(self.out)?.len();
            let failed_at = Instant::now();
            let Some(survivors) = self.disturb_once(&mut job, &ranks, random, counts)? else {
                continue;
            };
            let steps = done(self.out)?;
            self.check_survivors(&survivors, failed_at, counts)?;
            // The run goes on: it resumes from the newest checkpoint, and saves another one.
            while newest(self.out)? <= saved {
                if job.wait(Duration::from_millis(50))? {
                    return Ok(());
                }
                if saved == self.work.steps {
                    // A rank that was stopped after its last step may go on at any time, so the
                    // launcher waits for it.
                    signal(&ranks, Signal::CONT);
                }
                ensure!(
                    failed_at.elapsed() < HANG_TIMEOUT,
                    "no step within {HANG_TIMEOUT:?} of a failure"
                );
            }
            counts.slowest = counts.slowest.max(failed_at.elapsed());
            // A kill in the last moment of a save may find the new checkpoint there: then the run
            // is yet to start again.
            if let Some(start) = starts(self.out)?.get(begun) {
                let lost = steps.saturating_sub(*start);
                ensure!(
                    lost <= self.work.save_every,
                    "of {steps} steps {lost} were lost, more than {}: the run began at {start}",
                    self.work.save_every
                );
                counts.lost = counts.lost.max(lost);
            }
            if let Pace::Every(_) = self.pace {
                say(&format!(
                    "kills: at step {steps} of {}; {counts:?}",
                    self.work.steps
                ));
            }
        }
        ensure!(job.wait(HANG_TIMEOUT)?, "the run does not end");
        Ok(())
    }

    /// Returns the time until the next failure; `None` if there were enough.
    fn time_until_next(
        &self,
        counts: &DisturbanceCounts,
        before: u64,
        begin: Instant,
        random: &mut StdRng,
    ) -> Option<Duration> {
        let here = counts.all() - before;
        match self.pace {
            Pace::Random {
                longest,
                in_all,
                of_a_run,
            } => {
                (counts.all() < in_all && here < of_a_run).then(|| longest.mul_f64(random.random()))
            }
            Pace::Every(every) => {
                let next = every.mul_f64(here as f64 + 1.0);
                Some(next.saturating_sub(begin.elapsed()))
            }
        }
    }

    /// Disturbs the run in a random way. Returns the ranks that it has left, which cannot go on;
    /// `None` if nothing is lost.
    fn disturb_once(
        &self,
        job: &mut Job,
        ranks: &[Pid],
        random: &mut StdRng,
        counts: &mut DisturbanceCounts,
    ) -> Result<Option<Vec<Pid>>> {
        let (disturbance, _) = DISTURBANCES
            .choose_weighted(random, |(_, share)| *share)
            .expect("there is a disturbance, and its share is not 0");
        *counts.disturbances.entry(*disturbance).or_default() += 1;
        // The choice is made in any case, so that it does not change what is chosen later.
        let victim = random.random_range(0..ranks.len());
        let rank = victim..victim + 1;
        let host = 0..ranks.len() / 2;
        let (victims, with) = match disturbance {
            Disturbance::KillRank => (rank, Signal::KILL),
            Disturbance::StopRank => (rank, Signal::STOP),
            Disturbance::KillHost => (host, Signal::KILL),
            Disturbance::StopHost => (host, Signal::STOP),
            Disturbance::StopLauncher => {
                let launcher = [job.launcher()];
                signal(&launcher, Signal::STOP);
                thread::sleep(LONGEST_STOP.mul_f64(random.random()));
                signal(&launcher, Signal::CONT);
                // The ranks have gone on meanwhile.
                return Ok(None);
            }
            Disturbance::KillLauncher => {
                let failed_at = Instant::now();
                job.kill()?;
                // Its ranks end with it: those that are left would write beside the new ones.
                self.check_survivors(ranks, failed_at, counts)?;
                *job = self.work.start(self.out, self.output_path)?;
                return Ok(Some(Vec::new()));
            }
        };
        // All at once, as a host fails: the launcher must not get in between.
        signal(&ranks[victims.clone()], with);
        let survivors = [&ranks[..victims.start], &ranks[victims.end..]];
        Ok(Some(survivors.concat()))
    }

    /// Waits until the ranks that a failure has left have ended, and checks that this takes no
    /// longer than a step and the timeout.
    ///
    /// The launcher ends those that do not end by themselves once one has. `cargo xtask soak`
    /// checks that all do.
    fn check_survivors(
        &self,
        survivors: &[Pid],
        failed_at: Instant,
        counts: &mut DisturbanceCounts,
    ) -> Result<()> {
        let timeout = Duration::from_secs(self.work.timeout);
        let limit = self.longest_step + timeout + END_TIMEOUT;
        while survivors.iter().any(|rank| is_alive(*rank)) {
            let waited = failed_at.elapsed();
            ensure!(
                waited < limit,
                "a rank still runs {waited:.1?} after a failure: \
                 a step takes {:.1?}, the timeout is {timeout:?}",
                self.longest_step
            );
            thread::sleep(Duration::from_millis(10));
        }
        counts.waited = counts.waited.max(failed_at.elapsed());
        Ok(())
    }
}

/// Sends a signal to processes, some of which may have ended.
fn signal(processes: &[Pid], signal: Signal) {
    for process in processes {
        kill_process(*process, signal).ok();
    }
}
