//! Checkpoints that are written to an object store. Objects cannot be renamed there, so a
//! checkpoint is committed by putting its last object.

use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use object_store::{ObjectStoreExt as _, PutMode};

use super::prefix::Prefix;
use super::runtime::wait;
use super::upload::{FinishedUpload, Upload};
use crate::error::{FileError, IoOutcome as _};
use crate::metadata::METADATA_FILE;
use crate::storage::backend::{EntryKind, Stage, StagedFile, Storage};
use crate::storage::fs::is_nonce;
use crate::storage::integrity::INTEGRITY_FILE;
use crate::storage::names::CLAIM_FILE;
use crate::storage::os::nonce;
use crate::storage::paths::relative_parts;
use crate::storage::sidecar::Sidecar;
use crate::threads::lock;

/// The number of times that a commit is tried while its outcome is unknown.
const COMMIT_ATTEMPTS: u32 = 5;
/// The pause after the first attempt. After each further attempt it is twice as long.
const COMMIT_PAUSE: Duration = Duration::from_millis(200);
/// The number of times that the removal of a claim is tried.
const RELEASE_ATTEMPTS: u32 = 3;
/// The ending of the name of the object that claims the key of a single file; the name of the file
/// is before it.
const CLAIM_END: &str = ".claim";
/// The start of the name of a stage; the nonce is after it.
const NAME_START: &str = "tmp-";

/// A checkpoint that is being written.
#[derive(Debug)]
pub(super) struct ObjectStage {
    prefix: Prefix,
    /// The prefix that the target lies in; `None` for the root of a bucket.
    parent: Option<Prefix>,
    name: String,
    overwrite: bool,
    /// `true` on the rank that prepared the stage, until the commit: dropping the stage then
    /// removes what was written.
    cleans: bool,
    /// The objects of this save whose names do not contain its nonce, below the target or beside
    /// it.
    unmarked: Mutex<Vec<(Prefix, String)>>,
    single: FinishedUpload,
}

impl ObjectStage {
    /// Checks that nothing is at the target that would be in the way.
    pub(super) fn prepare(
        prefix: Prefix,
        parent: Option<Prefix>,
        overwrite: bool,
    ) -> Result<Self, FileError> {
        let path = prefix.name.clone();
        if !overwrite && prefix.head("")?.is_some() {
            return Err(FileError::Exists { path });
        }
        // Objects with a nonce are leftovers of crashed saves, or belong to saves in progress. They
        // do no harm.
        if prefix
            .list_names()?
            .iter()
            .any(|name| nonce_of(name).is_none())
        {
            return Err(if overwrite {
                FileError::Overwrite { path }
            } else {
                FileError::Exists { path }
            });
        }
        let mut stage = Self::join(prefix, parent, &format!("{NAME_START}{:016x}", nonce()))?;
        stage.overwrite = overwrite;
        stage.cleans = true;
        Ok(stage)
    }

    /// Returns the stage that another rank prepared under this name.
    pub(super) fn join(
        prefix: Prefix,
        parent: Option<Prefix>,
        name: &str,
    ) -> Result<Self, FileError> {
        // The name that a rank sends which saves to a directory, for example.
        if !name.strip_prefix(NAME_START).is_some_and(is_nonce) {
            return Err(FileError::TargetMismatch {
                path: prefix.name,
                file: name.to_owned(),
            });
        }
        Ok(ObjectStage {
            prefix,
            parent,
            name: name.to_owned(),
            overwrite: false,
            cleans: false,
            unmarked: Mutex::default(),
            single: FinishedUpload::default(),
        })
    }

    /// Returns the nonce in the name of the stage.
    fn nonce(&self) -> &str {
        self.name
            .strip_prefix(NAME_START)
            .expect("a stage has a name that `join` has checked")
    }

    /// Notes an object whose name does not contain the nonce, so that it is removed with the rest.
    fn note_unmarked(&self, prefix: &Prefix, name: &str) {
        lock(&self.unmarked).push((prefix.clone(), name.to_owned()));
    }

