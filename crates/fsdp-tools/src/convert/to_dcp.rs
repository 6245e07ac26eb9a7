//! Writing a DCP directory for N ranks, in one process.

use std::collections::HashSet;

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_formats::internals::finish_copy;
use fsdp_formats::metadata::Entry;
use fsdp_formats::plan::{
    Deduplicate, HeldBox, LocalPlan, Offer, WriteContent, WriteItem, plan_offers,
};
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
    // Ranks differ in their boxes only, so one schema stands for all of their plans.
    let schema = make_schema(source, &opaque_keys)?;
    let offers = (0..ranks).map(|rank| Offer {
        schema: 0,
        boxes: boxes_of_rank(&schema, rank, ranks),
    });
    let mut global_plan = plan_offers(
        std::slice::from_ref(&schema),
        offers.collect(),
        &(0..ranks).collect::<Vec<_>>(),
        Deduplicate::default(),
    )?;
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
    let mut plan = schema.clone();
    for (rank, selection) in global_plan.selections.iter().enumerate() {
        set_boxes_of_rank(&mut plan, rank, ranks);
        let items = RankItems {
            rank,
            plan: &plan,
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
    source.check_elements_read()?;
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

/// Returns the items that each rank has, without their boxes: tensors, which are cut along dim 0 as
/// torch cuts them, and values, which every rank has.
fn make_schema(
    source: &dyn Checkpoint,
    opaque_keys: &HashSet<&str>,
) -> Result<LocalPlan, FileError> {
    let metadata = source.metadata();
    let mut schema = LocalPlan::default();
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
        schema.items.push(WriteItem {
            fqn: fqn.clone(),
            path,
            content,
        });
    }
    Ok(schema)
}

/// Returns the boxes of a rank that are not empty, for the plan of all ranks.
fn boxes_of_rank(schema: &LocalPlan, rank: usize, rank_count: usize) -> Vec<HeldBox> {
    let mut held = Vec::new();
    for (position, item) in schema.items.iter().enumerate() {
        if let WriteContent::Tensor { shape, .. } = &item.content {
            let bounds = rows_of_rank(shape, rank, rank_count);
            if !bounds.is_empty() {
                held.push(HeldBox {
                    item: position as u32,
                    index: 0,
                    bounds,
                });
            }
        }
    }
    held
}

/// Gives the tensors of a plan the boxes of a rank.
fn set_boxes_of_rank(plan: &mut LocalPlan, rank: usize, rank_count: usize) {
    for item in &mut plan.items {
        if let WriteContent::Tensor { shape, boxes, .. } = &mut item.content {
            boxes.clear();
            boxes.push(rows_of_rank(shape, rank, rank_count));
        }
    }
}
