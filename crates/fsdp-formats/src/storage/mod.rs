//! Storage of checkpoints, and how they are committed: local directories and object stores behind
//! one trait.
//!
//! [`Durable`] writes: a checkpoint is written to a [`Staging`], and committed to its target in one
//! step. [`CheckedDirectory`] reads, and checks what it reads against the integrity file. Only this
//! module creates, writes, syncs, renames or removes files of checkpoints.
//!
//! # Guarantees after a crash
//!
//! A checkpoint is written into a staging directory beside its target, `.NAME.tmp-<nonce>`; a long
//! name is cut there. First the data files are written, each allocated at its planned length and
//! fsynced when it is complete; then `.metadata`, fsynced too. Then the staging directory is
//! fsynced, one rename moves it to the target, and the parent directory is fsynced.
//!
//! * A process that is killed at any point leaves either the old checkpoint or the new one at the
//!   target, never a mixture, and at most one staging directory, which [`list_stale`] lists and
//!   [`clean_stale`] removes.
//! * After [`Staging::commit`] has returned, the new checkpoint survives a power loss, provided
//!   that the file system honours fsync. Before that, the old checkpoint survives, because it is
//!   not touched until the rename.
//! * Overwriting exchanges the two directories in one step (`renameat2` with `RENAME_EXCHANGE`),
//!   and then removes the old one. If another process is reading the old one, it stays, and
//!   [`list_stale`] lists it once nobody reads it. If the file system cannot exchange directories,
//!   the old one is first renamed to `.NAME.old-<nonce>`. A crash between the two renames leaves no
//!   target, but both checkpoints whole; the next [`Durable::prepare`] puts the old one back. Older
//!   versions that are still there have lost such names before, durably.
//! * A failed fsync fails the save. It is never retried, because the kernel may have dropped the
//!   pages. If the new checkpoint is at the target nevertheless, the error is
//!   [`FileError::AfterCommit`](crate::FileError).
//!
//! The process that prepared a staging directory holds a lock on it (`flock`) as long as it lives,
//! so that no other process considers the directory stale.
//!
//! # Object stores
//!
//! Objects cannot be renamed, so a checkpoint is written directly to its target, under names that
//! no other save uses (`__0_0-<nonce>.distcp`, `.integrity-<nonce>`). It becomes a checkpoint when
//! its last object, `.metadata`, is put on the condition that there is none: of several saves to
//! one target exactly one commits. If the answer to that request is lost, the save reads the object
//! to find out whose it is. If that fails too, the save ends with
//! [`FileError::CommitUnknown`](crate::FileError) and removes nothing.
//!
//! A save that fails removes its objects and aborts its uploads. The objects of a killed save do no
//! harm, and the next save to the same target removes them after its commit. A checkpoint of
//! several objects is never overwritten, because that would take several steps.
//!
//! # Many ranks
//!
//! One rank [`prepare`](Durable::prepare)s and sends the staging directory's [name](Staging::name)
//! to the others, which [`join`](Durable::join) it. Each rank writes its own files. When all are
//! done, the first rank writes `.metadata` and [`commit`](Staging::commit)s.

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

pub use backend::StagedFile;
pub use checked_directory::CheckedDirectory;
pub use checked_file::CheckedFile;
pub use cleanup::{clean_stale, list_stale, targets_with_leftovers};
pub use file_system::{
    EntryKind, FileSystem, Identity, Links, LockKind, NewFile, OpenEntry, OpenError, Status,
};
pub use fs::{Durable, Step, StepHook};
pub use os::OperatingSystem;
pub use read_at::ReadAt;
pub use staging::Staging;

#[cfg(test)]
mod tests;
