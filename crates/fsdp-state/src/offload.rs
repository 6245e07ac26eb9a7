//! Moves state dicts to the CPU, as whole tensors or with their sharding.

use candle_core::Device;
use fsdp_comm::ProcessGroup;

use crate::keep_on::KeepOn;
use crate::{GatherOptions, StateDict, StateError, gather_state_dict};

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

/// Options of [`maybe_full_or_cpu_state_dict`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FullOrCpuOptions {
    /// `true` for whole tensors instead of sharded ones.
    pub full_state_dict: bool,
    /// `true` for tensors on the CPU.
    pub cpu_offload: bool,
    /// The ranks that get the result. In torch both options together imply rank 0 only; here the
    /// caller says so.
    pub keep_on: KeepOn,
}

/// Returns the state dict in the form that the options ask for, on the ranks that keep it, and an
/// empty dict on the others: torch's `_maybe_full_or_cpu_state_dict`.
///
/// With `full_state_dict` it is the result of [`gather_state_dict`]. Otherwise, with `cpu_offload`,
/// it is that of [`offload_state_dict_to_cpu`]. With neither it is the dict itself, and shares its
/// tensors.
///
/// Collectives: those of [`gather_state_dict`] with `full_state_dict`, else none.
///
/// # Errors
/// The errors of the function that does the work.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fsdp_flat::{LocalShard, ShardedTensor};
/// use fsdp_layout::TensorBox;
/// use fsdp_state::{FullOrCpuOptions, KeepOn, StateDict, StateValue, maybe_full_or_cpu_state_dict};
/// let sums = fsdp_comm::run_local(2, |group| {
///     let tensor = Tensor::full(1f32 + group.rank() as f32, 1, &Device::Cpu)?;
///     let half = LocalShard { bounds: TensorBox::new(vec![group.rank()], vec![1]), tensor };
///     let mut state = StateDict::new();
///     state.insert("bias", ShardedTensor::new(candle_core::DType::F32, vec![2], vec![half])?);
///     let offloaded = FullOrCpuOptions { cpu_offload: true, ..Default::default() };
///     let state_on_cpu = maybe_full_or_cpu_state_dict(&state, &group, &offloaded)?;
///     assert!(state_on_cpu.get("bias").and_then(StateValue::as_sharded).is_some()); // its own half, still
///     let options = FullOrCpuOptions { full_state_dict: true, keep_on: KeepOn::Ranks(vec![0]), ..offloaded };
///     let full = maybe_full_or_cpu_state_dict(&state, &group, &options)?;
///     let bias = full.get("bias").and_then(StateValue::as_tensor);
///     Ok::<_, fsdp_state::StateError>(bias.map(|bias| bias.sum_all()?.to_scalar::<f32>()).transpose()?)
/// })?;
/// assert_eq!((*sums[0].as_ref().unwrap(), *sums[1].as_ref().unwrap()), (Some(3.), None));
/// # Ok::<(), fsdp_comm::CommError>(())
/// ```
pub fn maybe_full_or_cpu_state_dict(
    state: &StateDict,
    group: &ProcessGroup,
    options: &FullOrCpuOptions,
) -> Result<StateDict, StateError> {
    let keep_on = options.keep_on.clone();
    if options.full_state_dict {
        let device = options.cpu_offload.then_some(Device::Cpu);
        return gather_state_dict(state, group, &GatherOptions { keep_on, device });
    }
    if options.cpu_offload {
        return offload_state_dict_to_cpu(state, &keep_on, group.rank());
    }
    Ok(if keep_on.contains(group.rank()) {
        state.clone()
    } else {
        StateDict::new()
    })
}
