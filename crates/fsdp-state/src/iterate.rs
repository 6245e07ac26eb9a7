//! A recursive map over state dicts.

use candle_core::{Device, Tensor};
use fsdp_flat::{RawTensor, ShardedTensor};
use fsdp_layout::{KeyPath, PathPart, PlainValue};

use crate::companion::{check_dict, copy_leaf, same_leaf};
use crate::keep_on::KeepOn;
use crate::{StateDict, StateError, StateValue};

/// The functions that [`iterate_state_dict`] calls on leaves, one for each kind. Each returns the
/// leaf's new value; its default keeps the value.
pub trait StateDictCallbacks {
    /// Maps a sharded tensor: torch's `sharded_tensor_func` and `dtensor_func`.
    ///
    /// # Errors
    /// The implementor's; the iteration ends with it.
    fn sharded(
        &mut self,
        path: &KeyPath,
        tensor: &ShardedTensor,
    ) -> Result<StateValue, StateError> {
        let _ = path;
        Ok(tensor.clone().into())
    }

    /// Maps a whole tensor: torch's `tensor_func`.
    ///
    /// # Errors
    /// The implementor's.
    fn tensor(&mut self, path: &KeyPath, tensor: &Tensor) -> Result<StateValue, StateError> {
        let _ = path;
        Ok(tensor.clone().into())
    }

    /// Maps a whole tensor that candle does not compute with.
    ///
    /// # Errors
    /// The implementor's.
    fn raw(&mut self, path: &KeyPath, tensor: &RawTensor) -> Result<StateValue, StateError> {
        let _ = path;
        Ok(tensor.clone().into())
    }

    /// Maps a plain value.
    ///
    /// # Errors
    /// The implementor's.
    fn plain(&mut self, path: &KeyPath, value: &PlainValue) -> Result<StateValue, StateError> {
        let _ = path;
        Ok(value.clone().into())
    }
}

/// Callbacks that keep every value.
#[derive(Debug, Clone, Copy, Default)]
pub struct Keep;

impl StateDictCallbacks for Keep {}

/// Options of [`iterate_state_dict`].
#[derive(Debug, Clone, Default)]
pub struct IterateOptions<'a> {
    /// The ranks that get the result: torch's `ranks_only`.
    pub keep_on: KeepOn,
    /// This rank, in the group that `keep_on` speaks of.
    pub rank: usize,
    /// The device of the results; `None` leaves tensors where the callbacks put them. Ignored with
    /// a companion. torch's `cpu_offload` is the CPU.
    pub device: Option<&'a Device>,
    /// A dict of the same structure whose tensors take the values, in place: torch's
    /// `companion_obj`.
    pub companion: Option<&'a StateDict>,
}

/// Maps every leaf of a state dict, depth-first in container order, to what the callbacks make of
/// it; dicts stay dicts, lists stay lists, tuples stay tuples. torch's `_iterate_state_dict`.
///
/// The callbacks, and any collectives in them, run on every rank. On a rank of
/// [`IterateOptions::keep_on`] the result has the structure of `state`; on all others it is empty,
/// and each mapped value is dropped at once. With a companion, each mapped tensor is copied into
/// the companion's tensor of that path (bytes into its memory, no cast), and it is the companion's
/// tensor that is in the result; plain values and raw tensors are the mapped ones. Without one, the
/// result holds just what the callbacks return, which by default shares memory with `state`.
///
/// This function itself communicates nothing.
///
/// # Errors
/// The errors of the callbacks; [`StateError::CompanionMismatch`]: the structure is checked before
/// any callback runs, a mapped tensor when it is copied. Errors are this rank's own.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_layout::KeyPath;
/// use fsdp_state::{IterateOptions, StateDict, StateDictCallbacks, StateError, StateValue, iterate_state_dict};
///
/// struct ToBf16;
/// impl StateDictCallbacks for ToBf16 {
///     fn tensor(&mut self, _: &KeyPath, tensor: &Tensor) -> Result<StateValue, StateError> {
///         Ok(tensor.to_dtype(DType::BF16)?.into())
///     }
/// }
///
/// let mut state = StateDict::new();
/// state.insert("weight", Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?);
/// state.insert("step", 3i64);
/// let half = iterate_state_dict(&state, &mut ToBf16, &IterateOptions::default())?;
/// assert_eq!(half.get("weight").and_then(|weight| weight.as_tensor()).map(Tensor::dtype), Some(DType::BF16));
/// # Ok::<(), StateError>(())
/// ```
pub fn iterate_state_dict(
    state: &StateDict,
    callbacks: &mut impl StateDictCallbacks,
    options: &IterateOptions<'_>,
) -> Result<StateDict, StateError> {
    let keeps = options.keep_on.contains(options.rank);
    let companion = options.companion.filter(|_| keeps);
    let mut path = KeyPath::default();
    if let Some(companion) = companion {
        check_dict(state, companion, &mut path)?;
    }
    let device = options.device;
    Ok(Iteration {
        callbacks,
        keeps,
        device,
        path,
    }
    .dict(state, companion)?
    .unwrap_or_default())
}

