//! Checkpoints that grow in an object store, where nothing can be renamed: what commits one is its last object.

use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use object_store::{PutMode, PutPayload};

use super::fs::{is_nonce, nonce};
use super::local::Beside;
use super::upload::{Slot, Upload};
use crate::error::CheckpointError;
use crate::integrity::INTEGRITY_FILE;
use crate::location::{Location, Resolved};
use crate::metadata::METADATA_FILE;
use crate::object::Prefix;

/// Claims a target for files with names that are not the saver's own.
const CLAIM: &str = ".fsdp-claim";
/// What commits a save is tried so often, as long as it is not known whether it was done…
const COMMIT_ATTEMPTS: u32 = 5;
/// … with a pause that doubles from this.
const COMMIT_PAUSE: Duration = Duration::from_millis(200);

/// A checkpoint that is being written.
#[derive(Debug)]
pub(super) struct ObjectStaging {
    prefix: Prefix,
    /// What it lies in, and its name there.
    beside: Option<(Prefix, String)>,
    name: String,
    overwrite: bool,
    /// Whether this is the one that prepared, and nothing was committed: on drop, what was written is removed.
    cleans: bool,
    /// Objects that it may remove though their names say nothing, and whether they are in the parent.
    own: Mutex<Vec<(String, bool)>>,
    single: Slot,
}

/// The name of a staging directory, without the nonce.
const NAME: &str = "tmp-";

impl ObjectStaging {
    pub(super) fn prepare(target: &Location, prefix: Prefix, overwrite: bool) -> Result<Self, CheckpointError> {
        let path = || prefix.name().to_owned();
        let is_object = prefix.head("")?.is_some();
        if is_object && !overwrite {
            return Err(CheckpointError::Exists { path: path() });
        }
        // What crashed saves left, or what others are just writing, is in nobody's way.
        let taken = prefix.names()?.iter().any(|name| nonce_of(name).is_none());
        match (taken, overwrite) {
            (true, false) => return Err(CheckpointError::Exists { path: path() }),
            (true, true) => return Err(CheckpointError::Overwrite { path: path() }),
            (false, _) => {}
        }
        let mut staging = Self::join(target, prefix, &format!("{NAME}{:016x}", nonce()))?;
        (staging.overwrite, staging.cleans) = (overwrite, true);
        Ok(staging)
    }

    pub(super) fn join(target: &Location, prefix: Prefix, name: &str) -> Result<Self, CheckpointError> {
        if !name.strip_prefix(NAME).is_some_and(is_nonce) {
            let reason = "the name that another rank sent is that of no save to an object store";
            return Err(CheckpointError::NotCommitted { path: prefix.name().to_owned(), reason });
        }
        let beside = match target.split() {
            Ok((parent, name)) => match parent.resolve()? {
                Resolved::Object(parent) => Some((parent, name.to_owned())),
                Resolved::Local(_) => None,
            },
            // The root of a bucket.
            Err(_) => None,
        };
        let (own, single) = Default::default();
        Ok(ObjectStaging { prefix, beside, name: name.to_owned(), overwrite: false, cleans: false, own, single })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn nonce(&self) -> &str {
        self.name.strip_prefix(NAME).unwrap_or_default()
    }

    pub(super) fn target(&self) -> &Path {
        self.prefix.name()
    }

    /// Of several savers that find nothing at the target, one gets through here.
    pub(super) fn claim(&self) -> Result<(), CheckpointError> {
        // In its words is who it is, should the answer get lost.
        self.put_new(CLAIM, self.nonce().as_bytes())?;
        self.owns(CLAIM, false);
        Ok(())
    }

    /// Checks that all files are here: a rank with another URL or another endpoint has written its own elsewhere.
    pub(super) fn check_files<'f>(&self, mut files: impl Iterator<Item = &'f String>) -> Result<(), CheckpointError> {
        let here: HashSet<String> = self.prefix.all()?.into_iter().collect();
        let path = self.target().to_owned();
        match files.find(|file| !here.contains(*file)) {
            None => Ok(()),
            // Another save to the same target was faster, and has cleaned up.
            Some(_) if here.contains(METADATA_FILE) => Err(CheckpointError::Exists { path }),
            Some(file) => Err(CheckpointError::Elsewhere { path, file: file.clone() }),
        }
    }

    fn owns(&self, name: &str, beside: bool) {
        self.own.lock().unwrap_or_else(PoisonError::into_inner).push((name.to_owned(), beside));
    }

    pub(super) fn create(&self, relative: &str, length: u64) -> Result<Upload, CheckpointError> {
        crate::paths::check_relative(relative).map_err(|reason| CheckpointError::Path {
            root: self.target().to_owned(),
            path: relative.to_owned(),
            reason,
        })?;
        let upload = Upload::new(&self.prefix, relative, length, true)?;
        if nonce_of(relative) != Some(self.nonce()) {
            self.owns(relative, false);
        }
        Ok(upload)
    }

    pub(super) fn create_single(&self, length: u64) -> Result<Upload, CheckpointError> {
        Ok(Upload::new(&self.prefix, "", length, false)?.parked(self.single.clone()))
    }

    /// The prefix that the target lies in.
    fn parent(&self) -> Result<&Prefix, CheckpointError> {
        self.beside.as_ref().map(|(parent, _)| parent).ok_or_else(|| {
            let error = io::Error::new(io::ErrorKind::InvalidInput, "it is a bucket, which cannot be a file");
            CheckpointError::io("write to", self.target())(error)
        })
    }

