//! Loading into the memory of the live tensors: no byte is copied twice, and nothing is allocated.

use std::ops::Range;

use candle_core::Tensor;
use fsdp_comm::ProcessGroup;
use fsdp_dcp::Location;
use fsdp_dcp::checkpoint::Checkpoint;
use fsdp_dcp::reader::Destination;
use fsdp_flat::storage::is_freed;
use fsdp_flat::{FlatError, TakenStorages};
use fsdp_layout::KeyPath;
use fsdp_state::{
    FlatStateDict, LoadReport, StateDict, StateValue, copy_state_dict, flatten_state_dict, unflatten_state_dict,
};
use indexmap::IndexMap;
use tracing::info_span;

use crate::CheckpointError;
use crate::load::{Buffer, LoadOptions, Wanted, open, wanted};

/// As [`load`](crate::load()), into the memory of the tensors of `state`, as torch's `dcp.load` does it: every tensor that
/// shares a storage with them sees the change, a model and its optimizer for the views that
/// [`get_state_dict`](crate::get_state_dict()) with `share_storage` gives. Plain values are replaced in `state`.
///
/// The bytes of CPU tensors are read to where they belong, with nothing in between. Tensors on a GPU, of another dtype
/// than was saved, and those that share some elements are read into fresh memory first; of those that are the same tensor
/// under several names, the first is read. While it lasts, whoever reads
/// one of the tensors elsewhere gets the error of a freed one. Collective over `group`: three agreements.
///
/// # Errors
/// Those of [`load`](crate::load()), the same on every rank, and nothing has changed: keys, shapes, dtypes, coverage, and
/// files that are missing or too short are found before the first byte is read. [`CheckpointError::NotFillable`] for
/// tensors that are not contiguous, or freed.
///
/// Damage inside a file, which only reading shows, is [`CheckpointError::PartlyLoaded`] on every rank: the tensors hold a
/// mixture then. Where that must not be, use [`load`](crate::load()).
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_checkpoint::{CheckpointError, LoadOptions, SaveOptions, load_in_place, save};
/// use fsdp_state::StateDict;
/// let dir = tempfile::tempdir()?;
/// let path = dir.path().join("step-00000001");
/// fsdp_comm::run_local(1, |group| {
///     let weight = Tensor::new(&[1f32, 2., 3.], &Device::Cpu)?;
///     let mut state = StateDict::new();
///     state.insert("weight", weight.clone());
///     save(path.as_path(), &state, &group, &SaveOptions::default())?;
///     weight.zero_set()?;
///     load_in_place(path.as_path(), &mut state, &group, &LoadOptions::default())?;
///     assert_eq!(weight.to_vec1::<f32>()?, [1., 2., 3.]);
///     Ok::<_, CheckpointError>(())
/// })?
/// .pop()
/// .unwrap()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn load_in_place(
    path: impl Into<Location>,
    state: &mut StateDict,
    group: &ProcessGroup,
    options: &LoadOptions,
) -> Result<LoadReport, CheckpointError> {
    let group = &group.with_deadline_at_least(options.deadline);
    let path = &path.into();
    let _span = info_span!("load in place", rank = group.rank(), %path).entered();
    let reader = group.agree("load: open", open(path, options))?;
    let load = group.agree("load: check", InPlace::check(&reader, state, options))?;
    let filled = group.agree("load: read", load.fill(&reader, options));
    let (filled, report) = filled.map_err(|error| partly_loaded(error.into()))?;
    *state = filled;
    Ok(report)
}

/// As [`load_in_place`] on one rank, from a checkpoint of any format that is open. No communication.
///
/// # Errors
/// As [`load_in_place`].
pub fn read_in_place(
    reader: &dyn Checkpoint,
    state: &mut StateDict,
    options: &LoadOptions,
) -> Result<LoadReport, CheckpointError> {
    let load = InPlace::check(reader, state, options)?;
    let (filled, report) = load.fill(reader, options).map_err(partly_loaded)?;
    *state = filled;
    Ok(report)
}

fn partly_loaded(source: CheckpointError) -> CheckpointError {
    CheckpointError::PartlyLoaded { source: Box::new(source) }
}

/// A load that is known to fit, and the memory that it goes to.
struct InPlace {
    values: IndexMap<String, StateValue>,
    paths: IndexMap<String, KeyPath>,
    wanted: Vec<Wanted>,
    report: LoadReport,
    /// For each of `wanted` its tensors in `taken`: none if it was saved in another dtype.
    own: Vec<Range<usize>>,
    taken: TakenStorages,
}

