//! The symbolic links in a run's folder: one such as `best` or `latest` may be the only name by which a checkpoint is
//! known that somebody needs.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::FileError;
use crate::storage::location::Location;

/// The links in a folder, each with the file or directory that it leads to.
#[derive(Debug, Default)]
pub struct LinksInFolder {
    /// Names, and targets without any links on the way.
    links: Vec<(String, PathBuf)>,
}

impl LinksInFolder {
    /// Finds the links in the folder of a checkpoint. A link that leads nowhere needs nothing, and object stores have
    /// no links.
    ///
    /// # Errors
    /// A folder that cannot be listed.
    pub fn beside(checkpoint: &Location) -> Result<Self, FileError> {
        let Some(folder) = checkpoint.local().and_then(Path::parent) else { return Ok(Self::default()) };
        let mut links = Vec::new();
        for entry in fs::read_dir(folder).map_err(FileError::io("list", folder))? {
            let link = entry.map_err(FileError::io("list", folder))?.path();
            if link.is_symlink()
                && let Ok(target) = link.canonicalize()
            {
                links.push((link.file_name().unwrap_or_default().to_string_lossy().into_owned(), target));
            }
        }
        links.sort();
        Ok(LinksInFolder { links })
    }

    /// Returns the name of a link that leads to a checkpoint, or to a file in it.
    #[must_use]
    pub fn leading_to(&self, checkpoint: &Location) -> Option<&str> {
        let place = checkpoint.local()?.canonicalize().ok()?;
        self.links.iter().find(|(_, target)| target.starts_with(&place)).map(|(name, _)| name.as_str())
    }
}
