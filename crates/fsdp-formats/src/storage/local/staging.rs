//! Staging directories of the file system.

use std::io;
use std::path::{Path, PathBuf};

use super::leftovers::{is_being_read, new_staging_name, recover, rename_old_versions};
use super::lock::FileLock;
use super::read::list_names;
use crate::error::{FileError, IoOutcome as _};
use crate::storage::backend::{EntryKind, Links, Stage, StagedFile, Storage, check_write};
use crate::storage::file_system::{FileSystem, Identity, NewFile, OpenEntry};
use crate::storage::fs::{Durable, Step, parent_of, staging_path, staging_prefix};
use crate::storage::paths::relative_parts;
use crate::storage::sidecar::Sidecar;

/// The name, in a staging directory, of a checkpoint that is one file.
const SINGLE_FILE: &str = "file";
/// The name, in a staging directory, of the file that goes beside it.
const SINGLE_SIDECAR: &str = ".beside";

/// A directory beside its target.
#[derive(Debug)]
pub(super) struct LocalStage {
    durable: Durable,
    target: PathBuf,
    directory: PathBuf,
    name: String,
    overwrite: bool,
    /// The lock of the process that prepared the directory. While it is held, dropping the stage
    /// removes the directory.
    lock: Option<Box<dyn OpenEntry>>,
}

