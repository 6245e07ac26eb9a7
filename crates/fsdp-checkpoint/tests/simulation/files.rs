//! The simulated disk as ranks see it: each operation may fail, or be the last one of a rank or of
//! the machine.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use fsdp_formats::FormatError;
use fsdp_formats::storage::{
    EntryKind, FileSystem, Identity, Links, LockKind, NewFile, OpenEntry, OpenError, ReadAt, Status,
};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::disk::{Disk, IO, Inode, NO_SPACE, NOT_SUPPORTED};
use super::flaw::Flaw;
use super::schedule::{Schedule, current_rank};
use super::simulate::locked;

/// The way in which a job ends before its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Strike {
    /// One rank is killed.
    Rank,
    /// All ranks are killed, and the machine goes on.
    Job,
    /// The machine loses its power.
    Power,
}

/// The moment at which a job is struck.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Moment {
    /// Instead of the operation with this number.
    Operation(u64),
    /// Instead of the rename with this number, or so many operations after it: the steps there are
    /// the ones that commit.
    Rename { number: u64, after: u64 },
}

/// The troubles of one job.
#[derive(Debug)]
pub(crate) struct Trouble {
    pub(crate) random: StdRng,
    /// The way in which the job ends before its time, and when.
    pub(crate) strike: Option<(Moment, Strike)>,
    /// `true` once the job was struck.
    pub(crate) was_struck: bool,
    /// The probability that an operation fails.
    pub(crate) failures: f64,
    /// The number of operations so far.
    pub(crate) operations: u64,
    /// The number of those that renamed something.
    pub(crate) renames: u64,
    /// The number of those that gave a file another name.
    pub(crate) links: u64,
    /// A hash of all operations in order.
    pub(crate) trace: u64,
}

impl Trouble {
    /// Returns no trouble at all: nothing fails, and nothing is struck.
    pub(crate) fn none() -> Self {
        Trouble {
            random: StdRng::seed_from_u64(0),
            strike: None,
            was_struck: false,
            failures: 0.0,
            operations: 0,
            renames: 0,
            links: 0,
            trace: 0,
        }
    }

    /// Counts an operation, and returns the strike that comes instead of it.
    fn count(&mut self, operation: Operation) -> Option<Strike> {
        self.operations += 1;
        self.renames += u64::from(operation == Operation::Rename);
        self.links += u64::from(operation == Operation::Link);
        let (moment, strike) = self.strike?;
        if let Moment::Rename { number, after } = moment
            && operation == Operation::Rename
            && number == self.renames
        {
            self.strike = Some((Moment::Operation(self.operations + after), strike));
        }
        let is_now =
            matches!(self.strike, Some((Moment::Operation(at), _)) if at == self.operations);
        self.was_struck |= is_now;
        is_now.then_some(strike)
    }
}

/// A machine: its disk, and the job that runs on it.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) disk: Mutex<Disk>,
    pub(crate) schedule: Mutex<Arc<Schedule>>,
    pub(crate) trouble: Mutex<Trouble>,
    /// `false` if the file system cannot exchange two directories.
    pub(crate) exchanges: bool,
    pub(crate) flaw: Option<Flaw>,
    /// The files whose sync a flaw has put off until something is renamed.
    pub(crate) late: Mutex<Vec<(Inode, PathBuf)>>,
}

/// The kind of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Look,
    Read,
    Create,
    Allocate,
    Write,
    Sync,
    SyncDirectory,
    Rename,
    Link,
    Remove,
}

/// The file system of a machine, as one process sees it.
#[derive(Debug, Clone)]
pub(crate) struct Files {
    machine: Arc<Machine>,
    /// The rank that this is the file system of; `None` for the checker, which nothing goes wrong
    /// for.
    rank: Option<usize>,
}

fn error(code: i32) -> io::Error {
    io::Error::from_raw_os_error(code)
}

impl Machine {
    /// Returns the file system of a rank, or that of the checker.
    pub(crate) fn files(self: &Arc<Self>, rank: Option<usize>) -> Arc<dyn FileSystem> {
        Arc::new(Files {
            machine: self.clone(),
            rank,
        })
    }

