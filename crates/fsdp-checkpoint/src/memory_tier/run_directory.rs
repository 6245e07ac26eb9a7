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

use crate::catalog::{CheckpointOnBranch, RunPosition, list_branches};
use crate::error::{CheckpointError, broadcast_result};

/// The name of the file, in the directory of a run's checkpoints, with the [`RunNumbers`] of the
/// run in the memory tier.
const RUN_FILE: &str = ".memory-tier";

/// The name of the file, in the run's directory of the memory tier, with the number of the host.
const HOST_FILE: &str = "host";

/// The length of a number in both files: 16 hexadecimal digits.
const NUMBER_BYTES: u64 = 16;

/// The numbers of a run in the memory tier: each is that of a directory there.
#[derive(Debug, Clone, Copy)]
struct RunNumbers {
    current: u64,
    left: Option<LeftDirectory>,
}

/// The directory that a run had in the memory tier before it began to save without its tier. The
/// steps there are not used again once it has saved, as the run does not continue from them.
#[derive(Debug, Clone, Copy)]
struct LeftDirectory {
    number: u64,
    /// The position of the newest checkpoint at that time; `None` if there was none.
    newest: Option<RunPosition>,
}

impl RunNumbers {
    /// The most bytes of the file: two numbers and a position.
    const MAX_BYTES: u64 = 80;

    /// Reads the numbers in a run's file.
    fn read(file: &Location) -> Result<Self, CheckpointError> {
        let text = file.read_file(Self::MAX_BYTES)?;
        let parsed = std::str::from_utf8(&text).ok().and_then(Self::parse);
        parsed.ok_or_else(|| CheckpointError::NotAMemoryTier {
            path: file.name().to_owned(),
        })
    }

    /// Reads the numbers: `CURRENT`, `CURRENT LEFT`, or `CURRENT LEFT BRANCH STEP`.
    fn parse(text: &str) -> Option<Self> {
        let words: Vec<&str> = text.split(' ').collect();
        let number = |text: &str| u64::from_str_radix(text, 16).ok();
        let current = number(words[0])?;
        let left = match words[1..] {
            [] => None,
            [left] => Some(LeftDirectory {
                number: number(left)?,
                newest: None,
            }),
            [left, branch, step] => Some(LeftDirectory {
                number: number(left)?,
                newest: Some(RunPosition {
                    branch: branch.parse().ok()?,
                    step: step.parse().ok()?,
                }),
            }),
            _ => return None,
        };
        Some(RunNumbers { current, left })
    }

    /// Writes the numbers to a run's file.
    fn write(self, file: &Location) -> Result<(), CheckpointError> {
        let mut text = format!("{:016x}", self.current);
        if let Some(left) = self.left {
            text.push_str(&format!(" {:016x}", left.number));
            if let Some(RunPosition { branch, step }) = left.newest {
                text.push_str(&format!(" {branch} {step}"));
            }
        }
        Ok(Durable::new().replace_file(file, text.as_bytes())?)
    }
}

/// Gives a run another number in the memory tier, if it has one, because it is about to save
/// without its tier: steps that are there now would be newer than the checkpoint that is saved.
pub(crate) fn leave_tier(run: &Location) -> Result<(), CheckpointError> {
    let file = run.join(RUN_FILE);
    if !file.exists()? {
        return Ok(());
    }
    let numbers = RunNumbers::read(&file)?;
    match numbers.left {
        // The tier has not been used since.
        Some(_) => Ok(()),
        None => RunNumbers {
            current: random_number(),
            left: Some(LeftDirectory {
                number: numbers.current,
                newest: newest_position(run)?,
            }),
        }
        .write(&file),
    }
}

/// Returns the position of the newest checkpoint of a run; `None` if it has none.
fn newest_position(run: &Location) -> Result<Option<RunPosition>, CheckpointError> {
    let (committed, _) = list_branches(run)?;
    Ok(committed.last().map(CheckpointOnBranch::position))
}

