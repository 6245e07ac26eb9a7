//! The symbolic links in a run's folders: one such as `best` or `latest` may be the only name by
//! which a checkpoint is known that somebody needs.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{FileError, IoOutcome as _};
use crate::storage::location::Location;

/// The links in a folder, or in several, each with the file or directory that it leads to.
#[derive(Debug, Default)]
pub struct LinksInFolder {
    /// Names, and targets without any links on the way.
    links: Vec<(String, PathBuf)>,
}

impl LinksInFolder {
    /// Finds the links in the folder of a checkpoint. A link that leads nowhere needs nothing, and
    /// object stores have no links.
    ///
    /// # Errors
    /// A folder that cannot be listed.
    pub fn beside(checkpoint: &Location) -> Result<Self, FileError> {
        match checkpoint.local().and_then(Path::parent) {
            Some(folder) => Self::in_folders(folder, &[folder]),
            None => Ok(Self::default()),
        }
    }

    /// Finds the links in the folder of a run, in the folder of one of its checkpoints, and in the
    /// folders between. The name of a link is its path below the run's folder.
    ///
    /// # Errors
    /// A folder that cannot be listed.
    pub fn of_run(run: &Location, checkpoint: &Location) -> Result<Self, FileError> {
        let (Some(run), Some(checkpoint)) = (run.local(), checkpoint.local()) else {
            return Ok(Self::default());
        };
        let folders: Vec<&Path> = checkpoint
            .ancestors()
            .skip(1)
            .take_while(|folder| folder.starts_with(run))
            .collect();
        Self::in_folders(run, &folders)
    }

    /// Finds the links in folders that are below `root`, or are `root`.
    fn in_folders(root: &Path, folders: &[&Path]) -> Result<Self, FileError> {
        let mut links = Vec::new();
        for &folder in folders {
            for entry in fs::read_dir(folder).during("list", folder)? {
                let link = entry.during("list", folder)?.path();
                // A link that leads nowhere protects nothing.
                if link.is_symlink()
                    && let Ok(target) = link.canonicalize()
                {
                    let name = link
                        .strip_prefix(root)
                        .unwrap_or(&link)
                        .to_string_lossy()
                        .into_owned();
                    links.push((name, target));
                }
            }
        }
        links.sort();
        Ok(LinksInFolder { links })
    }

    /// Returns the name of a link that leads to a checkpoint, or to a file in it; `None` if no link
    /// does.
    #[must_use]
    pub fn leading_to(&self, checkpoint: &Location) -> Option<&str> {
        let checkpoint_path = checkpoint.local()?.canonicalize().ok()?;
        self.links
            .iter()
            .find(|(_, target)| target.starts_with(&checkpoint_path))
            .map(|(name, _)| name.as_str())
    }
}
