//! Files that commands write beside checkpoints, such as pictures and pages. Each appears only when
//! it is complete.

use std::path::Path;

use anyhow::Result;
use fsdp_formats::storage::Durable;

use crate::failure::{CommandError, exists_already, not_replaceable};

/// Checks that a file can be written to `path`: nothing is there or, with `overwrite`, a file.
///
/// # Errors
/// Anything else is there.
pub(crate) fn check_free(path: &Path, overwrite: bool) -> Result<(), CommandError> {
    let Ok(found) = path.symlink_metadata() else {
        return Ok(());
    };
    let path = path.display().to_string();
    if !overwrite {
        return Err(exists_already(&path));
    }
    if found.is_file() {
        Ok(())
    } else {
        Err(not_replaceable(&path))
    }
}

/// Writes a file.
///
/// # Errors
/// Something is there that may not be replaced; the storage's errors.
pub(crate) fn write(path: &Path, bytes: &[u8], overwrite: bool) -> Result<()> {
    // It is written under another name first, so a reader sees all of it or nothing.
    let staging = Durable::new().prepare(path, overwrite)?;
    let file = staging.create_single(bytes.len() as u64)?;
    file.write_at(0, bytes)?;
    file.finish()?;
    Ok(staging.commit_single()?)
}
