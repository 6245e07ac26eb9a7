//! State dicts of the same structure: made on the CPU, compared, and copied from one to the other.

use fsdp_flat::storage::zeros;
use fsdp_flat::{RawTensor, ShardedTensor};
use fsdp_layout::KeyPath;

use crate::iterate::check_dict;
use crate::memory::copy_into;
use crate::traverse::leaves;
use crate::{
    IterateOptions, Keep, StateDict, StateDictCallbacks, StateError, StateValue, get_element, iterate_state_dict,
};

/// A dict of the same structure whose tensors are zeros on the CPU, in memory of their own: something to copy into,
/// again and again. Sharded tensors keep their boxes; plain values are copied. torch's `_create_cpu_state_dict`,
/// without its pinned or shared memory, which candle does not have.
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
    struct Zeros;
    impl StateDictCallbacks for Zeros {
        fn sharded(&mut self, _: &KeyPath, tensor: &ShardedTensor) -> Result<StateValue, StateError> {
            Ok(ShardedTensor::zeros(tensor.dtype(), tensor.shape(), &tensor.boxes())?.into())
        }

        fn tensor(&mut self, _: &KeyPath, tensor: &candle_core::Tensor) -> Result<StateValue, StateError> {
            Ok(zeros(tensor.dims(), tensor.dtype())?.into())
        }

        fn raw(&mut self, _: &KeyPath, tensor: &RawTensor) -> Result<StateValue, StateError> {
            let bytes = vec![0; tensor.bytes().len()];
            Ok(RawTensor::new(tensor.dtype(), tensor.shape().to_vec(), bytes)?.into())
        }
    }
    iterate_state_dict(state, &mut Zeros, &IterateOptions::default())
}

/// Whether two dicts have the same structure, and in the same places tensors of the same kind, dtype, shape and
/// boxes. Plain values may differ, and so may devices and the order of keys. torch's `_check_state_dict_similarity`.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_state::{StateDict, check_state_dict_similarity};
/// let of = |len| -> candle_core::Result<StateDict> {
///     Ok([("weight", Tensor::zeros(len, DType::F32, &Device::Cpu)?.into())].into_iter().collect())
/// };
/// assert!(check_state_dict_similarity(&of(2)?, &of(2)?));
/// assert!(!check_state_dict_similarity(&of(2)?, &of(3)?));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[must_use]
pub fn check_state_dict_similarity(a: &StateDict, b: &StateDict) -> bool {
    check(a, b).is_ok()
}

/// Copies the values of one dict into another of the same structure: bytes into the memory of its tensors, on
/// whatever device they are; plain values and raw tensors take the places of those there.
/// torch's `_copy_state_dict`. No communication.
///
/// # Errors
/// [`StateError::CompanionMismatch`] if the dicts are not similar (see [`check_state_dict_similarity`]); nothing has
/// been copied then.
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
    check(state, copy)?;
    let options = IterateOptions { companion: Some(copy), ..IterateOptions::default() };
    *copy = iterate_state_dict(state, &mut Keep, &options)?;
    Ok(())
}

fn check(a: &StateDict, b: &StateDict) -> Result<(), StateError> {
    check_dict(a, b, &mut KeyPath::default())?;
    leaves(a).into_iter().try_for_each(|(path, value)| match get_element(b, &path) {
        Some(other) => same_leaf(&path, value, other),
        None => Ok(()),
    })
}

/// Whether a value can be copied into another.
pub(crate) fn same_leaf(path: &KeyPath, value: &StateValue, companion: &StateValue) -> Result<(), StateError> {
    let same = match (value, companion) {
        (StateValue::Tensor(a), StateValue::Tensor(b)) => a.dtype() == b.dtype() && a.dims() == b.dims(),
        (StateValue::Raw(a), StateValue::Raw(b)) => a.dtype() == b.dtype() && a.shape() == b.shape(),
        (StateValue::Sharded(a), StateValue::Sharded(b)) => {
            a.dtype() == b.dtype() && a.shape() == b.shape() && a.boxes() == b.boxes()
        }
        (StateValue::Plain(_), StateValue::Plain(_)) => true,
        _ => false,
    };
    if same {
        return Ok(());
    }
    let (found, expected) = (describe(value), describe(companion));
    Err(StateError::CompanionMismatch { key: path.flat_key(), found, expected })
}

/// Copies a value into its companion, and returns what then stands there.
pub(crate) fn copy_leaf(value: &StateValue, companion: &StateValue) -> Result<StateValue, StateError> {
    match (value, companion) {
        (StateValue::Tensor(from), StateValue::Tensor(to)) => copy_into(from, to)?,
        (StateValue::Sharded(from), StateValue::Sharded(to)) => {
            for (from, to) in from.shards().iter().zip(to.shards()) {
                copy_into(&from.tensor, &to.tensor)?;
            }
        }
        (value, _) => return Ok(value.clone()),
    }
    Ok(companion.clone())
}

/// Kind, dtype, shape and boxes, for messages.
pub(crate) fn describe(value: &StateValue) -> String {
    match value {
        StateValue::Tensor(tensor) => format!("tensor of {:?} {:?}", tensor.dtype(), tensor.dims()),
        StateValue::Raw(tensor) => format!("raw tensor of {} {:?}", tensor.dtype(), tensor.shape()),
        StateValue::Sharded(tensor) => {
            let boxes: Vec<String> = tensor.boxes().iter().map(ToString::to_string).collect();
            format!("sharded tensor of {:?} {:?} with boxes {}", tensor.dtype(), tensor.shape(), boxes.join(" "))
        }
        StateValue::Dict(dict) => format!("dict of {} keys", dict.len()),
        StateValue::List(list) => format!("list of {} values", list.len()),
        StateValue::Tuple(list) => format!("tuple of {} values", list.len()),
        StateValue::Plain(value) => value.type_name().to_owned(),
    }
}
