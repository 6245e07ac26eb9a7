//! State dicts of the same structure: made on the CPU, compared, and copied from one to the other,
//! its companion.

use std::collections::HashSet;

use candle_core::Device;
use fsdp_flat::storage::zeros;
use fsdp_flat::{RawTensor, ShardedTensor};
use fsdp_layout::{KeyPath, PathPart};

use crate::error::StateError;
use crate::keep_on::KeepOn;
use crate::memory::copy_into;
use crate::state_dict::{StateDict, StateValue};
use crate::traverse::{get_element, iterate_state_dict};

/// Returns a copy on the CPU, for the ranks that keep it; an empty dict on all others. Sharded
/// tensors stay sharded. torch's `_offload_state_dict_to_cpu`.
///
/// Tensors that are on the CPU already are copied too: the result shares memory with nothing, so
/// training may go on while it is written to a file. `rank` is this rank's number in the group
/// whose ranks `keep_on` lists. No communication.
///
/// # Errors
/// candle's errors, on this rank only.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_state::{KeepOn, StateDict, offload_state_dict_to_cpu};
/// let mut state = StateDict::new();
/// state.insert("weight", Tensor::zeros(4, DType::F32, &Device::Cpu)?);
/// let keep_on = KeepOn::Ranks(vec![0, 2]);
/// assert_eq!(offload_state_dict_to_cpu(&state, &keep_on, 2)?.len(), 1);
/// assert!(offload_state_dict_to_cpu(&state, &keep_on, 1)?.is_empty());
/// # Ok::<(), fsdp_state::StateError>(())
/// ```
pub fn offload_state_dict_to_cpu(
    state: &StateDict,
    keep_on: &KeepOn,
    rank: usize,
) -> Result<StateDict, StateError> {
    if keep_on.contains(rank) {
        state.copy_to(Some(&Device::Cpu))
    } else {
        Ok(StateDict::new())
    }
}

/// Makes a dict of the same structure whose tensors are zeros on the CPU, in memory of their own.
/// Copies can be made into it again and again. Sharded tensors keep their boxes; plain values are
/// copied. torch's `_create_cpu_state_dict`, without its pinned or shared memory, which candle does
/// not have.
///
/// # Errors
/// Dtypes whose elements are not plain bytes.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_state::{StateDict, check_state_dict_similarity, copy_state_dict, create_cpu_state_dict};
/// let mut state = StateDict::new();
/// state.insert("weight", Tensor::ones((2, 3), DType::F32, &Device::Cpu)?);
/// let mut copy = create_cpu_state_dict(&state)?;
/// assert!(check_state_dict_similarity(&state, &copy));
/// copy_state_dict(&state, &mut copy)?;
/// let weight = copy.get("weight").and_then(|weight| weight.as_tensor()).unwrap();
/// assert_eq!(weight.sum_all()?.to_scalar::<f32>()?, 6.0);
/// # Ok::<(), fsdp_state::StateError>(())
/// ```
pub fn create_cpu_state_dict(state: &StateDict) -> Result<StateDict, StateError> {
    iterate_state_dict(state, |_, value| {
        Ok(match value {
            StateValue::Tensor(tensor) => zeros(tensor.dims(), tensor.dtype())?.into(),
            StateValue::Sharded(tensor) => {
                ShardedTensor::zeros(tensor.dtype(), tensor.shape(), &tensor.boxes())?.into()
            }
            StateValue::Raw(tensor) => {
                let bytes = vec![0; tensor.bytes().len()];
                RawTensor::new(tensor.dtype(), tensor.shape().to_vec(), bytes)?.into()
            }
            other => other.clone(),
        })
    })
    .map(StateDict::without_notes)
}

/// Returns `true` if two dicts have the same structure, and in the same places tensors of the same
/// kind, dtype, shape and boxes. Plain values may differ, and so may devices and the order of keys.
/// torch's `_check_state_dict_similarity`.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_state::{StateDict, check_state_dict_similarity};
/// let zeros = |len| -> candle_core::Result<StateDict> {
///     Ok([("weight", Tensor::zeros(len, DType::F32, &Device::Cpu)?.into())].into_iter().collect())
/// };
/// assert!(check_state_dict_similarity(&zeros(2)?, &zeros(2)?));
/// assert!(!check_state_dict_similarity(&zeros(2)?, &zeros(3)?));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[must_use]
pub fn check_state_dict_similarity(state: &StateDict, other: &StateDict) -> bool {
    check_dict(state, other, &mut KeyPath::default()).is_ok()
}

