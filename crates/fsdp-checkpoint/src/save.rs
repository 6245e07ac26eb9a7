//! Saving a state dict as a checkpoint: every rank writes what it holds, one rank plans and
//! commits.

use std::borrow::Cow;
use std::fmt::{self, Write as _};
use std::hash::Hasher as _;
use std::ops::Range;
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};
use fsdp_comm::ProcessGroup;
use fsdp_dcp::Location;
use fsdp_dcp::checkpoint::check_replaceable;
use fsdp_dcp::limits::MAX_OBJECT_BYTES;
use fsdp_dcp::lineage::Lineage;
use fsdp_dcp::plan::{Deduplicate, GlobalPlan, LocalPlan, Selection, plan_part};
use fsdp_dcp::storage::{Durable, Staging, clean_stale};
use fsdp_dcp::verify::with_causes;
use fsdp_dcp::writer::value_item_length;
use fsdp_dcp::writer::{
    Before, PayloadSource, RankWritten, WriteOptions, finish, write_changed, write_rank,
};
use fsdp_digest::Digest;
use fsdp_flat::storage::{HostBytes, to_device};
use fsdp_layout::{ErrorKind, Failure, PlainValue, TensorBox};
use fsdp_state::{FlatStateDict, StateDict, StateValue, flatten_state_dict};
use indexmap::IndexMap;
use tracing::{debug, info_span};
use twox_hash::XxHash3_64;

use crate::CheckpointError;
use crate::parent::{Writing, written_before};
use crate::plan::{CachedPlan, PLANNER, PlanCache, PlanKey};
pub use crate::progress::SaveProgress;
use crate::rounds::gather_in_rounds;
use crate::threads::{Access, threads};

/// The default deadline of saves and loads, for which ranks wait for each other. It is long because
/// writing may be slow. A rank that dies is noticed at once, whatever the deadline is.
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(30 * 60);

/// The options of a save; the same on every rank.
#[derive(Debug, Clone)]
pub struct SaveOptions {
    /// `true` to replace an existing checkpoint. It stays whole until the new one is committed.
    pub overwrite: bool,
    /// The rule for which of several ranks that hold the same values writes them.
    pub deduplicate: Deduplicate,
    /// The options of writing a rank's file.
    pub write: WriteOptions,
    /// The time that a rank waits for the others to write; longer than the process group's own
    /// deadline for a collective.
    pub deadline: Duration,
    /// The operations that make files durable. Tests replace them by operations that fail.
    pub durable: Durable,
    /// `true` to write only what has changed since the last save of the same [`Saver`], or since
    /// [`parent`](Self::parent). Data files of which at least half is unchanged are hard-linked, so
    /// that frozen weights take no time to write and no space. Each rank computes digests of its
    /// values first to find what has changed. In an object store, unchanged files are copied inside
    /// the store: they take space, but are not uploaded. A save in another layout than the last one
    /// writes everything.
    pub incremental: bool,
    /// The checkpoint that the run has loaded, for the first incremental save of a process. It is
    /// used only if it has the digest of the parent in [`lineage`](Self::lineage).
    /// [`Checkpointer`](crate::Checkpointer) fills it in.
    pub parent: Option<Location>,
    /// The place of the checkpoint in its run, to be recorded with it.
    /// [`Checkpointer`](crate::Checkpointer) fills it in.
    pub lineage: Option<Lineage>,
    /// The progress of the save on this rank. Keep a clone to read it while the save runs.
    pub progress: SaveProgress,
}

impl Default for SaveOptions {
    fn default() -> Self {
        SaveOptions {
            overwrite: false,
            deduplicate: Deduplicate::default(),
            write: WriteOptions::default(),
            deadline: DEFAULT_DEADLINE,
            durable: Durable::default(),
            incremental: false,
            parent: None,
            lineage: None,
            progress: SaveProgress::default(),
        }
    }
}

impl SaveOptions {
    /// Returns the number of threads with which a rank of `group` writes to `path`.
    pub(crate) fn threads(&self, path: &Location, group: &ProcessGroup) -> usize {
        threads(
            Access::Write,
            self.write.threads,
            group,
            path.local().is_none(),
        )
    }
}