impl LocalStage {
    /// Makes a staging directory. Missing parents are created.
    pub(super) fn prepare(
        durable: &Durable,
        target: &Path,
        overwrite: bool,
    ) -> Result<Self, FileError> {
        durable.create_directories(&staging_prefix(target)?.0)?;
        // A crashed overwrite may have left the old checkpoint under another name.
        recover(durable, target)?;
        if !overwrite && durable.files().exists(target) {
            return Err(FileError::Exists {
                path: target.to_owned(),
            });
        }
        // `mkdir` is atomic: of two savers with the same nonce, one gets `false` and draws another.
        loop {
            let name = new_staging_name(durable.files());
            let mut staging = Self::without_lock(durable, target, name, overwrite)?;
            if !durable.create_directory(&staging.directory)? {
                continue;
            }
            let lock = match durable.files().open_directory(&staging.directory) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                lock => lock.during("open", &staging.directory)?,
            };
            // Where locks do not work, nobody takes the directory for stale either.
            let _ = lock.lock();
            // Before it was locked, another save may have taken it for what a crash has left, and
            // have removed it.
            let status = durable.files().status(&staging.directory, Links::Refuse);
            if status.is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
                continue;
            }
            staging.lock = Some(lock);
            return Ok(staging);
        }
    }

    /// Returns the staging directory that another process prepared.
    pub(super) fn join(durable: &Durable, target: &Path, name: &str) -> Result<Self, FileError> {
        let staging = Self::without_lock(durable, target, name.to_owned(), true)?;
        // The name came from another rank, and must not lead elsewhere.
        if name.starts_with("tmp-")
            && !name.contains('/')
            && durable.files().is_directory(&staging.directory)
        {
            return Ok(staging);
        }
        let (parent, prefix) = staging_prefix(target)?;
        Err(FileError::TargetMismatch {
            path: parent,
            file: format!("{prefix}{name}"),
        })
    }

    /// Returns the staging directory of this name beside a target, without a lock.
    fn without_lock(
        durable: &Durable,
        target: &Path,
        name: String,
        overwrite: bool,
    ) -> Result<Self, FileError> {
        Ok(LocalStage {
            durable: durable.clone(),
            target: target.to_owned(),
            directory: staging_path(target, &name)?,
            name,
            overwrite,
            lock: None,
        })
    }

    /// Returns `true` if anything is at a path.
    fn exists(&self, path: &Path) -> bool {
        self.durable.files().exists(path)
    }

    /// Gives a new file or directory the permissions of the one that it replaces: what was private
    /// stays private.
    fn copy_permissions(&self, path: &Path) -> Result<(), FileError> {
        let files = self.durable.files();
        // Where nothing is replaced, the permissions are those that the system gives to new files.
        let Ok(replaced) = files.status(&self.target, Links::Follow) else {
            return Ok(());
        };
        if !self.overwrite || (replaced.kind == EntryKind::Directory) != files.is_directory(path) {
            return Ok(());
        }
        files
            .set_permissions(path, replaced.mode)
            .during("set the permissions of", path)
    }

    /// Publishes what is at `staged`. An error after which it is at the target nevertheless becomes
    /// [`FileError::AfterCommit`].
    fn commit_by(
        self,
        staged: &Path,
        publish: impl FnOnce(Self) -> Result<(), FileError>,
    ) -> Result<(), FileError> {
        let files = self.durable.shared_files().clone();
        let target = self.target.clone();
        let staged_identity = find_identity(&*files, staged);
        publish(self).map_err(|error| {
            if staged_identity.is_none() || find_identity(&*files, &target) != staged_identity {
                return error;
            }
            FileError::AfterCommit {
                path: target,
                source: Box::new(error),
            }
        })
    }

    /// Puts the directory in the target's place. All files must be finished.
    fn publish(mut self) -> Result<(), FileError> {
        // Before the rename, all names inside must be durable: it may survive a loss of power
        // without them.
        self.sync_directories(&self.directory)?;
        if self.overwrite && self.exists(&self.target) {
            return self.replace();
        }
        self.durable.rename_new(&self.directory, &self.target)?;
        // The directory is the checkpoint now, so dropping the stage must not remove it.
        self.lock = None;
        self.durable.sync_directory(parent_of(&self.target))
    }

    /// Puts the directory in the place of the old checkpoint, and removes that.
    fn replace(mut self) -> Result<(), FileError> {
        let durable = self.durable.clone();
        let parent = parent_of(&self.target);
        self.copy_permissions(&self.directory)?;
        if durable.exchange(&self.directory, &self.target)? {
            if let Err(error) = durable.sync_directory(parent) {
                // The exchange may not be durable, so the save has failed: the old checkpoint goes
                // back. Unless that is durable, either may be at the target, now or after a loss of
                // power, and nothing may be removed.
                let is_back = matches!(durable.exchange(&self.directory, &self.target), Ok(true))
                    && durable.sync_directory(parent).is_ok();
                if !is_back {
                    self.lock = None;
                }
                return Err(error);
            }
        } else {
            // Two renames, between which there is no target. If there is a crash at that point,
            // `recover` puts the old checkpoint back. It must not find still older ones.
            rename_old_versions(&durable, &self.target)?;
            let old = staging_path(&self.target, &self.name.replacen("tmp-", "old-", 1))?;
            let outcome = durable
                .rename_new(&self.target, &old)
                .and_then(|()| durable.rename_new(&self.directory, &self.target));
            if let Err(error) = outcome {
                let _ = recover(&durable, &self.target);
                return Err(error);
            }
            durable.sync_directory(parent)?;
            self.directory = old;
        }
        // `directory` is the old checkpoint now. The new one is durable, so the old one may go.
        self.lock = None;
        let old = durable.files().open_directory(&self.directory);
        if old.as_ref().is_ok_and(|old| is_being_read(&**old)) {
            // The reader continues with it. It is listed as stale once the reader has finished.
            return Ok(());
        }
        durable.remove_directory(&self.directory)
    }

    /// Syncs a directory, after the directories in it.
    fn sync_directories(&self, directory: &Path) -> Result<(), FileError> {
        let entries = self
            .durable
            .files()
            .list(directory)
            .during("list", directory)?;
        for (name, kind) in entries {
            if kind == EntryKind::Directory {
                self.sync_directories(&directory.join(name))?;
            }
        }
        self.durable.sync_directory(directory)
    }

    /// Puts a sidecar beside the target, durably, at the path of its pending name.
    fn publish_pending(&self, path: &Path, bytes: &[u8]) -> Result<(), FileError> {
        let staged_sidecar = self.directory.join(SINGLE_SIDECAR);
        self.write(SINGLE_SIDECAR, bytes)?;
        self.copy_permissions(&staged_sidecar)?;
        self.durable.rename_over(&staged_sidecar, path)?;
        self.durable.sync_directory(parent_of(&self.target))
    }

    /// Puts the file of a checkpoint that is one file, and its sidecar, in their places.
    fn publish_single(mut self, sidecar: Option<Sidecar<'_>>) -> Result<(), FileError> {
        let durable = self.durable.clone();
        let parent = parent_of(&self.target).to_owned();
        // Two files cannot be replaced at once. So a lock keeps out others who replace them at the
        // same time. Without it, the sidecar that is removed below could be theirs. The lock is
        // that of the sidecar, because targets of different names may have a sidecar of the same
        // name.
        let lock = sidecar
            .map(|sidecar| FileLock::wait(durable.shared_files(), &parent.join(sidecar.name)))
            .transpose();
        let _lock = match lock {
            // The name is too long for the file system, so that nobody has such a sidecar.
            Err(error) if error.is_absence() => None,
            lock => lock?,
        };
        // Nothing has changed yet: a sidecar that would replace the file of somebody else is
        // refused here.
        let unneeded = match sidecar {
            Some(sidecar) => {
                sidecar.find_unneeded(&parent, list_names(durable.files(), &parent)?.0)?
            }
            None => Vec::new(),
        };
        let pending_sidecar =
            sidecar.and_then(|sidecar| Some((parent.join(sidecar.pending_name), sidecar.bytes?)));
        // What is there under the pending name already may be what the old file needs: a process
        // was killed before it gave that its final name. The content is the same.
        let new_sidecar = pending_sidecar
            .as_ref()
            .map(|(path, _)| path)
            .filter(|path| !self.exists(path));
        let staged_file = self.directory.join(SINGLE_FILE);
        let outcome = match &pending_sidecar {
            // Step 1: publish the sidecar under its pending name, which readers of the old file do
            // not look at.
            Some((path, bytes)) => self.publish_pending(path, bytes),
            None => Ok(()),
        };
        // Step 2: publish the file itself. This rename is the commit. Readers of the new file know
        // both names of its sidecar.
        let outcome = outcome.and_then(|()| {
            if self.overwrite {
                durable.rename_over(&staged_file, &self.target)
            } else {
                durable.rename_new(&staged_file, &self.target)
            }
        });
        if let Err(error) = outcome {
            // A step may fail after it was done. The sidecar goes only if the file has stayed where
            // it was.
            if let Some(path) = new_sidecar
                && self.exists(&staged_file)
            {
                let _ = durable.remove_file(path);
            }
            return Err(error);
        }
        durable.sync_directory(&parent)?;
        // Step 3: give the sidecar its final name, and remove what only the old file needed.
        let mut final_name = None;
        if let (Some(Sidecar { name, .. }), Some((path, _))) = (sidecar, &pending_sidecar) {
            durable.rename_over(path, &parent.join(name))?;
            durable.sync_directory(&parent)?;
            final_name = Some(name);
        }
        for old in unneeded
            .iter()
            .filter(|old| final_name != Some(old.as_str()))
        {
            self.remove_sidecar(old)?;
        }
        self.lock = None;
        durable.remove_directory(&self.directory)
    }
}