/// Copies the values of one dict into another of the same structure: bytes into the memory of its
/// tensors, on whatever device they are; plain values and raw tensors replace the old ones. torch's
/// `_copy_state_dict`. No communication.
///
/// # Errors
/// [`StateError::CompanionMismatch`] if the dicts are not similar (see
/// [`check_state_dict_similarity`]); nothing has been copied then.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fsdp_state::{StateDict, copy_state_dict, create_cpu_state_dict};
/// let mut state = StateDict::new();
/// state.insert("weight", Tensor::new(&[1f32, 2.], &Device::Cpu)?);
/// let mut copy = create_cpu_state_dict(&state)?; // once
/// copy_state_dict(&state, &mut copy)?; // and then for every save
/// assert_eq!(copy.get("weight").unwrap().as_tensor().unwrap().to_vec1::<f32>()?, [1., 2.]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn copy_state_dict(state: &StateDict, copy: &mut StateDict) -> Result<(), StateError> {
    copy_state_dict_deferring(state, copy, &|_| false)?.finish()
}

/// Copies like [`copy_state_dict`], but leaves out the sharded tensors that `can_wait` selects by
/// their paths. They are copied by [`DeferredCopies::finish`], on any thread, and must stay as they
/// are until then. Sharded tensors that are not on the CPU are copied at once, because another
/// thread would not wait for the device to compute them. No communication.
///
/// # Errors
/// The errors of [`copy_state_dict`].
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_flat::ShardedTensor;
/// use fsdp_state::{StateDict, StateValue, copy_state_dict_deferring, create_cpu_state_dict};
/// let weight = ShardedTensor::from_whole(&Tensor::ones(2, DType::F32, &Device::Cpu)?);
/// let state: StateDict = [("weight", weight.into()), ("step", 3i64.into())].into_iter().collect();
/// let mut copy = create_cpu_state_dict(&state)?;
/// let later = copy_state_dict_deferring(&state, &mut copy, &|path| path.below(&["weight"]).is_some())?;
/// assert_eq!(copy.plain_at(&["step"]).and_then(|step| step.as_int()), Some(3));
/// later.finish()?; // as a rule on another thread
/// let copied = &copy.get("weight").and_then(StateValue::as_sharded).unwrap().shards()[0].tensor;
/// assert_eq!(copied.to_vec1::<f32>()?, [1., 1.]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn copy_state_dict_deferring(
    state: &StateDict,
    copy: &mut StateDict,
    can_wait: &dyn Fn(&KeyPath) -> bool,
) -> Result<DeferredCopies, StateError> {
    // All is compared before anything is copied, so that an error leaves the copy as it was.
    check_dict(state, copy, &mut KeyPath::default())?;
    let mut deferred = DeferredCopies::default();
    let copied = iterate_state_dict(state, |path, value| {
        let companion = get_element(copy, path).expect("both dicts have the same structure");
        match (value, companion) {
            (StateValue::Sharded(source), StateValue::Sharded(target)) => {
                let mut shards = source.shards().iter().chain(target.shards());
                if shards.all(|shard| shard.tensor.device().is_cpu()) && can_wait(path) {
                    deferred.0.push((source.clone(), target.clone()));
                } else {
                    copy_shards(source, target)?;
                }
            }
            (StateValue::Tensor(source), StateValue::Tensor(target)) => copy_into(source, target)?,
            // Plain values and raw tensors never change, so they are shared.
            (value, _) => return Ok(value.clone()),
        }
        Ok(companion.clone())
    })?;
    *copy = copied;
    Ok(deferred)
}

/// The copies that [`copy_state_dict_deferring`] has left for later.
#[derive(Debug, Default)]
#[must_use = "the copy is not complete without them"]
pub struct DeferredCopies(Vec<(ShardedTensor, ShardedTensor)>);

impl DeferredCopies {
    /// Returns `true` if nothing was left for later.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Makes the copies. No communication.
    ///
    /// # Errors
    /// Memory that was released meanwhile.
    pub fn finish(self) -> Result<(), StateError> {
        self.0
            .iter()
            .try_for_each(|(source, target)| copy_shards(source, target))
    }
}