/// The sizes and the duration of a save.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct SaveReport {
    /// The bytes of tensors that this rank wrote.
    pub rank_bytes: u64,
    /// The bytes of tensors that all ranks wrote.
    pub total_bytes: u64,
    /// The bytes of tensors of this rank that were not written but linked; see
    /// [`SaveOptions::incremental`].
    pub linked_bytes: u64,
    /// The digest of all that was saved; `None` if none was recorded.
    pub digest: Option<Digest>,
    /// The time from the call to the commit, on this rank.
    pub duration: Duration,
    /// The time for which an optimizer step, or another change of the state, waited for the copy of
    /// a save in the background on this rank.
    pub waited: Duration,
}

/// Saves a state dict as a DCP checkpoint directory at `path`, a path or a URL ([`Location`]):
/// torch's `dcp.save`. `torch.distributed.checkpoint.load` opens the result. To save repeatedly,
/// use a [`Saver`], which keeps the plan. [`load`](crate::load()) has an example.
///
/// Collective: every rank of `group` passes its own values under the same keys. Values that several
/// ranks hold are written once. Plain values must be the same on all ranks that have the key. Only
/// plans, statuses, hashes and sums for digests move between ranks, no tensor bytes. When this
/// returns, the checkpoint is durable. When it fails, every rank gets the error, and whatever was
/// at `path` before is unchanged.
///
/// # Errors
/// A state dict that cannot be saved; ranks that disagree on a dtype, a shape or a plain value;
/// boxes that overlap or leave holes; a checkpoint that exists already (in an object store it
/// cannot be overwritten); errors of the storage.
pub fn save(
    path: impl Into<Location>,
    state: &StateDict,
    group: &ProcessGroup,
    options: &SaveOptions,
) -> Result<SaveReport, CheckpointError> {
    Saver::new().save(path, state, group, options)
}

/// Saves state dicts repeatedly, and keeps the plan of one save for the next.
///
/// Every rank has a `Saver`, and all ranks use theirs for the same saves. [`Saver::save`] works
/// like [`save`], but as long as the layout does not change, ranks exchange one hash instead of
/// planning again.
#[derive(Debug, Default)]
pub struct Saver {
    plans: PlanCache,
    last: Option<LastSave>,
}

/// The last save, whose files the next incremental save may link.
#[derive(Debug)]
struct LastSave {
    path: Location,
    written: RankWritten,
}

impl Saver {
    /// Makes a saver that has planned nothing yet. No communication.
    #[must_use]
    pub fn new() -> Self {
        Saver::default()
    }

