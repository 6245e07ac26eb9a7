//! Saving a state dict as a checkpoint: every rank writes what it holds, one rank commits.

use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};

use fsdp_comm::ProcessGroup;
use fsdp_dcp::durable::{Durable, Staging};
use fsdp_dcp::item::value_item_length;
use fsdp_dcp::plan::{Deduplicate, GlobalPlan, LocalPlan, Selection, plan_save};
use fsdp_dcp::writer::{PayloadSource, RankWritten, WriteOptions, finish, write_rank};
use fsdp_flat::storage::with_bytes;
use fsdp_layout::value::PlainTensor;
use fsdp_layout::{DType, PlainValue, TensorBox};
use fsdp_state::{FlatStateDict, StateDict, StateValue, flatten_state_dict};
use indexmap::IndexMap;
use tracing::{debug, info_span};

use crate::CheckpointError;

/// The rank that plans and commits.
const COORDINATOR: usize = 0;

/// How long ranks wait for each other in a save or a load, unless told otherwise: writing takes as long as it takes,
/// and a rank that dies is noticed at once all the same.
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(30 * 60);

/// How to save; the same on every rank.
#[derive(Debug, Clone)]
pub struct SaveOptions {
    /// Replace a checkpoint that is there. It stays whole until the new one is.
    pub overwrite: bool,
    /// Which of several ranks that hold the same values writes them.
    pub deduplicate: Deduplicate,
    /// How each rank writes its file.
    pub write: WriteOptions,
    /// How long a rank waits for the others to write; longer than the process group's own deadline for a collective.
    pub deadline: Duration,
    /// The way to durable storage; tests make its steps fail.
    pub durable: Durable,
}

impl Default for SaveOptions {
    fn default() -> Self {
        SaveOptions {
            overwrite: false,
            deduplicate: Deduplicate::default(),
            write: WriteOptions::default(),
            deadline: DEFAULT_DEADLINE,
            durable: Durable::default(),
        }
    }
}

/// What a save did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct SaveReport {
    /// Payload bytes that this rank wrote: tensors, and objects as they are stored.
    pub rank_bytes: u64,
    /// The same for all ranks together.
    pub total_bytes: u64,
    /// Time on this rank, from the call to the commit.
    pub duration: Duration,
}

/// Saves a state dict as a DCP checkpoint directory at `path`, which `torch.distributed.checkpoint.load` opens:
/// torch's `dcp.save`.
///
/// Collective: every rank of `group` brings its own values under the same keys; values that several ranks hold are
/// written once. Only plans, statuses and hashes move between ranks, no tensor bytes. When it returns, the checkpoint
/// is durable; when it fails, every rank gets the error, and what was at `path` before is untouched.
///
/// # Errors
/// A state dict that cannot be saved, ranks that disagree on a dtype or shape, boxes that overlap or leave holes,
/// a checkpoint that is there already, and whatever the file system says.
pub fn save(
    path: &Path,
    state: &StateDict,
    group: &ProcessGroup,
    options: &SaveOptions,
) -> Result<SaveReport, CheckpointError> {
    let start = Instant::now();
    let group = &group.with_deadline(group.deadline().max(options.deadline));
    let _span = info_span!("save", rank = group.rank(), path = %path.display()).entered();

    let (plan, source) = group.agree("save: plan", Source::new(state))?;
    let plans = group.gather_object(&plan, COORDINATOR)?;
    let coordinated = plans.as_ref().map(|plans| coordinate(path, plans, options)).transpose();
    let mut coordinated = group.agree("save: plan", coordinated)?;

    let orders = coordinated.as_ref().map(|(global, staging)| orders(global, staging));
    let (selection, staging_name, total_bytes) = group.scatter_object(orders.as_deref(), COORDINATOR)?;
    let written = match &coordinated {
        Some((_, staging)) => write(staging, group.rank(), &plan, &selection, &source, options),
        None => options
            .durable
            .join(path, &staging_name)
            .map_err(CheckpointError::from)
            .and_then(|staging| write(&staging, group.rank(), &plan, &selection, &source, options)),
    };
    let written = group.agree("save: write", written)?;
    let rank_bytes = written.payload_bytes;
    let all_written = group.gather_object(&written, COORDINATOR)?;

    let committed = match (coordinated.take(), plans, all_written) {
        (Some((global, staging)), Some(plans), Some(written)) => {
            finish(staging, global.metadata, &plans, &written).map_err(CheckpointError::from)
        }
        _ => Ok(()),
    };
    group.agree("save: commit", committed)?;
    let report = SaveReport { rank_bytes, total_bytes, duration: start.elapsed() };
    debug!(rank_bytes, total_bytes, seconds = report.duration.as_secs_f64(), "saved");
    Ok(report)
}

/// On the coordinator: the plan of all, and the directory to write into.
fn coordinate(
    path: &Path,
    plans: &[LocalPlan],
    options: &SaveOptions,
) -> Result<(GlobalPlan, Staging), CheckpointError> {
    let _span = info_span!("plan").entered();
    let planned = plan_save(plans, fsdp_dcp::plan::SaveOptions { deduplicate: options.deduplicate });
    let planned = planned.map_err(fsdp_dcp::CheckpointError::from)?;
    Ok((planned, options.durable.prepare(path, options.overwrite)?))
}

/// What each rank is told: its items, the staging directory's name, the bytes of all ranks.
fn orders(global: &GlobalPlan, staging: &Staging) -> Vec<(Selection, String, u64)> {
    let total: u64 = global.loads.iter().sum();
    global.selections.iter().map(|selection| (selection.clone(), staging.name().to_owned(), total)).collect()
}

