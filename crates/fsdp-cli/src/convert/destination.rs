//! The destination on the command line, and the check that it may be written.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail, ensure};
use fsdp_formats::checkpoint::{self, Checkpoint};
use fsdp_formats::reader::OpenOptions;
use fsdp_formats::{FileError, Location};
use fsdp_layout::{ErrorKind, Failure as _};
use fsdp_tools::convert::{ConfigEdits, OutputFormat};
use fsdp_tools::tensor_parallel::TensorParallelPlan;

use super::arguments::{TargetArguments, WriteArguments};
use crate::failure::{exists_already_error, not_replaceable_error, usage_error};
use crate::text::choice_name;

/// The place to write to, and the options of writing.
pub(super) struct Destination<'a> {
    pub(super) path: &'a Location,
    pub(super) target: OutputFormat,
    /// The name of the format on the command line.
    pub(super) format_name: String,
    pub(super) drop_opaque: bool,
    /// The directory whose configuration and tokenizer are copied.
    pub(super) model_directory: Option<&'a Location>,
    /// The parts that tensor-parallel ranks get.
    pub(super) tensor_parallel_plan: Option<TensorParallelPlan>,
    /// The settings that a copied `config.json` gets.
    pub(super) config: ConfigEdits,
    pub(super) writing: &'a WriteArguments,
}

impl<'a> Destination<'a> {
    /// Makes the destination of a command that writes any format.
    ///
    /// # Errors
    /// Options that the format does not have.
    pub(super) fn new(
        path: &'a Location,
        target: &'a TargetArguments,
        writing: &'a WriteArguments,
    ) -> Result<Self> {
        Ok(Destination {
            path,
            target: target.output_format()?,
            format_name: choice_name(&target.to),
            drop_opaque: target.drop_opaque,
            model_directory: target.model_directory()?,
            tensor_parallel_plan: None,
            config: ConfigEdits::default(),
            writing,
        })
    }

    /// Opens the source, and checks that the destination does not overlap it, and is free or may be
    /// replaced.
    ///
    /// # Errors
    /// The source cannot be opened, or the destination cannot be written.
    pub(super) fn open_source(&self, source: &Location) -> Result<Box<dyn Checkpoint>> {
        self.open_selected(source, &|_| true)
    }

    /// Opens a source as [`Destination::open_source`] does, of which only some keys are wanted.
    ///
    /// # Errors
    /// The same as [`Destination::open_source`].
    pub(super) fn open_selected(
        &self,
        source: &Location,
        is_wanted: checkpoint::KeyFilter<'_>,
    ) -> Result<Box<dyn Checkpoint>> {
        let options = OpenOptions { verify: true };
        let opened = checkpoint::open_selected(source, options, is_wanted)?;
        self.path.check_target()?;
        let is_taken = self.path.exists()?;
        let path = self.path.to_string();
        if is_within(source, self.path) || is_within(self.path, source) {
            bail!(usage_error(
                format!(
                    "`{path}` and `{source}` overlap: a checkpoint cannot be written over its source"
                ),
                "choose a destination outside the source",
            ));
        }
        if self.is_one_file() && path.ends_with('/') {
            let format_name = &self.format_name;
            bail!(usage_error(
                format!(
                    "`{path}` is the name of a directory, and `--to {format_name}` writes one file"
                ),
                "leave out the slash at its end, or add the name of the file",
            ));
        }
        if is_taken {
            let hint = "choose another destination; `--overwrite` replaces a checkpoint";
            ensure!(self.writing.overwrite, exists_already_error(&path, hint));
            ensure!(self.is_replaceable()?, not_replaceable_error(&path));
        }
        Ok(opened)
    }

    /// Returns `true` if `--overwrite` may replace what is there, so that a mistake does not delete
    /// other files. A file may be replaced if it is empty or of a known format, a directory if it
    /// is empty or holds nothing but a checkpoint.
    ///
    /// # Errors
    /// The destination cannot be read.
    fn is_replaceable(&self) -> Result<bool> {
        let is_file = match self.path.local() {
            Some(path) => path.is_file(),
            None => self.path.is_file()?,
        };
        if is_file != self.is_one_file() {
            return Ok(false);
        }
        if is_file {
            let opened = checkpoint::open(self.path, OpenOptions { verify: false });
            let is_of_no_format =
                opened.is_err_and(|error| error.kind() == ErrorKind::UnsupportedVersion);
            // A file of no known format may be something else than a checkpoint, unless it is
            // empty.
            return Ok(!is_of_no_format || self.path.read_file(0).is_ok());
        }
        // In an object store only single objects can be replaced. For all else the conversion
        // returns an error.
        if self.path.local().is_none() {
            return Ok(true);
        }
        match checkpoint::check_replaceable(self.path) {
            Err(FileError::NotReplaceable { .. }) => Ok(false),
            outcome => {
                outcome?;
                Ok(true)
            }
        }
    }

    /// Returns `true` for a format that is one file.
    const fn is_one_file(&self) -> bool {
        matches!(
            self.target,
            OutputFormat::SafetensorsFile | OutputFormat::Torch
        )
    }

    /// Returns the name of the file for values that the format cannot hold; `None` for a format
    /// that can hold all.
    pub(super) fn values_file(&self) -> Option<String> {
        match self.target {
            OutputFormat::SafetensorsFile => {
                let file = self.path.name().file_name()?;
                Some(checkpoint::values_beside(&file.to_string_lossy()))
            }
            OutputFormat::SafetensorsDirectory { .. } | OutputFormat::SafetensorsShards { .. } => {
                Some(checkpoint::VALUES_FILE.to_owned())
            }
            _ => None,
        }
    }
}

/// Returns `true` if a place is another one, or is in it.
fn is_within(inner: &Location, outer: &Location) -> bool {
    match (inner.local(), outer.local()) {
        (Some(inner), Some(outer)) => match (resolve(inner), resolve(outer)) {
            (Some(inner), Some(outer)) => inner.starts_with(outer),
            _ => false,
        },
        (None, None) => inner.name().starts_with(outer.name()),
        _ => false,
    }
}

/// Returns the absolute path of a place; `None` if it cannot be resolved. If the place does not
/// exist yet, the closest directory above it that exists is resolved.
fn resolve(path: &Path) -> Option<PathBuf> {
    path.ancestors().find_map(|ancestor| {
        // The path of the current directory is empty.
        let place = if ancestor.as_os_str().is_empty() {
            Path::new(".")
        } else {
            ancestor
        };
        let tail = path.strip_prefix(ancestor).ok()?;
        Some(place.canonicalize().ok()?.join(tail))
    })
}