impl Stage for LocalStage {
    fn name(&self) -> &str {
        &self.name
    }

    fn target(&self) -> &Path {
        &self.target
    }

    fn directory(&self) -> &Path {
        &self.directory
    }

    fn create(&self, relative: &str, length: u64) -> Result<Box<dyn StagedFile>, FileError> {
        let parts = relative_parts(&self.target, relative)?;
        let (name, directories) = parts.split_last().expect("a path has a part");
        let mut path = self.directory.clone();
        for directory in directories {
            path.push(directory);
            self.durable.create_directory(&path)?;
        }
        path.push(name);
        let durable = &self.durable;
        let file = durable.step(Step::CreateFile, "create", &path, || {
            durable.files().create_file(&path)
        })?;
        // A file gets its full length first, so that a full disk is found before the writing.
        if length > 0 {
            durable.step(Step::Preallocate, "allocate space for", &path, || {
                file.allocate(length)
            })?;
        }
        Ok(Box::new(LocalFile {
            durable: self.durable.clone(),
            file,
            path,
            length,
        }))
    }

    fn link(&self, from: &dyn Storage, name: &str, as_name: &str) -> Result<bool, FileError> {
        let Some(from) = from.local() else {
            return Ok(false);
        };
        let parts = relative_parts(&self.target, name)?;
        let as_parts = relative_parts(&self.target, as_name)?;
        // A file in a subdirectory, which no save of this crate makes, is left to the caller.
        if parts.len() > 1 || as_parts.len() > 1 {
            return Ok(false);
        }
        // Linking fails across file systems, on file systems without links, and if the file is
        // gone. Then the caller writes it.
        Ok(self
            .durable
            .files()
            .link(&from.join(name), &self.directory.join(as_name))
            .is_ok())
    }