fn write(
    staging: &Staging,
    rank: usize,
    plan: &LocalPlan,
    selection: &Selection,
    source: &Source,
    options: &SaveOptions,
) -> Result<RankWritten, CheckpointError> {
    let _span = info_span!("write", rank).entered();
    Ok(write_rank(staging, rank, plan, selection, source, &options.write)?)
}

/// This rank's flat values, as the writer asks for them.
struct Source {
    tensors: IndexMap<String, Vec<(TensorBox, Payload)>>,
    values: IndexMap<String, PlainValue>,
}

/// The elements of one box.
enum Payload {
    Tensor(candle_core::Tensor),
    Raw(fsdp_flat::RawTensor),
}

impl Source {
    fn new(state: &StateDict) -> Result<(LocalPlan, Source), CheckpointError> {
        let FlatStateDict { values, mut paths } = flatten_state_dict(state)?;
        let mut plan = LocalPlan::default();
        let mut source = Source { tensors: IndexMap::new(), values: IndexMap::new() };
        for (fqn, value) in values {
            let path = paths.swap_remove(&fqn);
            match value {
                StateValue::Tensor(tensor) => {
                    let dtype = fsdp_flat::dtype::of(&tensor)?;
                    let (shape, whole) = (tensor.dims().to_vec(), TensorBox::whole(tensor.dims()));
                    plan.add_tensor(&fqn, path, dtype, shape, vec![whole.clone()]);
                    source.tensors.insert(fqn, vec![(whole, Payload::Tensor(tensor.contiguous()?))]);
                }
                StateValue::Sharded(tensor) => {
                    plan.add_tensor(&fqn, path, tensor.file_dtype()?, tensor.shape().to_vec(), tensor.boxes());
                    let shards = tensor
                        .shards()
                        .iter()
                        .map(|shard| Ok((shard.bounds.clone(), Payload::Tensor(shard.tensor.contiguous()?))));
                    source.tensors.insert(fqn, shards.collect::<Result<_, CheckpointError>>()?);
                }
                StateValue::Raw(tensor) => {
                    let (shape, whole) = (tensor.shape().to_vec(), TensorBox::whole(tensor.shape()));
                    plan.add_tensor(&fqn, path, tensor.dtype(), shape, vec![whole.clone()]);
                    source.tensors.insert(fqn, vec![(whole, Payload::Raw(tensor))]);
                }
                object => {
                    let value = object_value(&fqn, &object)?;
                    let length = value_item_length(&value).map_err(|problem| CheckpointError::Unsavable {
                        fqn: fqn.clone(),
                        problem: problem.to_string(),
                    })?;
                    plan.add_value(&fqn, path, length);
                    source.values.insert(fqn, value);
                }
            }
        }
        Ok((plan, source))
    }
}

/// A leaf that is no tensor as one object, tensors inside it included.
fn object_value(fqn: &str, value: &StateValue) -> Result<PlainValue, CheckpointError> {
    let list = |list: &[StateValue]| list.iter().map(|value| object_value(fqn, value)).collect::<Result<_, _>>();
    Ok(match value {
        StateValue::Plain(value) => value.clone(),
        StateValue::List(values) => PlainValue::List(list(values)?),
        StateValue::Tuple(values) => PlainValue::Tuple(list(values)?),
        StateValue::Dict(dict) => {
            let entries = dict.iter().map(|(key, value)| Ok((PlainValue::Str(key.clone()), object_value(fqn, value)?)));
            PlainValue::Dict(entries.collect::<Result<_, CheckpointError>>()?)
        }
        StateValue::Tensor(tensor) => {
            let data = with_bytes(&tensor.contiguous()?, <[u8]>::to_vec)?;
            let dtype = fsdp_flat::dtype::of(tensor)?;
            PlainValue::Tensor(PlainTensor { dtype, shape: tensor.dims().to_vec(), data })
        }
        StateValue::Raw(tensor) => PlainValue::Tensor(PlainTensor {
            dtype: tensor.dtype(),
            shape: tensor.shape().to_vec(),
            data: tensor.bytes().to_vec(),
        }),
        other => {
            return Err(CheckpointError::Unsavable {
                fqn: fqn.to_owned(),
                problem: format!("a {} inside a tuple has no key of its own", other.kind()),
            });
        }
    })
}

impl PayloadSource for Source {
    fn payload(
        &self,
        fqn: &str,
        bounds: &TensorBox,
        range: Range<u64>,
        sink: &mut dyn FnMut(&[u8]) -> Result<(), fsdp_dcp::CheckpointError>,
    ) -> Result<(), fsdp_dcp::CheckpointError> {
        let not_stored = || fsdp_dcp::CheckpointError::NotStored { fqn: fqn.to_owned() };
        let boxes = self.tensors.get(fqn).ok_or_else(not_stored)?;
        let (_, payload) = boxes.iter().find(|(held, _)| held == bounds).ok_or_else(not_stored)?;
        let range = range.start as usize..range.end as usize;
        let give = |bytes: &[u8]| sink(bytes.get(range).ok_or_else(not_stored)?);
        match payload {
            Payload::Raw(tensor) => give(tensor.bytes()),
            Payload::Tensor(tensor) => with_bytes(tensor, give).map_err(|_| not_stored())?,
        }
    }

    fn value(&self, fqn: &str) -> Result<Cow<'_, PlainValue>, fsdp_dcp::CheckpointError> {
        let value = self.values.get(fqn);
        value.map(Cow::Borrowed).ok_or_else(|| fsdp_dcp::CheckpointError::NotStored { fqn: fqn.to_owned() })
    }
}

/// Bytes of a box in this dtype.
pub(crate) fn box_bytes(bounds: &TensorBox, dtype: DType) -> u64 {
    bounds.numel() as u64 * dtype.size_in_bytes()
}
