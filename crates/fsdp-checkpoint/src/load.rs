//! Loading a checkpoint into a state dict: each rank reads the bytes that it needs, and nothing else.

use std::time::Duration;

use candle_core::Tensor;
use fsdp_comm::ProcessGroup;
use fsdp_dcp::Location;
use fsdp_dcp::checkpoint::Checkpoint;
use fsdp_dcp::metadata::Entry;
use fsdp_dcp::plan::{LoadPlanError, LoadRequest};
use fsdp_dcp::reader::{CheckpointReader, Destination, OpenOptions, ReadOptions};
use fsdp_flat::storage::TensorBuffer;
use fsdp_flat::{LocalShard, RawTensor, ShardedTensor};
use fsdp_layout::{DType, KeyPath, PathPart, PlainValue, TensorBox};
use fsdp_state::{FlatStateDict, LoadReport, StateDict, StateValue, flatten_state_dict, unflatten_state_dict};
use indexmap::IndexMap;
use tracing::info_span;

use crate::CheckpointError;
use crate::save::DEFAULT_DEADLINE;

/// How to load; the same on every rank.
#[derive(Debug, Clone, Copy)]
pub struct LoadOptions {
    /// Leave values alone that the checkpoint does not have, instead of failing: torch's `allow_partial_load`.
    pub allow_missing: bool,
    /// Convert tensors that were saved in another dtype. torch does so silently.
    pub allow_cast: bool,
    /// Check what is read against the checkpoint's hashes, if it has any.
    pub verify: bool,
    /// Threads that read, on each rank.
    pub threads: usize,
    /// How long a rank waits for the others to read; longer than the process group's own deadline for a collective.
    pub deadline: Duration,
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions {
            allow_missing: false,
            allow_cast: false,
            verify: true,
            threads: ReadOptions::default().threads,
            deadline: DEFAULT_DEADLINE,
        }
    }
}

impl LoadOptions {
    /// What of them concerns the reading of tensors.
    pub(crate) fn of_tensors(&self) -> ReadOptions {
        let plan = fsdp_dcp::plan::ReadPlanOptions { allow_missing: false, allow_cast: self.allow_cast };
        ReadOptions { plan, threads: self.threads }
    }
}

/// Fills a state dict from the checkpoint at `path`, a path or a URL ([`Location`]), at whatever number of ranks it was
/// saved: torch's `dcp.load`, except that nothing changes where it fails ([`load_in_place`](crate::load_in_place) is as
/// torch's, and faster).
///
/// `template` says what is wanted: the boxes of its sharded tensors, its whole tensors, its plain values. All of them
/// are replaced by what was saved, tensors by fresh ones; keys that only the checkpoint has are ignored, and listed in
/// the report as unexpected. Collective over `group`, for two agreements only: every rank reads for itself. Tensors come
/// on the CPU. The report is this rank's: ranks that ask for the same keys get the same.
///
/// # Errors
/// The same on every rank, and no rank's template is changed: a key that the checkpoint lacks, another shape, dtype
/// or kind, chunks that do not cover what is wanted, damaged files.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_checkpoint::{CheckpointError, LoadOptions, SaveOptions, load, save};
/// use fsdp_flat::{LocalShard, ShardedTensor};
/// use fsdp_layout::TensorBox;
/// use fsdp_state::StateDict;
/// let dir = tempfile::tempdir()?;
/// let path = dir.path().join("step-00000001");
/// // Three ranks save a row each, and a number.
/// let saved = fsdp_comm::run_local(3, |group| {
///     let row = TensorBox::new(vec![group.rank(), 0], vec![1, 2]);
///     let tensor = Tensor::full(group.rank() as f32, (1, 2), &Device::Cpu)?;
///     let shards = vec![LocalShard { bounds: row, tensor }];
///     let mut state = StateDict::new();
///     state.insert("weight", ShardedTensor::new(DType::F32, vec![3, 2], shards)?);
///     state.insert("step", 1i64);
///     Ok::<_, CheckpointError>(save(path.as_path(), &state, &group, &SaveOptions::default())?.total_bytes)
/// })?;
/// assert_eq!(*saved[0].as_ref().unwrap(), 3 * 2 * 4);
/// // Two ranks load a column each.
/// let columns = fsdp_comm::run_local(2, |group| {
///     let column = TensorBox::new(vec![0, group.rank()], vec![3, 1]);
///     let mut state = StateDict::new();
///     state.insert("weight", ShardedTensor::zeros(DType::F32, &[3, 2], &[column])?);
///     state.insert("step", 0i64);
///     load(path.as_path(), &mut state, &group, &LoadOptions::default())?;
///     assert_eq!(state.plain_at(&["step"]).and_then(|step| step.as_int()), Some(1));
///     let weight = state.get("weight").and_then(|weight| weight.as_sharded()).unwrap();
///     Ok::<_, CheckpointError>(weight.shards()[0].tensor.flatten_all()?.to_vec1::<f32>()?)
/// })?;
/// assert_eq!(*columns[1].as_ref().unwrap(), [0., 1., 2.]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn load(
    path: impl Into<Location>,
    template: &mut StateDict,
    group: &ProcessGroup,
    options: &LoadOptions,
) -> Result<LoadReport, CheckpointError> {
    let group = &group.with_deadline_at_least(options.deadline);
    let path = &path.into();
    let _span = info_span!("load", rank = group.rank(), %path).entered();
    let reader = group.agree("load: open", open(path, options))?;
    let (loaded, report) = group.agree("load: read", read_template(&reader, template, options))?;
    *template = loaded;
    Ok(report)
}

