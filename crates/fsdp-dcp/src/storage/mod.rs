//! The places of checkpoints, and commits to them: local directories and object stores behind one trait.
//!
//! [`Durable`] writes: a checkpoint grows in a [`Staging`] and takes its place in one step. [`CheckedDirectory`] reads,
//! and checks what it reads against the integrity file. Only this module creates, writes, syncs, renames or removes
//! files of checkpoints.
//!
//! # The crash contract
//!
//! A checkpoint is written into a staging directory beside its target, `.NAME.tmp-<nonce>`. First come the data files,
//! each allocated at its planned length and fsynced when it is complete; then `.metadata`, fsynced too. Then the staging
//! directory is fsynced, one rename puts it in the target's place, and the parent directory is fsynced.
//!
//! * A process that is killed at any point leaves either the old checkpoint or the new one at the target, never a
//!   mixture, and at most one staging directory, which [`stale()`] lists and [`clean_stale`] removes.
//! * After [`Staging::commit`] has returned, the new checkpoint survives a loss of power, as far as the file system
//!   honours fsync. Before that, the old one does: nothing of it is touched until the rename.
//! * Overwriting exchanges the two directories in one step (`renameat2` with `RENAME_EXCHANGE`) and removes the old one
//!   afterwards, unless somebody reads it: then [`stale()`] lists it as soon as nobody does. Where the file system cannot exchange, the old one is first renamed to `.NAME.old-<nonce>`. A crash
//!   between the two renames leaves no target, but both checkpoints whole; the next [`Durable::prepare`] puts the old
//!   one back.
//! * A failed fsync fails the save. It is never tried again: the kernel may have dropped the pages. The error is
//!   [`FileError::AfterCommit`](crate::FileError) if the new checkpoint is at the target all the same.
//!
//! The process that prepared a staging directory holds a lock on it (`flock`) for as long as it lives, so that no other
//! process takes the directory for stale.
//!
//! # Object stores
//!
//! Objects cannot be renamed, so a checkpoint grows in its place, under names that no other save uses
//! (`__0_0-<nonce>.distcp`, `.integrity-<nonce>`). It becomes a checkpoint when its last object, `.metadata`, is put on
//! the condition that there is none: of several saves to one target exactly one commits. Where the answer to that
//! request is lost, the object's content tells whose it is. Where that cannot be found out either, the save ends with
//! [`FileError::CommitUnknown`](crate::FileError) and removes nothing.
//!
//! A save that fails removes its objects and aborts its uploads. The objects of a killed save disturb nobody, and the
//! next save to the same target removes them after its commit. A checkpoint of several objects is never overwritten,
//! since that would take several steps.
//!
//! # Many ranks
//!
//! One rank [`prepare`](Durable::prepare)s and sends the staging directory's [name](Staging::name) to the others, which
//! [`join`](Durable::join) it. Each rank writes its own files. When all are done, the first rank writes `.metadata` and
//! [`commit`](Staging::commit)s.

pub(crate) mod backend;
pub(crate) mod checked_directory;
pub(crate) mod checked_file;
pub(crate) mod cleanup;
pub(crate) mod file_system;
pub(crate) mod fs;
pub(crate) mod integrity;
pub(crate) mod lineage;
pub(crate) mod local;
pub(crate) mod location;
pub(crate) mod names;
#[cfg(feature = "object-store")]
pub(crate) mod object;
mod os;
pub(crate) mod paths;
pub(crate) mod read_at;
pub(crate) mod sidecar;
pub(crate) mod staging;

pub use checked_directory::CheckedDirectory;
pub use checked_file::CheckedFile;
pub use cleanup::{clean_stale, stale};
pub use file_system::{
    EntryKind, FileSystem, Identity, Links, LockKind, Lockable, NewFile, OpenDirectory, OpenError, Status,
};
pub use fs::{Durable, Step, StepHook};
pub use read_at::ReadAt;
pub use staging::{StagedFile, Staging};

#[cfg(test)]
mod tests;
