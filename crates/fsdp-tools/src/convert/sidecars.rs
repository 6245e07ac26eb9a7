//! The files of `torch.save` beside a DCP directory's own that a conversion copies as they are.

use std::collections::HashSet;

use fsdp_formats::checkpoint::{Checkpoint, Format, PartOf};
use fsdp_formats::internals::SIDECAR_FILES;

/// The sidecar files of a DCP directory that are copied as they are.
#[derive(Debug, Default)]
pub(super) struct CopiedSidecars {
    /// The names of the files.
    pub(super) files: Vec<String>,
    /// The keys in them, which stay out of the directory's own files.
    pub(super) keys: HashSet<String>,
}

impl CopiedSidecars {
    /// Finds the sidecar files of which all keys are still present and unchanged. If some keys of a
    /// file are excluded, renamed, or computed anew (cast, averaged, mapped), the file is not
    /// copied, and its remaining keys are written like all others. Other formats than DCP have no
    /// such files.
    pub(super) fn find(checkpoint: &dyn Checkpoint) -> Self {
        let mut copied = CopiedSidecars::default();
        if checkpoint.format() != Format::Dcp {
            return copied;
        }
        for part in checkpoint.parts() {
            if is_sidecar(&part) && is_unchanged(checkpoint, &part) {
                copied.files.push(part.path.to_owned());
                copied.keys.extend(part.keys.values().cloned());
            }
        }
        copied
    }

    /// Returns `true` if a file is a sidecar with keys that is not copied as it is: its keys are
    /// written like all others.
    pub(super) fn is_taken_apart(&self, checkpoint: &dyn Checkpoint, file: &str) -> bool {
        !self.files.iter().any(|copied| copied == file)
            && checkpoint
                .parts()
                .iter()
                .any(|part| is_sidecar(part) && part.path == file)
    }
}

/// Returns the keys whose data is in sidecar files.
pub(super) fn keys_in_sidecars(checkpoint: &dyn Checkpoint) -> HashSet<&str> {
    checkpoint
        .metadata()
        .stored()
        .filter(|(_, _, stored)| SIDECAR_FILES.contains(&stored.relative_path.as_str()))
        .map(|(fqn, ..)| fqn)
        .collect()
}

/// Returns `true` if a checkpoint has all keys of a part of it, as they are.
fn is_unchanged(checkpoint: &dyn Checkpoint, part: &PartOf<'_>) -> bool {
    let part_entries = &part.checkpoint.metadata().entries;
    let whole_entries = &checkpoint.metadata().entries;
    // The same entry is not enough: a tensor that is computed anew has it too, and all values of a
    // file have one.
    part.keys.iter().all(|(key, name)| {
        part_entries.get(key) == whole_entries.get(name)
            && checkpoint.key_in_parts(name) == Some(name)
    })
}

/// Returns `true` if a part of a checkpoint is a sidecar file.
fn is_sidecar(part: &PartOf<'_>) -> bool {
    SIDECAR_FILES.contains(&part.path)
}