    fn has(&self, flaw: Flaw) -> bool {
        self.flaw == Some(flaw)
    }
}

impl Files {
    fn disk(&self) -> MutexGuard<'_, Disk> {
        locked(&self.machine.disk)
    }

    /// Returns `true` if something may go wrong here: not for the checker, nor on a helper thread.
    fn may_fail(&self) -> bool {
        self.rank.is_some() && current_rank() == self.rank
    }

    /// Begins an operation: other ranks may run, the job may be struck, and the operation may fail.
    fn begin(&self, operation: Operation, path: &Path) -> io::Result<()> {
        let Some(rank) = self.rank else { return Ok(()) };
        let schedule = locked(&self.machine.schedule).clone();
        if std::thread::panicking() || !self.may_fail() {
            return if schedule.is_killed(rank) {
                Err(error(IO))
            } else {
                Ok(())
            };
        }
        schedule.pass();
        let mut trouble = locked(&self.machine.trouble);
        let struck = trouble.count(operation);
        let text = format!("{rank} {operation:?} {}", path.display());
        trouble.trace =
            trouble.trace.rotate_left(7) ^ twox_hash::XxHash3_64::oneshot(text.as_bytes());
        tracing::trace!("{text}");
        if let Some(strike) = struck {
            tracing::trace!("{strike:?} is struck");
            let seed = trouble.random.random();
            drop(trouble);
            self.strike(&schedule, rank, strike, seed);
            // This rank ends here, if it was struck.
            schedule.pass();
            return Ok(());
        }
        let (failures, chance) = (trouble.failures, trouble.random.random::<f64>());
        if chance >= failures {
            return Ok(());
        }
        let takes_space = matches!(
            operation,
            Operation::Create
                | Operation::Allocate
                | Operation::Write
                | Operation::Link
                | Operation::Rename
        );
        tracing::trace!("it fails");
        Err(error(if takes_space && chance < failures / 2.0 {
            NO_SPACE
        } else {
            IO
        }))
    }

    /// Kills a rank, or all, and makes the disk lose power.
    fn strike(&self, schedule: &Schedule, rank: usize, strike: Strike, seed: u64) {
        if strike == Strike::Power {
            self.disk().lose_power(seed);
            locked(&self.machine.late).clear();
        }
        match strike {
            Strike::Rank => schedule.kill(rank),
            Strike::Job | Strike::Power => {
                (0..schedule.ranks()).for_each(|rank| schedule.kill(rank))
            }
        }
    }

    /// Syncs the files whose sync a flaw has put off, each in a step of its own.
    fn sync_late(&self) -> io::Result<()> {
        let late = std::mem::take(&mut *locked(&self.machine.late));
        for (inode, path) in late {
            self.begin(Operation::Sync, &path)?;
            // A file that is gone needs no sync.
            self.disk().sync_file(inode).ok();
        }
        Ok(())
    }

    /// Empties the files below a directory under all their names.
    fn truncate(&self, path: &Path) {
        let mut disk = self.disk();
        for (name, kind) in disk.list(path).unwrap_or_default() {
            if kind == EntryKind::File {
                disk.truncate(&path.join(name)).ok();
            }
        }
    }

    /// Returns a handle of its own, with its own number for locks.
    fn open(&self, inode: Inode, path: &Path) -> Handle {
        let holder = self.disk().holder();
        Handle {
            files: self.clone(),
            path: path.to_owned(),
            inode,
            holder,
        }
    }
}

/// Returns `true` for the directory in which a checkpoint is written before its commit.
fn is_staging(path: &Path) -> bool {
    path.file_name()
        .is_some_and(|name| name.to_string_lossy().contains(".tmp-"))
}