    /// Saves like [`save`]. The first call plans which rank writes what. A later call plans again
    /// only if some rank's layout (keys, shapes, dtypes, boxes) has changed since the last one;
    /// otherwise one agreement is enough.
    ///
    /// # Errors
    /// The errors of [`save`].
    pub fn save(
        &mut self,
        path: impl Into<Location>,
        state: &StateDict,
        group: &ProcessGroup,
        options: &SaveOptions,
    ) -> Result<SaveReport, CheckpointError> {
        let start = Instant::now();
        let path = &path.into();
        let group = &group.with_deadline_at_least(options.deadline);
        let _span = info_span!("save", rank = group.rank(), %path).entered();
        let threads = options.threads(path, group);
        let write_options = WriteOptions {
            threads: Some(threads),
            ..options.write
        };

        // Step 1: plan which rank writes what, or take the plan of the last save if no rank's
        // layout has changed.
        let Saver { plans, last } = self;
        let Planned {
            plan,
            source,
            cached,
            is_planned,
        } = plan_save(plans, state, group, options)?;
        options.progress.expect(cached.rank_bytes);
        // Step 2: the planner prepares the staging directory, and the others join it.
        let (staging, name) = prepare_on_planner(path, group, options)?;
        // Step 3: every rank writes its own file. In an incremental save, items that have not
        // changed since the last save with the same plan (or since the checkpoint that the run was
        // resumed from) are linked.
        let last = match last.take() {
            Some(last) => Some(last).filter(|_| options.incremental && is_planned),
            None => from_parent(group, &plan, cached, &source, options, threads)?,
        };
        let before = last.as_ref().map(|last| Before {
            path: &last.path,
            written: &last.written,
        });
        let written = in_staging(staging.as_ref(), &name, path, options, |staging| {
            write(
                staging,
                group.rank(),
                &plan,
                &cached.selection,
                &source,
                write_options,
                before,
            )
        });
        let written = group.agree("save: write", written.map_err(WithCauses))?;
        let linked_bytes = written.linked_bytes;
        let this_save = options.incremental.then(|| LastSave {
            path: path.clone(),
            written: written.clone(),
        });
        let all_written = gather_in_rounds(group, vec![written], RankWritten::wire_bytes, PLANNER)?;

        // Step 4: the planner records the places of all items in the metadata, and commits.
        let committed = match (staging, &cached.metadata, all_written) {
            (Some(staging), Some(metadata), Some(written)) => {
                let _span = info_span!("commit", rank = group.rank()).entered();
                let written: Vec<RankWritten> = written.into_iter().flatten().collect();
                let saved = finish(staging, metadata.clone(), &written, options.lineage.clone());
                saved
                    .map(|digests| digests.map(|digests| digests.root()))
                    .map_err(CheckpointError::from)
            }
            _ => Ok(None),
        };
        let digest = group.agree("save: commit", committed.map_err(WithCauses))?;
        let digest: Option<Digest> = group.broadcast_object(Some(&digest), PLANNER)?;
        let CachedPlan {
            rank_bytes,
            total_bytes,
            ..
        } = *cached;
        self.last = this_save;
        let (duration, waited) = (start.elapsed(), Duration::ZERO);
        let report = SaveReport {
            rank_bytes,
            total_bytes,
            linked_bytes,
            digest,
            duration,
            waited,
        };
        debug!(
            rank_bytes,
            total_bytes,
            seconds = report.duration.as_secs_f64(),
            "saved"
        );
        Ok(report)
    }
}

/// An error that is sent to other ranks. Its text includes its causes, such as the system's reason,
/// because only the text is sent.
struct WithCauses(CheckpointError);

impl fmt::Display for WithCauses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&with_causes(&self.0))
    }
}

impl Failure for WithCauses {
    fn kind(&self) -> ErrorKind {
        self.0.kind()
    }
}

/// Returns a [`LastSave`] for the first save of a process, made from the checkpoint that the run
/// has loaded: the items of it that this rank would write now. Returns `None` if nothing is to be
/// linked. Collectives: those of [`written_before`].
fn from_parent(
    group: &ProcessGroup,
    plan: &LocalPlan,
    cached: &CachedPlan,
    source: &LocalState,
    options: &SaveOptions,
    threads: usize,
) -> Result<Option<LastSave>, CheckpointError> {
    let digest = options
        .lineage
        .as_ref()
        .and_then(|lineage| lineage.parent)
        .map(|parent| parent.digest);
    let (Some(path), Some(digest)) = (&options.parent, digest) else {
        return Ok(None);
    };
    if !options.incremental || !options.write.digests {
        return Ok(None);
    }
    let (selection, metadata) = (&cached.selection, cached.metadata.as_ref());
    let writing = Writing {
        plan,
        selection,
        source,
        threads,
        metadata,
    };
    let written = written_before(path, digest, group, &writing)?;
    Ok(Some(LastSave {
        path: path.clone(),
        written,
    }))
}

/// The outcome of [`plan_save`].
pub(crate) struct Planned<'p> {
    /// The boxes and values that this rank holds.
    pub(crate) plan: LocalPlan,
    /// The values themselves.
    pub(crate) source: LocalState,
    cached: &'p CachedPlan,
    /// `true` if the plan is that of the save before.
    is_planned: bool,
}

