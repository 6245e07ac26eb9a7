//! The operations on the file system. Tests can make each of them fail.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::io::Errno;
use tracing::debug_span;
use twox_hash::XxHash3_64;

use super::file_system::FileSystem;
use super::os::{OperatingSystem, UNSUPPORTED};
use crate::error::{FileError, IoOutcome as _};

/// One kind of durable step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Step {
    /// A directory is created.
    CreateDirectory,
    /// A file is created.
    CreateFile,
    /// A file gets its full length.
    Preallocate,
    /// Bytes are written.
    Write,
    /// A file is fsynced.
    SyncFile,
    /// A directory is fsynced.
    SyncDirectory,
    /// Something is renamed to where nothing was, or a file over a file.
    Rename,
    /// Two directories change places.
    Exchange,
    /// Something is removed.
    Remove,
}

/// A watcher of every step: a test makes one fail, or ends the process there.
pub trait StepHook: Send + Sync {
    /// Runs before a step. An error from it stands for one of the step itself.
    fn before(&self, step: Step, path: &Path) -> io::Result<()>;

    /// Runs after a step that succeeded.
    fn after(&self, step: Step, path: &Path) -> io::Result<()> {
        let _ = (step, path);
        Ok(())
    }
}

/// The way to durable storage. Clones share the hook that watches its steps.
#[derive(Clone)]
pub struct Durable {
    hook: Option<Arc<dyn StepHook>>,
    files: Arc<dyn FileSystem>,
}

impl Default for Durable {
    fn default() -> Self {
        Durable {
            hook: None,
            files: Arc::new(OperatingSystem),
        }
    }
}

impl fmt::Debug for Durable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Durable")
            .field("hook", &self.hook.is_some())
            .finish()
    }
}

impl Durable {
    /// Returns durable storage without a hook.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns durable storage whose every step the hook watches.
    #[must_use]
    pub fn with_hook(hook: Arc<dyn StepHook>) -> Self {
        Durable {
            hook: Some(hook),
            ..Self::default()
        }
    }

    /// Returns durable storage with the same hook in another file system.
    pub(super) fn within(&self, files: &Arc<dyn FileSystem>) -> Self {
        Durable {
            hook: self.hook.clone(),
            files: files.clone(),
        }
    }

    /// Returns the file system that it works on.
    pub(super) fn files(&self) -> &dyn FileSystem {
        &*self.files
    }

    /// Returns the file system that it works on, to be kept.
    pub(super) fn shared_files(&self) -> &Arc<dyn FileSystem> {
        &self.files
    }

    /// Runs one step between the two calls of the hook. The operation is for errors.
    pub(super) fn step<T>(
        &self,
        step: Step,
        operation: &'static str,
        path: &Path,
        run: impl FnOnce() -> io::Result<T>,
    ) -> Result<T, FileError> {
        let _span = match step {
            Step::Write => debug_span!("write_at"),
            Step::SyncFile | Step::SyncDirectory => debug_span!("fsync", path = %path.display()),
            Step::Rename | Step::Exchange => debug_span!("rename", path = %path.display()),
            _ => tracing::Span::none(),
        }
        .entered();
        // An error of the hook counts as one of the step, before it or after it.
        let outcome = match &self.hook {
            None => run(),
            Some(hook) => hook
                .before(step, path)
                .and_then(|()| run())
                .and_then(|done| hook.after(step, path).map(|()| done)),
        };
        outcome.during(operation, path)
    }

    /// Creates one directory, whose parent must exist. Returns `false` if it existed already.
    pub(super) fn create_directory(&self, path: &Path) -> Result<bool, FileError> {
        self.step(
            Step::CreateDirectory,
            "create the directory",
            path,
            || match self.files.create_directory(path) {
                Ok(()) => Ok(true),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
                Err(error) => Err(error),
            },
        )
    }

    /// Creates a directory and its missing parents, each durably: what is saved in it later is not
    /// lost with its name.
    ///
    /// Directories that exist already are made durable too: a process may have made one and ended
    /// before it synced it.
    ///
    /// # Errors
    /// [`FileError::Io`].
    pub fn create_directories(&self, path: &Path) -> Result<(), FileError> {
        // A relative path ends with an empty one, and an absolute one with the root.
        let Some(parent) = path.parent() else {
            return Ok(());
        };
        self.create_directories(parent)?;
        let existed = self.files.is_directory(path);
        if !existed {
            self.create_directory(path)?;
        }
        match self.sync_directory(parent_of(path)) {
            // The directory existed before, and it is somebody else's, or its file system has no
            // syncs.
            Err(FileError::Io { source, .. }) if existed && is_refused(&source) => Ok(()),
            synced => synced,
        }
    }

    /// Fsyncs a directory, which makes the names in it durable.
    pub(super) fn sync_directory(&self, path: &Path) -> Result<(), FileError> {
        self.step(Step::SyncDirectory, "sync the directory", path, || {
            self.files.sync_directory(path)
        })
    }

