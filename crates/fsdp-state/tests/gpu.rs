//! Tensors on GPUs move between ranks in GPU memory. `cargo xtask gpu` runs this where a GPU is.
//!
//! A test starts this very program again for each rank, where `rank_process` finds out from its
//! environment what to do.

#![expect(clippy::unwrap_used, reason = "these are tests, and their helpers")]

#[path = "../../fsdp-comm/tests/nccl_ranks/mod.rs"]
mod nccl_ranks;
#[expect(dead_code, reason = "other test programs need the rest")]
#[path = "../../fsdp-comm/tests/processes/mod.rs"]
mod processes;
#[expect(dead_code, reason = "another test program asks for the rest")]
#[path = "it/ranks.rs"]
mod ranks;
#[expect(dead_code, reason = "another test program asks for the rest")]
#[path = "../../fsdp-comm/tests/stand_in/mod.rs"]
mod stand_in;

use std::time::Duration;

use candle_core::cuda_backend::cudarc::driver::CudaContext;
use candle_core::{DType, Device, Tensor};
use fsdp_comm::{BackendKind, Operation, ProcessGroup, init_process_group_within};
use fsdp_flat::storage::{release, to_device};
use fsdp_flat::{RawTensor, ShardedTensor};
use fsdp_layout::TensorBox;
use fsdp_state::{
    GatherOptions, KeepOn, LoadOptions, StateDict, StateValue, broadcast_state_dict,
    gather_sharded_tensor, gather_state_dict, reshard_sharded_tensor,
};
use processes::SHORT_DEADLINE;
use ranks::{DTYPES, Numbers, assert_cut, bits, bits_at, cut, cuts, f32s, flat_ranges, tensor};

/// The numbers of ranks, of which several may share a GPU.
const WORLDS: [usize; 2] = [2, 4];

const DEADLINE: Duration = Duration::from_secs(60);

/// Returns the number of GPUs.
fn gpus() -> usize {
    usize::try_from(CudaContext::device_count().unwrap()).unwrap()
}

/// The program of each rank.
#[test]
fn rank_process() {
    let Ok(task) = std::env::var("FSDP_TEST") else {
        return;
    };
    let rank: usize = std::env::var("RANK").unwrap().parse().unwrap();
    let group = init_process_group_within(BackendKind::Nccl, DEADLINE).unwrap();
    let device = Device::new_cuda(rank % gpus()).unwrap();
    match task.as_str() {
        "any cuts" => any_cuts(&group, &device),
        "large" => large(&group, &device),
        "counts" => count(&group, &device),
        "failures" => failures(&group, &device),
        "until one is lost" => until_one_is_lost(&group.with_deadline(SHORT_DEADLINE), &device),
        other => panic!("`{other}` is not known"),
    }
}

/// Runs the ranks of a task, with streams at full speed and slowed down if this is the stand-in.
fn run_all(task: &str) {
    for world_size in WORLDS {
        for slow in [&[][..], &[("CUDA_STAND_IN_DELAY_US", "300")]] {
            nccl_ranks::start(gpus(), world_size, task, slow).assert_casualties(&[]);
        }
    }
}

/// Returns a tensor on a GPU, if candle can have it there.
fn on_gpu(tensor: &Tensor, device: &Device) -> Tensor {
    to_device(tensor, device).unwrap_or_else(|_| tensor.clone())
}

/// Returns a sharded tensor whose boxes are on a GPU, if candle can have them there.
fn sharded_on_gpu(tensor: &ShardedTensor, device: &Device) -> ShardedTensor {
    tensor.to_device(device).unwrap_or_else(|_| tensor.clone())
}

/// Draws a shape.
fn shape(numbers: &mut Numbers) -> Vec<usize> {
    (0..numbers.below(4)).map(|_| numbers.below(7)).collect()
}

#[test]
fn any_boxes_become_any_others_bit_for_bit() {
    run_all("any cuts");
}

