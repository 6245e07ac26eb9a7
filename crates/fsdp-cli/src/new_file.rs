//! Files that commands write beside checkpoints, such as pictures and pages. Each appears only when
//! it is complete.

use std::path::Path;

use anyhow::Result;
use fsdp_formats::storage::Durable;

use crate::failure::{CommandError, exists_already_error, not_replaceable_error};

/// Checks that a file can be written to `path`: nothing is there or, with `overwrite`, a file.
///
/// # Errors
/// Anything else is there.
pub(crate) fn check_free(path: &Path, overwrite: bool) -> Result<(), CommandError> {
    let Ok(metadata) = path.symlink_metadata() else {
        return Ok(());
    };
    let path = path.display().to_string();
    if !overwrite {
        return Err(exists_already_error(&path));
    }
    if metadata.is_file() {
        Ok(())
    } else {
        Err(not_replaceable_error(&path))
    }
}

/// Writes a file, which appears whole or not at all.
///
/// # Errors
/// Something is there that may not be replaced; the storage's errors.
pub(crate) fn write_file(path: &Path, bytes: &[u8], overwrite: bool) -> Result<()> {
    // It is written under another name first, so a reader sees all of it or nothing.
    let staging = Durable::new().prepare(path, overwrite)?;
    let file = staging.create_single(bytes.len() as u64)?;
    file.write_at(0, bytes)?;
    file.finish()?;
    Ok(staging.commit_single()?)
}