    pub(super) fn check_kind(&self, directory: bool) -> Result<(), CheckpointError> {
        let (path, wanted) = (self.target().to_owned(), if directory { "directory" } else { "file" });
        let other = match directory {
            true => self.prefix.head("")?.is_some(),
            false => !self.prefix.is_empty()?,
        };
        if other { Err(CheckpointError::NotReplaceable { path, wanted }) } else { Ok(()) }
    }

    pub(super) fn check_beside(&self, name: &str) -> Result<(), CheckpointError> {
        let parent = self.parent()?;
        match !self.overwrite && parent.head(name)?.is_some() {
            true => Err(CheckpointError::Exists { path: parent.name_of(name) }),
            false => Ok(()),
        }
    }

    pub(super) fn remove_beside(&self, name: &str) -> Result<(), CheckpointError> {
        self.parent()?.delete(name)
    }

    pub(super) fn commit(mut self, last: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
        if let Err(error) = self.put_new(last, bytes) {
            // It may be there, or come yet: what it speaks of must stay.
            self.cleans &= !matches!(error, CheckpointError::CommitUnknown { .. });
            return Err(error);
        }
        self.cleans = false;
        // Best effort: what is left is in nobody's way. No other save to this target can be committed any more.
        let claimed = self.own.lock().unwrap_or_else(PoisonError::into_inner).iter().any(|(name, _)| name == CLAIM);
        if claimed {
            let _ = self.prefix.delete(CLAIM);
        }
        for name in self.prefix.names().unwrap_or_default() {
            if nonce_of(&name).is_some_and(|nonce| nonce != self.nonce()) {
                let _ = self.prefix.delete(&name);
            }
        }
        Ok(())
    }

    /// Puts an object where none may be. Whether it did is found out also where the answer got lost.
    fn put_new(&self, name: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
        let exists = || CheckpointError::Exists { path: self.target().to_owned() };
        let mut pause = COMMIT_PAUSE;
        let mut attempt = 1;
        loop {
            let error = match self.prefix.put(name, PutPayload::from(bytes.to_vec()), PutMode::Create) {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            let refused = match &error {
                CheckpointError::Io { source, .. } => matches!(
                    source.kind(),
                    io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported | io::ErrorKind::InvalidInput
                ),
                _ => true,
            };
            if refused {
                return Err(error);
            }
            // A retry inside the client may have met its own first attempt: the content tells whose it is.
            match self.prefix.get(name) {
                Ok(Some(there)) if there == bytes => return Ok(()),
                Ok(Some(_)) => return Err(exists()),
                Ok(None) | Err(_) if attempt < COMMIT_ATTEMPTS => {}
                Ok(None) | Err(_) => {
                    let path = self.prefix.name_of(name);
                    return Err(CheckpointError::CommitUnknown { path, source: Box::new(error) });
                }
            }
            attempt += 1;
            std::thread::sleep(pause);
            pause *= 2;
        }
    }

    pub(super) fn commit_single(mut self, beside: Option<Beside<'_>>) -> Result<(), CheckpointError> {
        let upload = self.single.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(upload) = upload else { return Ok(()) };
        // An upload in parts has no condition, so this is as near as it gets.
        if !self.overwrite && self.prefix.head("")?.is_some() {
            return Err(CheckpointError::Exists { path: self.target().to_owned() });
        }
        if let Some(Beside { new_name, bytes: Some(bytes), .. }) = beside {
            self.owns(new_name, true);
            self.parent()?.put(new_name, PutPayload::from(bytes.to_vec()), PutMode::Overwrite)?;
        }
        let length = upload.length();
        if let Err(error) = upload.complete(PutMode::Overwrite) {
            // The answer may have been lost, not the request; then what belongs to the object must stay.
            if self.prefix.head("").is_ok_and(|there| there.is_none_or(|there| there.size != length)) {
                return Err(error);
            }
            self.cleans = false;
            return Err(CheckpointError::CommitUnknown { path: self.target().to_owned(), source: Box::new(error) });
        }
        self.cleans = false;
        let Some(Beside { name, new_name, bytes }) = beside else { return Ok(()) };
        // Best effort, since the commit is done: readers know both names, and which checkpoint a file belongs to.
        let parent = self.parent()?;
        let renamed = match bytes {
            Some(bytes) => parent.put(name, PutPayload::from(bytes.to_vec()), PutMode::Overwrite),
            None => parent.delete(name),
        };
        if renamed.is_ok() {
            let _ = parent.delete(new_name);
        }
        Ok(())
    }

    /// Removes what was written, as far as the store lets us.
    fn clean(&self) {
        // An upload that waits for the commit is aborted by its drop.
        drop(self.single.lock().unwrap_or_else(PoisonError::into_inner).take());
        for (name, beside) in self.own.lock().unwrap_or_else(PoisonError::into_inner).drain(..).rev() {
            let _ = match (beside, &self.beside) {
                (true, Some((parent, _))) => parent.delete(&name),
                _ => self.prefix.delete(&name),
            };
        }
        for name in self.prefix.names().unwrap_or_default() {
            if nonce_of(&name) == Some(self.nonce()) {
                let _ = self.prefix.delete(&name);
            }
        }
    }
}

impl Drop for ObjectStaging {
    fn drop(&mut self) {
        if self.cleans {
            self.clean();
        }
    }
}

/// The nonce in the name of an object that belongs to one save: `__0_0-<nonce>.distcp`, `.integrity-<nonce>`.
pub(super) fn nonce_of(name: &str) -> Option<&str> {
    let data = name.strip_prefix("__").and_then(|name| name.strip_suffix(".distcp"));
    let nonce = match data {
        Some(data) => data.split_once('-')?.1,
        None => name.strip_prefix(INTEGRITY_FILE)?.strip_prefix('-')?,
    };
    is_nonce(nonce).then_some(nonce)
}
