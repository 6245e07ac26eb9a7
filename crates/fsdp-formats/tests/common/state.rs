//! A whole state in memory, and a save of it by N ranks that are threads: what the test binaries of
//! this crate share.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

use fsdp_formats::plan::{Deduplicate, LocalPlan, plan_save};
use fsdp_formats::storage::Durable;
use fsdp_formats::writer::value_item_length;
use fsdp_formats::writer::{PayloadSource, RankItems, WriteOptions, finish, write_rank};
use fsdp_formats::{FileError, Location};
use fsdp_layout::boxes::{boxes_of_flat_range, copy_runs};
use fsdp_layout::{DType, PlainValue, TensorBox};

/// A whole state in memory; every rank reads its boxes from it.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) tensors: BTreeMap<String, (DType, Vec<usize>, Vec<u8>)>,
    pub(crate) values: BTreeMap<String, PlainValue>,
}

impl PayloadSource for State {
    fn payload(
        &self,
        fqn: &str,
        bounds: &TensorBox,
        range: Range<u64>,
        sink: &mut dyn FnMut(&[u8]) -> Result<(), FileError>,
    ) -> Result<(), FileError> {
        let bytes = self.part(fqn, bounds);
        // Odd pieces, so that the writer has to gather them.
        bytes[range.start as usize..range.end as usize]
            .chunks(100_003)
            .try_for_each(sink)
    }

    fn value(&self, fqn: &str) -> Result<Cow<'_, PlainValue>, FileError> {
        Ok(Cow::Borrowed(&self.values[fqn]))
    }
}

impl State {
    pub(crate) fn part(&self, fqn: &str, bounds: &TensorBox) -> Vec<u8> {
        let (dtype, shape, bytes) = &self.tensors[fqn];
        let element = dtype.size_in_bytes() as usize;
        let mut part = Vec::with_capacity(bounds.numel() * element);
        for run in copy_runs(bounds, &TensorBox::whole(shape), bounds) {
            part.extend_from_slice(&bytes[run.src * element..(run.src + run.len) * element]);
        }
        part
    }

    /// Makes the plan of what each of `ranks` ranks holds: flat ranges of every tensor but the
    /// scalar, which all have.
    pub(crate) fn plans(&self, ranks: usize) -> Vec<LocalPlan> {
        (0..ranks)
            .map(|rank| {
                let mut plan = LocalPlan::default();
                for (fqn, (dtype, shape, _)) in &self.tensors {
                    plan.add_tensor(fqn, None, *dtype, shape.clone(), shard(shape, rank, ranks));
                }
                for (fqn, value) in &self.values {
                    plan.add_value(fqn, None, value_item_length(value).unwrap());
                }
                plan
            })
            .collect()
    }
}

/// Returns a rank's equal part of the flat tensor, as boxes; all of a scalar.
pub(crate) fn shard(shape: &[usize], rank: usize, ranks: usize) -> Vec<TensorBox> {
    if shape.is_empty() {
        return vec![TensorBox::whole(shape)];
    }
    let numel: usize = shape.iter().product();
    let each = numel.div_ceil(ranks);
    boxes_of_flat_range(
        shape,
        (rank * each).min(numel)..((rank + 1) * each).min(numel),
    )
}

/// Saves a state on ranks that are threads. It replaces an old checkpoint in a local directory; an
/// object store cannot replace one.
pub(crate) fn save(
    state: &State,
    ranks: usize,
    target: impl Into<Location>,
    durable: &Durable,
) -> Result<(), FileError> {
    let target = &target.into();
    let plans = state.plans(ranks);
    let global = plan_save(&plans, Deduplicate::default())?;
    let staging = durable.prepare(target, target.local().is_some())?;
    let name = staging.name().to_owned();
    let written = std::thread::scope(|scope| {
        let ranks: Vec<_> = plans
            .iter()
            .enumerate()
            .map(|(rank, plan)| {
                let (selection, name) = (&global.selections[rank], &name);
                scope.spawn(move || {
                    let joined = durable.join(target, name)?;
                    let items = RankItems {
                        rank,
                        plan,
                        selection,
                        source: state,
                    };
                    let options = WriteOptions {
                        threads: Some(2),
                        ..WriteOptions::default()
                    };
                    write_rank(&joined, &items, &options, None)
                })
            })
            .collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().unwrap())
            .collect::<Result<Vec<_>, _>>()
    })?;
    finish(staging, global.metadata, &written, None).map(|_| ())
}
