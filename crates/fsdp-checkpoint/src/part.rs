//! [`CheckpointPart`]: the part of a checkpoint below one key, as a checkpoint of its own.

use fsdp_digest::StateDigest;
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_formats::internals::{Layer, LayerView, Origin};
use fsdp_formats::metadata::Metadata;
use fsdp_layout::KeyPath;
use indexmap::IndexMap;

/// The part of a checkpoint below one key, as a checkpoint of its own: of `generator.model.weight`
/// the part below `generator` has `model.weight`.
///
/// A [`Stateful`](crate::Stateful) type that holds several others loads each of them from its part.
/// [`StatefulDict`](crate::StatefulDict) does so.
#[derive(Debug)]
pub struct CheckpointPart<'c> {
    view: LayerView<'c>,
    /// The keys in the whole checkpoint, by those in the part.
    whole_keys: IndexMap<String, String>,
}

impl<'c> CheckpointPart<'c> {
    /// Returns the part of a checkpoint below a key; it is empty if there is nothing below it.
    #[must_use]
    pub fn new(checkpoint: &'c dyn Checkpoint, key: &str) -> Self {
        let metadata = checkpoint.metadata();
        let mut part = Metadata::default();
        let mut paths = IndexMap::new();
        let mut digests = StateDigest::default();
        let mut whole_keys = IndexMap::new();
        for (whole_key, entry) in &metadata.entries {
            let Some(inner_key) = below(whole_key, key) else {
                continue;
            };
            let path = metadata
                .planner_data
                .as_ref()
                .and_then(|paths| paths.get(whole_key)?.below(&[key]));
            paths.insert(
                inner_key.to_owned(),
                path.unwrap_or_else(|| KeyPath::from_key(inner_key)),
            );
            if let Some(digest) = checkpoint.digests().and_then(|all| all.get(whole_key)) {
                digests.insert(inner_key, digest);
            }
            part.entries.insert(inner_key.to_owned(), entry.clone());
            whole_keys.insert(inner_key.to_owned(), whole_key.clone());
        }
        part.planner_data = metadata.planner_data.as_ref().map(|_| paths);
        let mut view = LayerView::new(checkpoint, part, None);
        view.digests = checkpoint.digests().map(|_| digests);
        CheckpointPart { view, whole_keys }
    }
}

impl Layer for CheckpointPart<'_> {
    fn view(&self) -> &LayerView<'_> {
        &self.view
    }

    fn origin<'o>(&'o self, fqn: &'o str) -> Origin<'o> {
        let whole_key = self.whole_keys.get(fqn);
        Origin::Source(0, whole_key.map_or(fqn, String::as_str))
    }
}

/// Returns the rest of a flat key below the key `part`; `None` if it does not lie below it.
pub(crate) fn below<'k>(flat_key: &'k str, part: &str) -> Option<&'k str> {
    flat_key.strip_prefix(part)?.strip_prefix('.')
}
