//! Comparing replicas: rank-local metadata, and shards that each rank wrote for itself, have several copies of what was
//! replicated. A load takes the first; a copy that differs means that the ranks had drifted apart.

use fsdp_layout::TensorBox;
use thiserror::Error;

use super::report::Report;
use crate::error::FileError;
use crate::formats::checkpoint::Checkpoint;
use crate::formats::lookup::tensor_of;
use crate::formats::stream::stream_boxes;
use crate::metadata::{BytesEntry, Entry, Replica};
use crate::plan::{ChunkError, validate_chunks};

/// Two copies that should be one.
#[derive(Debug, Error)]
enum ReplicaError {
    #[error("this copy of the {what} differs from the first one")]
    Differs { what: &'static str },
    #[error("this copy cannot be read")]
    Read(#[from] FileError),
    #[error("this copy cannot be of this tensor")]
    Chunk(#[from] ChunkError),
}

/// Compares each replica with the copy that a load takes, bit for bit.
pub(super) fn compare(checkpoint: &dyn Checkpoint, report: &mut Report, progress: Option<&(dyn Fn(u64) + Sync)>) {
    for replica in &checkpoint.metadata().replicas {
        report.replicas += 1;
        let compared = match &replica.bounds {
            Some(bounds) => tensor(checkpoint, replica, bounds, progress),
            None => value(checkpoint, replica),
        };
        if let Err(error) = compared {
            report.add(Some(&replica.fqn), Some(&replica.stored), &error);
        }
    }
}

fn value(checkpoint: &dyn Checkpoint, replica: &Replica) -> Result<(), ReplicaError> {
    let is_same = match checkpoint.read_value(&replica.fqn) {
        // What cannot be read is compared as it is stored.
        Err(error) if error.opaque_type().is_some() => {
            let Some(Entry::Bytes(BytesEntry { stored: Some(stored) })) =
                checkpoint.metadata().entries.get(&replica.fqn)
            else {
                return Err(error.into());
            };
            let (first, this) =
                (checkpoint.read_item(&replica.fqn, stored)?, checkpoint.read_item(&replica.fqn, &replica.stored)?);
            first == this
        }
        first => first?.same_bits(&checkpoint.read_value_replica(replica)?),
    };
    if !is_same {
        return Err(ReplicaError::Differs { what: "value" });
    }
    Ok(())
}

fn tensor(
    checkpoint: &dyn Checkpoint,
    replica: &Replica,
    whole: &TensorBox,
    progress: Option<&(dyn Fn(u64) + Sync)>,
) -> Result<(), ReplicaError> {
    let entry = tensor_of(checkpoint.metadata(), &replica.fqn)?;
    validate_chunks(&entry.shape, [whole])?;
    let dtype = entry.properties.dtype;
    let length = whole.numel() as u64 * dtype.size_in_bytes();
    let mut first = Vec::new();
    let mut same = true;
    let mut read = |part: &TensorBox, dst: &mut [u8]| {
        checkpoint.read_replica(replica, part, dst)?;
        first.resize(dst.len(), 0);
        checkpoint.read_box(&replica.fqn, part, &mut first)?;
        same = same && first == dst;
        Ok(())
    };
    stream_boxes::<FileError>(&mut read, dtype, whole, 0..length, &mut |bytes| {
        if let Some(progress) = progress {
            progress(bytes.len() as u64);
        }
        Ok(())
    })?;
    if !same {
        return Err(ReplicaError::Differs { what: "chunk" });
    }
    Ok(())
}
