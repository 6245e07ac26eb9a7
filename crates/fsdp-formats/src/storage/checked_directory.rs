//! The files of a checkpoint: opened safely, counted, and checked where an integrity file covers
//! them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use fsdp_digest::StateDigest;

use super::backend::{Links, ReadDirectory};
use super::checked_file::CheckedFile;
use super::integrity::{
    FileIntegrity, INTEGRITY_FILE, Integrity, decode_lineage, integrity_beside,
};
use super::lineage::Lineage;
use super::location::Location;
use super::read_at::{ReadAt, read_file};
use crate::error::{FileError, FormatError};
use crate::limits::{MAX_INTEGRITY_BYTES, MAX_LISTED_FILES, MAX_PICKLE_BYTES};
use crate::metadata::METADATA_FILE;
use crate::threads::lock;

/// The number of files that are kept open; a load that needs more opens them again.
const OPEN_FILES: usize = 200;

/// The directory, or the prefix in an object store, of a checkpoint.
#[derive(Debug)]
pub struct CheckedDirectory {
    directory: Box<dyn ReadDirectory>,
    /// The content of the integrity file.
    integrity: Option<Integrity>,
    files: Mutex<HashMap<String, Arc<CheckedFile>>>,
    /// The entries with files that hold nothing but copies.
    copies: HashSet<String>,
    bytes_read: Arc<AtomicU64>,
}

/// Returns `true` for the text that Git LFS keeps in place of a file.
fn is_lfs_pointer(file: &dyn ReadAt) -> bool {
    const START: &[u8] = b"version https://git-lfs.github.com/spec/";
    let mut start = [0; START.len()];
    file.read_exact_at(0, &mut start).is_ok() && start == START
}

impl CheckedDirectory {
    /// Opens a directory. With `verify`, its integrity file is read, if there is one.
    #[doc(hidden)]
    pub fn open(location: &Location, verify: bool, links: Links) -> Result<Self, FileError> {
        let mut directory = CheckedDirectory {
            directory: location.storage()?.open(links)?,
            integrity: None,
            files: Mutex::default(),
            copies: HashSet::new(),
            bytes_read: Arc::default(),
        };
        if verify {
            directory.integrity = directory.read_directory_integrity()?;
        }
        Ok(directory)
    }

    /// Opens a directory whose format has no list of its files, and checks that all those exist
    /// that the integrity file lists: a missing one would go unnoticed otherwise. Symbolic links
    /// are followed.
    pub(crate) fn open_covered(location: &Location, verify: bool) -> Result<Self, FileError> {
        let directory = Self::open(location, verify, Links::Follow)?;
        let mut missing = Vec::new();
        for name in directory.covered() {
            if !directory.has(&name)? {
                missing.push(name);
            }
        }
        directory.check_missing(missing)?;
        Ok(directory)
    }

    /// Opens the directory of a checkpoint that is the single file `name`. With `verify`, the
    /// integrity file of that file is read, if there is one; [`integrity_beside`] returns its name.
    /// Symbolic links are followed.
    #[doc(hidden)]
    pub fn open_beside(location: &Location, name: &str, verify: bool) -> Result<Self, FileError> {
        let mut directory = Self::open(location, false, Links::Follow)?;
        let integrity = integrity_beside(name);
        if verify && directory.has(&integrity)? {
            directory.integrity = Some(directory.read_integrity(&integrity)?);
        }
        Ok(directory)
    }

    /// Opens a directory to read one of its files, which another program may have put there. The
    /// file is checked if the directory's integrity file lists it.
    pub(crate) fn open_for(
        location: &Location,
        name: &str,
        verify: bool,
    ) -> Result<Self, FileError> {
        let mut directory = Self::open(location, verify, Links::Refuse)?;
        directory.integrity = directory.integrity.and_then(|mut integrity| {
            let files = BTreeMap::from([integrity.files.remove_entry(name)?]);
            Some(Integrity {
                files,
                ..Integrity::default()
            })
        });
        Ok(directory)
    }

    /// Reads the integrity file of a directory.
    ///
    /// In an object store several saves to one target may have left theirs, each under a name of
    /// its own. The right one has the hash of the `.metadata` that was committed.
    fn read_directory_integrity(&self) -> Result<Option<Integrity>, FileError> {
        if self.has(INTEGRITY_FILE)? {
            return self.read_integrity(INTEGRITY_FILE).map(Some);
        }
        let mut names = self.names()?;
        names.retain(|name| {
            name.strip_prefix(INTEGRITY_FILE)
                .is_some_and(|rest| rest.starts_with('-'))
        });
        let mut last_integrity = None;
        for name in &names {
            // If none is right, the last one is used, so that reading the `.metadata` fails with
            // the right error.
            let integrity = last_integrity.insert(self.read_integrity(name)?);
            if names.len() == 1 || self.covers_metadata(integrity)? {
                break;
            }
        }
        Ok(last_integrity)
    }

