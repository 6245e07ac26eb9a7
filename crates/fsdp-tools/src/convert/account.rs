//! The account of a conversion: what of the source is in the destination in another way, or not at
//! all. The views of the source tell what they change, and the formats what they cannot hold.

use std::collections::HashSet;

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::{Change, Checkpoint, Structure};

use super::output::OutputFormat;
use super::sidecars::CopiedSidecars;
use super::{to_torch, to_torch_checkpointing};

/// Returns what was changed by the views of the source and by its writer (`written`). Elements must
/// have been written before, because some changes are found then.
pub(super) fn list_changes(source: &dyn Checkpoint, written: Vec<Change>) -> Vec<Change> {
    let mut changes = [source.changes(), written].concat();
    // No format that is written knows that two keys may have the same elements.
    let mut shared = Vec::new();
    for (fqn, first_key) in source.shared_tensors() {
        shared.push(format!("{fqn}: {first_key}"));
    }
    shared.sort_unstable();
    changes.extend(Change::new(
        "tensor",
        "got a copy of elements that another tensor has too in the source",
        shared,
    ));
    changes
}

/// Returns the containers that a format cannot express. Those in sidecar files that are copied as
/// they are stay as they are.
pub(super) fn find_lost_containers(
    source: &dyn Checkpoint,
    target: OutputFormat,
    sidecars: &CopiedSidecars,
) -> Result<Vec<String>, FileError> {
    let mut containers = Vec::new();
    if let Some(structure) = source.structure() {
        containers = describe_lost_containers(structure, target);
    }
    for part in source.parts() {
        if sidecars.files.iter().any(|file| file == part.path)
            && let Some(structure) = part.checkpoint.structure()
        {
            let copied: HashSet<String> = describe_lost_containers(structure, target)
                .into_iter()
                .collect();
            containers.retain(|container| !copied.contains(container));
        }
    }
    if matches!(target, OutputFormat::TorchCheckpointing { .. })
        && !to_torch_checkpointing::has_items(source, &to_torch::choose_structure(source)?)
    {
        containers.push("the root: it is the item `model`, so keys begin with `model.`".to_owned());
    }
    Ok(containers)
}

/// Returns descriptions of the containers of a structure that a format cannot express.
fn describe_lost_containers(structure: &Structure, target: OutputFormat) -> Vec<String> {
    let mut containers = structure.modules();
    if !target.keeps_containers() {
        containers.extend(structure.describe_untold());
    }
    containers
}