    /// Renames to a place where nothing is. If something is there, it stays, and the error is
    /// [`FileError::Exists`].
    pub(super) fn rename_new(&self, from: &Path, to: &Path) -> Result<(), FileError> {
        let renamed = self.step(Step::Rename, "rename to", to, || {
            self.files.rename_new(from, to)
        });
        match renamed {
            // Another save was faster: that is told in the words of a target that exists.
            Err(FileError::Io { source, .. }) if source.kind() == io::ErrorKind::AlreadyExists => {
                Err(FileError::Exists {
                    path: to.to_owned(),
                })
            }
            outcome => outcome,
        }
    }

    /// Renames a file over whatever file is there.
    pub(super) fn rename_over(&self, from: &Path, to: &Path) -> Result<(), FileError> {
        self.step(Step::Rename, "rename to", to, || {
            self.files.rename_over(from, to)
        })
    }

    /// Exchanges two paths in one step. Returns `false` if the file system cannot do that.
    pub(super) fn exchange(&self, staged: &Path, target: &Path) -> Result<bool, FileError> {
        let exchanged = self.step(
            Step::Exchange,
            "put the new checkpoint in place of",
            target,
            || self.files.exchange(staged, target),
        );
        match exchanged {
            Ok(()) => Ok(true),
            Err(FileError::Io { source, .. }) if is_unsupported(&source) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Removes a file.
    pub(super) fn remove_file(&self, path: &Path) -> Result<(), FileError> {
        self.step(Step::Remove, "remove", path, || {
            self.files.remove_file(path)
        })
    }

    /// Removes a directory with all that it holds.
    pub(super) fn remove_directory(&self, path: &Path) -> Result<(), FileError> {
        self.step(Step::Remove, "remove", path, || {
            match self.files.remove_directory(path) {
                // Another process that cleans up at the same time may have been faster.
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                outcome => outcome,
            }
        })
    }
}

/// Returns `true` if the operation is not for this process, or not for this file system.
fn is_refused(error: &io::Error) -> bool {
    let kinds = [
        io::ErrorKind::PermissionDenied,
        io::ErrorKind::ReadOnlyFilesystem,
    ];
    kinds.contains(&error.kind()) || is_unsupported(error)
}

/// Returns `true` if the file system does not know the operation.
fn is_unsupported(error: &io::Error) -> bool {
    Errno::from_io_error(error).is_some_and(|errno| UNSUPPORTED.contains(&errno))
}

/// Returns the directory that a path lies in: the current one for a bare name.
pub(super) fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// The most bytes of a name in most file systems.
const MAX_NAME_BYTES: usize = 255;

/// The most bytes that a target's name takes in the longest name beside it, `.NAME.tmp-<nonce>`.
const MAX_TARGET_BYTES: usize = MAX_NAME_BYTES - "..tmp-0123456789abcdef".len();

/// Returns the directory that `target` lies in, and the prefix of the names there that belong to
/// it: `.NAME.`. A long name is cut in it.
pub(super) fn staging_prefix(target: &Path) -> Result<(PathBuf, String), FileError> {
    let name = cut_name(utf8_name("write to", target)?);
    Ok((parent_of(target).to_owned(), format!(".{name}.")))
}

/// Returns a target's name as names beside it have it. One that leaves no room for the rest is cut,
/// and ends with a hash of all of it, so that it belongs to no other target. A name that is too
/// long by itself stays as it is: the file system refuses it at once.
fn cut_name(name: &str) -> Cow<'_, str> {
    if name.len() <= MAX_TARGET_BYTES || name.len() > MAX_NAME_BYTES {
        return Cow::Borrowed(name);
    }
    let hash = format!("~{:016x}", XxHash3_64::oneshot(name.as_bytes()));
    let end = name.floor_char_boundary(MAX_TARGET_BYTES - hash.len());
    Cow::Owned(format!("{}{hash}", &name[..end]))
}

/// Returns the path of what belongs to `target` beside it, by the rest of its name: `.NAME.<rest>`.
pub(super) fn staging_path(target: &Path, rest: &str) -> Result<PathBuf, FileError> {
    let (parent, prefix) = staging_prefix(target)?;
    Ok(parent.join(format!("{prefix}{rest}")))
}

/// Returns the last part of a path; an error of this operation if that has no name in UTF-8.
pub(super) fn utf8_name<'p>(operation: &'static str, path: &'p Path) -> Result<&'p str, FileError> {
    path.file_name()
        .and_then(|name| name.to_str())
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "it has no name in UTF-8"))
        .during(operation, path)
}

/// Returns `true` if `text` has the form of a nonce in a file name: 16 hexadecimal digits.
pub(super) fn is_nonce(text: &str) -> bool {
    text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}
