//! Checking the zip checksums of DCP items and torch archives, for checkpoints without an integrity
//! file.

use std::collections::BTreeSet;

use fsdp_formats::checkpoint::Checkpoint;
use fsdp_formats::complete::Problem;
use fsdp_formats::internals::{check_records, on_each};
use fsdp_formats::metadata::StorageInfo;
use fsdp_formats::storage::{CheckedDirectory, ReadAt};
use fsdp_formats::{FileError, FormatError};

use super::report::Report;

/// Checks the zip checksums of all DCP items.
pub(super) fn check_items(
    checkpoint: &dyn Checkpoint,
    report: &mut Report,
    threads: usize,
    progress: Option<&(dyn Fn(u64) + Sync)>,
) {
    let directory = checkpoint.directory();
    let items = checkpoint
        .metadata()
        .stored()
        .filter(|(_, _, stored)| stored.transforms.is_empty());
    let items: Vec<(&str, &StorageInfo)> = items.map(|(fqn, _, stored)| (fqn, stored)).collect();
    let checked = on_each(&items, threads, |(fqn, stored)| {
        check_item(directory, fqn, stored, progress)
    });
    for ((fqn, stored), checked) in items.into_iter().zip(checked) {
        if let Err(error) = checked {
            report.add(fqn, Some(stored), &error);
        }
    }
}

/// Checks the zip checksums of all files that are archives: of pickles, storages and arrays.
pub(super) fn check_files(
    checkpoint: &dyn Checkpoint,
    report: &mut Report,
    threads: usize,
    progress: Option<&(dyn Fn(u64) + Sync)>,
) {
    let directory = checkpoint.directory();
    let mut names: BTreeSet<&str> = checkpoint
        .metadata()
        .stored()
        .map(|(_, _, stored)| stored.relative_path.as_str())
        .collect();
    if checkpoint.format().is_file() {
        names.extend(checkpoint.path().file_name().and_then(|name| name.to_str()));
    }
    for name in names {
        let checked = directory.file(name).and_then(|file| {
            let all = StorageInfo {
                relative_path: name.to_owned(),
                offset: 0,
                length: file.len(),
                transforms: Vec::new(),
            };
            match is_archive(&*file) {
                Ok(true) => check_records(&*file, &all, threads, progress),
                Ok(false) => Ok(()),
                Err(error) => Err(error),
            }
            .map_err(|source| directory.file_error(name, source))
        });
        if let Err(error) = checked {
            report.problems.push(Problem::with_file(name, &error));
        }
    }
}

/// Returns `true` if a file begins as an archive does.
fn is_archive(file: &dyn ReadAt) -> Result<bool, FormatError> {
    let mut start = [0; 2];
    if file.len() < start.len() as u64 {
        return Ok(false);
    }
    file.read_exact_at(0, &mut start)?;
    Ok(start == *b"PK")
}

/// Checks the checksum of each record of one item.
fn check_item(
    directory: &CheckedDirectory,
    fqn: &str,
    stored: &StorageInfo,
    progress: Option<&(dyn Fn(u64) + Sync)>,
) -> Result<(), FileError> {
    let file = directory.file(&stored.relative_path)?;
    check_records(&*file, stored, 1, progress).map_err(|source| FileError::Item {
        fqn: fqn.to_owned(),
        path: directory.path().join(&stored.relative_path),
        offset: stored.offset,
        source,
    })
}