    /// Reads the lineage from the integrity file of a directory, without decoding its list of
    /// files. Returns `None` without such a file, or without a lineage in it.
    pub(crate) fn read_lineage(location: &Location) -> Result<Option<Lineage>, FileError> {
        let directory = Self::open(location, false, Links::Refuse)?;
        if !directory.has(INTEGRITY_FILE)? {
            let integrity = directory.read_directory_integrity()?;
            return Ok(integrity.and_then(|integrity| integrity.lineage));
        }
        let bytes = directory.read_checked(INTEGRITY_FILE, MAX_INTEGRITY_BYTES)?;
        decode_lineage(&bytes).map_err(|source| directory.file_error(INTEGRITY_FILE, source))
    }

    /// Reads the integrity file of this name.
    fn read_integrity(&self, name: &str) -> Result<Integrity, FileError> {
        let bytes = self.read_checked(name, MAX_INTEGRITY_BYTES)?;
        Integrity::decode(&bytes).map_err(|source| self.file_error(name, source))
    }

    /// Returns `true` if an integrity file has the hash of the `.metadata` that is here, or none of
    /// a `.metadata`.
    fn covers_metadata(&self, integrity: &Integrity) -> Result<bool, FileError> {
        let Some(hashes) = integrity.files.get(METADATA_FILE) else {
            return Ok(true);
        };
        let file = self.directory.file(METADATA_FILE)?;
        // Why it could not be read is told when it is read to be used.
        let outcome = self.read_by_hashes(file, METADATA_FILE, Some(hashes), MAX_PICKLE_BYTES);
        Ok(outcome.is_ok())
    }

    /// Returns the number of threads that should read in place of each one that would read from a
    /// disk.
    pub(crate) fn threads_per_reader(&self) -> usize {
        self.directory.threads_per_reader()
    }

    /// Returns `true` if its files are objects of an object store, so that each read of them comes
    /// over the network.
    #[must_use]
    pub fn is_object_store(&self) -> bool {
        self.directory.is_object_store()
    }

