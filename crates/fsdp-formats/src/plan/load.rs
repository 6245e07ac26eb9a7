//! The load plan of one rank: which parts of which chunks it reads.

use fsdp_layout::{DType, TensorBox};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::validate::{ChunkError, validate_chunks};
use crate::metadata::{Entry, Metadata, TensorEntry};

/// A tensor that a rank wants parts of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadRequest {
    /// The flat key.
    pub fqn: String,
    /// The element type that the destination has.
    pub dtype: DType,
    /// The global shape that the destination has.
    pub shape: Vec<usize>,
    /// The boxes wanted. Empty ones need nothing.
    pub boxes: Vec<TensorBox>,
}

/// One overlap of a wanted box with a saved chunk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadItem {
    /// Position of the request.
    pub request: usize,
    /// Position of the box in it.
    pub wanted: usize,
    /// Position of the chunk in the metadata.
    pub chunk: usize,
    /// The common part, in coordinates of the whole tensor.
    pub overlap: TensorBox,
}

/// The reason why a load cannot be done. Nothing was read.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LoadPlanError {
    /// The checkpoint has no such key.
    #[error("missing key in checkpoint: `{fqn}`")]
    Missing {
        /// The key.
        fqn: String,
    },
    /// The checkpoint has a tensor where a value is wanted, or the other way round.
    #[error("`{fqn}` is a {saved} in the checkpoint, but a {wanted} is wanted")]
    Kind {
        /// The key.
        fqn: String,
        /// The kind that is saved.
        saved: &'static str,
        /// The kind that is wanted.
        wanted: &'static str,
    },
    /// The shapes differ.
    #[error("size mismatch for `{fqn}`: saved {saved:?}, wanted {wanted:?}")]
    Size {
        /// The key.
        fqn: String,
        /// Saved shape.
        saved: Vec<usize>,
        /// Wanted shape.
        wanted: Vec<usize>,
    },
    /// The dtypes differ, and casting was not asked for.
    #[error(
        "dtype mismatch for `{fqn}`: saved {saved}, wanted {wanted}; ask for a cast to convert"
    )]
    DType {
        /// The key.
        fqn: String,
        /// Saved dtype.
        saved: DType,
        /// Wanted dtype.
        wanted: DType,
    },
    /// A wanted box does not lie in the tensor.
    #[error("box {bounds} of `{fqn}` does not lie in its shape {shape:?}")]
    OutOfBounds {
        /// The key.
        fqn: String,
        /// The box.
        bounds: TensorBox,
        /// The shape.
        shape: Vec<usize>,
    },
    /// The checkpoint's chunks of this tensor make no sense.
    #[error("the checkpoint's chunks of `{fqn}` are broken")]
    Chunks {
        /// The key.
        fqn: String,
        /// The defect.
        #[source]
        source: ChunkError,
    },
    /// The checkpoint does not hold all of a wanted box.
    #[error("the checkpoint holds only {covered} of {numel} elements of box {bounds} of `{fqn}`")]
    Incomplete {
        /// The key.
        fqn: String,
        /// The box.
        bounds: TensorBox,
        /// Elements of it that are saved.
        covered: usize,
        /// Elements of it.
        numel: usize,
    },
}

