//! Checking the zip checksums of DCP items and torch archives, for checkpoints without an integrity
//! file.

use std::collections::BTreeSet;

use fsdp_formats::complete::Problem;
use fsdp_formats::internals::{check_records, on_each};
use fsdp_formats::metadata::StorageInfo;
use fsdp_formats::storage::ReadAt;
use fsdp_formats::{FileError, FormatError};

use super::Verification;

impl Verification<'_> {
    /// Checks the zip checksums of all DCP items.
    pub(super) fn check_items(&mut self) {
        let checkpoint = self.checkpoint;
        // A transformed item is no archive in the file.
        let items: Vec<(&str, &StorageInfo)> = checkpoint
            .metadata()
            .stored()
            .filter(|(_, _, stored)| stored.transforms.is_empty())
            .map(|(fqn, _, stored)| (fqn, stored))
            .collect();
        let checked = on_each(&items, self.threads, |(fqn, stored)| {
            self.check_item(fqn, stored)
        });
        for ((fqn, stored), checked) in items.into_iter().zip(checked) {
            if let Err(error) = checked {
                self.add_problem(fqn, Some(stored), &error);
            }
        }
    }

    /// Checks the checksum of each record of one item.
    fn check_item(&self, fqn: &str, stored: &StorageInfo) -> Result<(), FileError> {
        let directory = self.checkpoint.directory();
        let file = directory.file(&stored.relative_path)?;
        check_records(&*file, stored, 1, self.progress).map_err(|source| FileError::Item {
            fqn: fqn.to_owned(),
            path: directory.path().join(&stored.relative_path),
            offset: stored.offset,
            source,
        })
    }

    /// Checks the zip checksums of all files that are archives: of pickles, storages and arrays.
    pub(super) fn check_files(&mut self) {
        let checkpoint = self.checkpoint;
        let mut names: BTreeSet<&str> = checkpoint
            .metadata()
            .stored()
            .map(|(_, _, stored)| stored.relative_path.as_str())
            .collect();
        // A file without tensors has a pickle all the same.
        if checkpoint.format().is_file() {
            names.extend(checkpoint.path().file_name().and_then(|name| name.to_str()));
        }
        for name in names {
            if let Err(error) = self.check_file(name) {
                let problem = Problem::of_file(name, &error);
                self.report.problems.push(problem);
            }
        }
    }

    /// Checks the checksum of each record of a file, if it is an archive.
    fn check_file(&self, name: &str) -> Result<(), FileError> {
        let directory = self.checkpoint.directory();
        let file = directory.file(name)?;
        let whole_file = StorageInfo {
            relative_path: name.to_owned(),
            offset: 0,
            length: file.len(),
            transforms: Vec::new(),
        };
        let checked = match is_archive(&*file) {
            Ok(true) => check_records(&*file, &whole_file, self.threads, self.progress),
            Ok(false) => Ok(()),
            Err(error) => Err(error),
        };
        checked.map_err(|source| directory.file_error(name, source))
    }
}

/// Returns `true` if a file begins as a zip archive does.
fn is_archive(file: &dyn ReadAt) -> Result<bool, FormatError> {
    let mut start = [0; 2];
    if file.len() < start.len() as u64 {
        return Ok(false);
    }
    file.read_exact_at(0, &mut start)?;
    Ok(start == *b"PK")
}
