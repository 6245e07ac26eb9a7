//! Loading at the same and at other numbers of ranks, into fresh tensors and in place, beside raw
//! reads of as many bytes into fresh memory.

use anyhow::Result;
use fsdp::checkpoint::{load, load_in_place, save};
use fsdp::formats::checkpoint::Checkpoint as _;
use fsdp::formats::reader::CheckpointReader;
use fsdp::prelude::*;

use crate::figures::{Case, Figures, Pairs};
use crate::model::{Training, on_ranks, state_bytes, timed};
use crate::{Bench, limits};

/// Loads on another number of ranks than saved.
const RESHARDS: [(usize, usize); 4] = [(4, 2), (1, 4), (4, 1), (3, 5)];

/// Measures loads on each of some numbers of ranks. The ranks that save are `saved_on`; if that is
/// `None`, as many as load, and those of [`RESHARDS`] too.
pub(crate) fn run(
    bench: &Bench<'_>,
    ranks: &[usize],
    saved_on: Option<usize>,
    figures: &mut Figures,
) -> Result<()> {
    let mut pairs: Vec<(usize, usize)> = ranks
        .iter()
        .map(|&ranks| (saved_on.unwrap_or(ranks), ranks))
        .collect();
    if saved_on.is_none() {
        pairs.extend(RESHARDS);
    }
    for (index, &(from, to)) in pairs.iter().enumerate() {
        let path = bench.directory.join(format!("of-{from}"));
        if !path.exists() {
            on_ranks(from, |group| {
                let training = Training::new(group, bench.size, FsdpConfig::default())?;
                Ok(save(
                    &path,
                    &training.state()?,
                    training.group(),
                    &SaveOptions::default(),
                )?)
            })?;
        }
        let cases = on_ranks(to, |group| {
            let training = Training::new(group, bench.size, FsdpConfig::default())?;
            let group = training.group();
            let state = training.state()?;
            let own = state_bytes(&state);
            let total = total(group, own)?;
            let raw = bench.directory.join(format!("raw-{}", group.rank()));
            limits::write(&raw, own, 1, false)?;
            let options = LoadOptions::default();
            let mut pairs = [Pairs::default(), Pairs::default()];
            let mut peaks = [0; 2];
            for _ in 0..bench.runs {
                let limit = timed(group, || limits::read(&raw, own, limits::threads(to)))?;
                let mut template = state.clone();
                let loaded = timed(group, || Ok(load(&path, &mut template, group, &options)?))?;
                pairs[0].push(loaded.time, limit.time);
                peaks[0] = peaks[0].max(loaded.peak.saturating_sub(total));
                drop(template);
                let mut live = state.clone();
                let loaded = timed(group, || {
                    Ok(load_in_place(&path, &mut live, group, &options)?)
                })?;
                pairs[1].push(loaded.time, limit.time);
                peaks[1] = peaks[1].max(loaded.peak);
            }
            std::fs::remove_file(&raw)?;
            let reader = CheckpointReader::open(&path)?;
            state.clone().load_state_dict(&reader, group, &options)?;
            let saved = if from == to {
                String::new()
            } else {
                format!(", saved on {from}")
            };
            let cases = ["load", "load in place"].iter().zip(pairs).zip(peaks).map(
                |((name, pairs), peak)| Case {
                    peak_bytes: Some(peak / to as u64),
                    read_ratio: Some(reader.bytes_read() as f64 / own as f64),
                    ..bench.case(
                        &format!("{name}{saved}"),
                        to,
                        total,
                        pairs.seconds(),
                        pairs.limit("raw read, fresh memory"),
                    )
                },
            );
            Ok(cases.collect::<Vec<_>>())
        })?;
        cases.into_iter().for_each(|case| figures.push(case));
        // In memory there is no room for the checkpoints of all numbers of ranks at once.
        if !pairs[index + 1..].iter().any(|&(later, _)| later == from) {
            std::fs::remove_dir_all(&path)?;
        }
    }
    Ok(())
}

/// The sum over all ranks.
pub(crate) fn total(group: &ProcessGroup, own: usize) -> Result<u64> {
    let mut total = [own as i64];
    group.all_reduce(&mut total, ReduceOp::Sum)?;
    Ok(total[0].unsigned_abs())
}
