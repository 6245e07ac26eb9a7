//! Writing a DCP directory for N ranks, in one process.

use std::collections::HashSet;

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_formats::internals::finish_copy;
use fsdp_formats::metadata::Entry;
use fsdp_formats::plan::{Deduplicate, LocalPlan, WriteContent, WriteItem, plan_save};
use fsdp_formats::writer::{
    RankItems, RankWritten, WriteOptions, WrittenFile, value_item_length, write_rank,
};
use indexmap::IndexMap;

use super::opaque::OpaqueCopy;
use super::output::{Conversion, Converted, Streamed, rows_of_rank, stored_item, summary};

/// Writes all of a checkpoint as a DCP directory for `ranks` ranks.
pub(super) fn write(
    conversion: Conversion<'_>,
    ranks: usize,
    opaque: &[(String, String)],
) -> Result<Converted, FileError> {
    let Conversion {
        source,
        staging,
        extra,
        options,
    } = conversion;
    let opaque: HashSet<&str> = opaque.iter().map(|(fqn, _)| fqn.as_str()).collect();
    let plans = plans(source, ranks, &opaque)?;
    let mut global = plan_save(&plans, Deduplicate::default())?;
    // Without paths, torch's offline tools use flat keys. If only some keys have paths, all are
    // dropped.
    match &source.metadata().planner_data {
        Some(paths) if !paths.is_empty() || source.metadata().entries.is_empty() => {}
        _ => global.metadata.planner_data = None,
    }
    let streamed = Streamed {
        source,
        options,
        extra: IndexMap::new(),
    };
    let write_options = WriteOptions {
        threads: Some(options.threads),
        ..WriteOptions::default()
    };
    // The ranks write one after the other; the threads of each share its tensors.
    let mut written = Vec::with_capacity(ranks);
    for (rank, (plan, selection)) in plans.iter().zip(&global.selections).enumerate() {
        let items = RankItems {
            rank,
            plan,
            selection,
            source: &streamed,
        };
        written.push(write_rank(&staging, &items, &write_options, None)?);
    }
    let copy = OpaqueCopy {
        source,
        staging: &staging,
        progress: options.progress,
    };
    copy.copy(&opaque, &mut global.metadata, &mut written)?;
    if !extra.is_empty() {
        // The names of these files are the same in every save, so another save at the same place
        // could write them too: exclude that.
        staging.claim()?;
        let mut files = RankWritten::default();
        for (name, integrity) in extra.copy(&staging)? {
            files.files.push(WrittenFile { name, integrity });
        }
        written.push(files);
    }
    let (lineage, digests) = (source.lineage().cloned(), source.digests());
    finish_copy(staging, global.metadata, &written, lineage, digests)?;
    Ok(summary(source))
}

/// Makes the local plans of `ranks` ranks: tensors cut along dim 0 as torch cuts them, values on
/// every rank.
fn plans(
    source: &dyn Checkpoint,
    ranks: usize,
    opaque: &HashSet<&str>,
) -> Result<Vec<LocalPlan>, FileError> {
    let metadata = source.metadata();
    let mut plans = vec![LocalPlan::default(); ranks];
    for (fqn, entry) in &metadata.entries {
        if matches!(entry, Entry::Tensor(_)) && opaque.contains(fqn.as_str()) {
            // The items of opaque tensors are copied, and are not part of a plan.
            continue;
        }
        let path = metadata
            .planner_data
            .as_ref()
            .and_then(|paths| paths.get(fqn))
            .cloned();
        let content = match entry {
            Entry::Bytes(_) => {
                let length = match stored_item(source, fqn)? {
                    Some(item) => item.len() as u64,
                    None => value_item_length(&source.read_value(fqn)?).map_err(|source| {
                        FileError::Encode {
                            fqn: fqn.clone(),
                            source,
                        }
                    })?,
                };
                WriteContent::Value { length }
            }
            Entry::Tensor(tensor) => WriteContent::Tensor {
                properties: tensor.properties.clone(),
                shape: tensor.shape.clone(),
                boxes: Vec::new(),
                is_whole: false,
            },
        };
        for (rank, plan) in plans.iter_mut().enumerate() {
            // All ranks hold all values; the plan of the save chooses who writes each.
            let mut content = content.clone();
            if let WriteContent::Tensor { shape, boxes, .. } = &mut content {
                boxes.push(rows_of_rank(shape, rank, ranks));
            }
            plan.items.push(WriteItem {
                fqn: fqn.clone(),
                path: path.clone(),
                content,
            });
        }
    }
    Ok(plans)
}
