//! The directory of a run in a memory tier, and the hosts that have one.

use std::collections::HashMap;
use std::fs::{self, DirBuilder};
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::Path;

use fsdp_comm::ProcessGroup;
use fsdp_formats::storage::Durable;
use fsdp_formats::{FileError, Location};
use fsdp_state::LoadError as _;
use twox_hash::XxHash3_64;

use crate::error::{CheckpointError, broadcast_result};

/// The name of the file, in the directory of a run's checkpoints, with the number of the run in the
/// memory tier.
const RUN_FILE: &str = ".memory-tier";

/// The name of the file, in the run's directory of the memory tier, with the number of the host.
const HOST_FILE: &str = "host";

/// The length of both files: 16 hexadecimal digits.
const NUMBER_BYTES: u64 = 16;

/// The directory of a run in the memory tier, during one operation in which all ranks take part.
#[derive(Debug, Clone)]
pub(super) struct RunDirectory {
    pub(super) group: ProcessGroup,
    /// The name of the operation, for messages.
    pub(super) operation: &'static str,
    /// The run's own directory on this host.
    pub(super) root: Location,
    /// The lowest rank of each rank's host.
    pub(super) hosts: Vec<usize>,
}

impl RunDirectory {
    /// Finds the run's directory in the tier. If it has none yet, `create` makes one; without
    /// `create` this returns `None`. Collective: agreements, an object broadcast and an object
    /// all-gather.
    ///
    /// # Errors
    /// The same on every rank: errors of the storage, a directory of another user.
    pub(super) fn find(
        directory: &Location,
        run: &Location,
        group: ProcessGroup,
        operation: &'static str,
        create: bool,
    ) -> Result<Option<Self>, CheckpointError> {
        // Step 1: rank 0 finds the name of the run's directory.
        let mut name = Ok(None);
        if group.rank() == 0 {
            name = name_in_tier(run, create).map(Some);
        }
        let Some(name): Option<String> = broadcast_result(&group, operation, name, 0)? else {
            return Ok(None);
        };
        // Step 2: each rank reads the number of its host. Ranks with the same number see the same
        // directory, so they count as one host.
        let root = directory.join(name);
        let host = make_private(&root).and_then(|()| read_or_make_number(&root.join(HOST_FILE)));
        let own_number = CheckpointError::agree(&group, operation, None, host)?;
        let numbers: Vec<u64> = group.all_gather_object(&own_number)?;
        let mut lowest_ranks: HashMap<u64, usize> = HashMap::new();
        let hosts = numbers
            .into_iter()
            .enumerate()
            .map(|(rank, number)| *lowest_ranks.entry(number).or_insert(rank))
            .collect();
        Ok(Some(RunDirectory {
            group,
            operation,
            root,
            hosts,
        }))
    }
}

/// Returns the name of a run's directory in the tier: a part of the name of its own directory, for
/// those who look into the tier, and a hash of the run's number and path. (A copy of the run's
/// directory has the same number, but is another run.) A run that has no number yet gets one with
/// `create`; without, this returns `None`.
pub(super) fn name_in_tier(
    run: &Location,
    create: bool,
) -> Result<Option<String>, CheckpointError> {
    let file = run.join(RUN_FILE);
    if !create && !file.exists()? {
        return Ok(None);
    }
    let number = read_or_make_number(&file)?;
    let path = run
        .local()
        .and_then(|path| path.canonicalize().ok())
        .unwrap_or_else(|| run.name().to_owned());
    let hash = XxHash3_64::oneshot_with_seed(number, path.as_os_str().as_encoded_bytes());
    let readable_part: String = path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .chars()
        .filter(char::is_ascii_alphanumeric)
        .take(32)
        .collect();
    Ok(Some(format!("{readable_part}-{hash:016x}")))
}

/// Makes a directory of the tier that other users cannot read, unless it exists. (An object store
/// has no directories.)
///
/// # Errors
/// It cannot be made, or belongs to another user.
pub(super) fn make_private(directory: &Location) -> Result<(), CheckpointError> {
    let Some(path) = directory.local() else {
        return Ok(());
    };
    make_private_directory(path).map_err(|source| {
        let path = path.to_owned();
        let operation = "create";
        FileError::Io {
            operation,
            path,
            source,
        }
        .into()
    })
}

/// Makes a directory that only this user can open, and the directories above it. One that exists
/// must be this user's.
fn make_private_directory(path: &Path) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        outcome => return outcome,
    }
    // A tmpfs is often open to all users. One who made this directory before could read the state,
    // or replace it.
    if fs::symlink_metadata(path)?.uid() == rustix::process::geteuid().as_raw() {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::PermissionDenied,
        "it belongs to another user",
    ))
}

/// Reads the number in a file. A missing file is created with a random number. If several ranks
/// create it at the same time, one of them succeeds, and all read its number.
fn read_or_make_number(file: &Location) -> Result<u64, CheckpointError> {
    if !file.exists()? {
        match create_number_file(file) {
            Ok(()) | Err(FileError::Exists { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let text = file.read_file(NUMBER_BYTES)?;
    std::str::from_utf8(&text)
        .ok()
        .and_then(|text| u64::from_str_radix(text, 16).ok())
        .ok_or_else(|| CheckpointError::NotAMemoryTier {
            path: file.name().to_owned(),
        })
}

/// Creates a file with a new random number, in one step. If another process has written one before,
/// that is the error [`FileError::Exists`].
fn create_number_file(file: &Location) -> Result<(), FileError> {
    // The standard library seeds its hashers with random numbers of the system.
    let text = format!("{:016x}", RandomState::new().build_hasher().finish());
    let staging = Durable::new().prepare(file, false)?;
    let new_file = staging.create_single(NUMBER_BYTES)?;
    new_file.write_at(0, text.as_bytes())?;
    new_file.finish()?;
    staging.commit_single()
}
