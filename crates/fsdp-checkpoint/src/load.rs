//! Loading a checkpoint into a state dict: torch's `dcp.load`, into fresh tensors or in place.

use fsdp_comm::{CommError, ProcessGroup};
use fsdp_formats::Location;
use fsdp_formats::checkpoint::{self, Checkpoint};
use fsdp_formats::reader::OpenOptions;
use fsdp_layout::PlainValue;
use fsdp_state::engine::DictTarget;
use fsdp_state::{
    FlatStateDict, LoadError as _, LoadOptions, LoadReport, Source as _, StateDict, StateValue,
    check_state, flatten_state_dict, get_element_mut, is_part_of, load_state,
};
use tracing::info_span;

use crate::error::{CheckpointError, with_causes_in_text};
use crate::save::with_storage_deadline;
use crate::source::CheckpointSource;

/// The name of all loads, for messages.
pub(crate) const LOAD: &str = "load";

/// Fills a state dict from the checkpoint at `path`, a path or a URL ([`Location`]), of any format
/// and saved on any number of ranks. This is torch's `dcp.load`, except that a load that fails
/// changes nothing. ([`load_in_place`] works in place like torch's, and is faster.)
///
/// `template` selects what to load: the boxes of its sharded tensors, its whole tensors, and its
/// plain values. All of them are replaced by the saved values, in fresh tensors. Keys that only the
/// checkpoint has are ignored, and listed in the report as unexpected. Collective over `group`:
/// ranks communicate to agree, and each reads its own data. Ranks may request different keys; one
/// that any rank requests is not unexpected.
///
/// # Errors
/// The same on every rank, and no rank's template is changed: a key that the checkpoint lacks,
/// another shape, dtype or kind, chunks that do not cover what is wanted, damaged files.
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
    load_from(&path.into(), template, group, options, FillMode::Fresh)
}

/// Loads like [`load`], but into the memory of the tensors in `state`, as torch's `dcp.load` does:
/// every tensor that shares a storage with them sees the change. Plain values are replaced in
/// `state`.
///
/// CPU tensors are filled directly from the files. Tensors on a GPU, and tensors of another dtype
/// than the saved one, are read into other memory first. If several names share one tensor, the
/// first name is read. During the load, reading one of the tensors elsewhere fails as for a
/// released tensor. Collectives: those of [`load`].
///
/// # Errors
/// The same on every rank. Keys, shapes, dtypes and boxes that do not fit, tensors that are
/// released or not contiguous, and files that are missing or too short, are found before the first
/// byte is read; nothing has changed then.
///
/// Damage inside a file, which only reading can find, is
/// [`StateError::PartlyLoaded`](fsdp_state::StateError::PartlyLoaded) on every rank. The tensors
/// then hold a mixture of old and loaded values. To prevent that, set
/// [`staged`](fsdp_state::LoadOptions::staged), or use [`load`].
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
    load_from(&path.into(), state, group, options, FillMode::InPlace)
}

/// Opens a checkpoint and loads it into a state dict, in fresh tensors or in place. Collectives:
/// those of [`load_state`]. A rank that cannot open the checkpoint goes straight to the first
/// agreement there, so opening takes no agreement of its own.
fn load_from(
    path: &Location,
    state: &mut StateDict,
    group: &ProcessGroup,
    options: &LoadOptions,
    mode: FillMode,
) -> Result<LoadReport, CheckpointError> {
    let group = with_storage_deadline(group, options.deadline);
    let checkpoint = CheckpointError::or_refuse(&group, LOAD, open_on_this_rank(path, options))?;
    fill(&*checkpoint, state, &group, options, mode)
}

/// Opens a checkpoint on every rank of a group, for callers that may communicate in other ways
/// before they load. Collective: one agreement.
pub(crate) fn open(
    operation: &str,
    path: &Location,
    group: &ProcessGroup,
    options: &LoadOptions,
) -> Result<Box<dyn Checkpoint>, CheckpointError> {
    CheckpointError::agree(group, operation, None, open_on_this_rank(path, options))
}

/// Opens a checkpoint on this rank. No communication.
fn open_on_this_rank(
    path: &Location,
    options: &LoadOptions,
) -> Result<Box<dyn Checkpoint>, CheckpointError> {
    Ok(checkpoint::open(
        path,
        OpenOptions {
            verify: options.verify,
        },
    )?)
}

