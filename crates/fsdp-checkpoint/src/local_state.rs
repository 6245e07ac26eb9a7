//! The values of a state dict that a rank holds, as the plan of a save and the writer need them.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use candle_core::Tensor;
use fsdp_digest::Digest;
use fsdp_flat::storage::{GpuReader, HostBytes, HostCopies};
use fsdp_flat::{FlatError, RawTensor};
use fsdp_formats::FileError;
use fsdp_formats::limits::MAX_OBJECT_BYTES;
use fsdp_formats::plan::LocalPlan;
use fsdp_formats::writer::{PayloadSource, value_item_length};
use fsdp_layout::{KeyPath, PathPart, PlainValue, TensorBox};
use fsdp_state::{FlatStateDict, StateDict, StateValue, flatten_state_dict};
use indexmap::IndexMap;

use crate::error::CheckpointError;
use crate::progress::SaveProgress;

/// The values that a rank holds, by their flat keys: what a save plans with, and the source from
/// which the writer takes them.
pub(crate) struct LocalState {
    /// The description of all values, for planning.
    pub(crate) plan: LocalPlan,
    tensors: IndexMap<String, Vec<(TensorBox, Payload)>>,
    values: IndexMap<String, PlainValue>,
    /// The numbers of steps in the state of optimizers, which are tensors.
    steps: Vec<(String, Digest)>,
    gpu_source: Option<GpuSource>,
    pub(crate) progress: SaveProgress,
}

/// The place from which elements of tensors on GPUs are read.
enum GpuSource {
    Copies(HostCopies),
    /// The GPUs themselves.
    Live(GpuReader),
}

/// The elements of one box.
enum Payload {
    Tensor(Tensor),
    Raw(RawTensor),
}

impl LocalState {
    /// Flattens a state dict. The elements of tensors on GPUs are read when they are asked for:
    /// from `copies` if there are some, else from the GPU, after the work that this thread has
    /// given to it.
    ///
    /// # Errors
    /// Values that a checkpoint cannot hold, and tensors that cannot be read.
    pub(crate) fn new(
        state: &StateDict,
        copies: Option<HostCopies>,
        progress: SaveProgress,
    ) -> Result<LocalState, CheckpointError> {
        let FlatStateDict { values, mut paths } = flatten_state_dict(state)?;
        let mut local = LocalState {
            plan: LocalPlan::default(),
            tensors: IndexMap::new(),
            values: IndexMap::new(),
            steps: Vec::new(),
            gpu_source: copies.map(GpuSource::Copies),
            progress,
        };
        for (fqn, value) in values {
            let path = paths.swap_remove(&fqn);
            if value.is_tensor()
                && path.as_ref().is_some_and(is_step)
                && let Some(step) = value.to_plain()?
            {
                local.steps.push((fqn.clone(), Digest::of_value(&step)));
            }
            let plan = &mut local.plan;
            let boxes = match value {
                StateValue::Tensor(tensor) => {
                    let dtype = fsdp_flat::dtype::file_dtype(tensor.dtype())?;
                    plan.add_whole_tensor(&fqn, path, dtype, tensor.dims().to_vec());
                    let whole = TensorBox::whole(tensor.dims());
                    vec![(whole, Payload::Tensor(tensor.contiguous()?))]
                }
                StateValue::Sharded(tensor) => {
                    let dtype = tensor.file_dtype()?;
                    let shape = tensor.shape().to_vec();
                    plan.add_tensor(&fqn, path, dtype, shape, tensor.boxes());
                    let mut boxes = Vec::with_capacity(tensor.shards().len());
                    for shard in tensor.shards() {
                        let payload = Payload::Tensor(shard.tensor.contiguous()?);
                        boxes.push((shard.bounds.clone(), payload));
                    }
                    boxes
                }
                StateValue::Raw(tensor) => {
                    plan.add_whole_tensor(&fqn, path, tensor.dtype(), tensor.shape().to_vec());
                    vec![(TensorBox::whole(tensor.shape()), Payload::Raw(tensor))]
                }
                object => {
                    let (value, length) = plain_value(&fqn, object)?;
                    plan.add_value(&fqn, path, length);
                    local.values.insert(fqn, value);
                    continue;
                }
            };
            local.tensors.insert(fqn, boxes);
        }
        if local.gpu_source.is_none() {
            let boxes = local.tensors.values().flatten();
            let on_gpus: Vec<Tensor> = boxes
                .filter_map(|(_, payload)| match payload {
                    Payload::Tensor(tensor) if tensor.device().is_cuda() => Some(tensor.clone()),
                    _ => None,
                })
                .collect();
            local.gpu_source = GpuReader::begin(&on_gpus)?.map(GpuSource::Live);
        }
        Ok(local)
    }

    /// Returns the digest of each value that all ranks must have alike, sorted by key: plain
    /// values, and the numbers of steps in the state of optimizers.
    pub(crate) fn value_digests(&self) -> Vec<(String, Digest)> {
        let mut digests: Vec<(String, Digest)> = self
            .values
            .iter()
            .map(|(key, value)| (key.clone(), Digest::of_value(value)))
            .chain(self.steps.iter().cloned())
            .collect();
        digests.sort_unstable();
        digests
    }
}

