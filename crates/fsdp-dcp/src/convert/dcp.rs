//! Writing a DCP directory for N ranks, in one process.

use fsdp_layout::TensorBox;

use super::stream::Streamed;
use super::{ConvertOptions, Converted, summary};
use crate::checkpoint::Checkpoint;
use crate::error::{FileError, FormatError};
use crate::item::value_item_length;
use crate::metadata::Entry;
use crate::plan::{LocalPlan, PlanOptions, WriteContent, WriteItem, plan_save};
use crate::storage::Staging;
use crate::writer::{WriteOptions, finish, write_rank};

pub(super) fn write(
    source: &dyn Checkpoint,
    staging: Staging,
    ranks: usize,
    options: ConvertOptions<'_>,
) -> Result<Converted, FileError> {
    let plans = plans(source, ranks)?;
    let mut global = plan_save(&plans, PlanOptions::default())?;
    // Without paths, torch's offline tools take flat keys; half of them would be worse than none.
    if source.metadata().planner_data.is_none() {
        global.metadata.planner_data = None;
    }
    let streamed = Streamed { source, options, extra: Default::default() };
    let write_options = WriteOptions { threads: options.threads };
    let mut written = Vec::with_capacity(ranks);
    for (rank, (plan, selection)) in plans.iter().zip(&global.selections).enumerate() {
        written.push(write_rank(&staging, rank, plan, selection, &streamed, &write_options)?);
    }
    finish(staging, global.metadata, &plans, &written)?;
    Ok(summary(source))
}

/// The local plans of `ranks` ranks: tensors cut along dim 0 as torch cuts them, values on every rank.
pub(super) fn plans(source: &dyn Checkpoint, ranks: usize) -> Result<Vec<LocalPlan>, FileError> {
    let metadata = source.metadata();
    let mut plans = vec![LocalPlan::default(); ranks];
    for (fqn, entry) in &metadata.entries {
        let path = metadata.planner_data.as_ref().and_then(|paths| paths.get(fqn)).cloned();
        let content = match entry {
            Entry::Bytes(_) => {
                let value = source.read_value(fqn)?;
                let encode = |source: FormatError| FileError::Encode { fqn: fqn.clone(), source };
                WriteContent::Value { length: value_item_length(&value).map_err(encode)? }
            }
            Entry::Tensor(tensor) => WriteContent::Tensor {
                properties: tensor.properties.clone(),
                shape: tensor.shape.clone(),
                boxes: Vec::new(),
            },
        };
        for (rank, plan) in plans.iter_mut().enumerate() {
            let mut content = content.clone();
            if let WriteContent::Tensor { shape, boxes, .. } = &mut content {
                boxes.push(chunk_of(shape, rank, ranks));
            }
            plan.items.push(WriteItem { fqn: fqn.clone(), path: path.clone(), content });
        }
    }
    Ok(plans)
}

/// A rank's rows of a tensor, by torch's chunk rule; all of a scalar.
pub(super) fn chunk_of(shape: &[usize], rank: usize, ranks: usize) -> TensorBox {
    let mut bounds = TensorBox::whole(shape);
    if let Some(&rows) = shape.first() {
        let each = rows.div_ceil(ranks);
        let start = each.saturating_mul(rank).min(rows);
        bounds.offsets[0] = start;
        bounds.sizes[0] = each.min(rows - start);
    }
    bounds
}
