//! The weighted average of checkpoints with the same keys, such as the last checkpoints of a run,
//! or the models of a "soup".

use std::collections::HashSet;

use fsdp_formats::checkpoint::{Change, Checkpoint};
use fsdp_formats::internals::{Layer, LayerSource, LayerView, Origin, tensor_of};
use fsdp_formats::metadata::Metadata;
use fsdp_formats::reader::Slot;
use fsdp_formats::storage::{CheckedDirectory, Links};
use fsdp_formats::{FileError, Location};
use fsdp_layout::{TensorBox, count_text};

use super::base_model::BaseModel;
use super::lora::{check_same_scales, is_factor};
use super::numbers::{fill_slots, write_numbers};
use crate::convert::{CASTABLE, Losses, Optimizers, is_scale_of_integers};
use crate::diff::{Difference, metadata_difference};
use crate::elements::{for_each_number, parts_of_complex};

/// The average of checkpoints.
///
/// Floating-point and complex tensors are averaged, element by element, in `f64`, and rounded once.
/// Everything else (values, counts, and optimizer state, whose average is meaningless) is taken
/// from the first checkpoint.
#[derive(Debug)]
pub struct Average<'a> {
    view: LayerView<'a>,
    /// The weight of each checkpoint; they add up to 1.
    weights: Vec<f64>,
    /// The keys of the tensors that are averaged.
    averaged: HashSet<String>,
    /// The keys of averaged tensors that are factors of LoRA adapters.
    factors: Vec<String>,
    losses: Losses,
}

impl<'a> Average<'a> {
    /// Makes the average of checkpoints. `weights` has one weight for each, whose sum must not be
    /// 0; if it is empty, all weights are equal.
    ///
    /// # Errors
    /// Checkpoints whose keys, shapes or dtypes differ; adapters with other scales; tensors of
    /// 8-bit floats and other quantized ones; weights that are not finite, or not one for each; an
    /// average of two weights that are one in the first checkpoint.
    pub fn new(sources: Vec<&'a dyn Checkpoint>, weights: &[f64]) -> Result<Self, FileError> {
        let Some((first, further_sources)) = sources.split_first() else {
            return Err(merge_error("there are no checkpoints"));
        };
        let weights = normalize_weights(weights, sources.len())?;
        for checkpoint in further_sources {
            check_same(*first, *checkpoint)?;
        }
        // Only weights are averaged. What else the checkpoints hold comes from the first one.
        let optimizers = Optimizers::new(first.metadata());
        let mut averaged = HashSet::new();
        for (fqn, tensor) in first.metadata().tensors() {
            let dtype = tensor.properties.dtype;
            if optimizers.is_of_training(fqn, tensor) {
                continue;
            }
            // Complex numbers are averaged part by part.
            let is_number = CASTABLE.contains(&parts_of_complex(dtype).unwrap_or(dtype));
            let what = if is_scale_of_integers(first.metadata(), fqn) {
                "belongs to quantized weights".to_owned()
            } else if is_number {
                let mut opaque_types = sources
                    .iter()
                    .filter_map(|source| source.opaque_type(fqn).transpose());
                match opaque_types.next().transpose()? {
                    Some(opaque) => format!("is of the type {opaque}"),
                    None => {
                        averaged.insert(fqn.to_owned());
                        continue;
                    }
                }
            } else if dtype.is_float() || dtype.is_quantized() {
                format!("has the dtype {dtype}")
            } else {
                // Integers are counts or indices.
                continue;
            };
            // An average of the scales beside the quantized weights of the first checkpoint would
            // be a broken model.
            if !further_sources.is_empty() {
                return Err(merge_error(format!(
                    "`{fqn}` {what}, which cannot be averaged: leave it out with `--exclude`, or merge the checkpoints before \
                     they are quantized"
                )));
            }
        }
        let tensors = first.metadata().tensors().map(|(fqn, _)| fqn);
        let factors: Vec<String> = tensors
            .filter(|fqn| averaged.contains(*fqn) && is_factor(fqn))
            .map(str::to_owned)
            .collect();
        if !factors.is_empty() {
            check_same_scales(&sources)?;
        }
        // Replicas in a source are not replicas of the average.
        let metadata = Metadata {
            replicas: Vec::new(),
            ..first.metadata().clone()
        };
        let model = BaseModel::read(first.directory())?;
        let average = Average {
            view: LayerView {
                metadata,
                structure: first.structure().cloned(),
                sources: sources.into_iter().map(LayerSource::Lent).collect(),
                digests: None,
            },
            weights,
            averaged,
            factors,
            losses: Losses::default(),
        };
        // Its configuration is that of the first checkpoint.
        model.check_names_of_one(average.source(0), &average, |key| {
            average.averaged.contains(key)
        })?;
        average.losses.forget();
        Ok(average)
    }

