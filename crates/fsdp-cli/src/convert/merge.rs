//! `fsdp merge`: merges several checkpoints into one.

use anyhow::Result;
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_tools::convert::View;
use fsdp_tools::merge::{Average, Lora, LoraConfig};

use super::arguments::MergeArguments;
use super::write::{Destination, open, write};
use crate::failure::UsageError;
use crate::keys::Keys;
use crate::output;
use crate::text::count;

/// Writes the average of checkpoints, or a base with a LoRA adapter: `fsdp merge`.
///
/// # Errors
/// The sources cannot be read, or do not belong together, or the destination cannot be written:
/// then there is none.
pub(crate) fn merge(arguments: &MergeArguments) -> Result<()> {
    let destination = Destination::of(
        &arguments.destination,
        &arguments.target,
        &arguments.writing,
    )?;
    let keys = Keys::new(&arguments.include, &arguments.exclude, &[], None)?;
    let opened = arguments
        .from
        .iter()
        .map(|from| open(from, &destination))
        .collect::<Result<Vec<_>>>()?;
    let mut views = Vec::with_capacity(opened.len());
    for source in &opened {
        keys.check(source.metadata())?;
        views.push(View::new(&**source, |key| keys.rename(key), None)?);
    }
    let views: Vec<&dyn Checkpoint> = views.iter().map(|view| view as &dyn Checkpoint).collect();
    let Some(place) = &arguments.lora else {
        let average = Average::new(views, &arguments.weight)?;
        let taken: Vec<&str> = average.taken_from_first().collect();
        if !taken.is_empty() {
            let keys = count(taken.len(), "key is", "keys are");
            output::talk(&format!("{keys} taken from the first checkpoint:"));
            output::talk_keys(&taken);
        }
        return write(&average, &destination);
    };
    let [base] = views.as_slice() else {
        return Err(UsageError::OneBase.into());
    };
    let config = LoraConfig::read(place)?;
    // Open the file rather than the directory: a trainer's directory holds more than the adapter.
    let files = ["adapter_model.safetensors", "adapter_model.bin"].map(|name| place.join(name));
    let file = files.iter().find(|file| file.is_file().unwrap_or(false));
    let adapter = open(file.unwrap_or(place), &destination)?;
    let merged = Lora::new(*base, &*adapter, &config)?;
    let changed = count(merged.changed().count(), "tensor", "tensors");
    output::talk(&format!("the adapter changes {changed}"));
    write(&merged, &destination)
}
