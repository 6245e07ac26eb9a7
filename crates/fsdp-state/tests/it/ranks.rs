//! Ranks, tensors of arbitrary bits, and ways to cut them.

use std::time::Duration;

use candle_core::{DType, Tensor};
use fsdp_comm::{LocalRanks, ProcessGroup};
use fsdp_flat::storage::{HostBytes, HostBytesMut, zeros};
use fsdp_flat::{LocalShard, ShardedTensor};
use fsdp_layout::boxes::boxes_of_flat_range;
use fsdp_layout::shard::chunk_range;
use fsdp_layout::{KeyPath, PathPart, TensorBox};
use fsdp_state::{StateDict, StateError, StateValue};

/// Every dtype of candle that has bytes.
pub(crate) const DTYPES: [DType; 11] = [
    DType::F32,
    DType::U8,
    DType::U32,
    DType::I16,
    DType::I32,
    DType::I64,
    DType::BF16,
    DType::F16,
    DType::F64,
    DType::F8E4M3,
    DType::F8E8M0,
];

/// Runs a function on ranks that are threads, and returns the results in rank order.
pub(crate) fn run<T: Send>(world_size: usize, f: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    let ranks = LocalRanks {
        world_size,
        stack_bytes: 2 << 20,
        deadline: Duration::from_secs(30),
        ..LocalRanks::default()
    };
    ranks.run(f).unwrap()
}

/// Checks that all ranks failed with the same message, and returns it.
pub(crate) fn one_error<T>(outcomes: Vec<Result<T, StateError>>) -> StateError {
    let mut errors: Vec<StateError> = outcomes
        .into_iter()
        .enumerate()
        .map(|(rank, outcome)| {
            outcome
                .err()
                .unwrap_or_else(|| panic!("rank {rank} succeeded"))
        })
        .collect();
    let messages: Vec<String> = errors.iter().map(ToString::to_string).collect();
    assert!(
        messages.iter().all(|message| *message == messages[0]),
        "{messages:#?}"
    );
    let kinds: Vec<_> = errors.iter().map(std::mem::discriminant).collect();
    assert!(kinds.iter().all(|kind| *kind == kinds[0]));
    errors.remove(0)
}

/// Numbers that look random and are the same everywhere.
#[derive(Debug, Clone)]
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }
}

/// Makes a tensor of arbitrary bits, NaNs included.
pub(crate) fn tensor(shape: &[usize], dtype: DType, seed: u64) -> Tensor {
    let mut numbers = Numbers(seed);
    let tensor = zeros(shape, dtype).unwrap();
    let mut bytes = HostBytesMut::write(&tensor).unwrap();
    bytes.fill_with(|| numbers.next() as u8);
    bytes.finish().unwrap();
    tensor
}

pub(crate) fn f32s(shape: &[usize], seed: u64) -> Tensor {
    tensor(shape, DType::F32, seed)
}

/// Returns a tensor's bytes.
pub(crate) fn bits(tensor: &Tensor) -> Vec<u8> {
    HostBytes::read(&tensor.contiguous().unwrap())
        .unwrap()
        .to_vec()
}

/// Returns the bytes of the whole tensor at a key.
pub(crate) fn bits_at(state: &StateDict, key: &str) -> Vec<u8> {
    bits(
        state
            .get(key)
            .and_then(StateValue::as_tensor)
            .unwrap_or_else(|| panic!("no tensor `{key}`")),
    )
}

/// Copies these boxes of a tensor to memory of their own.
pub(crate) fn cut(full: &Tensor, boxes: &[TensorBox]) -> ShardedTensor {
    let whole = ShardedTensor::from_whole(full);
    let shards = boxes.iter().map(|bounds| LocalShard {
        bounds: bounds.clone(),
        tensor: whole.read_box(bounds).unwrap(),
    });
    ShardedTensor::new(full.dtype(), full.dims().to_vec(), shards.collect()).unwrap()
}

/// Checks that a sharded tensor has exactly these boxes of a tensor, bit for bit.
pub(crate) fn assert_cut(sharded: &ShardedTensor, full: &Tensor, boxes: &[TensorBox]) {
    assert_eq!(
        (sharded.shape(), sharded.dtype()),
        (full.dims(), full.dtype())
    );
    assert_eq!(sharded.boxes(), boxes);
    for (shard, expected) in sharded.shards().iter().zip(cut(full, boxes).shards()) {
        assert_eq!(
            bits(&shard.tensor),
            bits(&expected.tensor),
            "{}",
            shard.bounds
        );
    }
}

/// The boxes of each rank.
pub(crate) type Cuts = Vec<Vec<TensorBox>>;

/// Chunks of dimension 0, as torch cuts them; trailing ranks may have none.
pub(crate) fn chunks(shape: &[usize], world_size: usize) -> Cuts {
    (0..world_size)
        .map(|rank| {
            let rows = chunk_range(shape[0], world_size, rank);
            let (mut offsets, mut sizes) = (vec![0; shape.len()], shape.to_vec());
            (offsets[0], sizes[0]) = (rows.start, rows.len());
            if rows.is_empty() {
                Vec::new()
            } else {
                vec![TensorBox::new(offsets, sizes)]
            }
        })
        .collect()
}

/// Returns flat ranges that may cut rows, as a FlatParameter's shards do.
pub(crate) fn flat_ranges(shape: &[usize], world_size: usize) -> Cuts {
    let numel = shape.iter().product();
    (0..world_size)
        .map(|rank| boxes_of_flat_range(shape, chunk_range(numel, world_size, rank)))
        .collect()
}

/// Boxes cut anywhere and given to any rank; some are on two ranks.
pub(crate) fn random_cuts(shape: &[usize], world_size: usize, seed: u64) -> Cuts {
    let mut numbers = Numbers(seed);
    let mut boxes = vec![TensorBox::whole(shape)];
    for _ in 0..numbers.below(7) {
        let index = numbers.below(boxes.len());
        if shape.is_empty() {
            break;
        }
        let dim = numbers.below(shape.len());
        let bounds = boxes.swap_remove(index);
        let at = numbers.below(bounds.sizes[dim] + 1);
        for (start, len) in [(0, at), (at, bounds.sizes[dim] - at)] {
            let mut part = bounds.clone();
            part.offsets[dim] += start;
            part.sizes[dim] = len;
            boxes.push(part);
        }
    }
    let mut cuts = vec![Vec::new(); world_size];
    for bounds in boxes {
        let owner = numbers.below(world_size);
        let second = numbers.below(world_size);
        if second != owner && numbers.below(4) == 0 {
            cuts[second].push(bounds.clone());
        }
        cuts[owner].push(bounds);
    }
    cuts
}

/// Cuts a tensor in one of several ways, chosen by number: chunks, flat ranges, everything on one
/// rank or on all, or anything.
pub(crate) fn cuts(shape: &[usize], world_size: usize, seed: u64) -> Cuts {
    let whole = vec![TensorBox::whole(shape)];
    match seed % 6 {
        0 if !shape.is_empty() => chunks(shape, world_size),
        1 => flat_ranges(shape, world_size),
        2 => {
            let holder = (seed / 6) as usize % world_size;
            (0..world_size)
                .map(|rank| {
                    if rank == holder {
                        whole.clone()
                    } else {
                        Vec::new()
                    }
                })
                .collect()
        }
        3 => vec![whole; world_size],
        _ => random_cuts(shape, world_size, seed),
    }
}

pub(crate) fn path(key: &str) -> KeyPath {
    KeyPath(vec![PathPart::Key(key.to_owned())])
}
