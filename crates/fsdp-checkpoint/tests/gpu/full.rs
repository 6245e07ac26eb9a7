//! Full state dicts of models on GPUs, whose ranks have NCCL.

use std::time::Duration;

use candle_core::cuda_backend::cudarc::driver::CudaContext;
use candle_core::{DType, Device};
use fsdp_checkpoint::{StateDictOptions, get_state_dict, set_state_dict, state_digest};
use fsdp_comm::{BackendKind, init_process_group_within};
use fsdp_nn::algorithm::{AdamOptions, Algorithm};
use fsdp_nn::{FsdpConfig, MixedPrecision};
use fsdp_state::{StateDict, flatten_state_dict};

use crate::counts::{counts, has_counts};
use crate::{alone, backward_on, large_run, nccl_ranks, step};

const DEADLINE: Duration = Duration::from_secs(60);

/// More bytes than are copied beside the state: norms, steps, and the strides that kernels get.
const SMALL_BYTES: u64 = 10_000;

/// Returns the number of GPUs.
fn gpus() -> usize {
    usize::try_from(CudaContext::device_count().unwrap()).unwrap()
}

/// Gets the full state dict of a run on rank 0, and brings it into another run.
pub(crate) fn run_rank() {
    let rank: usize = std::env::var("RANK").unwrap().parse().unwrap();
    let group = init_process_group_within(BackendKind::Nccl, DEADLINE).unwrap();
    let device = Device::new_cuda(rank % gpus()).unwrap();
    for param in [None, Some(DType::BF16)] {
        let config = FsdpConfig {
            device: device.clone(),
            mixed_precision: MixedPrecision {
                param,
                ..MixedPrecision::default()
            },
            ..FsdpConfig::default()
        };
        let adamw = Algorithm::AdamW(AdamOptions::adamw());
        let mut run = large_run(group.clone(), config.clone(), &adamw, false);
        let mut other = large_run(group.clone(), config, &adamw, false);
        for (run, number) in [(&mut run, 1), (&mut other, 2)] {
            backward_on(run, number, &device);
            step(run);
        }
        let saved = state_digest(&run, &group).unwrap().root();
        assert_ne!(state_digest(&other, &group).unwrap().root(), saved);

        let full = StateDictOptions {
            full_state_dict: true,
            cpu_offload: true,
            ..StateDictOptions::default()
        };
        let before = counts();
        let (model, optim) =
            get_state_dict(run.model.parameters(), &[&run.optimizers[0]], &full).unwrap();
        let moved = counts().since(before);
        let bytes = bytes_of(&model) + bytes_of(&optim);
        assert_eq!(bytes > 0, rank == 0);
        let expected = bytes..=bytes + SMALL_BYTES;
        assert!(
            !has_counts() || expected.contains(&moved.to_host),
            "{moved:?} {bytes}"
        );
        assert!(moved.to_device < SMALL_BYTES, "{moved:?}");

        let from_rank0 = StateDictOptions {
            broadcast_from_rank0: true,
            ..full
        };
        let before = counts();
        let parameters = std::sync::Arc::clone(other.model.parameters());
        let mut optimizers = [&mut other.optimizers[0]];
        set_state_dict(&model, &optim, &parameters, &mut optimizers, &from_rank0).unwrap();
        let moved = counts().since(before);
        assert!(
            !has_counts() || expected.contains(&moved.to_device),
            "{moved:?} {bytes}"
        );
        assert!(moved.to_host < SMALL_BYTES, "{moved:?}");
        assert_eq!(state_digest(&other, &group).unwrap().root(), saved);
    }
}

/// Returns the bytes of the tensors in a state dict, without the numbers of steps, which are not on
/// GPUs.
fn bytes_of(state: &StateDict) -> u64 {
    let values = flatten_state_dict(state).unwrap().values;
    let tensors = values.values().flat_map(|value| value.candle_tensors());
    tensors
        .filter(|tensor| tensor.rank() > 0)
        .map(|tensor| (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64)
        .sum()
}

#[test]
fn a_full_state_dict_is_copied_to_the_host_of_rank_0_only_and_goes_back_from_there() {
    let _alone = alone();
    for slow in [&[][..], &[("CUDA_STAND_IN_DELAY_US", "300")]] {
        for world_size in [2, 4] {
            nccl_ranks::start(gpus(), world_size, "full", slow).assert_casualties(&[]);
        }
    }
}
