//! Leftovers of crashed saves beside a directory: staging directories, and old versions that were
//! being replaced.

use std::io;
use std::path::{Path, PathBuf};

use crate::error::{FileError, IoOutcome as _};
use crate::storage::backend::EntryKind;
use crate::storage::file_system::{FileSystem, LockKind, OpenEntry};
use crate::storage::fs::{Durable, is_nonce, parent_of, staging_path, staging_prefix};

/// Returns the staging directories of crashed saves to `target`, and the old versions that were
/// replaced but not removed.
pub(super) fn list_stale(files: &dyn FileSystem, target: &Path) -> Result<Vec<PathBuf>, FileError> {
    let mut found = list_leftovers(files, target, "tmp")?;
    // Without a target the old version is the only one: it is put back, and not removed. With one,
    // a reader may still have the old version open, which its lock tells.
    if files.exists(target) {
        found.extend(list_leftovers(files, target, "old")?);
    }
    found.retain(|directory| lock(files, directory).is_some());
    Ok(found)
}

/// Gives the old versions that `target` has replaced the names of staging directories. This comes
/// before `target` itself becomes an old version, because [`recover`] puts an old version back,
/// which must be the last one. After this, no crash brings back a version that was removed.
pub(super) fn rename_old_versions(durable: &Durable, target: &Path) -> Result<(), FileError> {
    let parent = parent_of(target);
    let old = list_leftovers(durable.files(), target, "old")?;
    // The target is looked for after the old versions were listed. If there is none, another
    // process is between its two renames, and one of the old versions is the only version there is.
    if !durable.files().exists(target) {
        return Ok(());
    }
    // The target that has replaced the old checkpoints must be durable before they lose their
    // names.
    durable.sync_directory(parent)?;
    for directory in &old {
        let name = new_staging_name(durable.files());
        durable.rename_new(directory, &staging_path(target, &name)?)?;
    }
    if old.is_empty() {
        Ok(())
    } else {
        durable.sync_directory(parent)
    }
}

/// Puts the old version back where a crash in the middle of an overwrite left no target.
pub(super) fn recover(durable: &Durable, target: &Path) -> Result<(), FileError> {
    if durable.files().exists(target) {
        return Ok(());
    }
    let old = list_leftovers(durable.files(), target, "old")?;
    let Some(newest) = old.last() else {
        return Ok(());
    };
    durable.rename_new(newest, target)?;
    durable.sync_directory(parent_of(target))
}

/// Returns a name that no other staging directory has, without what all names of the target's
/// staging directories begin with.
pub(super) fn new_staging_name(files: &dyn FileSystem) -> String {
    format!("tmp-{:016x}", files.nonce())
}

/// Returns the paths of the directories beside `target` that are called `.NAME.<kind>-<nonce>`,
/// sorted.
pub(super) fn list_leftovers(
    files: &dyn FileSystem,
    target: &Path,
    kind: &str,
) -> Result<Vec<PathBuf>, FileError> {
    let (parent, prefix) = staging_prefix(target)?;
    let prefix = format!("{prefix}{kind}-");
    let list = match files.list(&parent) {
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            return Ok(Vec::new());
        }
        list => list.during("list", &parent)?,
    };
    let mut found = Vec::new();
    for (name, entry) in list {
        let is_ours = name
            .to_str()
            .and_then(|name| name.strip_prefix(&prefix))
            .is_some_and(is_nonce);
        if is_ours && entry == EntryKind::Directory {
            found.push(parent.join(name));
        }
    }
    found.sort();
    Ok(found)
}

/// Returns `true` if somebody reads a checkpoint, and locks it against new readers otherwise, for
/// as long as `directory` is open. Where locks do not work, nobody is known to read.
pub(super) fn is_being_read(directory: &dyn OpenEntry) -> bool {
    matches!(directory.try_lock(LockKind::Exclusive), Ok(false))
}

/// Locks a staging directory, or an old version, and returns it. Returns `None` if somebody else
/// holds its lock, or if locks do not work, so that this is not known.
pub(super) fn lock(files: &dyn FileSystem, directory: &Path) -> Option<Box<dyn OpenEntry>> {
    let open = files.open_directory(directory).ok()?;
    matches!(open.try_lock(LockKind::Exclusive), Ok(true)).then_some(open)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_that_was_replaced_is_not_put_back_instead_of_the_last_one() {
        let parent = tempfile::tempdir().unwrap();
        let target = parent.path().join("c");
        let [replaced, last] = ["ffffffffffffffff", "0123456789abcdef"]
            .map(|nonce| parent.path().join(format!(".c.old-{nonce}")));
        let durable = Durable::new();
        for directory in [&target, &replaced] {
            assert!(durable.create_directory(directory).unwrap());
        }
        // The target is about to be replaced in two steps, and there is a crash between them.
        rename_old_versions(&durable, &target).unwrap();
        durable.rename_new(&target, &last).unwrap();
        recover(&durable, &target).unwrap();
        assert!(target.exists() && !last.exists() && !replaced.exists());
        // Removed with everything else that crashes leave.
        let [left] = &list_stale(durable.files(), &target).unwrap()[..] else {
            panic!("one is left")
        };
        assert!(
            left.file_name()
                .unwrap()
                .to_str()
                .unwrap()
                .starts_with(".c.tmp-")
        );
    }

    #[test]
    fn what_is_left_beside_a_long_name_belongs_to_that_name_only() {
        let parent = tempfile::tempdir().unwrap();
        let durable = Durable::new();
        // Two names of 255 bytes. They differ at their ends, which are cut off.
        let [first, second] =
            ["1", "2"].map(|end| parent.path().join(format!("{}{end}", "é".repeat(127))));
        let left = staging_path(&first, &new_staging_name(durable.files())).unwrap();
        assert!(durable.create_directory(&left).unwrap());
        assert_eq!(list_stale(durable.files(), &first).unwrap(), [left]);
        assert!(list_stale(durable.files(), &second).unwrap().is_empty());
    }

    #[test]
    fn the_only_version_stays_for_recovery() {
        let parent = tempfile::tempdir().unwrap();
        let target = parent.path().join("c");
        let only = parent.path().join(".c.old-0123456789abcdef");
        let durable = Durable::new();
        assert!(durable.create_directory(&only).unwrap());
        rename_old_versions(&durable, &target).unwrap();
        assert!(only.exists());
        recover(&durable, &target).unwrap();
        assert!(target.exists());
    }
}