pub(crate) fn open(path: &Location, options: &LoadOptions) -> Result<CheckpointReader, CheckpointError> {
    Ok(CheckpointReader::open_with(path, OpenOptions { verify: options.verify })?)
}

/// As [`load`] on one rank, from a checkpoint of any format that is open. No communication.
///
/// # Errors
/// As [`load`].
pub fn read_template(
    reader: &dyn Checkpoint,
    template: &StateDict,
    options: &LoadOptions,
) -> Result<(StateDict, LoadReport), CheckpointError> {
    let FlatStateDict { mut values, paths } = flatten_state_dict(template)?;
    let (wanted, report) = wanted(reader, &mut values, options)?;
    let mut buffers = wanted.iter().map(Wanted::fresh).collect::<Result<Vec<_>, _>>()?;
    let destinations = wanted.iter().zip(&mut buffers).map(|(tensor, buffers)| Destination {
        request: tensor.request.clone(),
        buffers: buffers.iter_mut().map(Buffer::bytes_mut).collect(),
    });
    reader.read(destinations.collect(), options.of_tensors())?;
    for (tensor, buffers) in wanted.into_iter().zip(buffers) {
        let (fqn, value) = tensor.into_value(buffers)?;
        values.insert(fqn, value);
    }
    Ok((unflatten_state_dict(FlatStateDict { values, paths })?, report))
}

/// What is to be read for the tensors of a flat state dict, and what only one side has. Plain values are read at once, and
/// replaced.
pub(crate) fn wanted(
    reader: &dyn Checkpoint,
    values: &mut IndexMap<String, StateValue>,
    options: &LoadOptions,
) -> Result<(Vec<Wanted>, LoadReport), CheckpointError> {
    let mut report = LoadReport::default();
    let mut wanted = Vec::new();
    for (fqn, value) in values.iter_mut() {
        let Some(saved) = reader.metadata().entries.get(fqn) else {
            if !options.allow_missing {
                return Err(fsdp_dcp::FileError::from(LoadPlanError::Missing { fqn: fqn.clone() }).into());
            }
            report.missing.push(fqn.clone());
            continue;
        };
        match Wanted::of(fqn, value, saved, options.allow_cast)? {
            Some(tensor) => wanted.push(tensor),
            // An object, or a tensor where a plain value is wanted: a number saved as a 0-d tensor.
            None => *value = StateValue::Plain(reader.read_value(fqn)?),
        }
    }
    for fqn in reader.metadata().entries.keys() {
        if !values.contains_key(fqn) {
            report.unexpected.push(fqn.clone());
        }
    }
    Ok((wanted, report))
}

