//! DeepSpeed's directory in the folder of another trainer.

use crate::deepspeed;
use crate::error::{FileError, FormatError};
use crate::storage::backend::Links;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::location::Location;

/// The file that holds the name of the directory.
const LATEST: &str = "latest";
/// The most bytes of such a file.
const MAX_LATEST_BYTES: u64 = 4096;
/// The beginning of the names that DeepSpeed gives to its directories.
const STEP_PREFIX: &str = "global_step";

/// Returns the name of the directory of DeepSpeed's shards among the names in a folder: the one
/// that `latest` names, or else the only one that has a name of DeepSpeed's; `None` if there is
/// none.
///
/// # Errors
/// A `latest` that names no directory in the folder; several directories, and no `latest`.
pub(super) fn find_directory(
    location: &Location,
    names: &[String],
) -> Result<Option<String>, FileError> {
    if names.iter().any(|name| name == LATEST) && !location.join(LATEST).is_directory()? {
        let directory = CheckedDirectory::open(location, false, Links::Follow)?;
        let text = directory.read_checked(LATEST, MAX_LATEST_BYTES)?;
        let name = String::from_utf8_lossy(&text).trim().to_owned();
        if name.is_empty() || name.contains(['/', '\\', '\0']) || name == "." || name == ".." {
            let reason = "it is no name of a directory beside it";
            let source = FormatError::malformed("name of a checkpoint", reason);
            return Err(directory.file_error(LATEST, source));
        }
        if !location.join(&name).is_directory()? {
            return Err(FileError::MissingFiles {
                path: location.name().to_owned(),
                files: vec![name],
            });
        }
        return Ok(Some(name));
    }
    let mut step_names = Vec::new();
    for name in names {
        let is_step = name.strip_prefix(STEP_PREFIX).is_some_and(|step| {
            !step.is_empty() && step.bytes().all(|digit| digit.is_ascii_digit())
        });
        if is_step
            && location.join(name).is_directory()?
            && deepspeed::is_there(&location.join(name).names()?)
        {
            step_names.push(name.clone());
        }
    }
    if let [first, second, ..] = &step_names[..] {
        let reason =
            format!("it has both `{first}` and `{second}`, and no `{LATEST}` that names one");
        let source = FormatError::malformed("folder of checkpoints", reason);
        return Err(source.in_file(location.name()));
    }
    Ok(step_names.pop())
}
