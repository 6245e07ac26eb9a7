//! Saving a state dict as a checkpoint: every rank writes what it holds, one rank plans and
//! commits.

use std::time::{Duration, Instant};

use fsdp_comm::ProcessGroup;
use fsdp_digest::Digest;
use fsdp_formats::Location;
use fsdp_formats::checkpoint::check_replaceable;
use fsdp_formats::lineage::Lineage;
use fsdp_formats::plan::{Deduplicate, GlobalPlan, plan_part};
use fsdp_formats::storage::{Durable, Staging, clean_stale};
use fsdp_formats::writer::{Before, RankItems, RankWritten, WriteOptions, finish, write_rank};
use fsdp_state::{LoadError as _, StateDict};
use tracing::{debug, info_span};

use crate::error::{CheckpointError, broadcast_result};
use crate::local_state::LocalState;
use crate::parent::written_before;
use crate::plan::{PLANNER, PlanCache, Planned};
use crate::progress::SaveProgress;
use crate::rounds::{ROUND_BYTES, gather_in_rounds};
use crate::threads::{Access, thread_count};

/// The default deadline of saves and loads, for which ranks wait for each other. It is long because
/// writing may be slow. A rank that dies is noticed at once, whatever the deadline is.
pub const STORAGE_DEADLINE: Duration = Duration::from_secs(30 * 60);

/// The options of a save; the same on every rank.
#[derive(Debug, Clone, Default)]
pub struct SaveOptions {
    /// `true` to replace an existing checkpoint. It stays whole until the new one is committed. A
    /// symbolic link is never replaced: save to what it leads to.
    pub overwrite: bool,
    /// The rule for which of several ranks that hold the same values writes them.
    pub deduplicate: Deduplicate,
    /// The options of writing a rank's file.
    pub write: WriteOptions,
    /// The time that a rank waits for the others to write. `None` means [`STORAGE_DEADLINE`]. A
    /// time that is less than the group's deadline has no effect.
    pub deadline: Option<Duration>,
    /// `true` to write only what has changed since the last save of the same
    /// [`Checkpointer`](crate::Checkpointer), or since the checkpoint that it has loaded. Data
    /// files of which at least half is unchanged are hard-linked, so that frozen weights take no
    /// time to write and no space. Each rank computes digests of its values first to find what has
    /// changed. In an object store, unchanged files are copied inside the store: they take space,
    /// but are not uploaded. A save in another layout than the last one writes everything.
    pub incremental: bool,
    /// The progress of the save on this rank. Keep a clone to read it while the save runs.
    pub progress: SaveProgress,
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
    /// The newest step of the run that it has left with this save, because it had gone back to an
    /// older one ([`Branch`](fsdp_formats::lineage::Branch)); else `None`. That checkpoint stays
    /// until somebody removes it, or saves the step again and overwrites it, but the run does not
    /// continue from it any more.
    pub left: Option<u64>,
}

/// Saves a state dict as a DCP checkpoint directory at `path`, a path or a URL ([`Location`]):
/// torch's `dcp.save`. `torch.distributed.checkpoint.load` opens the result. To save repeatedly or
/// in the background, use a [`Checkpointer`](crate::Checkpointer), which keeps the plan.
/// [`load`](crate::load()) has an example.
///
/// Collective: every rank of `group` passes its own values under the same keys. Values that several
/// ranks hold are written once. Plain values must be the same on all ranks that have the key; of
/// whole tensors that differ between ranks one is saved, so give each rank's its own key. Only
/// plans, statuses, hashes and sums for digests move between ranks, no tensor bytes: three
/// agreements, four exchanges of objects for the plan, broadcasts of the place and of the digest,
/// and a gather of what each rank has written. When this returns, the checkpoint is durable. When
/// it fails, every rank gets the error, and whatever was at `path` before is unchanged.
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
    let request = SaveRequest {
        path: path.into(),
        options: options.clone(),
        durable: Durable::default(),
        lineage: None,
        left_step: None,
        parent: None,
    };
    let local = LocalState::new(state, None, options.progress.clone());
    Saver::default().save(&request, local, group)
}

