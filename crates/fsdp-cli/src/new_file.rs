//! Files that commands write beside checkpoints, such as pictures and pages. Each appears only when
//! it is complete.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use fsdp_formats::Location;
use fsdp_formats::storage::StagedFile;

use crate::failure::{exists_already_error, not_of_content_error};
use crate::stop;

/// The content of a file that a command writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Content {
    /// An HTML page.
    Page,
    /// An SVG picture.
    Picture,
    /// A NumPy array.
    Array,
}

impl Content {
    /// Returns the words for messages.
    const fn name(self) -> &'static str {
        match self {
            Content::Page => "an HTML page",
            Content::Picture => "an SVG picture",
            Content::Array => "a NumPy array",
        }
    }

    /// Returns the bytes with which such files begin.
    const fn start(self) -> &'static [u8] {
        match self {
            Content::Page => b"<!doctype html>",
            Content::Picture => b"<svg",
            Content::Array => b"\x93NUMPY",
        }
    }
}

/// A file that a command is to write.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewFile<'a> {
    pub(crate) path: &'a Path,
    pub(crate) content: Content,
    /// The value of `--overwrite`; `None` for a command without that option.
    pub(crate) overwrite: Option<bool>,
}

impl NewFile<'_> {
    /// Checks that the file can be written: nothing is there or, with `--overwrite`, a file of the
    /// same content, or an empty one. So a mistake does not delete a checkpoint.
    ///
    /// # Errors
    /// Anything else is there, or what is there cannot be read; a name that is too long.
    pub(crate) fn check(&self) -> Result<()> {
        Location::from(self.path).check_target()?;
        let Ok(metadata) = self.path.symlink_metadata() else {
            return Ok(());
        };
        let path = self.path.display().to_string();
        match self.overwrite {
            Some(true) if metadata.is_file() && self.has_same_content()? => Ok(()),
            Some(true) => Err(not_of_content_error(&path, self.content.name()).into()),
            overwrite => {
                let hint = match overwrite {
                    Some(_) => "choose another destination; `--overwrite` replaces such a file",
                    None => "choose another destination",
                };
                Err(exists_already_error(&path, hint).into())
            }
        }
    }

    /// Returns `true` if the file that is there begins as this one will, or is empty.
    fn has_same_content(&self) -> Result<bool> {
        let start = self.content.start();
        let mut found = Vec::with_capacity(start.len());
        File::open(self.path)
            .and_then(|file| file.take(start.len() as u64).read_to_end(&mut found))
            .with_context(|| format!("failed to read `{}`", self.path.display()))?;
        Ok(found.is_empty() || found == start)
    }

    /// Writes the file, which appears whole or not at all.
    ///
    /// # Errors
    /// Something else is there: see [`Self::check`]. The file cannot be written, or a signal has
    /// stopped that.
    pub(crate) fn write(&self, bytes: &[u8]) -> Result<()> {
        self.write_with(bytes.len() as u64, |file| Ok(file.write_at(0, bytes)?))
    }

    /// Writes the file by a function that writes all of its `length` bytes. It appears whole or not
    /// at all.
    ///
    /// # Errors
    /// The errors of [`Self::write`], and those of `write_all`.
    pub(crate) fn write_with(
        &self,
        length: u64,
        write_all: impl FnOnce(&dyn StagedFile) -> Result<()>,
    ) -> Result<()> {
        self.check()?;
        let place = Location::from(self.path);
        stop::write_unless_stopped(&place, |durable| {
            // It is written under another name first, so a reader sees all of it or nothing.
            let staging = durable.prepare(&place, self.overwrite == Some(true))?;
            let file = staging.create_single(length)?;
            write_all(&*file)?;
            file.finish()?;
            Ok(staging.commit_single()?)
        })
    }
}