/// Gathers, reshards and broadcasts tensors of all dtypes that are cut in any way. The boxes of
/// some ranks are on the host.
fn any_cuts(group: &ProcessGroup, device: &Device) {
    let (rank, world_size) = (group.rank(), group.world_size());
    let mut numbers = Numbers(7);
    for turn in 0..6 * DTYPES.len() {
        let dtype = DTYPES[turn % DTYPES.len()];
        let (shape, seed, wanted) = (shape(&mut numbers), numbers.next(), numbers.next());
        let full = tensor(&shape, dtype, seed);
        let (held, wanted) = (
            cuts(&shape, world_size, seed),
            cuts(&shape, world_size, wanted),
        );
        let mut own = cut(&full, &held[rank]);
        if turn % 5 != rank {
            own = sharded_on_gpu(&own, device);
        }
        let what = format!("{turn}: {dtype:?} {shape:?}");
        let resharded = reshard_sharded_tensor(&own, &wanted[rank], group).unwrap();
        assert_cut(&resharded, &full, &wanted[rank]);

        let root = turn % world_size;
        let whole = gather_sharded_tensor(&own, group, root, None).unwrap();
        assert_eq!(whole.is_some(), rank == root, "{what}");
        if let Some(whole) = whole {
            assert_eq!(bits(&whole), bits(&full), "{what}");
        }
        let mut state = StateDict::new();
        state.insert("weight", own);
        state.insert("whole", on_gpu(&f32s(&[3, 2], 5), device));
        let options = GatherOptions {
            keep_on: KeepOn::All,
            device: (turn % 2 == 0).then_some(Device::Cpu),
        };
        let gathered = gather_state_dict(&state, group, &options).unwrap();
        assert_eq!(bits_at(&gathered, "weight"), bits(&full), "{what}");
        assert_eq!(bits_at(&gathered, "whole"), bits(&f32s(&[3, 2], 5)));

        let mask = RawTensor::new(fsdp_layout::DType::Bool, vec![4], vec![1, 0, 0, 1]).unwrap();
        let mut root_state = StateDict::new();
        root_state.insert("weight", full.clone());
        root_state.insert("mask", mask);
        let zeros = ShardedTensor::zeros(dtype, &shape, &wanted[rank]).unwrap();
        let mut local = StateDict::new();
        local.insert("weight", sharded_on_gpu(&zeros, device));
        let empty = RawTensor::new(fsdp_layout::DType::Bool, vec![4], vec![0; 4]).unwrap();
        local.insert("mask", empty);
        let root_state = (rank == root).then_some(&root_state);
        let options = LoadOptions::default();
        let (loaded, _) = broadcast_state_dict(root_state, &local, root, group, &options).unwrap();
        let weight = loaded.get("weight").and_then(StateValue::as_sharded);
        // A tensor of one element is sent with the names, and is whole.
        match weight {
            Some(weight) => assert_cut(weight, &full, &wanted[rank]),
            None => assert_eq!(bits_at(&loaded, "weight"), bits(&full), "{what}"),
        }
        assert!(
            matches!(loaded.get("mask"), Some(StateValue::Raw(mask)) if mask.bytes() == [1, 0, 0, 1])
        );
    }
}

#[test]
fn tensors_of_several_windows_arrive_whole() {
    for world_size in WORLDS {
        nccl_ranks::start(gpus(), world_size, "large", &[]).assert_casualties(&[]);
    }
}