    fn create_single(&self, length: u64) -> Result<Box<dyn StagedFile>, FileError> {
        let file = self.create(SINGLE_FILE, length)?;
        self.copy_permissions(&self.directory.join(SINGLE_FILE))?;
        Ok(file)
    }

    fn may_be_replaced_by(&self, wanted: EntryKind) -> Result<bool, FileError> {
        let files = self.durable.files();
        // Another save may put a checkpoint there or take it away between two looks, so what is
        // found is judged by one of them. The second one finds a link that leads nowhere.
        let found = files
            .status(&self.target, Links::Follow)
            .or_else(|_| files.status(&self.target, Links::Refuse));
        Ok(found.map_or(true, |status| status.kind == wanted))
    }

    fn check_sidecar(&self, name: &str) -> Result<(), FileError> {
        let path = parent_of(&self.target).join(name);
        if self.exists(&path) && !self.overwrite {
            return Err(FileError::Exists { path });
        }
        Ok(())
    }

    fn remove_sidecar(&self, name: &str) -> Result<(), FileError> {
        let parent = parent_of(&self.target);
        let path = parent.join(name);
        if !self.exists(&path) {
            return Ok(());
        }
        self.durable.remove_file(&path)?;
        self.durable.sync_directory(parent)
    }

    fn check_files(&self, files: &mut dyn Iterator<Item = &String>) -> Result<(), FileError> {
        // A rank may have joined the staging directory of another save to the same place.
        for file in files {
            if !self.exists(&self.directory.join(file)) {
                return Err(FileError::TargetMismatch {
                    path: self.target.clone(),
                    file: file.clone(),
                });
            }
        }
        Ok(())
    }

    fn commit(self: Box<Self>, marker: &str, bytes: &[u8]) -> Result<(), FileError> {
        self.write(marker, bytes)?;
        let from = self.directory.clone();
        self.commit_by(&from, Self::publish)
    }

    fn commit_single(self: Box<Self>, sidecar: Option<Sidecar<'_>>) -> Result<(), FileError> {
        let from = self.directory.join(SINGLE_FILE);
        self.commit_by(&from, |stage| stage.publish_single(sidecar))
    }
}

/// Returns the numbers by which the system identifies a file or directory under any name; `None` if
/// it does not exist.
fn find_identity(files: &dyn FileSystem, path: &Path) -> Option<Identity> {
    files
        .status(path, Links::Refuse)
        .map(|status| status.identity)
        .ok()
}

impl Drop for LocalStage {
    fn drop(&mut self) {
        if self.lock.is_some() {
            // Best effort: a directory that stays is listed as stale.
            let _ = self.durable.remove_directory(&self.directory);
        }
    }
}

/// A file of a staging directory.
#[derive(Debug)]
struct LocalFile {
    durable: Durable,
    file: Box<dyn NewFile>,
    path: PathBuf,
    length: u64,
}

impl StagedFile for LocalFile {
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), FileError> {
        check_write(&self.path, self.length, offset, bytes)?;
        self.durable.step(Step::Write, "write", &self.path, || {
            self.file.write_at(offset, bytes)
        })
    }

    fn finish(self: Box<Self>) -> Result<(), FileError> {
        self.durable
            .step(Step::SyncFile, "sync", &self.path, || self.file.sync())
    }
}