/// A save to one place: its options, and what only a [`Checkpointer`](crate::Checkpointer) adds to
/// them.
#[derive(Debug, Clone)]
pub(crate) struct SaveRequest {
    pub(crate) path: Location,
    pub(crate) options: SaveOptions,
    /// The operations that make files durable.
    pub(crate) durable: Durable,
    /// The place of the checkpoint in its run, to be recorded with it.
    pub(crate) lineage: Option<Lineage>,
    /// The newest step of the run that it leaves with this save; on rank 0.
    pub(crate) left_step: Option<u64>,
    /// The checkpoint that the run has loaded, for the first incremental save of a process. It is
    /// used only if it has the digest of the parent in `lineage`.
    pub(crate) parent: Option<Location>,
}

impl SaveRequest {
    /// Returns the name of the save, for messages. Ranks must agree on it, so it has the step. A
    /// path may be another one on other hosts.
    pub(crate) fn operation(&self) -> String {
        match &self.lineage {
            Some(lineage) => format!("save of step {}", lineage.step),
            None => "save".to_owned(),
        }
    }

    /// Checks that every rank can write to the place of the save: each writes a small file to a
    /// staging directory, which is then removed. Collectives: a broadcast of a result and an
    /// agreement.
    ///
    /// # Errors
    /// The same on every rank: the errors of the storage.
    pub(crate) fn check_writable(&self, group: &ProcessGroup) -> Result<(), CheckpointError> {
        let group = &with_storage_deadline(group, self.options.deadline);
        // When the planner's staging directory is dropped, all files are removed. Until the last
        // agreement other ranks write to it.
        let (own_staging, name) = self.prepare_on_planner(group)?;
        if own_staging.is_none() && self.path.local().is_some() {
            self.wait_until_visible(&name);
        }
        let written = self.work_in_staging(own_staging.as_ref(), &name, |staging| {
            let file = staging.create(&staging.data_file_of(group.rank(), 0), 1)?;
            file.write_at(0, &[0])?;
            Ok(file.finish()?)
        });
        CheckpointError::agree(group, "save: write", None, written)
    }

