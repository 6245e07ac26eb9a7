//! [`Compared`]: a checkpoint whose tensors are compared with their digests as they are read.

use std::sync::{Mutex, PoisonError};

use fsdp_digest::{Digest, Sum};
use fsdp_formats::FileError;
use fsdp_formats::checkpoint::{Checkpoint, stream};
use fsdp_formats::internals::{Layer, LayerView, Origin, tensor_of, wrong_box};
use fsdp_formats::reader::Slot;
use fsdp_layout::TensorBox;

use super::to_safetensors::Sums;

/// A checkpoint that sums the elements of its tensors as they are read. Where a cast, a map or a
/// merge writes other elements, these sums are all that can be compared with recorded digests.
#[derive(Debug)]
pub struct Compared<'a> {
    view: LayerView<'a>,
    /// The sums over what was read so far.
    sums: Mutex<Sums>,
}

impl<'a> Compared<'a> {
    /// Makes a view that compares what is read of `source` with its recorded digests.
    #[must_use]
    pub fn new(source: &'a dyn Checkpoint) -> Self {
        Compared {
            view: LayerView {
                digests: source.digests().cloned(),
                ..LayerView::new(
                    source,
                    source.metadata().clone(),
                    source.structure().cloned(),
                )
            },
            sums: Mutex::default(),
        }
    }
}

impl Layer for Compared<'_> {
    fn view(&self) -> &LayerView<'_> {
        &self.view
    }

    fn origin<'o>(&'o self, fqn: &'o str) -> Origin<'o> {
        Origin::Source(0, fqn)
    }

    fn note_read(&self, fqn: &str, slots: &[Slot<'_>]) -> Result<(), FileError> {
        if self.view.digests.is_none() {
            return Ok(());
        }
        let tensor = tensor_of(&self.view.metadata, fqn)?;
        let element_bytes = tensor.properties.dtype.size_in_bytes() as usize;
        let mut sum = Sum::default();
        for slot in slots {
            sum.add_box(&tensor.shape, &slot.bounds, element_bytes, slot.bytes)
                .map_err(|error| wrong_box(fqn, &error))?;
        }
        let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        sums.entry(fqn.to_owned()).or_default().add(sum);
        Ok(())
    }

    fn check_noted(&self) -> Result<(), FileError> {
        let source = self.source(0);
        let sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        let mut names = Vec::new();
        for (fqn, sum) in &*sums {
            let recorded = source.digests().and_then(|digests| digests.get(fqn));
            let tensor = tensor_of(source.metadata(), fqn)?;
            let dtype = tensor.properties.dtype;
            if recorded.is_none() || recorded == Some(sum.finish(dtype, &tensor.shape)) {
                continue;
            }
            // Only a part of the tensor may have been read, or a part twice.
            if recorded != Some(digest_tensor(source, fqn)?) {
                names.push(fqn.clone());
            }
        }
        if names.is_empty() {
            return Ok(());
        }
        Err(FileError::Digests {
            path: source.path().to_owned(),
            names,
        })
    }
}

/// Returns the digest of a tensor, which is read a piece at a time.
pub(crate) fn digest_tensor(checkpoint: &dyn Checkpoint, fqn: &str) -> Result<Digest, FileError> {
    let tensor = tensor_of(checkpoint.metadata(), fqn)?;
    let dtype = tensor.properties.dtype;
    let whole = TensorBox::whole(&tensor.shape);
    let length = whole.numel() as u64 * dtype.size_in_bytes();
    let mut sum = Sum::default();
    let mut offset = 0;
    stream::<FileError>(checkpoint, fqn, &whole, 0..length, &mut |bytes| {
        sum.add_bytes(offset, bytes);
        offset += bytes.len() as u64;
        Ok(())
    })?;
    Ok(sum.finish(dtype, &tensor.shape))
}
