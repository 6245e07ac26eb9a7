//! The state that simulated runs save: each version of it is known to the last bit.

use anyhow::{Context as _, Result, ensure};
use candle_core::{DType, Device, Tensor};
use fsdp_flat::{LocalShard, ShardedTensor};
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_layout::TensorBox;
use fsdp_state::StateDict;

/// A tensor of the state.
struct Kind {
    name: &'static str,
    shape: [usize; 2],
    /// `true` if every rank holds all of it; otherwise each holds some rows.
    is_replicated: bool,
    /// `true` if it is the same in all versions, as frozen weights are.
    is_frozen: bool,
}

const TENSORS: [Kind; 3] = [
    Kind {
        name: "frozen",
        shape: [12, 512],
        is_replicated: false,
        is_frozen: true,
    },
    Kind {
        name: "weight",
        shape: [11, 5],
        is_replicated: false,
        is_frozen: false,
    },
    Kind {
        name: "bias",
        shape: [1, 7],
        is_replicated: true,
        is_frozen: false,
    },
];

/// The key of the version.
const VERSION: &str = "step";

/// Returns the elements of some rows of a tensor in a version. They differ from tensor to tensor,
/// from place to place and, unless the tensor is frozen, from version to version.
fn elements(tensor: &Kind, version: u64, rows: std::ops::Range<usize>) -> Vec<f32> {
    let version = if tensor.is_frozen { 0 } else { version };
    let columns = tensor.shape[1];
    let first = tensor.name.len() as u64;
    (rows.start * columns..rows.end * columns)
        .map(|index| ((first + index as u64 * 31 + version * 977) % 65_521) as f32)
        .collect()
}

/// Returns the rows that a rank holds: about the same number as the others, and perhaps none.
fn rows(tensor: &Kind, rank: usize, ranks: usize) -> std::ops::Range<usize> {
    let each = tensor.shape[0].div_ceil(ranks);
    (rank * each).min(tensor.shape[0])..((rank + 1) * each).min(tensor.shape[0])
}

/// Returns a rank's part of a version. Without a version, it is the state of a run that has not
/// begun: the same tensors, with elements that are in no version.
pub(crate) fn part(version: Option<u64>, rank: usize, ranks: usize) -> Result<StateDict> {
    let mut state = StateDict::new();
    for tensor in &TENSORS {
        let rows = if tensor.is_replicated {
            0..tensor.shape[0]
        } else {
            rows(tensor, rank, ranks)
        };
        let shape = [rows.len(), tensor.shape[1]];
        let values = match version {
            Some(version) => elements(tensor, version, rows.clone()),
            None => vec![-1.0; shape[0] * shape[1]],
        };
        let values = Tensor::from_vec(values, &shape, &Device::Cpu)?;
        if tensor.is_replicated {
            state.insert(tensor.name, values);
            continue;
        }
        let bounds = TensorBox::new(vec![rows.start, 0], shape.to_vec());
        let shards = if rows.is_empty() {
            Vec::new()
        } else {
            vec![LocalShard {
                bounds,
                tensor: values,
            }]
        };
        state.insert(
            tensor.name,
            ShardedTensor::new(DType::F32, tensor.shape.to_vec(), shards)?,
        );
    }
    state.insert(VERSION, version.map_or(-1, |version| version as i64));
    Ok(state)
}

/// Returns the version of a rank's part. It is an error if any bit differs from that version.
pub(crate) fn version_of(state: &StateDict, rank: usize, ranks: usize) -> Result<u64> {
    let version = state
        .plain_at(&[VERSION])
        .and_then(|version| version.as_int())
        .context("the state has no version")?;
    let version = u64::try_from(version)?;
    for tensor in &TENSORS {
        let value = state
            .get(tensor.name)
            .with_context(|| format!("the state has no {}", tensor.name))?;
        let (found, rows) = if tensor.is_replicated {
            (value.as_tensor().cloned(), 0..tensor.shape[0])
        } else {
            let shards = value
                .as_sharded()
                .context("a tensor is not sharded")?
                .shards();
            (
                shards.first().map(|shard| shard.tensor.clone()),
                rows(tensor, rank, ranks),
            )
        };
        let found = found
            .map(|found| found.flatten_all()?.to_vec1::<f32>())
            .transpose()?
            .unwrap_or_default();
        ensure!(
            found == elements(tensor, version, rows),
            "`{}` is not that of version {version}",
            tensor.name
        );
    }
    Ok(version)
}

/// Returns the version that a checkpoint holds. It is an error if any bit differs from that
/// version.
pub(crate) fn version_in(checkpoint: &dyn Checkpoint) -> Result<u64> {
    let version = checkpoint
        .read_value(VERSION)?
        .as_int()
        .context("the version is no number")?;
    let version = u64::try_from(version)?;
    for tensor in &TENSORS {
        let mut bytes = vec![0; tensor.shape[0] * tensor.shape[1] * 4];
        checkpoint.read_box(tensor.name, &TensorBox::whole(&tensor.shape), &mut bytes)?;
        let expected = elements(tensor, version, 0..tensor.shape[0]);
        let expected: Vec<u8> = expected
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        ensure!(
            bytes == expected,
            "`{}` is not that of version {version}",
            tensor.name
        );
    }
    Ok(version)
}