    /// Returns the prefix that the target lies in.
    fn parent(&self) -> Result<&Prefix, FileError> {
        let reason = "it is a bucket, which cannot be a file";
        self.parent
            .as_ref()
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, reason))
            .during("write to", self.target())
    }

    /// Puts the object of a single file to its key, and its sidecar beside it. The claim excludes
    /// other writers.
    fn put_single(
        &mut self,
        upload: Upload,
        sidecar: Option<Sidecar<'_>>,
    ) -> Result<(), FileError> {
        if !self.overwrite && self.prefix.head("")?.is_some() {
            return Err(FileError::Exists {
                path: self.target().to_owned(),
            });
        }
        // Nothing has changed yet: a sidecar that would replace the object of somebody else is
        // refused here.
        let unneeded = match sidecar {
            Some(sidecar) => {
                let parent = self.parent()?;
                let existing = parent.head(sidecar.name)?.map(|_| sidecar.name.to_owned());
                sidecar.find_unneeded(&parent.name, existing.into_iter().collect())?
            }
            None => Vec::new(),
        };
        // Step 1: put the sidecar, under its pending name.
        if let Some(Sidecar {
            pending_name,
            bytes: Some(bytes),
            ..
        }) = sidecar
        {
            let parent = self.parent()?;
            self.note_unmarked(parent, pending_name);
            parent.put(pending_name, bytes, PutMode::Overwrite)?;
        }
        // Step 2: put the object itself. This is the commit.
        let length = upload.length;
        if let Err(error) = upload.complete() {
            // Without an object of this length in its place, the upload has certainly not been
            // done.
            if self
                .prefix
                .head("")
                .is_ok_and(|existing| existing.is_none_or(|existing| existing.size != length))
            {
                return Err(error);
            }
            // Otherwise the upload may have succeeded, and only the answer was lost. Then the
            // sidecar must stay.
            self.cleans = false;
            return Err(FileError::CommitUnknown {
                path: self.target().to_owned(),
                source: Box::new(error),
            });
        }
        self.cleans = false;
        // Step 3: give the sidecar its final name. If there is none, remove that of the old object.
        // A failure is ignored, since the commit is done: readers look for both names, and can tell
        // if a sidecar belongs to the checkpoint.
        let Some(sidecar) = sidecar else {
            return Ok(());
        };
        let parent = self.parent()?;
        let Some(bytes) = sidecar.bytes else {
            for unneeded_name in &unneeded {
                let _ = parent.delete(unneeded_name);
            }
            return Ok(());
        };
        // If there was no sidecar before, one that is there now belongs to another file that was
        // put at the same time: then this one keeps its pending name.
        let mode = if unneeded.is_empty() {
            PutMode::Create
        } else {
            PutMode::Overwrite
        };
        if parent.put(sidecar.name, bytes, mode).is_ok() {
            let _ = parent.delete(sidecar.pending_name);
        }
        Ok(())
    }

    /// Removes the objects of saves with such a nonce, as far as the store allows it.
    fn delete_marked(&self, has_nonce: impl Fn(&str) -> bool) {
        for name in self.prefix.list_names().into_iter().flatten() {
            if nonce_of(&name).is_some_and(&has_nonce) {
                let _ = self.prefix.delete(&name);
            }
        }
    }

    /// Removes what was written, as far as the store allows it.
    fn clean(&self) {
        // An upload that waits for the commit is aborted by its drop.
        drop(lock(&self.single).take());
        // The claim was made first, so it is removed last: until then no other save can begin.
        for (prefix, name) in lock(&self.unmarked).drain(..).rev() {
            let _ = prefix.delete(&name);
        }
        self.delete_marked(|nonce| nonce == self.nonce());
    }
}

impl Stage for ObjectStage {
    fn name(&self) -> &str {
        &self.name
    }

    fn target(&self) -> &Path {
        &self.prefix.name
    }