    /// Waits until the staging directory that the planner has prepared is visible on this host, for
    /// [`VISIBLE_TIMEOUT`] at most. Whoever uses it afterwards gets the error if it is not.
    fn wait_until_visible(&self, name: &str) {
        let deadline = Instant::now() + VISIBLE_TIMEOUT;
        while self.durable.join(&self.path, name).is_err() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// Prepares the staging directory of the save on the planner. Returns it there, and its name on
    /// every rank. Collective: a broadcast of the result.
    ///
    /// # Errors
    /// The same on every rank: the errors of [`Self::prepare`].
    fn prepare_on_planner(
        &self,
        group: &ProcessGroup,
    ) -> Result<(Option<Staging>, String), CheckpointError> {
        let mut own_staging = None;
        let mut outcome = Ok(None);
        if group.rank() == PLANNER {
            outcome = self
                .prepare()
                .map(|staging| Some(own_staging.insert(staging).name().to_owned()));
        }
        let name = broadcast_result(group, "save: prepare", outcome, PLANNER)?;
        Ok((own_staging, name))
    }

    /// Prepares a staging directory for the new checkpoint, and removes those that killed saves
    /// have left beside it. Fails early if the commit could not replace what is there, or would
    /// remove files of other programs with the old checkpoint.
    ///
    /// # Errors
    /// A checkpoint that is there already, unless it may be overwritten; files of other programs;
    /// errors of the storage.
    fn prepare(&self) -> Result<Staging, CheckpointError> {
        if self.options.overwrite {
            check_replaceable(&self.path)?;
        }
        clean_stale(&self.path)?;
        let staging = self.durable.prepare(&self.path, self.options.overwrite)?;
        staging.check_replaces_directory()?;
        Ok(staging)
    }

    /// Does `work` in the staging directory of the save: in the planner's `own_staging`, or else in
    /// that called `name`, which the planner has prepared.
    ///
    /// # Errors
    /// The error of `work`; a staging directory that is not visible here.
    fn work_in_staging<T>(
        &self,
        own_staging: Option<&Staging>,
        name: &str,
        work: impl FnOnce(&Staging) -> Result<T, CheckpointError>,
    ) -> Result<T, CheckpointError> {
        match own_staging {
            Some(staging) => work(staging),
            None => work(&self.durable.join(&self.path, name)?),
        }
    }
}

/// The time after which a host that has looked for a directory before sees that another host has
/// made it. NFS remembers for 30 seconds that a name is missing.
const VISIBLE_TIMEOUT: Duration = Duration::from_secs(40);

/// Returns the group with the deadline of an operation on storage, which is longer than the group's
/// own: ranks wait for each other while they read or write files.
pub(crate) fn with_storage_deadline(
    group: &ProcessGroup,
    deadline: Option<Duration>,
) -> ProcessGroup {
    group.with_deadline(group.deadline().max(deadline.unwrap_or(STORAGE_DEADLINE)))
}

/// Saves state dicts repeatedly, and keeps the plan of one save for the next.
///
/// Every rank has a `Saver`, and all ranks use theirs for the same saves. As long as the layout
/// does not change, ranks exchange one hash instead of planning again.
#[derive(Debug, Default)]
pub(crate) struct Saver {
    plans: PlanCache,
    last_save: Option<LastSave>,
}

/// The last save, whose files the next incremental save may link.
#[derive(Debug)]
struct LastSave {
    /// The hash of its plan, which numbers the items.
    plan: u64,
    path: Location,
    written: RankWritten,
}

impl Saver {
    /// Saves like [`save`]. The first call plans which rank writes what. A later call plans again
    /// only if some rank's layout (keys, shapes, dtypes, boxes) has changed since the last one.
    ///
    /// `local` is an error if this rank has no state to save. Every rank gets it then.
    ///
    /// # Errors
    /// The errors of [`save`].
    pub(crate) fn save(
        &mut self,
        request: &SaveRequest,
        local: Result<LocalState, CheckpointError>,
        group: &ProcessGroup,
    ) -> Result<SaveReport, CheckpointError> {
        let start = Instant::now();
        let SaveRequest { path, options, .. } = request;
        let group = &with_storage_deadline(group, options.deadline);
        let rank = group.rank();
        let _span = info_span!("save", rank, %path).entered();

        // Step 1: plan which rank writes what, or take the plan of the last save if no rank's
        // layout has changed.
        let planned = self
            .plans
            .plan(group, &request.operation(), options.deduplicate, local)?;
        let Planned { local, cached, .. } = &planned;
        options.progress.begin_save(cached.rank_bytes);
        // Step 2: the planner prepares the staging directory, and the others join it.
        let (staging, name) = request.prepare_on_planner(group)?;
        // Step 3: every rank writes its own file. In an incremental save, items that have not
        // changed since the last save with the same plan (or since the checkpoint that the run was
        // resumed from) are linked.
        let is_object_store = path.local().is_none();
        let threads = thread_count(Access::Write, options.write.threads, group, is_object_store);
        let last_save = match self.last_save.take() {
            Some(last_save) => {
                // A save that failed has changed the plan, but not the items of the last one.
                let has_this_plan = last_save.plan == cached.shared_hash;
                Some(last_save).filter(|_| options.incremental && has_this_plan)
            }
            None => parent_as_last_save(request, &planned, group, threads)?,
        };
        let before = last_save.as_ref().map(|save| Before {
            path: &save.path,
            written: &save.written,
        });
        let write_options = WriteOptions {
            threads: Some(threads),
            ..options.write
        };
        let outcome = request.work_in_staging(staging.as_ref(), &name, |staging| {
            let _span = info_span!("write", rank, bytes = cached.rank_bytes).entered();
            let items = RankItems {
                rank,
                plan: &local.plan,
                selection: &cached.selection,
                source: local,
            };
            let written = write_rank(staging, &items, &write_options, before)?;
            // Linked bytes need no writing, so they count as done.
            options.progress.record_written(written.linked_bytes);
            Ok(written)
        });
        let written = CheckpointError::agree(group, "save: write", None, outcome)?;
        let linked_bytes = written.linked_bytes;
        let this_save = options.incremental.then(|| LastSave {
            plan: cached.shared_hash,
            path: path.clone(),
            written: written.clone(),
        });
        let written_by_ranks = gather_in_rounds(
            ROUND_BYTES,
            group,
            vec![written],
            RankWritten::wire_bytes,
            PLANNER,
        )?;

        // Step 4: the planner records the places of all items in the metadata, and commits.
        let committed = match (staging, written_by_ranks) {
            (Some(staging), Some(written_by_ranks)) => {
                let _span = info_span!("commit", rank).entered();
                let metadata = cached
                    .metadata
                    .clone()
                    .expect("the planner keeps the metadata");
                let all_written: Vec<RankWritten> =
                    written_by_ranks.into_iter().flatten().collect();
                finish(staging, metadata, &all_written, request.lineage.clone())
                    .map(|digests| Some((digests.map(|digests| digests.root()), request.left_step)))
                    .map_err(CheckpointError::from)
            }
            _ => Ok(None),
        };
        let (digest, left): (Option<Digest>, Option<u64>) =
            broadcast_result(group, "save: commit", committed, PLANNER)?;
        let report = SaveReport {
            rank_bytes: cached.rank_bytes,
            total_bytes: cached.total_bytes,
            linked_bytes,
            digest,
            duration: start.elapsed(),
            waited: Duration::ZERO,
            left,
        };
        self.last_save = this_save;
        debug!(
            report.rank_bytes,
            report.total_bytes,
            seconds = report.duration.as_secs_f64(),
            "saved"
        );
        Ok(report)
    }
}

/// Returns a [`LastSave`] for the first save of a process, made from the checkpoint that the run
/// has loaded: the items of it that this rank would write now. Returns `None` if nothing is to be
/// linked. Collectives: those of [`written_before`].
fn parent_as_last_save(
    request: &SaveRequest,
    planned: &Planned<'_>,
    group: &ProcessGroup,
    threads: usize,
) -> Result<Option<LastSave>, CheckpointError> {
    if !request.options.incremental || !request.options.write.digests {
        return Ok(None);
    }
    let parent = request.lineage.as_ref().and_then(|lineage| lineage.parent);
    let (Some(path), Some(parent)) = (&request.parent, parent) else {
        return Ok(None);
    };
    let written = written_before(path, parent.digest, planned, group, threads)?;
    Ok(Some(LastSave {
        plan: planned.cached.shared_hash,
        path: path.clone(),
        written,
    }))
}

/// Saves what this rank holds as a part of a checkpoint, in a DCP directory of its own, whatever
/// other ranks save. Returns the number of bytes of its tensors. No communication.
///
/// # Errors
/// Values that cannot be planned or read; a part that is there already; errors of the storage.
pub(crate) fn save_part(
    path: &Location,
    local: &LocalState,
    rank: usize,
    threads: usize,
) -> Result<u64, CheckpointError> {
    let GlobalPlan {
        metadata,
        selections,
        ..
    } = plan_part(&local.plan).map_err(fsdp_formats::FileError::from)?;
    let [selection] = selections.as_slice() else {
        unreachable!("a part is the plan of one rank");
    };
    let staging = Durable::new().prepare(path, false)?;
    // Digests are not computed: they are of whole tensors, and this rank has only parts of some.
    let options = WriteOptions {
        threads: Some(threads),
        digests: false,
    };
    let items = RankItems {
        rank,
        plan: &local.plan,
        selection,
        source: local,
    };
    let written = write_rank(&staging, &items, &options, None)?;
    let bytes = written.payload_bytes;
    finish(staging, metadata, &[written], None)?;
    Ok(bytes)
}
