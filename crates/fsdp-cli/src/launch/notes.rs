//! The directory in which ranks note the ranks because of which they failed.

use std::path::PathBuf;

use tempfile::TempDir;

/// Makes the directory. Returns `None` where none can be made: the notes are a help that no job
/// depends on.
pub(super) fn directory() -> Option<TempDir> {
    let places = [
        std::env::temp_dir(),
        PathBuf::from("/tmp"),
        PathBuf::from("/dev/shm"),
    ];
    let made = places
        .iter()
        .find_map(|place| tempfile::tempdir_in(place).ok());
    if made.is_none() {
        tracing::warn!(
            "no directory for temporary files: a rank that fails because of another one cannot note that"
        );
    }
    made
}
