//! Compares replicas: with rank-local metadata, and in shards that each rank wrote for itself,
//! there are several copies of replicated tensors and values. A load takes the first copy. If
//! another copy differs, the ranks no longer had the same values.

use fsdp_layout::TensorBox;
use thiserror::Error;

use super::checkpoint::{Checkpoint, KeyFilter};
use super::lookup::{find_value, tensor_of};
use super::opaque::hash_of_item;
use super::stream::{check_expansion, stream_boxes};
use crate::error::FileError;
use crate::metadata::{Entry, Metadata, Replica, StorageInfo};
use crate::plan::{ChunkError, validate_chunks};

/// An error in the comparison of two copies.
#[derive(Debug, Error)]
pub enum ReplicaError {
    /// The copy has other bits.
    #[error("this copy of the {what} differs from the first one")]
    Differs {
        /// The kind of what was compared.
        what: &'static str,
    },
    /// One copy is a tensor and the other a value.
    #[error("this copy is a {copy}, and the first one is a {first}")]
    Kind {
        /// The kind of the copy.
        copy: &'static str,
        /// The kind of the first one.
        first: &'static str,
    },
    /// The copy cannot be read.
    #[error("this copy cannot be read")]
    Read(#[from] FileError),
    /// The box of the copy does not fit the tensor.
    #[error("this copy cannot be of this tensor")]
    Chunk(#[from] ChunkError),
}

/// Compares a replica with the copy that a load takes, bit for bit.
pub fn compare(
    checkpoint: &dyn Checkpoint,
    replica: &Replica,
    progress: Option<&(dyn Fn(u64) + Sync)>,
) -> Result<(), ReplicaError> {
    let [copy, first] = [
        replica.bounds.is_some(),
        checkpoint.metadata().tensor(&replica.fqn).is_some(),
    ]
    .map(|is_tensor| if is_tensor { "tensor" } else { "value" });
    match &replica.bounds {
        _ if copy != first => Err(ReplicaError::Kind { copy, first }),
        Some(bounds) => compare_tensor(checkpoint, replica, bounds, progress),
        None => compare_value(checkpoint, replica),
    }
}

/// Compares all replicas of the tensors and values with these keys. The first replica that differs
/// is an error.
pub(crate) fn check_replicas(
    checkpoint: &dyn Checkpoint,
    keys: KeyFilter<'_>,
) -> Result<(), FileError> {
    let replicas = &checkpoint.metadata().replicas;
    for replica in replicas.iter().filter(|replica| keys(&replica.fqn)) {
        let what = match compare(checkpoint, replica, None) {
            Ok(()) => continue,
            Err(ReplicaError::Read(error)) => return Err(error),
            Err(ReplicaError::Differs { .. }) => "is not the same in both".to_owned(),
            Err(ReplicaError::Kind { .. }) => {
                "is a tensor in one and a value in the other".to_owned()
            }
            Err(error @ ReplicaError::Chunk(_)) => format!("cannot be read ({error})"),
        };
        return Err(FileError::Differing {
            fqn: replica.fqn.clone(),
            what,
            // There is no single first file of a box that is covered by other boxes.
            first: first_copy(checkpoint.metadata(), replica)
                .map_or_else(String::new, |first_stored| {
                    first_stored.relative_path.clone()
                }),
            second: replica.stored.relative_path.clone(),
        });
    }
    Ok(())
}

/// Returns the place of the copy of a box or a value that a load takes; `None` if it takes no such
/// box.
fn first_copy<'m>(metadata: &'m Metadata, replica: &Replica) -> Option<&'m StorageInfo> {
    match (metadata.entries.get(&replica.fqn)?, &replica.bounds) {
        (Entry::Bytes(value), _) => value.stored.as_ref(),
        (Entry::Tensor(tensor), None) => tensor.chunks.first()?.stored.as_ref(),
        (Entry::Tensor(tensor), Some(bounds)) => {
            let mut chunks = tensor.chunks.iter();
            let chunk = chunks.find(|chunk| chunk.bounds == *bounds)?;
            chunk.stored.as_ref()
        }
    }
}

/// Compares a replica of a value with the first copy.
fn compare_value(checkpoint: &dyn Checkpoint, replica: &Replica) -> Result<(), ReplicaError> {
    let is_same = match checkpoint.read_value(&replica.fqn) {
        // A value that cannot be read is compared by its stored bytes.
        Err(error) if error.opaque_type().is_some() => {
            let stored = find_value(checkpoint.metadata(), &replica.fqn)?;
            let first_item = checkpoint.read_item(&replica.fqn, stored)?;
            first_item == checkpoint.read_item(&replica.fqn, &replica.stored)?
        }
        first_value => first_value?.same_bits(&checkpoint.read_value_replica(replica)?),
    };
    if !is_same {
        return Err(ReplicaError::Differs { what: "value" });
    }
    Ok(())
}

/// Returns `true` if two items are the same as they are stored.
fn is_same_stored(
    checkpoint: &dyn Checkpoint,
    fqn: &str,
    first: &StorageInfo,
    second: &StorageInfo,
) -> Result<bool, FileError> {
    Ok(first.length == second.length
        && first.transforms == second.transforms
        && hash_of_item(checkpoint, fqn, first)? == hash_of_item(checkpoint, fqn, second)?)
}

/// Compares a replica of a tensor's box with the elements that the checkpoint gives there, piece by
/// piece. Opaque tensors are compared as they are stored.
fn compare_tensor(
    checkpoint: &dyn Checkpoint,
    replica: &Replica,
    bounds: &TensorBox,
    progress: Option<&(dyn Fn(u64) + Sync)>,
) -> Result<(), ReplicaError> {
    let entry = tensor_of(checkpoint.metadata(), &replica.fqn)?;
    validate_chunks(&entry.shape, [bounds])?;
    if checkpoint.opaque_type(&replica.fqn)?.is_some() {
        // Its elements cannot be read, so the items are compared as they are stored.
        return match first_copy(checkpoint.metadata(), replica) {
            Some(first) if is_same_stored(checkpoint, &replica.fqn, first, &replica.stored)? => {
                Ok(())
            }
            _ => Err(ReplicaError::Differs { what: "chunk" }),
        };
    }
    let dtype = entry.properties.dtype;
    let length = bounds.numel() as u64 * dtype.size_in_bytes();
    check_expansion(checkpoint, &replica.fqn, length)?;
    let mut first_bytes = Vec::new();
    let mut is_same = true;
    stream_boxes::<FileError>(
        &mut |part, dst| {
            checkpoint.read_replica(replica, part, dst)?;
            first_bytes.resize(dst.len(), 0);
            checkpoint.read_box(&replica.fqn, part, &mut first_bytes)?;
            // A box that differs is not the last to be read: progress counts all bytes.
            is_same = is_same && first_bytes == dst;
            Ok(())
        },
        dtype,
        bounds,
        0..length,
        &mut |bytes| {
            if let Some(progress) = progress {
                progress(bytes.len() as u64);
            }
            Ok(())
        },
    )?;
    if !is_same {
        return Err(ReplicaError::Differs { what: "chunk" });
    }
    Ok(())
}
