//! Checking the zip checksums of DCP items and torch archives, for checkpoints without an integrity
//! file.

use std::collections::BTreeSet;

use fsdp_formats::FileError;
use fsdp_formats::complete::Problem;
use fsdp_formats::internals::{check_records, check_transformed, is_archive, on_each};
use fsdp_formats::metadata::StorageInfo;
use fsdp_formats::storage::ReadAt as _;
use fsdp_layout::TensorBox;

use super::Verification;

impl Verification<'_> {
    /// Checks the zip checksums of all DCP items.
    pub(super) fn check_items(&mut self) {
        let checkpoint = self.checkpoint;
        let items: Vec<_> = checkpoint.metadata().stored().collect();
        let checked = on_each(&items, self.threads, |&(fqn, bounds, stored)| {
            self.check_item(fqn, bounds, stored)
        });
        for ((fqn, _, stored), checked) in items.into_iter().zip(checked) {
            if let Err(error) = checked {
                self.add_problem(fqn, Some(stored), &error);
            }
        }
    }

    /// Checks the checksum of each record of one item.
    fn check_item(
        &self,
        fqn: &str,
        bounds: Option<&TensorBox>,
        stored: &StorageInfo,
    ) -> Result<(), FileError> {
        let directory = self.checkpoint.directory();
        let file = directory.file(&stored.relative_path)?;
        let checked = if stored.transforms.is_empty() {
            check_records(&*file, stored, 1, self.progress)
        } else {
            let tensor = self.checkpoint.metadata().tensor(fqn);
            let dtype = tensor.map(|tensor| tensor.properties.dtype);
            check_transformed(&*file, stored, bounds.zip(dtype))
        };
        checked.map_err(|source| FileError::Item {
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
            let Err(error) = self.check_file(name) else {
                continue;
            };
            let problem = Problem::of_file(name, &error);
            let keys = match problem.offset {
                Some(offset) => self.keys_of_record(name, offset),
                None => Vec::new(),
            };
            if keys.iter().any(|key| self.named_keys.contains(key)) {
                continue;
            }
            self.report.problems.push(Problem {
                fqn: keys.first().cloned(),
                ..problem
            });
            self.named_keys.extend(keys);
        }
    }

    /// Returns the keys of the tensors whose elements lie in the record of a file that begins at
    /// this offset.
    fn keys_of_record(&self, name: &str, data_offset: u64) -> Vec<String> {
        /// A local header, without the name and the extra field, whose lengths are at its end.
        const HEADER_BYTES: usize = 30;
        let stored = self.checkpoint.metadata().stored();
        let before: Vec<(&str, u64)> = stored
            .filter(|(_, _, stored)| stored.relative_path == name && stored.offset < data_offset)
            .map(|(fqn, _, stored)| (fqn, stored.offset))
            .collect();
        let Some(header_offset) = before.iter().map(|&(_, offset)| offset).max() else {
            return Vec::new();
        };
        let mut header = [0; HEADER_BYTES];
        let file = self.checkpoint.directory().file(name);
        let read = file.map(|file| file.read_exact_at(header_offset, &mut header));
        let [.., name_0, name_1, extra_0, extra_1] = header;
        let lengths = [[name_0, name_1], [extra_0, extra_1]].map(u16::from_le_bytes);
        let header_bytes = HEADER_BYTES as u64 + lengths.map(u64::from).iter().sum::<u64>();
        if !matches!(read, Ok(Ok(()))) || header_offset + header_bytes != data_offset {
            return Vec::new();
        }
        let of_record = before
            .iter()
            .filter(|&&(_, offset)| offset == header_offset);
        of_record.map(|&(fqn, _)| fqn.to_owned()).collect()
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