/// A tensor that is being loaded.
pub(crate) struct Wanted {
    pub(crate) request: LoadRequest,
    kind: Kind,
    /// The dtype that was saved, which the buffers have.
    stored: DType,
}

/// What it becomes.
enum Kind {
    Whole(candle_core::DType),
    Sharded(candle_core::DType),
    Raw,
}

impl Kind {
    /// Whether candle makes it from tensors of this dtype.
    fn can_be_cast_from(&self, stored: DType) -> bool {
        let (Kind::Whole(dtype) | Kind::Sharded(dtype)) = self else { return false };
        let one = || -> Result<Tensor, CheckpointError> {
            let one = TensorBuffer::zeros(&[1], fsdp_flat::dtype::to_candle(stored)?)?.into_tensor();
            Ok(one.to_dtype(*dtype)?)
        };
        one().is_ok()
    }
}

/// Fresh memory of one box, in the dtype of the checkpoint.
pub(crate) enum Buffer {
    Tensor(TensorBuffer),
    Bytes(Vec<u8>),
}

impl Buffer {
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Buffer::Tensor(buffer) => buffer.bytes_mut(),
            Buffer::Bytes(bytes) => bytes,
        }
    }
}

impl Wanted {
    /// What is to be read for a value of the template; `None` if it is no tensor.
    fn of(fqn: &str, value: &StateValue, saved: &Entry, allow_cast: bool) -> Result<Option<Self>, CheckpointError> {
        let (kind, dtype, shape, boxes) = match value {
            StateValue::Tensor(tensor) => {
                let dtype = fsdp_flat::dtype::of(tensor)?;
                let shape = tensor.dims().to_vec();
                (Kind::Whole(tensor.dtype()), dtype, shape.clone(), vec![TensorBox::whole(&shape)])
            }
            StateValue::Sharded(tensor) => {
                (Kind::Sharded(tensor.dtype()), tensor.file_dtype()?, tensor.shape().to_vec(), tensor.boxes())
            }
            StateValue::Raw(tensor) => {
                (Kind::Raw, tensor.dtype(), tensor.shape().to_vec(), vec![TensorBox::whole(tensor.shape())])
            }
            _ => return Ok(None),
        };
        // The checks of shape and dtype are the plan's, but for what can be cast.
        let stored = match saved {
            Entry::Tensor(tensor) if tensor.shape == shape => tensor.properties.dtype,
            _ => dtype,
        };
        if allow_cast && stored != dtype && !kind.can_be_cast_from(stored) {
            let (fqn, saved, wanted) = (fqn.to_owned(), stored, dtype);
            return Err(fsdp_dcp::FileError::from(LoadPlanError::Cast { fqn, saved, wanted }).into());
        }
        let request = LoadRequest { fqn: fqn.to_owned(), dtype, shape, boxes };
        Ok(Some(Wanted { request, kind, stored }))
    }

    /// Memory for its boxes.
    pub(crate) fn fresh(&self) -> Result<Vec<Buffer>, CheckpointError> {
        let stored = self.stored;
        let buffers = self.request.boxes.iter().map(|bounds| match self.kind {
            Kind::Raw => Ok(Buffer::Bytes(vec![0; bounds.numel() * stored.size_in_bytes() as usize])),
            // There are dtypes that candle's tensors have, and yet cannot be made from any other.
            Kind::Whole(dtype) | Kind::Sharded(dtype) if stored == self.request.dtype => {
                Ok(Buffer::Tensor(TensorBuffer::zeros(&bounds.sizes, dtype)?))
            }
            _ => Ok(Buffer::Tensor(TensorBuffer::zeros(&bounds.sizes, fsdp_flat::dtype::to_candle(stored)?)?)),
        });
        buffers.collect()
    }

    /// Whether the bytes that were saved are those of candle's tensors.
    pub(crate) fn is_as_stored(&self) -> bool {
        self.stored == self.request.dtype && !matches!(self.kind, Kind::Raw)
    }