    fn directory(&self) -> &Path {
        self.target()
    }

    fn suffix(&self) -> Option<&str> {
        Some(self.nonce())
    }

    fn claim(&self) -> Result<(), FileError> {
        // If several saves found nothing at the target, only one gets the claim. It contains the
        // nonce, which tells whose it is if the answer is lost.
        let nonce = self.nonce().as_bytes();
        put_new(&self.prefix, CLAIM_FILE, nonce, self.target())?;
        self.note_unmarked(&self.prefix, CLAIM_FILE);
        Ok(())
    }

    fn create(&self, relative: &str, length: u64) -> Result<Box<dyn StagedFile>, FileError> {
        relative_parts(self.target(), relative)?;
        let upload = Upload::new(&self.prefix, relative, length, true)?;
        if nonce_of(relative) != Some(self.nonce()) {
            self.note_unmarked(&self.prefix, relative);
        }
        Ok(Box::new(upload))
    }

    fn link(&self, from: &dyn Storage, name: &str, as_name: &str) -> Result<bool, FileError> {
        relative_parts(self.target(), name)?;
        relative_parts(self.target(), as_name)?;
        // A store copies only its own objects.
        let Some(from) = from.as_object_storage() else {
            return Ok(false);
        };
        let from_prefix = from.open()?;
        if !Arc::ptr_eq(&from_prefix.store, &self.prefix.store)
            || nonce_of(as_name) != Some(self.nonce())
        {
            return Ok(false);
        }
        let source = from_prefix.key(name)?;
        let target = self.prefix.key(as_name)?;
        // The store copies the object itself, so no bytes come here. An object that is gone, or too
        // large to be copied in one request, is written by the caller.
        Ok(wait(self.prefix.store.copy(&source, &target)).is_ok())
    }

    fn create_single(&self, length: u64) -> Result<Box<dyn StagedFile>, FileError> {
        // The last request of this upload is the commit, so finishing the file only keeps the
        // upload for later.
        let mut upload = Upload::new(&self.prefix, "", length, false)?;
        upload.parked_in = Some(self.single.clone());
        Ok(Box::new(upload))
    }

    fn may_be_replaced_by(&self, wanted: EntryKind) -> Result<bool, FileError> {
        match wanted {
            EntryKind::Directory => Ok(self.prefix.head("")?.is_none()),
            EntryKind::File | EntryKind::Special => self.prefix.is_empty(),
        }
    }

    fn check_sidecar(&self, name: &str) -> Result<(), FileError> {
        let parent = self.parent()?;
        if !self.overwrite && parent.head(name)?.is_some() {
            return Err(FileError::Exists {
                path: parent.name_of(name),
            });
        }
        Ok(())
    }

    fn remove_sidecar(&self, name: &str) -> Result<(), FileError> {
        self.parent()?.delete(name)
    }

    fn check_files(&self, files: &mut dyn Iterator<Item = &String>) -> Result<(), FileError> {
        // A rank that was given another URL or endpoint has written its files elsewhere.
        let existing_files: HashSet<String> = self.prefix.list_all()?.into_iter().collect();
        let path = self.target().to_owned();
        for file in files {
            if existing_files.contains(file) {
                continue;
            }
            // Another save to the same target has committed first, and has removed these files.
            if existing_files.contains(METADATA_FILE) {
                return Err(FileError::Exists { path });
            }
            return Err(FileError::TargetMismatch {
                path,
                file: file.clone(),
            });
        }
        Ok(())
    }

    fn commit(mut self: Box<Self>, marker: &str, bytes: &[u8]) -> Result<(), FileError> {
        if let Err(error) = put_new(&self.prefix, marker, bytes, self.target()) {
            // If the outcome is unknown, the marker may exist, or appear later, so the files that
            // it names must stay.
            self.cleans &= !matches!(error, FileError::CommitUnknown { .. });
            return Err(error);
        }
        self.cleans = false;
        // Best effort from here on, because leftovers do no harm. They belong to saves that can no
        // longer commit, because the marker exists.
        let has_claim = lock(&self.unmarked)
            .iter()
            .any(|(_, name)| name == CLAIM_FILE);
        if has_claim {
            let _ = self.prefix.delete(CLAIM_FILE);
        }
        self.delete_marked(|nonce| nonce != self.nonce());
        Ok(())
    }

