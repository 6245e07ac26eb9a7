//! The weighted average of checkpoints with the same keys, such as the last checkpoints of a run,
//! or the models of a "soup".

use std::collections::HashSet;

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_formats::internals::{Layer, LayerSource, Origin, Seen, tensor_of};
use fsdp_formats::metadata::{Entry, Metadata};
use fsdp_formats::reader::Slot;
use fsdp_layout::{DType, TensorBox};

use super::numbers::{fill, for_each, is_floating, write};
use crate::convert::Optimizers;
use crate::elements::parts_of_complex;

/// The average of checkpoints.
///
/// Floating-point and complex tensors are averaged, element by element, in `f64`, and rounded once.
/// Everything else (values, counts, and optimizer state, whose average is meaningless) is taken
/// from the first checkpoint.
pub struct Average<'a> {
    seen: Seen<'a>,
    /// The weight of each; they add up to 1.
    weights: Vec<f64>,
    averaged: HashSet<String>,
}

impl std::fmt::Debug for Average<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Average")
            .field("weights", &self.weights)
            .finish_non_exhaustive()
    }
}

impl<'a> Average<'a> {
    /// Makes the average of checkpoints. `weights` has one weight for each, whose sum must not be
    /// 0; if it is empty, all weights are equal.
    ///
    /// # Errors
    /// Checkpoints whose keys, shapes or dtypes differ; tensors of 8-bit floats and other quantized
    /// ones; weights that are not finite, or not one for each.
    pub fn new(sources: Vec<&'a dyn Checkpoint>, weights: &[f64]) -> Result<Self, FileError> {
        let Some((first, others)) = sources.split_first() else {
            return Err(FileError::Merge {
                reason: "there are no checkpoints".to_owned(),
            });
        };
        let weights = if weights.is_empty() {
            vec![1.0; sources.len()]
        } else {
            weights.to_vec()
        };
        let sum: f64 = weights.iter().sum();
        if weights.len() != sources.len() {
            let reason = format!(
                "{} weights for {} checkpoints",
                weights.len(),
                sources.len()
            );
            return Err(FileError::Merge { reason });
        }
        if !sum.is_finite() || sum == 0.0 {
            return Err(FileError::Merge {
                reason: format!("the weights add up to {sum}"),
            });
        }
        let metadata = first.metadata().clone();
        for other in others {
            check_same(*first, *other)?;
        }
        let optimizers = Optimizers::of(&metadata);
        let mut averaged = HashSet::new();
        for (fqn, tensor) in metadata.tensors() {
            let dtype = tensor.properties.dtype;
            if optimizers.is_state(fqn, tensor) {
                continue;
            }
            let is_number = is_floating(parts(dtype));
            let mut opaque = None;
            if is_number {
                for source in &sources {
                    opaque = opaque.or(source.opaque_type(fqn)?);
                }
            }
            let what = match opaque {
                Some(of) => format!("is of the type {of}"),
                None if is_number => {
                    averaged.insert(fqn.to_owned());
                    continue;
                }
                None if dtype.is_float() || dtype.is_quantized() => {
                    format!("has the dtype {dtype}")
                }
                None => continue,
            };
            // An average of the scales beside the quantized weights of the first checkpoint would
            // be a broken model.
            if !others.is_empty() {
                let reason = format!(
                    "`{fqn}` {what}, which cannot be averaged: leave it out with `--exclude`, or merge the checkpoints before \
                     they are quantized"
                );
                return Err(FileError::Merge { reason });
            }
        }
        let weights = weights.iter().map(|weight| weight / sum).collect();
        // Replicas in a source are not replicas of the average.
        let metadata = Metadata {
            replicas: Vec::new(),
            ..metadata
        };
        let structure = first.structure().cloned();
        let sources = sources
            .iter()
            .map(|source| LayerSource::Lent(*source))
            .collect();
        Ok(Average {
            seen: Seen {
                sources,
                metadata,
                structure,
            },
            weights,
            averaged,
        })
    }

    /// Returns the keys whose values are taken from the first checkpoint.
    pub fn taken_from_first(&self) -> impl Iterator<Item = &str> {
        self.seen
            .metadata
            .entries
            .keys()
            .map(String::as_str)
            .filter(|fqn| !self.averaged.contains(*fqn))
    }
}

/// Returns the type of the numbers that a type's elements consist of: a complex one has two.
fn parts(dtype: DType) -> DType {
    parts_of_complex(dtype).unwrap_or(dtype)
}

/// Checks that two checkpoints have the same keys, and tensors of the same types and shapes.
fn check_same(first: &dyn Checkpoint, other: &dyn Checkpoint) -> Result<(), FileError> {
    let differs = |fqn: &str, what: &str| FileError::Unlike {
        fqn: fqn.to_owned(),
        what: what.to_owned(),
        first: first.path().display().to_string(),
        second: other.path().display().to_string(),
    };
    let (ours, theirs) = (&first.metadata().entries, &other.metadata().entries);
    if let Some(fqn) = theirs.keys().find(|fqn| !ours.contains_key(*fqn)) {
        return Err(differs(fqn, "is not in both"));
    }
    for (fqn, entry) in ours {
        match (entry, theirs.get(fqn)) {
            (_, None) => return Err(differs(fqn, "is not in both")),
            (Entry::Tensor(a), Some(Entry::Tensor(b))) if a.shape != b.shape => {
                return Err(differs(fqn, "has not the same shape in both"));
            }
            (Entry::Tensor(a), Some(Entry::Tensor(b)))
                if a.properties.dtype != b.properties.dtype =>
            {
                return Err(differs(fqn, "has not the same dtype in both"));
            }
            (Entry::Tensor(_), Some(Entry::Tensor(_)))
            | (Entry::Bytes(_), Some(Entry::Bytes(_))) => {}
            _ => return Err(differs(fqn, "is a tensor in one and a value in the other")),
        }
    }
    Ok(())
}

impl Layer for Average<'_> {
    fn seen(&self) -> &Seen<'_> {
        &self.seen
    }

    fn origin<'o>(&'o self, fqn: &'o str) -> Origin<'o> {
        if self.averaged.contains(fqn) {
            Origin::Made
        } else {
            Origin::Source(0, fqn)
        }
    }

    fn inputs_of_made(&self, fqn: &str, inputs: &mut Vec<(usize, String)>) {
        inputs.extend((0..self.seen.sources.len()).map(|index| (index, fqn.to_owned())));
    }

    fn read_made(&self, fqn: &str, slots: &mut [Slot<'_>]) -> Result<(), FileError> {
        let dtype = tensor_of(&self.seen.metadata, fqn)?.properties.dtype;
        let parts = parts(dtype);
        let mut average = |part: &TensorBox, bytes: &mut [u8]| {
            let mut sums = vec![0.0; bytes.len() / parts.size_in_bytes() as usize];
            for (source, weight) in self.seen.sources.iter().zip(&self.weights) {
                source.read_box(fqn, part, bytes)?;
                let mut sums = sums.iter_mut();
                for_each(parts, bytes, &mut |number| {
                    if let Some(sum) = sums.next() {
                        *sum += weight * number;
                    }
                });
            }
            write(parts, &sums, bytes);
            Ok(())
        };
        slots
            .iter_mut()
            .try_for_each(|slot| fill(slot, dtype, &mut average))
    }
}