impl FileSystem for Files {
    fn status(&self, path: &Path, _: Links) -> io::Result<Status> {
        self.begin(Operation::Look, path)?;
        self.disk().status(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<(OsString, EntryKind)>> {
        self.begin(Operation::Look, path)?;
        let mut list = self.disk().list(path)?;
        if self.machine.has(Flaw::ListingStale) && self.rank.is_some() {
            list.pop();
        }
        Ok(list
            .into_iter()
            .map(|(name, kind)| (name.into(), kind))
            .collect())
    }

    fn create_directory(&self, path: &Path) -> io::Result<()> {
        self.begin(Operation::Create, path)?;
        self.disk().create_directory(path)
    }

    fn create_file(&self, path: &Path) -> io::Result<Box<dyn NewFile>> {
        self.begin(Operation::Create, path)?;
        let inode = self.disk().create_file(path)?;
        Ok(Box::new(self.open(inode, path)))
    }

    fn open_directory(&self, path: &Path) -> io::Result<Box<dyn OpenEntry>> {
        self.begin(Operation::Look, path)?;
        let inode = {
            let disk = self.disk();
            disk.list(path)?;
            disk.resolve(path)?
        };
        Ok(Box::new(self.open(inode, path)))
    }

    fn open_lock(&self, path: &Path) -> io::Result<Box<dyn OpenEntry>> {
        self.begin(Operation::Create, path)?;
        let inode = {
            let mut disk = self.disk();
            match disk.resolve(path) {
                Ok(inode) => inode,
                Err(_) => disk.create_file(path)?,
            }
        };
        Ok(Box::new(self.open(inode, path)))
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        let begun = self.begin(Operation::SyncDirectory, path);
        let is_missing = self.machine.has(Flaw::StagingSyncMissing) && is_staging(path)
            || self.machine.has(Flaw::ParentSyncMissing) && !is_staging(path);
        if is_missing || (begun.is_err() && self.machine.has(Flaw::SyncErrorLost)) {
            return Ok(());
        }
        begun?;
        self.disk().sync_directory(path)
    }

    fn set_permissions(&self, path: &Path, mode: u32) -> io::Result<()> {
        self.begin(Operation::Look, path)?;
        self.disk().set_mode(path, mode)
    }

    fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.begin(Operation::Rename, to)?;
        let mut disk = self.disk();
        if disk.resolve(to).is_ok() && !self.machine.has(Flaw::RenameReplaces) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        disk.rename(from, to)?;
        drop(disk);
        self.sync_late()
    }

    fn rename_over(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.begin(Operation::Rename, to)?;
        self.disk().rename(from, to)
    }

    fn exchange(&self, a: &Path, b: &Path) -> io::Result<()> {
        if !self.machine.exchanges {
            return Err(error(NOT_SUPPORTED));
        }
        self.begin(Operation::Rename, b)?;
        if self.machine.has(Flaw::ExchangeInTwoSteps) {
            let aside = b.with_extension("aside");
            self.disk().rename(b, &aside)?;
            self.begin(Operation::Rename, b)?;
            self.disk().rename(a, b)?;
            return self.disk().rename(&aside, a);
        }
        if self.machine.has(Flaw::OldRemovedFirst) {
            let old = self.disk().list(b)?;
            for (name, _) in old {
                self.remove_file(&b.join(name))?;
            }
        }
        self.disk().exchange(a, b)?;
        self.sync_late()
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.begin(Operation::Link, to)?;
        self.disk().link(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.begin(Operation::Remove, path)?;
        self.disk().remove(path)
    }

    fn remove_directory(&self, path: &Path) -> io::Result<()> {
        if self.machine.has(Flaw::RemovalReachesLinks) {
            self.truncate(path);
        }
        // One name after the other, as a system does it.
        for (name, kind) in self.list(path)? {
            match kind {
                EntryKind::Directory => self.remove_directory(&path.join(name))?,
                _ => self.remove_file(&path.join(name))?,
            }
        }
        self.remove_file(path)
    }

    fn pause(&self, _: Duration) {
        if self.may_fail() {
            // Let another rank run. The lock must be free by then, because that rank takes it too.
            let schedule = locked(&self.machine.schedule).clone();
            schedule.pass();
        }
    }

    fn nonce(&self) -> u64 {
        // This number is the same in each repetition of a seed, and no other nonce of the run
        // equals it.
        let number = self.disk().holder();
        twox_hash::XxHash3_64::oneshot(&number.to_le_bytes())
    }
}

/// An open file or directory.
#[derive(Debug)]
struct Handle {
    files: Files,
    path: PathBuf,
    inode: Inode,
    /// The number by which it holds locks.
    holder: u64,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.files.disk().unlock(self.inode, self.holder);
    }
}

impl Handle {
    fn machine(&self) -> &Machine {
        &self.files.machine
    }