/// Moves a tensor that takes several windows, beside small ones.
fn large(group: &ProcessGroup, device: &Device) {
    let (rank, world_size) = (group.rank(), group.world_size());
    let shape = [4099, 2051];
    let full = f32s(&shape, 3);
    let ranges = flat_ranges(&shape, world_size);
    let small = f32s(&[5, 3], 4);
    let mut state = StateDict::new();
    state.insert("a", sharded_on_gpu(&cut(&full, &ranges[rank]), device));
    let small_ranges = flat_ranges(&[5, 3], world_size);
    state.insert(
        "b",
        sharded_on_gpu(&cut(&small, &small_ranges[rank]), device),
    );
    for keep_on in [KeepOn::All, KeepOn::Ranks(vec![world_size - 1])] {
        let options = GatherOptions {
            keep_on: keep_on.clone(),
            device: Some(Device::Cpu),
        };
        let gathered = gather_state_dict(&state, group, &options).unwrap();
        if keep_on.contains(rank) {
            assert!(bits_at(&gathered, "a") == bits(&full));
            assert!(bits_at(&gathered, "b") == bits(&small));
        }
    }
    let zeros = |ranges: &[_], shape: &[usize]| {
        let zeros = ShardedTensor::zeros(DType::F32, shape, ranges).unwrap();
        sharded_on_gpu(&zeros, device)
    };
    let mut local = StateDict::new();
    local.insert("a", zeros(&ranges[rank], &shape));
    local.insert("b", zeros(&small_ranges[rank], &[5, 3]));
    let mut root_state = StateDict::new();
    root_state.insert("a", full.clone());
    root_state.insert("b", small.clone());
    let root_state = (rank == 0).then_some(&root_state);
    let options = LoadOptions::default();
    let (loaded, _) = broadcast_state_dict(root_state, &local, 0, group, &options).unwrap();
    for (key, full, ranges) in [("a", &full, &ranges), ("b", &small, &small_ranges)] {
        let found = loaded.get(key).and_then(StateValue::as_sharded).unwrap();
        assert_cut(found, full, &ranges[rank]);
    }
    let wanted = cuts(&shape, world_size, 4);
    let own = sharded_on_gpu(&cut(&full, &ranges[rank]), device);
    let resharded = reshard_sharded_tensor(&own, &wanted[rank], group).unwrap();
    assert_cut(&resharded, &full, &wanted[rank]);
    // Columns, of which each element is a run of its own.
    let shape = [9001, world_size];
    let full = f32s(&shape, 5);
    let own = cut(&full, &flat_ranges(&shape, world_size)[rank]);
    let column = [TensorBox::new(vec![0, rank], vec![shape[0], 1])];
    let resharded = reshard_sharded_tensor(&sharded_on_gpu(&own, device), &column, group).unwrap();
    assert_cut(&resharded, &full, &column);
}

#[test]
fn only_what_a_rank_wants_on_the_host_is_copied_there() {
    for world_size in WORLDS {
        nccl_ranks::start(gpus(), world_size, "counts", &[]).assert_casualties(&[]);
    }
}

/// Counts the bytes that are copied between the host and the GPU.
fn count(group: &ProcessGroup, device: &Device) {
    let (rank, world_size) = (group.rank(), group.world_size());
    let shape = [1000, 77];
    let full = f32s(&shape, 3);
    let whole_bytes = bits(&full).len() as u64;
    let ranges = flat_ranges(&shape, world_size);
    let own = sharded_on_gpu(&cut(&full, &ranges[rank]), device);
    let mut state = StateDict::new();
    state.insert("weight", own.clone());
    for keep_on in [KeepOn::Ranks(vec![0]), KeepOn::All] {
        for on_host in [true, false] {
            let options = GatherOptions {
                keep_on: keep_on.clone(),
                device: on_host.then_some(Device::Cpu),
            };
            let before = bytes_moved();
            let gathered = gather_state_dict(&state, group, &options).unwrap();
            let is_kept = keep_on.contains(rank);
            assert_eq!(gathered.is_empty(), !is_kept);
            let expected = if is_kept && on_host { whole_bytes } else { 0 };
            assert_moved(before, [expected, 0], "a gather");
            if is_kept {
                assert_eq!(bits_at(&gathered, "weight"), bits(&full));
            }
        }
    }
    // The root has the tensor on the host, and all ranks want their parts on the GPU.
    let mut root_state = StateDict::new();
    root_state.insert("weight", full.clone());
    let root_state = (rank == 0).then_some(&root_state);
    let before = bytes_moved();
    let options = LoadOptions::default();
    let (loaded, _) = broadcast_state_dict(root_state, &state, 0, group, &options).unwrap();
    let expected = if rank == 0 { whole_bytes } else { 0 };
    assert_moved(before, [0, expected], "a broadcast");
    let found = loaded.get("weight").and_then(StateValue::as_sharded);
    assert_cut(found.unwrap(), &full, &ranges[rank]);
    // Nothing that is resharded comes to the host. candle's kernels get strides from there.
    let wanted = [TensorBox::new(vec![0, rank], vec![1000, 3])];
    let before = bytes_moved();
    let resharded = reshard_sharded_tensor(&own, &wanted, group).unwrap();
    if let Some((before, now)) = before.zip(bytes_moved()) {
        assert_eq!(now[0], before[0]);
        assert!(now[1] - before[1] < 1000, "{before:?} {now:?}");
    }
    assert_cut(&resharded, &full, &wanted);
    assert_eq!(group.traffic().count(Operation::AllGather), 0);
}