/// Removes the number of a directory that the run has left, once that directory is gone.
pub(super) fn forget_left(run: &Location) -> Result<(), CheckpointError> {
    let file = run.join(RUN_FILE);
    let numbers = RunNumbers::read(&file)?;
    RunNumbers {
        left: None,
        ..numbers
    }
    .write(&file)
}

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
    /// The directory on this host that the run has left, if it has left one.
    pub(super) left: Option<Location>,
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
        // Step 1: rank 0 finds the name of the run's directory, and that of one it has left.
        let mut names = Ok(None);
        if group.rank() == 0 {
            names = names_in_tier(run, create).map(Some);
        }
        let found: Option<(String, Option<String>)> =
            broadcast_result(&group, operation, names, 0)?;
        let Some((name, left_name)) = found else {
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
            left: left_name.map(|name| directory.join(name)),
        }))
    }
}

/// Returns the name of a run's directory in the tier; `None` if it has none.
pub(super) fn name_in_tier(run: &Location) -> Result<Option<String>, CheckpointError> {
    Ok(names_in_tier(run, false)?.map(|(name, _)| name))
}

/// Returns the name of a run's directory in the tier, and that of the directory that it has left
/// there, if it has. A run that has no number yet gets one with `create`; without, this returns
/// `None`.
fn names_in_tier(
    run: &Location,
    create: bool,
) -> Result<Option<(String, Option<String>)>, CheckpointError> {
    let file = run.join(RUN_FILE);
    if !file.exists()? {
        if !create {
            return Ok(None);
        }
        create_number_file_once(&file)?;
    }
    let mut numbers = RunNumbers::read(&file)?;
    if let Some(left) = numbers.left
        && left.newest == newest_position(run)?
    {
        // The save without the tier has failed, so the run still continues from what is there.
        numbers = RunNumbers {
            current: left.number,
            left: None,
        };
        numbers.write(&file)?;
    }
    let name_of = |number| directory_name(run, number);
    let left_name = numbers.left.map(|left| name_of(left.number));
    Ok(Some((name_of(numbers.current), left_name)))
}

/// Returns the name that a run's directory in the tier has with this number: a part of the name of
/// its own directory, for those who look into the tier, and a hash of the number and the path. (A
/// copy of the run's directory has the same number, but is another run.)
fn directory_name(run: &Location, number: u64) -> String {
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
    format!("{readable_part}-{hash:016x}")
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

/// Reads the number in a file. A missing file is created with a random number.
fn read_or_make_number(file: &Location) -> Result<u64, CheckpointError> {
    if !file.exists()? {
        create_number_file_once(file)?;
    }
    let text = file.read_file(NUMBER_BYTES)?;
    std::str::from_utf8(&text)
        .ok()
        .and_then(|text| u64::from_str_radix(text, 16).ok())
        .ok_or_else(|| CheckpointError::NotAMemoryTier {
            path: file.name().to_owned(),
        })
}

/// Creates a file with a new random number, in one step. If several ranks create it at the same
/// time, one of them succeeds, and that is no error on the others.
fn create_number_file_once(file: &Location) -> Result<(), CheckpointError> {
    match create_number_file(file) {
        Ok(()) | Err(FileError::Exists { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Creates a file with a new random number, in one step. If another process has written one before,
/// that is the error [`FileError::Exists`].
fn create_number_file(file: &Location) -> Result<(), FileError> {
    let text = format!("{:016x}", random_number());
    let staging = Durable::new().prepare(file, false)?;
    let new_file = staging.create_single(NUMBER_BYTES)?;
    new_file.write_at(0, text.as_bytes())?;
    new_file.finish()?;
    staging.commit_single()
}

/// Returns a random number.
fn random_number() -> u64 {
    // The standard library seeds its hashers with random numbers of the system.
    RandomState::new().build_hasher().finish()
}
