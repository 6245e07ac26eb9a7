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
//! # Many ranks
//!
//! One rank [`prepare`](Durable::prepare)s and sends the staging directory's [name](Staging::name) to the others, which
//! [`join`](Durable::join) it; each writes its own files; when all are done, the first one writes `.metadata` and
//! [`commit`](Staging::commit)s.

mod fs;
mod staging;
mod stale;

pub use fs::{Durable, Step, StepHook};
pub use staging::{StagedFile, Staging};
pub use stale::{clean_stale, recover, stale};

#[cfg(test)]
mod tests;
