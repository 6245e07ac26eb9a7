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
    /// copied, and its remaining keys are written like all others.
    pub(super) fn find(checkpoint: &dyn Checkpoint) -> Self {
        let mut copied = CopiedSidecars::default();
        if checkpoint.format() != Format::Dcp {
            return copied;
        }
        for part in checkpoint.parts() {
            if is_sidecar(&part)
                && part
                    .keys
                    .iter()
                    .all(|(key, name)| is_unchanged(checkpoint, &part, key, name))
            {
                copied.files.push(part.place.to_owned());
                copied.keys.extend(part.keys.values().cloned());
            }
        }
        copied
    }

    /// Returns `true` if a file is a sidecar with keys that is not copied as it is.
    pub(super) fn leaves_out(&self, checkpoint: &dyn Checkpoint, file: &str) -> bool {
        let is_it = |part: &PartOf<'_>| is_sidecar(part) && part.place == file;
        !self.files.iter().any(|copied| copied == file) && checkpoint.parts().iter().any(is_it)
    }
}

/// Returns the keys whose data is in sidecar files.
pub(super) fn keys_in_sidecars(checkpoint: &dyn Checkpoint) -> HashSet<&str> {
    let stored = checkpoint.metadata().stored();
    stored
        .filter(|(_, _, stored)| SIDECAR_FILES.contains(&stored.relative_path.as_str()))
        .map(|(fqn, ..)| fqn)
        .collect()
}

/// Returns `true` if a checkpoint has at `name` what a part of it has at `key`, as it is.
fn is_unchanged(checkpoint: &dyn Checkpoint, part: &PartOf<'_>, key: &str, name: &str) -> bool {
    let (own, seen) = (part.checkpoint.metadata(), checkpoint.metadata());
    // The same entry is not enough: a tensor that is computed anew has it too, and all values of a
    // file have one.
    own.entries.get(key) == seen.entries.get(name) && checkpoint.key_in_parts(name) == Some(name)
}

/// Returns `true` if a part of a checkpoint is a sidecar file.
fn is_sidecar(part: &PartOf<'_>) -> bool {
    SIDECAR_FILES.contains(&part.place)
}