    fn commit_single(mut self: Box<Self>, sidecar: Option<Sidecar<'_>>) -> Result<(), FileError> {
        let Some(upload) = lock(&self.single).take() else {
            return Err(io::Error::other(
                "its file was not finished before the commit",
            ))
            .during("write to", self.target());
        };
        // A multipart upload cannot be made conditional, and the file and its sidecar are two
        // objects. If two writers did this at once, the file of one could end up with the sidecar
        // of the other. So each writer first puts a claim, which fails while another writer's claim
        // exists.
        let parent = self.parent()?.clone();
        let key = self.prefix.key("")?;
        let file = key
            .filename()
            .expect("a key below a parent has a last part");
        let claim = format!("{file}{CLAIM_END}");
        put_new(
            &parent,
            &claim,
            self.nonce().as_bytes(),
            &parent.name_of(&claim),
        )?;
        self.note_unmarked(&parent, &claim);
        let outcome = self.put_single(upload, sidecar);
        // If there is still something to clean up, dropping the stage does that and then removes
        // the claim. Otherwise the claim is removed here.
        if !self.cleans {
            let _ = (0..RELEASE_ATTEMPTS).find(|_| parent.delete(&claim).is_ok());
        }
        outcome
    }
}

/// Puts an object on the condition that there is none. If the answer is lost, finds out if the
/// object was put. If another object exists, the error names `taken`.
fn put_new(prefix: &Prefix, name: &str, bytes: &[u8], taken: &Path) -> Result<(), FileError> {
    let mut pause = COMMIT_PAUSE;
    let mut attempt = 1;
    loop {
        let error = match prefix.put(name, bytes, PutMode::Create) {
            Ok(()) => return Ok(()),
            Err(error) => error,
        };
        if is_refusal(&error) {
            return Err(error);
        }
        // "There is one already" may be the answer to a retry inside the client, whose first
        // attempt succeeded. The content tells whose object it is: it holds offsets and hashes, or
        // the nonce, of one save.
        match prefix.get(name) {
            Ok(Some(existing)) if existing == bytes => return Ok(()),
            Ok(Some(_)) => {
                return Err(FileError::Exists {
                    path: taken.to_owned(),
                });
            }
            Ok(None) | Err(_) if attempt < COMMIT_ATTEMPTS => {}
            Ok(None) | Err(_) => {
                return Err(FileError::CommitUnknown {
                    path: prefix.name_of(name),
                    source: Box::new(error),
                });
            }
        }
        std::thread::sleep(pause);
        attempt += 1;
        pause *= 2;
    }
}

impl Drop for ObjectStage {
    fn drop(&mut self) {
        if self.cleans {
            self.clean();
        }
    }
}

/// Returns `true` if the store refused the request, so that the object was certainly not put.
fn is_refusal(error: &FileError) -> bool {
    let FileError::Io { source, .. } = error else {
        return true;
    };
    matches!(
        source.kind(),
        io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported | io::ErrorKind::InvalidInput
    )
}

/// Returns the nonce of a save from the name of an object that it wrote: `__0_0-<nonce>.distcp` or
/// `.integrity-<nonce>`. Returns `None` for other names, `.metadata` among them.
pub(super) fn nonce_of(name: &str) -> Option<&str> {
    let data_file = name
        .strip_prefix("__")
        .and_then(|name| name.strip_suffix(".distcp"));
    let nonce = match data_file {
        Some(data_file) => data_file.split_once('-')?.1,
        None => name.strip_prefix(INTEGRITY_FILE)?.strip_prefix('-')?,
    };
    is_nonce(nonce).then_some(nonce)
}
