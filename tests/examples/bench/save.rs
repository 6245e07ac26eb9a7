//! Saving, hashes and fsync on, beside raw writes of the same bytes.

use anyhow::Result;
use fsdp::prelude::*;

use crate::figures::{Case, Figures, Limit, Pairs, median};
use crate::model::{Training, on_ranks, state_bytes, timed};
use crate::{Bench, limits};

pub(crate) fn run(bench: &Bench<'_>, ranks: usize, figures: &mut Figures) -> Result<()> {
    let cases = on_ranks(ranks, |group| {
        let training = Training::new(group, bench.size, FsdpConfig::default())?;
        let group = training.group();
        let state = training.state()?;
        let own = state_bytes(&state);
        let threads = limits::threads(ranks);
        let options = CheckpointerOptions::default();
        let mut checkpointer = Checkpointer::new(&bench.directory, group, options)?;
        let mut synced = Pairs::default();
        let mut unsynced = Pairs::default();
        let mut peak = 0;
        let mut bytes = 0;
        let mut hashing = Vec::new();
        for _ in 0..bench.runs {
            let raw = bench.directory.join(format!("raw-{}", group.rank()));
            let limit = |sync| -> Result<_> {
                let limit = timed(group, || limits::write(&raw, own, threads, sync))?;
                std::fs::remove_file(&raw)?;
                Ok(limit.time)
            };
            let with_sync = limit(true)?;
            let without = limit(false)?;
            let path = bench.directory.join("saved");
            let saved = timed(group, || Ok(checkpointer.save(&path, &state)?))?;
            synced.push(saved.time, with_sync);
            unsynced.push(saved.time, without);
            (peak, bytes) = (saved.peak.max(peak), saved.value.total_bytes);
            if group.rank() == 0 {
                std::fs::remove_dir_all(&path)?;
            }
            let hashed = timed(group, || limits::hash(own, threads))?;
            hashing.push(hashed.time.as_secs_f64());
        }
        let seconds = synced.seconds();
        let case = |name: &str, limit| Case {
            peak_bytes: Some(peak / ranks as u64),
            ..bench.case(name, ranks, bytes, seconds, limit)
        };
        let hashing = median(hashing);
        let whole = Limit {
            name: "the save".to_owned(),
            seconds,
            ratio: seconds / hashing,
        };
        Ok(vec![
            case("save", synced.limit("raw write, fsync")),
            case("save", unsynced.limit("raw write, no fsync")),
            Case {
                seconds: hashing,
                peak_bytes: None,
                ..case("hashing", whole)
            },
        ])
    })?;
    cases.into_iter().for_each(|case| figures.push(case));
    Ok(())
}