    /// Returns `true` for a file of tensors, and `false` for one of metadata.
    fn is_data(&self) -> bool {
        self.path
            .extension()
            .is_some_and(|extension| extension == "distcp")
    }
}

impl NewFile for Handle {
    fn allocate(&self, length: u64) -> io::Result<()> {
        self.files.begin(Operation::Allocate, &self.path)?;
        self.files.disk().set_length(self.inode, length)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.files.begin(Operation::Write, &self.path)?;
        if self.machine().has(Flaw::WriteLost)
            && locked(&self.machine().trouble).random.random_bool(0.02)
        {
            return Ok(());
        }
        self.files.disk().write(self.inode, offset, bytes)
    }

    fn sync(&self) -> io::Result<()> {
        let begun = self.files.begin(Operation::Sync, &self.path);
        let mut disk = self.files.disk();
        if begun.is_err() {
            // The bytes that were written can be read, but a crash loses them.
            disk.give_up_writes(self.inode)?;
            return if self.machine().has(Flaw::SyncErrorLost) {
                Ok(())
            } else {
                begun
            };
        }
        let is_missing = if self.is_data() {
            Flaw::DataSyncMissing
        } else {
            Flaw::MetadataSyncMissing
        };
        if self.machine().has(is_missing) {
            return Ok(());
        }
        if self.machine().has(Flaw::SyncAfterRename) {
            locked(&self.machine().late).push((self.inode, self.path.clone()));
            return Ok(());
        }
        disk.sync_file(self.inode)
    }
}

impl OpenEntry for Handle {
    fn try_lock(&self, kind: LockKind) -> io::Result<bool> {
        self.files.begin(Operation::Look, &self.path)?;
        let is_taken = self.files.disk().try_lock(self.inode, self.holder, kind);
        Ok(is_taken || self.machine().has(Flaw::LocksIgnored))
    }

    fn lock(&self) -> io::Result<()> {
        while !self.try_lock(LockKind::Exclusive)? {
            self.files.pause(Duration::ZERO);
        }
        Ok(())
    }

    fn identity(&self) -> io::Result<Identity> {
        Ok(Identity(0, self.inode))
    }

    fn file(&self, parts: &[&str], _: Links) -> Result<Box<dyn ReadAt>, OpenError> {
        let path = parts
            .iter()
            .fold(self.path.clone(), |path, part| path.join(part));
        self.files
            .begin(Operation::Read, &path)
            .map_err(OpenError::Io)?;
        let (inode, length) = {
            let disk = self.files.disk();
            let inode = parts
                .iter()
                .try_fold(self.inode, |at, part| disk.lookup(at, part));
            let inode = inode.map_err(OpenError::Io)?;
            let length = disk
                .length(inode)
                .map_err(|_| OpenError::Refused("it is no regular file"))?;
            (inode, length)
        };
        Ok(Box::new(ReadFile {
            files: self.files.clone(),
            path,
            inode,
            length,
        }))
    }
}

/// A file that is read.
#[derive(Debug)]
struct ReadFile {
    files: Files,
    path: PathBuf,
    inode: Inode,
    length: u64,
}

impl ReadAt for ReadFile {
    fn len(&self) -> u64 {
        self.length
    }

    fn read_exact_at(&self, offset: u64, dst: &mut [u8]) -> Result<(), FormatError> {
        let length = dst.len() as u64;
        let read = self.files.begin(Operation::Read, &self.path);
        let read = read.and_then(|()| self.files.disk().read(self.inode, offset, dst));
        read.map_err(|source| FormatError::Read {
            offset,
            length,
            source,
        })
    }
}