/// Plans which rank writes what, or takes the plan from `plans` if no rank's layout has changed.
/// Collectives: an agreement; if ranks differ, an object all-gather; for a new plan, those of
/// [`PlanCache::plan`].
///
/// # Errors
/// The same on every rank: state that cannot be saved, or that differs between ranks.
pub(crate) fn plan_save<'p>(
    plans: &'p mut PlanCache,
    state: &StateDict,
    group: &ProcessGroup,
    options: &SaveOptions,
) -> Result<Planned<'p>, CheckpointError> {
    let _span = info_span!("plan", rank = group.rank()).entered();
    let local = LocalState::new(state, options.progress.clone());
    let layout = local.as_ref().map_or(0, |(plan, _)| plan.layout_hash());
    let key = PlanKey::new(group, layout, options.deduplicate);
    let values = local
        .as_ref()
        .map_or_else(|_| Vec::new(), |(_, source)| source.hashes_of_values());
    // A rank that cannot list its state takes part too. This agreement makes its error every
    // rank's, so no rank returns alone below.
    let is_planned = plans.is_planned(group, &key, &local, &values)?;
    let (plan, source) = local?;
    let cached = plans.plan(group, key, &plan, is_planned)?;
    Ok(Planned {
        plan,
        source,
        cached,
        is_planned,
    })
}

/// Saves what this rank holds as a part of a checkpoint, in a DCP directory of its own at `path`.
/// Returns the number of bytes of its tensors. This does not communicate.
pub(crate) fn save_part(
    path: &Location,
    plan: &LocalPlan,
    source: &LocalState,
    rank: usize,
    durable: &Durable,
    threads: usize,
) -> Result<u64, CheckpointError> {
    let GlobalPlan {
        metadata,
        selections,
        ..
    } = plan_part(plan).map_err(fsdp_dcp::FileError::from)?;
    let staging = durable.prepare(path, false)?;
    // Digests are not computed: they are of whole tensors, and this rank has only parts of some.
    let write = WriteOptions {
        threads: Some(threads),
        digests: false,
    };
    let selection = selections.into_iter().next().unwrap_or_default();
    let written = write_rank(&staging, rank, plan, &selection, source, &write)?;
    let bytes = written.payload_bytes;
    finish(staging, metadata, &[written], None)?;
    Ok(bytes)
}

/// Checks that every rank can write to a checkpoint at `path`: each writes a small file to the
/// staging directory of a save, which is then removed. Collectives: two agreements and an object
/// broadcast.
///
/// # Errors
/// The same on every rank: the errors of the storage.
pub(crate) fn check_writable(
    path: &Location,
    group: &ProcessGroup,
    options: &SaveOptions,
) -> Result<(), CheckpointError> {
    let group = &group.with_deadline_at_least(options.deadline);
    // When the planner's value is dropped, all files are removed. Until the last agreement other
    // ranks write to it.
    let (staging, name) = prepare_on_planner(path, group, options)?;
    if staging.is_none() && path.local().is_some() {
        wait_until_visible(&name, path, options);
    }
    let written = in_staging(staging.as_ref(), &name, path, options, |staging| {
        write_small_file(staging, group.rank())
    });
    Ok(group.agree("save: write", written.map_err(WithCauses))?)
}

/// The time after which a host that has looked for a directory before sees that another host has
/// made it. NFS remembers for 30 seconds that a name is missing.
const VISIBLE_WITHIN: Duration = Duration::from_secs(40);