/// Returns the bytes that were copied from GPUs to the host so far, and from the host to GPUs;
/// `None` with a real driver.
fn bytes_moved() -> Option<[u64; 2]> {
    let demands = stand_in::counts()?.process;
    Some([demands.bytes_down, demands.bytes_up])
}

/// Checks how many bytes were copied to the host and from it since `before`, if they are counted.
fn assert_moved(before: Option<[u64; 2]>, expected: [u64; 2], what: &str) {
    if let Some((before, now)) = before.zip(bytes_moved()) {
        assert_eq!([now[0] - before[0], now[1] - before[1]], expected, "{what}");
    }
}

#[test]
fn a_rank_that_cannot_read_is_an_error_on_all_and_the_next_call_works() {
    run_all("failures");
}

/// Lets one rank fail to read its part.
fn failures(group: &ProcessGroup, device: &Device) {
    let (rank, world_size) = (group.rank(), group.world_size());
    let full = f32s(&[12, 5], 3);
    let ranges = flat_ranges(&[12, 5], world_size);
    let gather = |own: ShardedTensor, keep_on| {
        let mut state = StateDict::new();
        state.insert("weight", own);
        let options = GatherOptions {
            keep_on,
            device: Some(Device::Cpu),
        };
        gather_state_dict(&state, group, &options)
    };
    for keep_on in [KeepOn::All, KeepOn::Ranks(vec![0])] {
        for failing in 0..world_size {
            let own = sharded_on_gpu(&cut(&full, &ranges[rank]), device);
            if rank == failing {
                release(&own.shards()[0].tensor).unwrap();
            }
            let error = gather(own, keep_on.clone()).unwrap_err().to_string();
            let errors = group.all_gather_object(&error).unwrap();
            assert!(errors.iter().all(|other| *other == error), "{errors:?}");
            let own = sharded_on_gpu(&cut(&full, &ranges[rank]), device);
            let gathered = gather(own, keep_on.clone()).unwrap();
            if keep_on.contains(rank) {
                assert_eq!(bits_at(&gathered, "weight"), bits(&full));
            }
        }
    }
}

#[test]
fn a_rank_that_is_lost_is_named_on_all_others() {
    for world_size in WORLDS {
        let others: Vec<usize> = (0..world_size).filter(|rank| *rank != 1).collect();
        let mut ranks = nccl_ranks::start(gpus(), world_size, "until one is lost", &[]);
        ranks.wait_for(&others, 2 * DEADLINE);
    }
}

/// Gathers until rank 1 is gone.
fn until_one_is_lost(group: &ProcessGroup, device: &Device) {
    let (rank, world_size) = (group.rank(), group.world_size());
    let full = f32s(&[12, 5], 3);
    let ranges = flat_ranges(&[12, 5], world_size);
    let mut state = StateDict::new();
    state.insert("weight", sharded_on_gpu(&cut(&full, &ranges[rank]), device));
    for turn in 0.. {
        if rank == 1 && turn == 3 {
            std::process::abort();
        }
        match gather_state_dict(&state, group, &GatherOptions::default()) {
            Ok(gathered) => assert_eq!(bits_at(&gathered, "weight"), bits(&full)),
            Err(error) => {
                assert!(turn >= 3 && error.to_string().contains("rank 1"), "{error}");
                return;
            }
        }
    }
}
