//! The digest of a checkpoint: the same for the same state, in any format, layout and number of
//! files.

use std::ops::Range;
use std::path::Path;

pub use fsdp_digest::{Digest, StateDigest, Sum};
use fsdp_layout::TensorBox;

use crate::error::FileError;
use crate::formats::checkpoint::Checkpoint;
use crate::formats::lookup::quantizer_key;
use crate::formats::opaque::digest_of_opaque;
use crate::formats::stream::{check_expansion, stream};
use crate::metadata::Entry;
use crate::threads::on_each;

/// The bytes that a thread digests of one tensor before it takes the next piece of work.
const PIECE_BYTES: u64 = 64 << 20;

/// A part of a tensor that one thread digests.
struct PartToDigest<'a> {
    /// The position of the tensor.
    tensor: usize,
    fqn: &'a str,
    shape: &'a [usize],
    /// The bytes of the part, in the string of the tensor's bytes.
    range: Range<u64>,
}

/// Returns the digests of all tensors and values of a checkpoint, by their keys, read on `threads`
/// threads in bounded memory.
///
/// # Errors
/// Files that are damaged or cannot be read.
pub fn digest(checkpoint: &dyn Checkpoint, threads: usize) -> Result<StateDigest, FileError> {
    let entries = &checkpoint.metadata().entries;
    let mut digests = StateDigest::default();
    let mut tensors = Vec::new();
    let mut jobs = Vec::new();
    // Step 1: digest values and opaque tensors here, and cut all other tensors into jobs.
    for (fqn, entry) in entries {
        match entry {
            Entry::Bytes(_) => {
                let value = checkpoint.describe_value(fqn)?;
                digests.insert(fqn, Digest::of_value(&value));
            }
            Entry::Tensor(_) if checkpoint.opaque_type(fqn)?.is_some() => {
                digests.insert(fqn, digest_of_opaque(checkpoint, fqn)?);
            }
            Entry::Tensor(tensor) => {
                let dtype = tensor.properties.dtype;
                let shape = tensor.shape.as_slice();
                let bytes = TensorBox::whole(shape).numel() as u64 * dtype.size_in_bytes();
                check_expansion(checkpoint, fqn, bytes)?;
                jobs.extend(
                    (0..bytes)
                        .step_by(PIECE_BYTES as usize)
                        .map(|start| PartToDigest {
                            tensor: tensors.len(),
                            fqn,
                            shape,
                            range: start..bytes.min(start + PIECE_BYTES),
                        }),
                );
                tensors.push((fqn, dtype, shape));
            }
        }
    }
    // Step 2: let the threads take one job after the other, and add the sums of each tensor's
    // parts. Their order does not matter.
    let mut sums = vec![Sum::default(); tensors.len()];
    let parts = on_each(&jobs, threads, |job| job.sum(checkpoint));
    for (job, part) in jobs.iter().zip(parts) {
        sums[job.tensor].add(part?);
    }
    // Step 3: turn each sum into a digest.
    for ((fqn, dtype, shape), sum) in tensors.into_iter().zip(sums) {
        digests.insert(fqn, sum.finish(dtype, shape));
        if let Some((name, digest)) = digest_of_quantizer(checkpoint, fqn)? {
            digests.insert(name, digest);
        }
    }
    Ok(digests)
}

/// Returns the digest of what the integers of a quantized tensor mean, and the name that it has
/// among the digests; `None` for other tensors, and where a key has that name.
pub fn digest_of_quantizer(
    checkpoint: &dyn Checkpoint,
    fqn: &str,
) -> Result<Option<(String, Digest)>, FileError> {
    let metadata = checkpoint.metadata();
    let name = quantizer_key(fqn);
    let is_quantized = metadata
        .tensor(fqn)
        .is_some_and(|tensor| tensor.properties.dtype.is_quantized());
    if !is_quantized || metadata.entries.contains_key(&name) {
        return Ok(None);
    }
    let quantizer = checkpoint.quantizer(fqn)?;
    Ok(quantizer.map(|quantizer| (name, Digest::of_value(&quantizer))))
}

/// Checks that a copy that was written to `path` has the digests of its original, if that has any.
pub fn check_copy(
    path: &Path,
    original: Option<&StateDigest>,
    copy: &StateDigest,
) -> Result<(), FileError> {
    let names = original.map_or_else(Vec::new, |original| original.differing(copy));
    if names.is_empty() {
        return Ok(());
    }
    Err(FileError::Digests {
        path: path.to_owned(),
        names,
    })
}

impl PartToDigest<'_> {
    /// Returns the sum over the part.
    fn sum(&self, checkpoint: &dyn Checkpoint) -> Result<Sum, FileError> {
        let mut sum = Sum::default();
        let mut at = self.range.start;
        let whole = TensorBox::whole(self.shape);
        stream(
            checkpoint,
            self.fqn,
            &whole,
            self.range.clone(),
            &mut |bytes| {
                sum.add_bytes(at, bytes);
                at += bytes.len() as u64;
                Ok::<(), FileError>(())
            },
        )?;
        Ok(sum)
    }
}
