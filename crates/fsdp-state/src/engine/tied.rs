//! Names of a source that become one tensor of the target, such as those of a tied parameter: their
//! values are compared, because only those of the first name are loaded.

use std::collections::HashMap;

use candle_core::Tensor;
use fsdp_flat::ShardedTensor;
use fsdp_flat::dtype::to_candle;
use fsdp_flat::storage::HostBytes;
use serde::{Deserialize, Serialize};

use super::target::Wanted;
use crate::error::StateError;
use crate::lend::{Lend, Memory};
use crate::schema::Schema;
use crate::state_dict::StateValue;

/// Two names whose values are compared.
pub(super) struct TiedPair {
    /// The position of the first name among the wanted tensors.
    pub(super) wanted_index: usize,
    /// The position of the second name in the source's schema.
    pub(super) position: usize,
}

impl TiedPair {
    /// Returns all pairs of the wanted tensors, each of a first name and another.
    pub(super) fn all(wanted: &[Wanted]) -> Vec<TiedPair> {
        let mut pairs = Vec::new();
        for (wanted_index, tensor) in wanted.iter().enumerate() {
            for &position in &tensor.tied_positions {
                pairs.push(TiedPair {
                    wanted_index,
                    position,
                });
            }
        }
        pairs
    }
}

/// The outcome of comparing the values of two names on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum TiedValues {
    /// They are equal as far as this rank has them.
    Same,
    /// They differ.
    Different,
    /// Other ranks have parts of them.
    Unknown,
}

/// Compares this rank's values of two names that become the tensor which is `wanted`.
///
/// # Errors
/// Values that cannot be read or converted.
pub(super) fn compare_values(
    first: &StateValue,
    second: &StateValue,
    wanted: &Wanted,
) -> Result<TiedValues, StateError> {
    match (first, second) {
        (StateValue::Tensor(first), StateValue::Tensor(second))
            if first.shape() == second.shape() =>
        {
            let is_same = ShardedTensor::from_whole(first)
                .is_same_view(&ShardedTensor::from_whole(second))
                || have_same_elements(first, second, to_candle(wanted.target_dtype)?)?;
            Ok(if is_same {
                TiedValues::Same
            } else {
                TiedValues::Different
            })
        }
        (StateValue::Sharded(first), StateValue::Sharded(second)) if first.is_same_view(second) => {
            Ok(TiedValues::Same)
        }
        // A rank that only receives values has none in their place.
        (StateValue::Plain(_), StateValue::Plain(_)) => Ok(TiedValues::Same),
        _ => Ok(TiedValues::Unknown),
    }
}

/// Returns `true` if two tensors have the same elements in a dtype.
fn have_same_elements(
    first: &Tensor,
    second: &Tensor,
    dtype: candle_core::DType,
) -> Result<bool, StateError> {
    let first = first.contiguous()?.to_dtype(dtype)?;
    let second = second.contiguous()?.to_dtype(dtype)?;
    Ok(*HostBytes::read(&first)? == *HostBytes::read(&second)?)
}

/// Returns the request for the elements of another name of a tensor that is wanted.
///
/// # Errors
/// [`StateError::TiedNamesDiffer`] if it is no tensor of the same shape.
pub fn want_tied(schema: &Schema, wanted: &Wanted, position: usize) -> Result<Wanted, StateError> {
    let (path, leaf) = schema
        .get(position)
        .expect("tied positions are those of the schema");
    let other = Wanted::new(schema, position, wanted.target_dtype, wanted.boxes.clone());
    match other.filter(|other| other.shape == wanted.shape) {
        Some(other) => Ok(Wanted {
            place: wanted.place,
            is_same_on_all: wanted.is_same_on_all,
            ..other
        }),
        None => Err(StateError::TiedNamesDiffer {
            first: wanted.key.clone(),
            second: path.flat_key(),
            found: format!(
                "the first is a tensor of shape {:?}, and the second a {leaf}",
                wanted.shape
            ),
        }),
    }
}

/// Checks that the values which two names of one tensor have in the same boxes become the same
/// values of the target.
///
/// # Errors
/// [`StateError::TiedNamesDiffer`]; values that cannot be converted.
pub fn check_tied_values(
    (first, first_values): (&Wanted, &Memory),
    (second, second_values): (&Wanted, &Memory),
) -> Result<(), StateError> {
    let is_same = match (first_values, second_values) {
        (Memory::Raw { bytes, .. }, Memory::Raw { bytes: others, .. }) => bytes == others,
        _ => have_same_values(first, first_values, second_values)?,
    };
    if is_same {
        Ok(())
    } else {
        Err(StateError::tied_values_differ(&first.key, &second.key))
    }
}

/// Returns `true` if the tensors of two memories are equal in the dtype of the target.
fn have_same_values(wanted: &Wanted, first: &Memory, second: &Memory) -> Result<bool, StateError> {
    let dtype = to_candle(wanted.target_dtype)?;
    let (first, second) = (first.tensors(), second.tensors());
    if first.len() != second.len() {
        return Ok(false);
    }
    for (tensor, other) in first.iter().zip(&second) {
        if !have_same_elements(tensor, other, dtype)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Lends fresh memory for pairs of names, and compares their values when both are there. The two
/// names of a pair follow each other in `requests`.
pub(super) struct PairLending<'a> {
    requests: &'a [Wanted],
    filled: HashMap<usize, Memory>,
}

impl<'a> PairLending<'a> {
    /// Begins to lend memory for these requests.
    pub(super) fn new(requests: &'a [Wanted]) -> Self {
        PairLending {
            requests,
            filled: HashMap::new(),
        }
    }
}

impl Lend for PairLending<'_> {
    fn lend(&mut self, wanted_index: usize) -> Result<Option<Memory>, StateError> {
        let Wanted {
            dtype,
            shape,
            boxes,
            ..
        } = &self.requests[wanted_index];
        Memory::fresh(*dtype, shape, boxes).map(Some)
    }

    fn filled(&mut self, wanted_index: usize, memory: Memory) -> Result<(), StateError> {
        let partner_index = wanted_index ^ 1;
        let Some(partner) = self.filled.remove(&partner_index) else {
            self.filled.insert(wanted_index, memory);
            return Ok(());
        };
        let own = (&self.requests[wanted_index], &memory);
        let other = (&self.requests[partner_index], &partner);
        // The first name of a pair is named first.
        if wanted_index < partner_index {
            check_tied_values(own, other)
        } else {
            check_tied_values(other, own)
        }
    }
}