    /// The value, of memory that has been filled.
    pub(crate) fn into_value(self, buffers: Vec<Buffer>) -> Result<(String, StateValue), CheckpointError> {
        let LoadRequest { fqn, dtype: file_dtype, shape, boxes } = self.request;
        let tensor = |buffer: Buffer, dtype: candle_core::DType| -> Result<Tensor, CheckpointError> {
            match buffer {
                Buffer::Tensor(buffer) => Ok(buffer.into_tensor().to_dtype(dtype)?),
                Buffer::Bytes(_) => Err(CheckpointError::Flat(fsdp_flat::FlatError::NotInCandle { dtype: file_dtype })),
            }
        };
        let mut buffers = buffers.into_iter();
        let value = match self.kind {
            Kind::Whole(dtype) => match buffers.next() {
                Some(buffer) => StateValue::Tensor(tensor(buffer, dtype)?),
                None => StateValue::Plain(PlainValue::None),
            },
            Kind::Sharded(dtype) => {
                let shards = boxes
                    .into_iter()
                    .zip(buffers)
                    .map(|(bounds, buffer)| Ok(LocalShard { bounds, tensor: tensor(buffer, dtype)? }))
                    .collect::<Result<_, CheckpointError>>()?;
                StateValue::Sharded(ShardedTensor::new(dtype, shape, shards)?)
            }
            Kind::Raw => match buffers.next() {
                Some(Buffer::Bytes(bytes)) => StateValue::Raw(RawTensor::new(file_dtype, shape, bytes)?),
                _ => StateValue::Plain(PlainValue::None),
            },
        };
        Ok((fqn, value))
    }
}

/// Everything under `prefix` (all of it for an empty one) that a checkpoint holds, whole, as the nested state dict
/// that was saved: torch's `_load_state_dict_from_keys`. Tensors are on the CPU. No communication; the caller should
/// know that it fits into memory.
///
/// # Errors
/// Damaged files.
pub fn load_whole(
    path: impl Into<Location>,
    prefix: &[&str],
    options: &LoadOptions,
) -> Result<StateDict, CheckpointError> {
    let reader = open(&path.into(), options)?;
    let template = whole_template(&reader, prefix)?;
    Ok(read_template(&reader, &template, options)?.0)
}

/// A template of all that a checkpoint holds under a path of keys: whole tensors in empty memory, `None` for values.
///
/// # Errors
/// Shapes that do not fit the machine, contradicting paths.
pub fn whole_template(reader: &CheckpointReader, prefix: &[&str]) -> Result<StateDict, CheckpointError> {
    let metadata = reader.metadata();
    let mut flat = FlatStateDict { values: IndexMap::new(), paths: IndexMap::new() };
    for (fqn, entry) in &metadata.entries {
        let path = metadata.planner_data.as_ref().and_then(|paths| paths.get(fqn));
        let path = path.cloned().unwrap_or_else(|| KeyPath(vec![PathPart::Key(fqn.clone())]));
        let starts = path.0.len() >= prefix.len()
            && prefix.iter().zip(&path.0).all(|(key, part)| *part == PathPart::Key((*key).to_owned()));
        if !starts {
            continue;
        }
        let value = match entry {
            Entry::Bytes(_) => StateValue::Plain(PlainValue::None),
            Entry::Tensor(tensor) => empty_tensor(&tensor.shape, tensor.properties.dtype)?,
        };
        flat.values.insert(fqn.clone(), value);
        flat.paths.insert(fqn.clone(), path);
    }
    Ok(unflatten_state_dict(flat)?)
}

/// A whole tensor to be read: of zeros that the system has not touched.
pub(crate) fn empty_tensor(shape: &[usize], dtype: DType) -> Result<StateValue, CheckpointError> {
    match fsdp_flat::dtype::to_candle(dtype) {
        Ok(dtype) => Ok(StateValue::Tensor(fsdp_flat::storage::zeros(shape, dtype)?)),
        Err(_) => Ok(StateValue::Raw(RawTensor::zeros(dtype, shape.to_vec())?)),
    }
}