/// Plans the reads for these requests, and checks everything: presence, kind, shape, dtype,
/// coverage. Returns the reads, sorted by file, then by position in it.
///
/// ```
/// use fsdp_formats::metadata::{Chunk, Entry, Metadata, TensorEntry, TensorProperties};
/// use fsdp_formats::plan::{plan_load, LoadRequest};
/// use fsdp_layout::{DType, TensorBox};
/// // Saved in two chunks of 8, wanted: elements 4..12.
/// let chunk = |at| Chunk { bounds: TensorBox::new(vec![at], vec![8]), stored: None };
/// let mut saved = Metadata::default();
/// let properties = TensorProperties::new(DType::F32);
/// saved.entries.insert(
///     "w".into(),
///     Entry::Tensor(TensorEntry { properties, shape: vec![16], chunks: vec![chunk(0), chunk(8)] }),
/// );
/// let wanted = TensorBox::new(vec![4], vec![8]);
/// let request = LoadRequest { fqn: "w".into(), dtype: DType::F32, shape: vec![16], boxes: vec![wanted] };
/// let reads = plan_load(&saved, &[request])?;
/// assert_eq!(reads.len(), 2);
/// assert_eq!(reads[1].overlap, TensorBox::new(vec![8], vec![4]));
/// # Ok::<(), fsdp_formats::plan::LoadPlanError>(())
/// ```
pub fn plan_load<'r>(
    metadata: &Metadata,
    requests: impl IntoIterator<Item = &'r LoadRequest>,
) -> Result<Vec<ReadItem>, LoadPlanError> {
    let mut reads = Vec::new();
    for (index, request) in requests.into_iter().enumerate() {
        match metadata.entries.get(&request.fqn) {
            None => {
                return Err(LoadPlanError::Missing {
                    fqn: request.fqn.clone(),
                });
            }
            Some(Entry::Bytes(_)) => {
                return Err(LoadPlanError::Kind {
                    fqn: request.fqn.clone(),
                    saved: "value",
                    wanted: "tensor",
                });
            }
            Some(Entry::Tensor(saved)) => plan_tensor(saved, index, request, &mut reads)?,
        }
    }
    // Unstored chunks (which cannot be read) come first, to fail early; the rest by place.
    reads.sort_by_key(|(place, read)| (*place, read.request, read.wanted));
    Ok(reads.into_iter().map(|(_, read)| read).collect())
}

/// A read, and the file and the offset of its chunk; `None` if the chunk is not stored.
type PlacedRead<'m> = (Option<(&'m str, u64)>, ReadItem);

/// Plans the reads of one request, and checks it.
fn plan_tensor<'m>(
    saved: &'m TensorEntry,
    index: usize,
    request: &LoadRequest,
    reads: &mut Vec<PlacedRead<'m>>,
) -> Result<(), LoadPlanError> {
    let fqn = &request.fqn;
    if saved.shape != request.shape {
        return Err(LoadPlanError::Size {
            fqn: fqn.clone(),
            saved: saved.shape.clone(),
            wanted: request.shape.clone(),
        });
    }
    if saved.properties.dtype != request.dtype {
        return Err(LoadPlanError::DType {
            fqn: fqn.clone(),
            saved: saved.properties.dtype,
            wanted: request.dtype,
        });
    }
    // Chunks that overlap would count twice below.
    validate_chunks(&saved.shape, saved.chunks.iter().map(|chunk| &chunk.bounds)).map_err(
        |source| LoadPlanError::Chunks {
            fqn: fqn.clone(),
            source,
        },
    )?;
    for (wanted, bounds) in request.boxes.iter().enumerate() {
        if !bounds.fits(&request.shape) {
            return Err(LoadPlanError::OutOfBounds {
                fqn: fqn.clone(),
                bounds: bounds.clone(),
                shape: request.shape.clone(),
            });
        }
        let mut covered = 0;
        for (chunk, saved_chunk) in saved.chunks.iter().enumerate() {
            let Some(overlap) = saved_chunk.bounds.intersect(bounds) else {
                continue;
            };
            covered += overlap.numel();
            let stored = saved_chunk.stored.as_ref();
            let place = stored.map(|stored| (stored.relative_path.as_str(), stored.offset));
            let read = ReadItem {
                request: index,
                wanted,
                chunk,
                overlap,
            };
            reads.push((place, read));
        }
        // The chunks are disjoint, so equal counts mean that all is there.
        let numel = bounds.numel();
        if covered != numel {
            return Err(LoadPlanError::Incomplete {
                fqn: fqn.clone(),
                bounds: bounds.clone(),
                covered,
                numel,
            });
        }
    }
    Ok(())
}