    /// Checks that what the configuration in `model_directory` says of weights that layers share is
    /// true of the average, for a copy of that configuration beside it.
    ///
    /// # Errors
    /// It would not be true; the configuration cannot be read.
    pub fn check_configuration(&self, model_directory: &Location) -> Result<(), FileError> {
        let directory = CheckedDirectory::open(model_directory, false, Links::Follow)?;
        let model = BaseModel::read(&directory)?;
        model.check_names_of_one(self.source(0), self, |key| self.averaged.contains(key))?;
        self.losses.forget();
        Ok(())
    }
}

/// Returns the error that checkpoints cannot be averaged.
fn merge_error(reason: impl Into<String>) -> FileError {
    FileError::Merge {
        reason: reason.into(),
    }
}

/// Returns a weight for each checkpoint, so that they add up to 1. Without weights, all are equal.
fn normalize_weights(weights: &[f64], checkpoint_count: usize) -> Result<Vec<f64>, FileError> {
    if weights.is_empty() {
        return Ok(vec![1.0 / checkpoint_count as f64; checkpoint_count]);
    }
    if weights.len() != checkpoint_count {
        return Err(merge_error(format!(
            "{} for {}",
            count_text(weights.len(), "weight", "weights"),
            count_text(checkpoint_count, "checkpoint", "checkpoints")
        )));
    }
    let sum: f64 = weights.iter().sum();
    if !sum.is_finite() || sum == 0.0 {
        return Err(merge_error(format!("the weights add up to {sum}")));
    }
    Ok(weights.iter().map(|weight| weight / sum).collect())
}

/// Checks that two checkpoints have the same keys, and tensors of the same types and shapes.
fn check_same(first: &dyn Checkpoint, second: &dyn Checkpoint) -> Result<(), FileError> {
    let first_entries = &first.metadata().entries;
    let second_entries = &second.metadata().entries;
    for fqn in first_entries.keys().chain(second_entries.keys()) {
        let what = match metadata_difference(first_entries.get(fqn), second_entries.get(fqn)) {
            None => continue,
            Some(Difference::Shape { .. }) => "has not the same shape in both",
            Some(Difference::DType { .. }) => "has not the same dtype in both",
            Some(Difference::Kind) => "is a tensor in one and a value in the other",
            Some(_) => "is not in both",
        };
        return Err(FileError::Unlike {
            fqn: fqn.clone(),
            what: what.to_owned(),
            first: first.path().display().to_string(),
            second: second.path().display().to_string(),
        });
    }
    Ok(())
}

impl Layer for Average<'_> {
    fn view(&self) -> &LayerView<'_> {
        &self.view
    }

    fn own_changes(&self) -> Vec<Change> {
        let keys = self.view.metadata.entries.keys();
        let from_first = keys.filter(|fqn| !self.averaged.contains(*fqn));
        let mut changes = Vec::new();
        changes.extend(Change::new(
            "key",
            "came from the first checkpoint alone",
            from_first.cloned().collect(),
        ));
        changes.extend(Change::new(
            "factor",
            "of adapters became averages, whose products are not the averages of the products \
             (merge each adapter into the base, and average the results)",
            self.factors.clone(),
        ));
        changes.extend(self.losses.changes());
        changes
    }

    fn origin<'o>(&'o self, fqn: &'o str) -> Origin<'o> {
        if self.averaged.contains(fqn) {
            Origin::Made
        } else {
            Origin::Source(0, fqn)
        }
    }

    fn inputs_of_made(&self, fqn: &str) -> Vec<(usize, String)> {
        let sources = 0..self.view.sources.len();
        sources.map(|index| (index, fqn.to_owned())).collect()
    }

    fn read_made(&self, fqn: &str, slots: &mut [Slot<'_>]) -> Result<(), FileError> {
        let dtype = tensor_of(&self.view.metadata, fqn)?.properties.dtype;
        // A complex number is two numbers.
        let number_dtype = parts_of_complex(dtype).unwrap_or(dtype);
        fill_slots(slots, dtype, |part: &TensorBox, bytes: &mut [u8]| {
            let count = bytes.len() / number_dtype.size_in_bytes() as usize;
            let mut sums = vec![0.0; count];
            let mut is_finite_in_first = Vec::with_capacity(count);
            for (position, source) in self.view.sources.iter().enumerate() {
                let weight = self.weights[position];
                source.read_box(fqn, part, bytes)?;
                let mut index = 0;
                for_each_number(number_dtype, bytes, &mut |number| {
                    if position == 0 {
                        is_finite_in_first.push(number.is_finite());
                    }
                    sums[index] += weight * number;
                    index += 1;
                });
            }
            // Round once, after all sources are added.
            let lost = write_numbers(number_dtype, &sums, &is_finite_in_first, bytes);
            self.losses.note(fqn, part, lost);
            Ok(())
        })
    }
}