impl InPlace {
    fn check(reader: &dyn Checkpoint, state: &StateDict, options: &LoadOptions) -> Result<Self, CheckpointError> {
        let FlatStateDict { mut values, paths } = flatten_state_dict(state)?;
        let (wanted, report) = wanted(reader, &mut values, options)?;
        let requests: Vec<_> = wanted.iter().map(|tensor| tensor.request.clone()).collect();
        reader.check_read(&requests, options.of_tensors().plan)?;
        let (mut tensors, mut own) = (Vec::new(), Vec::new());
        for wanted in &wanted {
            let fqn = &wanted.request.fqn;
            let parts: Vec<&Tensor> = match values.get(fqn) {
                Some(StateValue::Tensor(tensor)) => vec![tensor],
                Some(StateValue::Sharded(tensor)) => tensor.shards().iter().map(|shard| &shard.tensor).collect(),
                _ => Vec::new(),
            };
            for tensor in &parts {
                check_fillable(tensor).map_err(|problem| CheckpointError::NotFillable { fqn: fqn.clone(), problem })?;
            }
            let first = tensors.len();
            tensors.extend(parts.into_iter().filter(|_| wanted.is_as_stored()));
            own.push(first..tensors.len());
        }
        let taken = TakenStorages::take(&tensors)?;
        Ok(InPlace { values, paths, wanted, report, own, taken })
    }

    /// Whether this has the very memory of one before it, box by box: another name of a tied parameter. The first name is
    /// read.
    fn is_again(&self, index: usize) -> bool {
        let own = &self.own[index];
        let Some(first) = self.taken.same_as(own.start).filter(|_| !own.is_empty()) else { return false };
        let before = self.own.partition_point(|own| own.end <= first);
        let same = own.clone().zip(self.own[before].clone()).all(|(at, first)| self.taken.same_as(at) == Some(first));
        same && self.wanted[before].request.boxes == self.wanted[index].request.boxes
    }

    /// Reads everything to its place.
    fn fill(
        mut self,
        reader: &dyn Checkpoint,
        options: &LoadOptions,
    ) -> Result<(StateDict, LoadReport), CheckpointError> {
        let is_again: Vec<bool> = (0..self.wanted.len()).map(|index| self.is_again(index)).collect();
        let mut slices = self.taken.bytes_mut();
        let (mut to_read, mut own, mut fresh) = (Vec::new(), Vec::new(), Vec::new());
        for ((tensor, range), _) in self.wanted.into_iter().zip(self.own).zip(is_again).filter(|(_, again)| !again) {
            // Either its own memory or some that is fresh.
            let memory: Option<Vec<&mut [u8]>> = slices[range].iter_mut().map(Option::take).collect();
            let memory = memory.filter(|memory| memory.len() == tensor.request.boxes.len());
            fresh.push(if memory.is_some() { Vec::new() } else { tensor.fresh()? });
            own.push(memory);
            to_read.push(tensor);
        }
        let memory = own.into_iter().zip(&mut fresh);
        let destinations = to_read.iter().zip(memory).map(|(tensor, (own, fresh))| Destination {
            request: tensor.request.clone(),
            buffers: own.unwrap_or_else(|| fresh.iter_mut().map(Buffer::bytes_mut).collect()),
        });
        reader.read(destinations.collect(), options.of_tensors())?;
        drop(self.taken);
        let (mut loaded, mut live) = (StateDict::new(), StateDict::new());
        for (tensor, fresh) in to_read.into_iter().zip(fresh).filter(|(_, fresh)| !fresh.is_empty()) {
            let (fqn, value) = tensor.into_value(fresh)?;
            if let Some(value) = self.values.get(&fqn) {
                live.insert(fqn.clone(), value.clone());
            }
            loaded.insert(fqn, value);
        }
        copy_state_dict(&loaded, &mut live)?;
        self.values.extend(live.iter().map(|(fqn, value)| (fqn.to_owned(), value.clone())));
        Ok((unflatten_state_dict(FlatStateDict { values: self.values, paths: self.paths })?, self.report))
    }
}

/// Whether values can be put into the memory of a tensor.
fn check_fillable(tensor: &Tensor) -> Result<(), FlatError> {
    let shape = || tensor.dims().to_vec();
    if is_freed(tensor) {
        return Err(FlatError::Freed { shape: shape() });
    }
    if !tensor.is_contiguous() {
        return Err(FlatError::NotContiguous { shape: shape() });
    }
    Ok(())
}