/// Copies the elements of a rank's boxes into those of a tensor with the same boxes.
fn copy_shards(source: &ShardedTensor, target: &ShardedTensor) -> Result<(), StateError> {
    source
        .shards()
        .iter()
        .zip(target.shards())
        .try_for_each(|(source, target)| copy_into(&source.tensor, &target.tensor))
}

/// Checks that the values of one dict can be copied into those of another: that both have the same
/// keys, containers of the same kind and length, and leaves that fit in the same places.
fn check_dict(
    dict: &StateDict,
    companion: &StateDict,
    path: &mut KeyPath,
) -> Result<(), StateError> {
    let keys: HashSet<&str> = dict.keys().collect();
    let companion_keys: HashSet<&str> = companion.keys().collect();
    // The order of keys carries no meaning, so they are compared as sets.
    if keys != companion_keys {
        return Err(StateError::CompanionMismatch {
            key: path.flat_key(),
            found: describe_extra_keys(&keys, &companion_keys),
            expected: describe_extra_keys(&companion_keys, &keys),
        });
    }
    for (key, value) in dict {
        let companion = companion.get(key).expect("both dicts have the same keys");
        path.0.push(PathPart::Key(key.clone()));
        check_value(value, companion, path)?;
        path.0.pop();
    }
    Ok(())
}

/// Describes a dict by the keys of one dict that another lacks, for messages.
fn describe_extra_keys(keys: &HashSet<&str>, other_keys: &HashSet<&str>) -> String {
    let mut extra_keys: Vec<&str> = keys.difference(other_keys).copied().collect();
    extra_keys.sort_unstable();
    format!("dict with the keys {extra_keys:?} that the other lacks")
}

/// Checks two values at `path`, as [`check_dict`] does: leaves have the same kind, dtype, shape and
/// boxes.
fn check_value(
    value: &StateValue,
    companion: &StateValue,
    path: &mut KeyPath,
) -> Result<(), StateError> {
    let fits = match (value, companion) {
        (StateValue::Dict(dict), StateValue::Dict(companion)) => {
            return check_dict(dict, companion, path);
        }
        (StateValue::List(list), StateValue::List(companions))
        | (StateValue::Tuple(list), StateValue::Tuple(companions))
            if list.len() == companions.len() =>
        {
            for (index, (value, companion)) in list.iter().zip(companions).enumerate() {
                path.0.push(PathPart::Index(index));
                check_value(value, companion, path)?;
                path.0.pop();
            }
            true
        }
        (StateValue::Tensor(tensor), StateValue::Tensor(other)) => {
            tensor.dtype() == other.dtype() && tensor.dims() == other.dims()
        }
        (StateValue::Raw(tensor), StateValue::Raw(other)) => {
            tensor.dtype() == other.dtype() && tensor.shape() == other.shape()
        }
        (StateValue::Sharded(tensor), StateValue::Sharded(other)) => {
            tensor.dtype() == other.dtype()
                && tensor.shape() == other.shape()
                && tensor.boxes() == other.boxes()
        }
        (StateValue::Plain(_), StateValue::Plain(_)) => true,
        _ => false,
    };
    if fits {
        return Ok(());
    }
    Err(StateError::CompanionMismatch {
        key: path.flat_key(),
        found: describe(value),
        expected: describe(companion),
    })
}

/// Describes a value's kind, dtype, shape and boxes, for messages.
fn describe(value: &StateValue) -> String {
    match value {
        StateValue::Tensor(tensor) => format!("tensor of {:?} {:?}", tensor.dtype(), tensor.dims()),
        StateValue::Raw(tensor) => format!("raw tensor of {} {:?}", tensor.dtype(), tensor.shape()),
        StateValue::Sharded(tensor) => {
            let boxes: Vec<String> = tensor.boxes().iter().map(ToString::to_string).collect();
            format!(
                "sharded tensor of {:?} {:?} with boxes {}",
                tensor.dtype(),
                tensor.shape(),
                boxes.join(" ")
            )
        }
        StateValue::Dict(dict) => format!("dict of {} keys", dict.len()),
        StateValue::List(list) => format!("list of {} values", list.len()),
        StateValue::Tuple(list) => format!("tuple of {} values", list.len()),
        StateValue::Plain(value) => value.type_name().to_owned(),
    }
}