/// Returns what this rank's [`Stateful::load_state_dict`](crate::Stateful::load_state_dict) or
/// [`Stateful::check_load`](crate::Stateful::check_load) has returned, unless that of another rank
/// has failed. Collective: an agreement.
///
/// A type of one's own may fail on one rank alone. If it does so before it loads anything, this
/// agreement is the one at the beginning of the load, in which the other ranks wait. They get an
/// error of communication there, which all ranks know of, and do not come here with it.
pub(crate) fn agree_on_load<T>(
    group: &ProcessGroup,
    loaded: Result<T, CheckpointError>,
) -> Result<T, CheckpointError> {
    match loaded {
        Err(error) if error.comm().is_some() => Err(error),
        Err(error) => {
            let error_to_send = CheckpointError::State(with_causes_in_text(&error));
            match CheckpointError::agree(group, LOAD, Some(0), Err::<(), _>(error_to_send)) {
                // Another rank has no error of its own, so all ranks get that of this one.
                Err(CheckpointError::Comm(CommError::RankFailed {
                    operation,
                    failures,
                })) if failures.len() < group.world_size() => Err(CommError::RankFailed {
                    operation,
                    failures,
                }
                .into()),
                _ => Err(error),
            }
        }
        loaded => CheckpointError::agree(group, LOAD, Some(0), loaded),
    }
}

/// The way in which [`fill`] fills a state dict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FillMode {
    /// Its tensors are replaced by fresh ones.
    Fresh,
    /// Its tensors are filled.
    InPlace,
    /// Nothing changes. It is only checked that its tensors can be filled.
    Check,
}

/// Loads an open checkpoint into a state dict.
pub(crate) fn fill(
    checkpoint: &dyn Checkpoint,
    state: &mut StateDict,
    group: &ProcessGroup,
    options: &LoadOptions,
    mode: FillMode,
) -> Result<LoadReport, CheckpointError> {
    let in_place = mode != FillMode::Fresh;
    let _span =
        info_span!("load", rank = group.rank(), path = %checkpoint.path().display()).entered();
    // A checkpoint's keys are flat, whatever paths its state dict had.
    let mut flattened = flatten_state_dict(state);
    if in_place && let Err(error) = state.check_reaches_owner(|key| may_load(options, key)) {
        flattened = Err(error);
    }
    let FlatStateDict { values, paths } = CheckpointError::or_refuse(group, LOAD, flattened)?;
    let flat: StateDict = values
        .into_iter()
        .map(|(key, value)| (key, as_leaf(value)))
        .collect();
    let template = DictTarget::new(&flat, options.device.clone());
    let mut target = CheckpointError::or_refuse(group, LOAD, template)?.for_checkpoint(in_place);
    let mut source = CheckpointSource::by_flat_key(checkpoint);
    if mode == FillMode::Check {
        return check_state(LOAD, group, &mut source, &mut target, options);
    }
    let report =
        load_state::<_, _, CheckpointError>(LOAD, group, &mut source, &mut target, options)?;
    // Put the loaded values back where their keys stand in the nested state dict.
    for (key, value) in target.into_loaded() {
        let slot = paths
            .get(&key.flat_key())
            .and_then(|path| get_element_mut(state, path));
        *slot.expect("only keys of the state dict are loaded") = value;
    }
    Ok(report)
}

/// Returns `true` if a key, or something below it, is to be loaded.
fn may_load(options: &LoadOptions, key: &str) -> bool {
    let mut parts = options.only.iter().flatten();
    options.includes(key) || parts.any(|part| is_part_of(part, key))
}

/// Returns a placeholder for a list, a tuple or a dict that flattening has left whole, and other
/// values as they are. A checkpoint holds such a container as one plain value, so a plain value is
/// what the target must request. The saved value then replaces the whole container, whatever was in
/// it.
fn as_leaf(value: StateValue) -> StateValue {
    match value {
        StateValue::List(_) | StateValue::Tuple(_) | StateValue::Dict(_) => {
            StateValue::Plain(PlainValue::None)
        }
        value => value,
    }
}

/// Returns everything below the key `prefix` of a checkpoint of any format (the whole checkpoint
/// for an empty prefix), as a nested state dict of whole tensors on the CPU: torch's
/// `_load_state_dict_from_keys`. It must fit into memory. In formats that do not store paths, the
/// prefix is the beginning of flat keys, and these are the keys of the dict. No communication.
///
/// # Errors
/// Damaged files; shapes that do not fit the machine; paths that contradict each other.
pub fn load_whole(
    path: impl Into<Location>,
    prefix: &[&str],
    options: &LoadOptions,
) -> Result<StateDict, CheckpointError> {
    let checkpoint = open_on_this_rank(&path.into(), options)?;
    let source = CheckpointSource::new(&*checkpoint);
    source.schema().check_gaps()?;
    let key = prefix.join(".");
    let mut state = StateDict::new();
    source.copy_to(&mut state, |_, path| {
        path.below(prefix).is_some() || path.flat_key() == key
    })?;
    Ok(state)
}
