//! State dicts of the same structure: made on the CPU, compared, and copied from one to the other.

use fsdp_flat::storage::zeros;
use fsdp_flat::{RawTensor, ShardedTensor};
use fsdp_layout::KeyPath;

use crate::companion::{check_dict, same_leaf};
use crate::traverse::leaves;
use crate::{
    IterateOptions, Keep, StateDict, StateDictCallbacks, StateError, StateValue, get_element, iterate_state_dict,
};

/// Makes a dict of the same structure whose tensors are zeros on the CPU, in memory of their own. Copies can be made
/// into it again and again. Sharded tensors keep their boxes; plain values are copied. torch's
/// `_create_cpu_state_dict`, without its pinned or shared memory, which candle does not have.
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

/// Returns `true` if two dicts have the same structure, and in the same places tensors of the same kind, dtype, shape
/// and boxes. Plain values may differ, and so may devices and the order of keys. torch's
/// `_check_state_dict_similarity`.
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
/// whatever device they are; plain values and raw tensors replace the old ones.
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

/// Checks that two dicts have the same structure, and leaves that fit in the same places.
fn check(a: &StateDict, b: &StateDict) -> Result<(), StateError> {
    check_dict(a, b, &mut KeyPath::default())?;
    leaves(a).into_iter().try_for_each(|(path, value)| match get_element(b, &path) {
        Some(other) => same_leaf(&path, value, other),
        None => Ok(()),
    })
}
