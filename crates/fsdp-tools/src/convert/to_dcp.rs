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

use super::opaque::copy_opaque;
use super::output::{CheckpointPayloads, Conversion, encode_error, read_stored_item, rows_of_rank};

/// Writes all of a checkpoint as a DCP directory for `ranks` ranks. It holds any value, so no file
/// has to hold values beside it, and `None` is returned.
pub(super) fn write(
    conversion: Conversion<'_>,
    ranks: usize,
    opaque: &[(String, String)],
) -> Result<Option<String>, FileError> {
    let source = conversion.source;
    let staging = &conversion.staging;
    let opaque_keys: HashSet<&str> = opaque.iter().map(|(fqn, _)| fqn.as_str()).collect();
    let plans = make_plans(source, ranks, &opaque_keys)?;
    let mut global_plan = plan_save(&plans, Deduplicate::default())?;
    // Without paths, torch's offline tools use flat keys. If only some keys have paths, all are
    // dropped.
    match &source.metadata().planner_data {
        Some(paths) if !paths.is_empty() || source.metadata().entries.is_empty() => {}
        _ => global_plan.metadata.planner_data = None,
    }
    let payloads = CheckpointPayloads {
        source,
        options: conversion.options,
        inner_tensors: &IndexMap::new(),
    };
    let write_options = WriteOptions {
        threads: conversion.options.threads,
        ..WriteOptions::default()
    };
    // The ranks write one after the other; the threads of each share its tensors.
    let mut written = Vec::with_capacity(ranks);
    for (rank, (plan, selection)) in plans.iter().zip(&global_plan.selections).enumerate() {
        let items = RankItems {
            rank,
            plan,
            selection,
            source: &payloads,
        };
        written.push(write_rank(staging, &items, &write_options, None)?);
    }
    copy_opaque(
        &conversion,
        &opaque_keys,
        &mut global_plan.metadata,
        &mut written,
    )?;
    if !conversion.copied_files.directories.is_empty() {
        // The names of these files are the same in every save, so another save at the same place
        // could write them too: exclude that.
        staging.claim()?;
        let mut files = RankWritten::default();
        for (name, integrity) in conversion.copied_files.copy_to(staging)? {
            files.files.push(WrittenFile { name, integrity });
        }
        written.push(files);
    }
    let (lineage, digests) = (source.lineage().cloned(), source.digests());
    finish_copy(
        conversion.staging,
        global_plan.metadata,
        &written,
        lineage,
        digests,
    )?;
    Ok(None)
}

/// Makes the local plans of `rank_count` ranks: tensors cut along dim 0 as torch cuts them, values
/// on every rank.
fn make_plans(
    source: &dyn Checkpoint,
    rank_count: usize,
    opaque_keys: &HashSet<&str>,
) -> Result<Vec<LocalPlan>, FileError> {
    let metadata = source.metadata();
    let mut plans = vec![LocalPlan::default(); rank_count];
    for (fqn, entry) in &metadata.entries {
        if matches!(entry, Entry::Tensor(_)) && opaque_keys.contains(fqn.as_str()) {
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
                let length = match read_stored_item(source, fqn)? {
                    Some(item) => item.len() as u64,
                    None => value_item_length(&source.read_value(fqn)?)
                        .map_err(|source| encode_error(fqn, source))?,
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
                boxes.push(rows_of_rank(shape, rank, rank_count));
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