    /// Returns its path, or its URL.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.directory.name()
    }

    /// Returns `true` if an integrity file is there and in use.
    #[must_use]
    pub fn has_integrity(&self) -> bool {
        self.integrity.is_some()
    }

    /// Returns the digests of tensors and values that the integrity file has.
    pub(crate) fn digests(&self) -> Option<&StateDigest> {
        self.integrity.as_ref()?.digests.as_ref()
    }

    /// Returns the hashes that the integrity file has of a file.
    pub(crate) fn hashes(&self, relative: &str) -> Option<&FileIntegrity> {
        self.integrity.as_ref()?.files.get(relative)
    }

    /// Returns the lineage that the integrity file has.
    #[doc(hidden)]
    #[must_use]
    pub fn lineage(&self) -> Option<&Lineage> {
        self.integrity.as_ref()?.lineage.as_ref()
    }

    /// Returns the files that the integrity file covers, sorted.
    #[doc(hidden)]
    pub fn covered(&self) -> Vec<String> {
        let integrity = self.integrity.iter();
        integrity
            .flat_map(|integrity| integrity.files.keys())
            .cloned()
            .collect()
    }

    /// Checks that no files are missing: `files` are those that are. Only as many of them are taken
    /// as the error names.
    pub(crate) fn check_missing(
        &self,
        files: impl IntoIterator<Item = String>,
    ) -> Result<(), FileError> {
        let files: Vec<String> = files.into_iter().take(MAX_LISTED_FILES).collect();
        if files.is_empty() {
            return Ok(());
        }
        Err(FileError::MissingFiles {
            path: self.path().to_owned(),
            files,
        })
    }

    /// Returns the bytes that were read from its files so far.
    #[must_use]
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// Returns `true` if there is a regular file of this name.
    pub fn has(&self, relative: &str) -> Result<bool, FileError> {
        match self.directory.file(relative) {
            // A link, a directory or a file that may not be read is an error, and not an absence.
            Err(error) if error.is_absence() => Ok(false),
            file => file.map(|_| true),
        }
    }

    /// Notes that a file is one of the checkpoint's own, though it holds nothing but copies of what
    /// others have.
    pub(crate) fn note_copies(&mut self, relative: &str) {
        let entry = relative.split('/').next().unwrap_or(relative);
        self.copies.insert(entry.to_owned());
    }

    /// Returns `true` for a file that holds copies only, and for a folder with such files.
    pub(crate) fn holds_copies(&self, name: &str) -> bool {
        self.copies.contains(name)
    }

    /// Returns the names of the entries directly in it, sorted; those that are not UTF-8 are left
    /// out.
    #[doc(hidden)]
    pub fn names(&self) -> Result<Vec<String>, FileError> {
        self.directory.names()
    }

    /// Returns the names that [`CheckedDirectory::names`] leaves out, sorted, as messages show
    /// them.
    pub(crate) fn names_not_utf8(&self) -> Result<Vec<String>, FileError> {
        self.directory.names_not_utf8()
    }

    /// Opens a file below the directory. Where there is an integrity file, it must cover this one.
    pub fn file(&self, relative: &str) -> Result<Arc<CheckedFile>, FileError> {
        if let Some(file) = lock(&self.files).get(relative) {
            return Ok(file.clone());
        }
        // Not under the lock: an object store takes a while to answer.
        let opened = self.directory.file(relative)?;
        let hashes = self.required_hashes(relative)?;
        let opened = Arc::new(self.make_checked_file(opened, relative, hashes));
        let mut files = lock(&self.files);
        // If another thread has opened it too, both take the same one, which keeps what was
        // checked.
        if let Some(file) = files.get(relative) {
            return Ok(file.clone());
        }
        // Drop all files when there are too many: which of them will be needed again is not
        // known. Readers that hold a file keep it open.
        if files.len() >= OPEN_FILES {
            files.clear();
        }
        files.insert(relative.to_owned(), opened.clone());
        Ok(opened)
    }

    /// Opens a file that another program may have put beside the checkpoint's own. It is checked if
    /// the integrity file lists it.
    #[doc(hidden)]
    pub fn extra_file(&self, relative: &str) -> Result<CheckedFile, FileError> {
        let opened = self.directory.file(relative)?;
        Ok(self.make_checked_file(opened, relative, self.hashes(relative)))
    }

    /// Returns an open file that counts and checks what is read from it.
    fn make_checked_file(
        &self,
        file: Box<dyn ReadAt>,
        name: &str,
        hashes: Option<&FileIntegrity>,
    ) -> CheckedFile {
        CheckedFile {
            file: file.into(),
            bytes_per_read: self.directory.bytes_per_read(),
            name: name.to_owned(),
            integrity: hashes.cloned().map(Arc::new),
            bytes_read: self.bytes_read.clone(),
        }
    }

    /// Reads the whole file `relative` into memory, and checks its hashes, if the directory has an
    /// integrity file.
    ///
    /// # Errors
    /// A file of more than `limit` bytes, before it is read; one that is missing, or differs from
    /// its hashes.
    #[doc(hidden)]
    pub fn read_checked(&self, relative: &str, limit: u64) -> Result<Vec<u8>, FileError> {
        let file = self.directory.file(relative)?;
        self.read_by_hashes(file, relative, self.required_hashes(relative)?, limit)
    }

    /// Reads all of an open file of at most `limit` bytes, and checks it by these hashes.
    fn read_by_hashes(
        &self,
        file: Box<dyn ReadAt>,
        name: &str,
        hashes: Option<&FileIntegrity>,
        limit: u64,
    ) -> Result<Vec<u8>, FileError> {
        let file = CheckedFile {
            // Only what is read of the checkpoint's items is counted.
            bytes_read: Arc::default(),
            ..self.make_checked_file(file, name, hashes)
        };
        file.check_length()
            .and_then(|()| read_file(&file, limit))
            .map_err(|source| self.file_error(name, source))
    }

    /// Returns the error of a file from the reason. If the file stands for another one, which was
    /// never fetched, that is the reason.
    #[doc(hidden)]
    pub fn file_error(&self, relative: &str, source: FormatError) -> FileError {
        let source = match self.directory.file(relative) {
            Ok(file) if is_lfs_pointer(&*file) => FormatError::unsupported(
                "a pointer of Git LFS in place of the file itself (`git lfs pull` fetches that)",
            ),
            _ => source,
        };
        source.in_file(self.path().join(relative))
    }

    /// Returns the hashes of a file. Where there is an integrity file, a file that it does not list
    /// is an error.
    fn required_hashes(&self, relative: &str) -> Result<Option<&FileIntegrity>, FileError> {
        let hashes = self.hashes(relative);
        if hashes.is_some() || self.integrity.is_none() {
            return Ok(hashes);
        }
        let reason = "the integrity file does not list it";
        Err(self.file_error(relative, FormatError::malformed("checkpoint", reason)))
    }
}
