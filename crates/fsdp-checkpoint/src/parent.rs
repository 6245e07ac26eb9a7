//! The checkpoint that a run continues from. The first incremental save after a resume compares
//! with it and links its files.

use std::collections::BTreeSet;

use fsdp_comm::ProcessGroup;
use fsdp_digest::{Digest, StateDigest};
use fsdp_formats::Location;
use fsdp_formats::checkpoint::{Checkpoint, open};
use fsdp_formats::lineage::{Branch, Parent};
use fsdp_formats::reader::OpenOptions;
use fsdp_formats::writer::{RankWritten, box_sums, unchanged_entries};
use fsdp_state::LoadError as _;
use tracing::debug;

use crate::catalog::{CheckpointOnBranch, RunPosition, list_branches};
use crate::error::CheckpointError;
use crate::plan::{PLANNER, Planned};
use crate::rounds::{ROUND_BYTES, gather_in_rounds};

/// The bytes that the sum over a box takes to send, about.
const SUM_BYTES: u64 = 32;

/// Returns what this rank would have written of the checkpoint `parent`, if that has this digest:
/// the boxes of tensors that are what they were there. No bytes of tensors are read: the ranks'
/// sums must give the digests that are recorded. Collectives: an agreement, a gather for each 64
/// MiB of sums, and an object broadcast.
///
/// # Errors
/// The same on every rank: values that cannot be read from where they lie.
pub(crate) fn written_before(
    parent: &Location,
    digest: Digest,
    planned: &Planned<'_>,
    group: &ProcessGroup,
    threads: usize,
) -> Result<RankWritten, CheckpointError> {
    let Planned { local, cached, .. } = planned;
    let computed =
        box_sums(&local.plan, &cached.selection, local, threads).map_err(CheckpointError::from);
    let mut sums = CheckpointError::agree(group, "save: digest", None, computed)?;
    let gathered = gather_in_rounds(ROUND_BYTES, group, sums.clone(), |_| SUM_BYTES, PLANNER)?;
    // A parent that is gone, or another by now, is not an error: then everything is written.
    let checkpoint = open_parent(parent, digest);
    let found_entries = gathered.map(|sums| match (&checkpoint, &cached.metadata) {
        (Some((_, recorded)), Some(metadata)) => {
            unchanged_entries(metadata, recorded, sums.into_iter().flatten())
        }
        _ => BTreeSet::new(),
    });
    let unchanged: BTreeSet<u32> = group.broadcast_object(found_entries.as_ref(), PLANNER)?;
    let Some((checkpoint, _)) = checkpoint else {
        return Ok(RankWritten::default());
    };
    sums.retain(|sum| unchanged.contains(&sum.entry));
    Ok(RankWritten::from_checkpoint(
        &*checkpoint,
        group.rank(),
        &local.plan,
        &cached.selection,
        &sums,
    ))
}

/// Opens the parent, and returns its digests too; `None` if it cannot be opened, which is only
/// logged, or is another one than that of this digest by now.
fn open_parent(parent: &Location, digest: Digest) -> Option<(Box<dyn Checkpoint>, StateDigest)> {
    let opened = open(parent, OpenOptions { verify: true });
    let checkpoint = opened
        .inspect_err(|error| debug!(path = %parent, %error, "cannot link files of the parent"))
        .ok()?;
    let recorded = checkpoint.digests()?.clone();
    (recorded.root() == digest).then_some((checkpoint, recorded))
}

/// Finds the newest checkpoint of a run before a step of the memory tier that is on no later
/// branch. Returns its name, the branch of the step, and the checkpoint as the parent of the next
/// one, which is `None` if its step or digest was not recorded. Returns `None` if there is no such
/// checkpoint, or it cannot be read. Collective: one object broadcast.
///
/// # Errors
/// The errors of that collective.
pub(crate) fn parent_of_step(
    run: &Location,
    position: RunPosition,
    group: &ProcessGroup,
) -> Result<Option<(String, Branch, Option<Parent>)>, CheckpointError> {
    let mut parent = None;
    if group.rank() == PLANNER {
        parent = find_parent(run, position);
    }
    Ok(group.broadcast_object(Some(&parent), PLANNER)?)
}

/// Finds the checkpoint that [`parent_of_step`] returns, without communication. One that cannot be
/// read is only logged.
fn find_parent(run: &Location, position: RunPosition) -> Option<(String, Branch, Option<Parent>)> {
    let listed = list_branches(run);
    let (mut candidates, _) = listed
        .inspect_err(|error| debug!(path = %run, %error, "cannot list the checkpoints"))
        .ok()?;
    candidates.retain(|found| {
        found.checkpoint.step < position.step && found.branch.number <= position.branch
    });
    let CheckpointOnBranch {
        branch, checkpoint, ..
    } = candidates.pop()?;
    let opened = open(&checkpoint.path, OpenOptions { verify: true });
    let parent = opened
        .inspect_err(|error| debug!(path = %checkpoint.path, %error, "cannot read the parent"))
        .ok()?;
    let recorded = parent.lineage().map(|lineage| lineage.step);
    let parent = Parent::new(recorded, parent.digests().map(StateDigest::root));
    let branch = if branch.number == position.branch {
        branch
    } else {
        branch.fork(checkpoint.step, position.branch)
    };
    let name = checkpoint.path.name().file_name()?.to_str()?.to_owned();
    Some((name, branch, parent))
}