/// Waits until the staging directory that the planner has prepared is visible on this host, for
/// [`VISIBLE_WITHIN`] at most. Whoever uses it afterwards gets the error if it is not.
fn wait_until_visible(name: &str, path: &Location, options: &SaveOptions) {
    let until = Instant::now() + VISIBLE_WITHIN;
    while options.durable.join(path, name).is_err() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Writes one byte to the data file of a rank.
fn write_small_file(staging: &Staging, rank: usize) -> Result<(), CheckpointError> {
    let file = staging.create(&staging.data_file_of(rank, 0), 1)?;
    file.write_at(0, &[0])?;
    Ok(file.finish()?)
}

/// Prepares the staging directory of a save on the planner. Returns it there, and its name on every
/// rank. Collectives: an agreement and an object broadcast.
///
/// # Errors
/// The same on every rank: the errors of [`prepare`].
fn prepare_on_planner(
    path: &Location,
    group: &ProcessGroup,
    options: &SaveOptions,
) -> Result<(Option<Staging>, String), CheckpointError> {
    let staging = (group.rank() == PLANNER)
        .then(|| prepare(path, options))
        .transpose();
    let staging = group.agree("save: prepare", staging.map_err(WithCauses))?;
    let name = staging.as_ref().map(|staging| staging.name().to_owned());
    let name = group.broadcast_object(name.as_ref(), PLANNER)?;
    Ok((staging, name))
}

/// Does `work` in the staging directory of a save: in the planner's own, or else in that of this
/// name, which the planner has prepared.
///
/// # Errors
/// The error of `work`; a staging directory that is not visible here.
fn in_staging<T>(
    staging: Option<&Staging>,
    name: &str,
    path: &Location,
    options: &SaveOptions,
    work: impl FnOnce(&Staging) -> Result<T, CheckpointError>,
) -> Result<T, CheckpointError> {
    match staging {
        Some(staging) => work(staging),
        None => work(&options.durable.join(path, name)?),
    }
}

/// Prepares a staging directory for a new checkpoint at `path`, and removes those that killed saves
/// have left beside it. Fails early if the commit could not replace what is at `path`, or would
/// remove files of other programs with the old checkpoint.
fn prepare(path: &Location, options: &SaveOptions) -> Result<Staging, CheckpointError> {
    if options.overwrite {
        check_replaceable(path)?;
    }
    clean_stale(path)?;
    let staging = options.durable.prepare(path, options.overwrite)?;
    staging.check_replaces_directory()?;
    Ok(staging)
}

/// Writes this rank's file of a checkpoint, and links what has not changed since `before`.
fn write(
    staging: &Staging,
    rank: usize,
    plan: &LocalPlan,
    selection: &Selection,
    source: &LocalState,
    options: WriteOptions,
    before: Option<Before<'_>>,
) -> Result<RankWritten, CheckpointError> {
    let _span = info_span!("write", rank, bytes = source.progress.total()).entered();
    let written = write_changed(staging, rank, plan, selection, source, &options, before)?;
    // Linked bytes need no writing, so they count as done.
    source.progress.add(written.linked_bytes);
    Ok(written)
}

/// This rank's values by their flat keys: the source from which the writer takes them.
pub(crate) struct LocalState {
    tensors: IndexMap<String, Vec<(TensorBox, Payload)>>,
    values: IndexMap<String, PlainValue>,
    progress: SaveProgress,
}

/// The elements of one box.
enum Payload {
    Tensor(candle_core::Tensor),
    Raw(fsdp_flat::RawTensor),
}

impl LocalState {
    /// Flattens a state dict. Returns what this rank can write, for planning, and the values
    /// themselves.
    fn new(
        state: &StateDict,
        progress: SaveProgress,
    ) -> Result<(LocalPlan, LocalState), CheckpointError> {
        let FlatStateDict { values, mut paths } = flatten_state_dict(state)?;
        let mut plan = LocalPlan::default();
        let mut source = LocalState {
            tensors: IndexMap::new(),
            values: IndexMap::new(),
            progress,
        };
        for (fqn, value) in values {
            let path = paths.swap_remove(&fqn);
            match value {
                StateValue::Tensor(tensor) => {
                    let dtype = fsdp_flat::dtype::file_dtype(tensor.dtype())?;
                    let (shape, whole) = (tensor.dims().to_vec(), TensorBox::whole(tensor.dims()));
                    plan.add_whole_tensor(&fqn, path, dtype, shape);
                    source
                        .tensors
                        .insert(fqn, vec![(whole, Payload::Tensor(on_host(&tensor)?))]);
                }
                StateValue::Sharded(tensor) => {
                    plan.add_tensor(
                        &fqn,
                        path,
                        tensor.file_dtype()?,
                        tensor.shape().to_vec(),
                        tensor.boxes(),
                    );
                    let shards = tensor.shards().iter().map(|shard| {
                        Ok((
                            shard.bounds.clone(),
                            Payload::Tensor(on_host(&shard.tensor)?),
                        ))
                    });
                    source
                        .tensors
                        .insert(fqn, shards.collect::<Result<_, CheckpointError>>()?);
                }
                StateValue::Raw(tensor) => {
                    let (shape, whole) =
                        (tensor.shape().to_vec(), TensorBox::whole(tensor.shape()));
                    plan.add_whole_tensor(&fqn, path, tensor.dtype(), shape);
                    source
                        .tensors
                        .insert(fqn, vec![(whole, Payload::Raw(tensor))]);
                }
                object => {
                    let value = object
                        .to_object()?
                        .ok_or_else(|| CheckpointError::Unsavable {
                            fqn: fqn.clone(),
                            problem: "a sharded tensor inside a tuple has no key of its own"
                                .to_owned(),
                        })?;
                    let length = value_item_length(&value).map_err(|problem| {
                        CheckpointError::Unsavable {
                            fqn: fqn.clone(),
                            problem: problem.to_string(),
                        }
                    })?;
                    if length > MAX_OBJECT_BYTES {
                        let problem = format!(
                            "as one object it has {length} bytes, and {MAX_OBJECT_BYTES} can be read"
                        );
                        return Err(CheckpointError::Unsavable { fqn, problem });
                    }
                    plan.add_value(&fqn, path, length);
                    source.values.insert(fqn, value);
                }
            }
        }
        Ok((plan, source))
    }

    /// Returns a hash of each plain value, sorted by key.
    fn hashes_of_values(&self) -> Vec<(String, u64)> {
        let mut hashes: Vec<_> = self
            .values
            .iter()
            .map(|(key, value)| (key.clone(), hash_of(value)))
            .collect();
        hashes.sort_unstable();
        hashes
    }
}

/// Returns a hash that is the same on every rank for equal values. It hashes the value's `Debug`
/// text, because floats do not implement `Hash`.
fn hash_of(value: &PlainValue) -> u64 {
    let mut text = HashedText(XxHash3_64::new());
    // Writing to a hasher does not fail.
    let _ = write!(text, "{value:?}");
    text.0.finish()
}

/// Text that is hashed rather than kept.
struct HashedText(XxHash3_64);

impl fmt::Write for HashedText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.write(text.as_bytes());
        Ok(())
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
        sink: &mut dyn FnMut(&[u8]) -> Result<(), fsdp_dcp::FileError>,
    ) -> Result<(), fsdp_dcp::FileError> {
        let length = range.end - range.start;
        self.look(fqn, bounds, range, sink)?;
        self.progress.add(length);
        Ok(())
    }

    fn look(
        &self,
        fqn: &str,
        bounds: &TensorBox,
        range: Range<u64>,
        sink: &mut dyn FnMut(&[u8]) -> Result<(), fsdp_dcp::FileError>,
    ) -> Result<(), fsdp_dcp::FileError> {
        let not_stored = || fsdp_dcp::FileError::NotStored {
            fqn: fqn.to_owned(),
        };
        let boxes = self.tensors.get(fqn).ok_or_else(not_stored)?;
        let (_, payload) = boxes
            .iter()
            .find(|(held, _)| held == bounds)
            .ok_or_else(not_stored)?;
        let range = range.start as usize..range.end as usize;
        match payload {
            Payload::Raw(tensor) => sink(tensor.bytes().get(range).ok_or_else(not_stored)?)?,
            Payload::Tensor(tensor) => {
                let bytes = HostBytes::read(tensor).map_err(|_| not_stored())?;
                sink(bytes.get(range).ok_or_else(not_stored)?)?;
            }
        }
        Ok(())
    }

    fn value(&self, fqn: &str) -> Result<Cow<'_, PlainValue>, fsdp_dcp::FileError> {
        let value = self.values.get(fqn);
        value
            .map(Cow::Borrowed)
            .ok_or_else(|| fsdp_dcp::FileError::NotStored {
                fqn: fqn.to_owned(),
            })
    }
}
