//! State dicts of the same structure: made on the CPU, compared, and copied from one to the other.

use candle_core::Tensor;
use fsdp_flat::storage::zeros;
use fsdp_flat::{RawTensor, ShardedTensor};
use fsdp_layout::KeyPath;

use crate::companion::{check_dict, copy_leaf, copy_shards, same_leaf};
use crate::traverse::leaves;
use crate::{
    IterateOptions, StateDict, StateDictCallbacks, StateError, StateValue, get_element,
    iterate_state_dict,
};

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
    struct Zeros;
    impl StateDictCallbacks for Zeros {
        fn sharded(
            &mut self,
            _: &KeyPath,
            tensor: &ShardedTensor,
        ) -> Result<StateValue, StateError> {
            Ok(ShardedTensor::zeros(tensor.dtype(), tensor.shape(), &tensor.boxes())?.into())
        }

        fn tensor(&mut self, _: &KeyPath, tensor: &Tensor) -> Result<StateValue, StateError> {
            Ok(zeros(tensor.dims(), tensor.dtype())?.into())
        }

        fn raw(&mut self, _: &KeyPath, tensor: &RawTensor) -> Result<StateValue, StateError> {
            let bytes = vec![0; tensor.bytes().len()];
            Ok(RawTensor::new(tensor.dtype(), tensor.shape().to_vec(), bytes)?.into())
        }
    }
    iterate_state_dict(state, &mut Zeros, &IterateOptions::default())
}

/// Returns `true` if two dicts have the same structure, and in the same places tensors of the same
/// kind, dtype, shape and boxes. Plain values may differ, and so may devices and the order of keys.
/// torch's `_check_state_dict_similarity`.
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
    check(state, copy)?;
    let mut copier = Copier {
        copy,
        can_wait,
        later: DeferredCopies::default(),
    };
    let copied = iterate_state_dict(state, &mut copier, &IterateOptions::default())?;
    let later = copier.later;
    *copy = copied;
    Ok(later)
}

/// The copies that [`copy_state_dict_deferring`] has left for later.
#[derive(Debug, Default)]
#[must_use = "the copy is not complete without them"]
pub struct DeferredCopies(Vec<(ShardedTensor, ShardedTensor)>);

impl DeferredCopies {
    /// Makes the copies. No communication.
    ///
    /// # Errors
    /// Memory that was released meanwhile.
    pub fn finish(self) -> Result<(), StateError> {
        self.0
            .iter()
            .try_for_each(|(from, to)| copy_shards(from, to))
    }
}

/// Copies the leaves of a dict to the same places of `copy`, and puts those that can wait on a
/// list.
struct Copier<'a> {
    copy: &'a StateDict,
    can_wait: &'a dyn Fn(&KeyPath) -> bool,
    later: DeferredCopies,
}

impl Copier<'_> {
    /// Copies a leaf to its place in the other dict, and returns the value there.
    fn copy(&self, path: &KeyPath, value: StateValue) -> Result<StateValue, StateError> {
        match get_element(self.copy, path) {
            Some(companion) => copy_leaf(&value, companion),
            None => Ok(value),
        }
    }
}

impl StateDictCallbacks for Copier<'_> {
    fn sharded(
        &mut self,
        path: &KeyPath,
        tensor: &ShardedTensor,
    ) -> Result<StateValue, StateError> {
        if let Some(StateValue::Sharded(to)) = get_element(self.copy, path)
            && tensor
                .shards()
                .iter()
                .chain(to.shards())
                .all(|shard| shard.tensor.device().is_cpu())
            && (self.can_wait)(path)
        {
            self.later.0.push((tensor.clone(), to.clone()));
            return Ok(to.clone().into());
        }
        self.copy(path, tensor.clone().into())
    }

    fn tensor(&mut self, path: &KeyPath, tensor: &Tensor) -> Result<StateValue, StateError> {
        self.copy(path, tensor.clone().into())
    }
}

/// Checks that two dicts have the same structure, and leaves that fit in the same places.
fn check(a: &StateDict, b: &StateDict) -> Result<(), StateError> {
    check_dict(a, b, &mut KeyPath::default())?;
    leaves(a)
        .into_iter()
        .try_for_each(|(path, value)| match get_element(b, &path) {
            Some(other) => same_leaf(&path, value, other),
            None => Ok(()),
        })
}