/// Returns `true` for the path of a number of steps in the state of an optimizer: `optim`, `state`,
/// a parameter and `step`.
pub(crate) fn is_step(path: &KeyPath) -> bool {
    let is_key = |part: &PathPart, key: &str| matches!(part, PathPart::Key(found) if found == key);
    match path.0.as_slice() {
        [.., state, _, step] => is_key(state, "state") && is_key(step, "step"),
        _ => false,
    }
}

/// Returns a value that is no tensor as one object, and the length of that in a file.
///
/// # Errors
/// [`CheckpointError::Unsavable`].
fn plain_value(fqn: &str, value: StateValue) -> Result<(PlainValue, u64), CheckpointError> {
    let object = value
        .to_object()?
        .ok_or_else(|| unsavable(fqn, "a sharded tensor inside a tuple has no key of its own"))?;
    let length = value_item_length(&object).map_err(|problem| unsavable(fqn, problem))?;
    if length > MAX_OBJECT_BYTES {
        let problem =
            format!("as one object it has {length} bytes, and {MAX_OBJECT_BYTES} can be read");
        return Err(unsavable(fqn, problem));
    }
    Ok((object, length))
}

/// Returns the error that the value `fqn` cannot be saved.
fn unsavable(fqn: &str, problem: impl fmt::Display) -> CheckpointError {
    CheckpointError::Unsavable {
        fqn: fqn.to_owned(),
        problem: problem.to_string(),
    }
}

/// An error of passing on the elements of a tensor.
enum PassError {
    /// They cannot be read.
    Source(FlatError),
    /// Whoever got them has failed.
    Sink(FileError),
}

impl From<FlatError> for PassError {
    fn from(error: FlatError) -> Self {
        PassError::Source(error)
    }
}

impl PassError {
    /// Returns the error of a save of the value `fqn`.
    fn of_value(self, fqn: &str) -> FileError {
        match self {
            PassError::Source(FlatError::Freed { .. } | FlatError::NotContiguous { .. }) => {
                FileError::not_stored(fqn)
            }
            PassError::Source(source) => FileError::Payload {
                fqn: fqn.to_owned(),
                source: Box::new(source),
            },
            PassError::Sink(error) => error,
        }
    }
}

impl LocalState {
    /// Passes bytes of a tensor to `sink`, in order and in pieces.
    fn pass_on(
        &self,
        tensor: &Tensor,
        range: Range<usize>,
        sink: &mut dyn FnMut(&[u8]) -> Result<(), FileError>,
    ) -> Result<(), PassError> {
        let missing = || FlatError::Freed {
            shape: tensor.dims().to_vec(),
        };
        let mut sink = |piece: &[u8]| sink(piece).map_err(PassError::Sink);
        match &self.gpu_source {
            Some(GpuSource::Copies(copies)) if tensor.device().is_cuda() => {
                let was_copied = copies.read(tensor, range, &mut sink)?;
                was_copied.then_some(()).ok_or_else(|| missing().into())
            }
            Some(GpuSource::Live(reader)) if tensor.device().is_cuda() => {
                reader.read(tensor, range, &mut sink)
            }
            _ => {
                let bytes = HostBytes::read(tensor)?;
                sink(bytes.get(range).ok_or_else(missing)?)
            }
        }
    }
}

impl PayloadSource for LocalState {
    fn payload(
        &self,
        fqn: &str,
        bounds: &TensorBox,
        range: Range<u64>,
        sink: &mut dyn FnMut(&[u8]) -> Result<(), FileError>,
    ) -> Result<(), FileError> {
        let length = range.end - range.start;
        self.peek(fqn, bounds, range, sink)?;
        self.progress.record_written(length);
        Ok(())
    }

    fn peek(
        &self,
        fqn: &str,
        bounds: &TensorBox,
        range: Range<u64>,
        sink: &mut dyn FnMut(&[u8]) -> Result<(), FileError>,
    ) -> Result<(), FileError> {
        let held = self
            .tensors
            .get(fqn)
            .and_then(|boxes| boxes.iter().find(|(held, _)| held == bounds));
        let (_, payload) = held.ok_or_else(|| FileError::not_stored(fqn))?;
        let range = range.start as usize..range.end as usize;
        match payload {
            Payload::Raw(tensor) => {
                let found = tensor.bytes().get(range);
                sink(found.ok_or_else(|| FileError::not_stored(fqn))?)
            }
            Payload::Tensor(tensor) => self
                .pass_on(tensor, range, sink)
                .map_err(|error| error.of_value(fqn)),
        }
    }

    fn value(&self, fqn: &str) -> Result<Cow<'_, PlainValue>, FileError> {
        let value = self
            .values
            .get(fqn)
            .ok_or_else(|| FileError::not_stored(fqn))?;
        Ok(Cow::Borrowed(value))
    }
}
