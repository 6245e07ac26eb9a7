//! Making bytes durable: the only module of this workspace that creates, writes, syncs, renames or removes files.
//!
//! # The crash contract
//!
//! A checkpoint is written into a staging directory beside its target, `.NAME.tmp-<nonce>`:
//! every data file at its planned length, each fsynced; `.metadata` last, fsynced; then the staging directory is fsynced,
//! one rename puts it in the target's place, and the parent directory is fsynced.
//!
//! * A process killed at any point leaves the old checkpoint or the new one at the target, never a mixture, and at most
//!   one staging directory, which [`stale()`] lists and [`clean_stale`] removes.
//! * After [`Staging::commit`] returned, the new checkpoint survives a loss of power, as far as the file system honours
//!   fsync. Before that, the old one does: nothing of it is touched until the rename.
//! * Overwriting exchanges the two directories in one step (`renameat2` with `RENAME_EXCHANGE`) and removes the old one
//!   afterwards. Where the file system cannot exchange, the old one is first renamed to `.NAME.old-<nonce>`: a crash
//!   between the two renames leaves no target, but both checkpoints whole; [`recover`] puts the old one back, and every
//!   [`Durable::prepare`] calls it.
//! * A failed fsync fails the save. It is never tried again: the kernel may have dropped the pages.
//!
//! A staging directory is locked (`flock`) by the process that prepared it for as long as it lives, so that no other
//! one takes it for stale.
//!
//! # Object stores
//!
//! Nothing can be renamed there, so a checkpoint grows in its place, under names that no other save uses
//! (`__0_0-<nonce>.distcp`, `.integrity-<nonce>`), and is none until its last object, `.metadata`, is put on the condition
//! that there is none: of several saves to one target exactly one commits. Where the answer to that is lost, the content
//! tells whose it is; where that cannot be found out, [`CheckpointError::CommitUnknown`](crate::CheckpointError) says so
//! and nothing is removed. A save that fails removes its objects and aborts its uploads; what a killed one leaves is in
//! nobody's way, and the next save to the same target removes it after its commit. Several objects are never
//! overwritten, since that would take several steps.
//!
//! # Many ranks
//!
//! One rank [`prepare`](Durable::prepare)s and sends the staging directory's [name](Staging::name) to the others, which
//! [`join`](Durable::join) it; each writes its own files; when all are done, the first one writes `.metadata` and
//! [`commit`](Staging::commit)s.

mod fs;
mod local;
#[cfg(feature = "object-store")]
mod object;
mod staging;
mod stale;
#[cfg(feature = "object-store")]
mod upload;

pub use fs::{Durable, Step, StepHook};
pub use local::Beside;
pub use staging::{StagedFile, Staging};
pub use stale::{clean_stale, recover, stale};

#[cfg(test)]
mod tests;
