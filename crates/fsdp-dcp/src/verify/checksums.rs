//! Checking the zip checksums of DCP items and torch archives, for checkpoints without an integrity
//! file.

use std::collections::BTreeSet;

use super::report::{Problem, Report, corrupt_at, with_causes};
use crate::error::{FileError, FormatError};
use crate::formats::checkpoint::Checkpoint;
use crate::kind::kind_of;
use crate::metadata::StorageInfo;
use crate::storage::checked_directory::CheckedDirectory;
use crate::storage::read_at::{ReadAt, Window};
use crate::threads::on_each;
use crate::torch::zip::{Deflated, Directory, Kept, Record};

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
            report.add(Some(fqn), Some(stored), &error);
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
            report.problems.push(Problem {
                fqn: None,
                file: Some(name.to_owned()),
                offset: corrupt_at(&error),
                error: with_causes(&error),
                kind: kind_of(&error),
            });
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

/// Checks the checksum of each record of the item that lies at `stored` in a file. The first one
/// that differs is the error.
fn check_records(
    file: &dyn ReadAt,
    stored: &StorageInfo,
    threads: usize,
    progress: Option<&(dyn Fn(u64) + Sync)>,
) -> Result<(), FormatError> {
    let item = Window::new(file, stored.offset, stored.length)?;
    // Items of the SAFETENSORS format are no archives, and have no checksums.
    let Ok(archive) = Directory::read(&item).or_else(|_| Directory::read_rootless(&item)) else {
        return Ok(());
    };
    let records: Vec<(&String, &Record)> = archive.records.iter().collect();
    let checked = on_each(&records, threads, |(name, record)| {
        let start = archive.data_offset(&item, name, record)?;
        // The range is read even where there is no checksum, so that a range that cannot be read is
        // found.
        let crc = if record.is_deflated {
            crc(
                &Deflated::new(start, record, &Kept::default()).of(&item),
                0,
                record.length,
                progress,
            )?
        } else {
            crc(&item, start, record.length, progress)?
        };
        // A checksum of 0 says nothing: some writers leave it so, and torch accepts that.
        if record.crc != 0 && record.crc != crc {
            return Err(FormatError::Corrupt {
                file: stored.relative_path.clone(),
                offset: stored.offset + start,
                end: stored.offset + start + record.stored,
            });
        }
        Ok(())
    });
    checked.into_iter().collect()
}

/// Computes the checksum of a range.
fn crc(
    item: &dyn ReadAt,
    start: u64,
    length: u64,
    progress: Option<&(dyn Fn(u64) + Sync)>,
) -> Result<u32, FormatError> {
    let mut hasher = crc32fast::Hasher::new();
    let mut buffer = Vec::new();
    for at in (start..start + length).step_by(1 << 20) {
        buffer.resize((start + length - at).min(1 << 20) as usize, 0);
        item.read_exact_at(at, &mut buffer)?;
        hasher.update(&buffer);
        if let Some(progress) = progress {
            progress(buffer.len() as u64);
        }
    }
    Ok(hasher.finalize())
}
