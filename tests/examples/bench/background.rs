//! The cost of a save in the background for training: the stall, and the steps after it.

use anyhow::{Context as _, Result};
use fsdp::prelude::*;

use crate::figures::{Case, Figures, Pairs};
use crate::load::total;
use crate::model::{Training, on_ranks, state_bytes, timed};
use crate::{Bench, limits};

/// Steps that are looked at after a save.
const STEPS: usize = 10;

pub(crate) fn run(bench: &Bench<'_>, ranks: usize, figures: &mut Figures) -> Result<()> {
    let cases = on_ranks(ranks, |group| {
        let mut training = Training::new(group, bench.size, FsdpConfig::default())?;
        let group = training.group().clone();
        // For reading only: a save copies views that somebody may write to at once.
        let (state, guard) = training.run.state_to_save()?;
        let own = state_bytes(&state);
        drop((state, guard));
        let bytes = total(&group, own)?;
        let save = SaveOptions {
            overwrite: true,
            ..SaveOptions::default()
        };
        let options = CheckpointerOptions {
            save,
            ..CheckpointerOptions::default()
        };
        let mut checkpointer = Checkpointer::new(&bench.directory, &group, options)?;
        let path = bench.directory.join("behind");
        // The first one allocates the buffers.
        checkpointer.save_async(&path, &training.run)?;
        checkpointer.wait()?;
        let mut stalls = Pairs::default();
        let mut steps = Pairs::default();
        for _ in 0..bench.runs {
            let source = vec![1u8; own];
            let mut target = vec![2u8; own];
            let limit = timed(&group, || Ok(limits::copy_warm(&source, &mut target)))?.time;
            drop((source, target));
            let without = timed(&group, || (0..STEPS).try_for_each(|_| training.step()))?.time;
            let stall = timed(
                &group,
                || Ok(checkpointer.save_async(&path, &training.run)?),
            )?
            .time;
            let with = timed(&group, || (0..STEPS).try_for_each(|_| training.step()))?.time;
            let report = checkpointer.wait()?.context("no save was running")?;
            // The first step may have waited for the copy before it changed the weights.
            stalls.push(stall + report.waited, limit);
            steps.push(with, without);
        }
        group.barrier()?;
        if group.rank() == 0 {
            std::fs::remove_dir_all(&path)?;
        }
        let case = |name: &str, pairs: &Pairs, limit: &str| -> Case {
            bench.case(name, ranks, bytes, pairs.seconds(), pairs.limit(limit))
        };
        Ok(vec![
            case("async save, stall", &stalls, "memcpy, warm memory"),
            case("10 steps after async save", &steps, "10 steps without"),
        ])
    })?;
    cases.into_iter().for_each(|case| figures.push(case));
    Ok(())
}
