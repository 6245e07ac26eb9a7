//! The values of a state dict that a rank holds, as the plan of a save and the writer need them.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use candle_core::{Device, Tensor};
use fsdp_digest::Digest;
use fsdp_flat::RawTensor;
use fsdp_flat::storage::{HostBytes, to_device};
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
    pub(crate) progress: SaveProgress,
}

/// The elements of one box.
enum Payload {
    Tensor(Tensor),
    Raw(RawTensor),
}

impl LocalState {
    /// Flattens a state dict.
    ///
    /// # Errors
    /// Values that a checkpoint cannot hold, and tensors that cannot be read.
    pub(crate) fn new(
        state: &StateDict,
        progress: SaveProgress,
    ) -> Result<LocalState, CheckpointError> {
        let FlatStateDict { values, mut paths } = flatten_state_dict(state)?;
        let mut local = LocalState {
            plan: LocalPlan::default(),
            tensors: IndexMap::new(),
            values: IndexMap::new(),
            steps: Vec::new(),
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
                    vec![(whole, Payload::Tensor(on_host(&tensor)?))]
                }
                StateValue::Sharded(tensor) => {
                    let dtype = tensor.file_dtype()?;
                    let shape = tensor.shape().to_vec();
                    plan.add_tensor(&fqn, path, dtype, shape, tensor.boxes());
                    let mut boxes = Vec::with_capacity(tensor.shards().len());
                    for shard in tensor.shards() {
                        let payload = Payload::Tensor(on_host(&shard.tensor)?);
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
fn is_step(path: &KeyPath) -> bool {
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

/// Returns the tensor in contiguous host memory, where the writer's threads can read it several
/// times without a copy. Only tensors on a GPU, and those that are not contiguous, are copied.
fn on_host(tensor: &Tensor) -> Result<Tensor, CheckpointError> {
    Ok(to_device(&tensor.contiguous()?, &Device::Cpu)?)
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
        let host_bytes;
        let bytes = match payload {
            Payload::Raw(tensor) => tensor.bytes(),
            Payload::Tensor(tensor) => {
                host_bytes = HostBytes::read(tensor).map_err(|_| FileError::not_stored(fqn))?;
                &*host_bytes
            }
        };
        let found = bytes.get(range.start as usize..range.end as usize);
        sink(found.ok_or_else(|| FileError::not_stored(fqn))?)
    }

    fn value(&self, fqn: &str) -> Result<Cow<'_, PlainValue>, FileError> {
        let value = self
            .values
            .get(fqn)
            .ok_or_else(|| FileError::not_stored(fqn))?;
        Ok(Cow::Borrowed(value))
    }
}