struct Iteration<'a, C> {
    callbacks: &'a mut C,
    keeps: bool,
    device: Option<&'a Device>,
    path: KeyPath,
}

impl<C: StateDictCallbacks> Iteration<'_, C> {
    /// Visits the values of a dict, and returns the mapped ones; `None` if this rank keeps nothing.
    fn dict(
        &mut self,
        dict: &StateDict,
        companion: Option<&StateDict>,
    ) -> Result<Option<StateDict>, StateError> {
        let mut mapped = StateDict::new();
        for (key, value) in dict {
            self.path.0.push(PathPart::Key(key.clone()));
            if let Some(value) =
                self.value(value, companion.and_then(|companion| companion.get(key)))?
            {
                mapped.insert(key, value);
            }
            self.path.0.pop();
        }
        Ok(self.keeps.then_some(mapped))
    }

    /// Visits the values of a list, and returns the mapped ones; `None` if this rank keeps nothing.
    fn list(
        &mut self,
        list: &[StateValue],
        companion: Option<&[StateValue]>,
    ) -> Result<Option<Vec<StateValue>>, StateError> {
        let mut mapped = Vec::new();
        for (index, value) in list.iter().enumerate() {
            self.path.0.push(PathPart::Index(index));
            mapped.extend(self.value(value, companion.and_then(|companion| companion.get(index)))?);
            self.path.0.pop();
        }
        Ok(self.keeps.then_some(mapped))
    }

    /// Visits a value, and everything below it. The mapped leaf goes into the companion's leaf if
    /// there is one.
    fn value(
        &mut self,
        value: &StateValue,
        companion: Option<&StateValue>,
    ) -> Result<Option<StateValue>, StateError> {
        let mapped = match value {
            StateValue::Dict(dict) => {
                return Ok(self
                    .dict(dict, companion.and_then(StateValue::as_dict))?
                    .map(StateValue::Dict));
            }
            StateValue::List(list) => {
                return Ok(self.list(list, elements(companion))?.map(StateValue::List));
            }
            StateValue::Tuple(list) => {
                return Ok(self.list(list, elements(companion))?.map(StateValue::Tuple));
            }
            StateValue::Sharded(tensor) => self.callbacks.sharded(&self.path, tensor)?,
            StateValue::Tensor(tensor) => self.callbacks.tensor(&self.path, tensor)?,
            StateValue::Raw(tensor) => self.callbacks.raw(&self.path, tensor)?,
            StateValue::Plain(value) => self.callbacks.plain(&self.path, value)?,
        };
        match companion {
            _ if !self.keeps => Ok(None),
            Some(companion) => {
                same_leaf(&self.path, &mapped, companion)?;
                copy_leaf(&mapped, companion).map(Some)
            }
            None => mapped.to_device(self.device).map(Some),
        }
    }
}

/// Returns the elements of a list or a tuple.
fn elements(value: Option<&StateValue>) -> Option<&[StateValue]> {
    match value {
        Some(StateValue::List(list) | StateValue::Tuple(list)) => Some(list),
        _ => None,
    }
}
