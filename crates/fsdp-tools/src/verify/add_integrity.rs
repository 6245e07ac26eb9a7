//! Making an integrity file for a checkpoint that has none, from the bytes as they are now.

use std::collections::{BTreeMap, BTreeSet};

use fsdp_formats::checkpoint::{ExtraFiles, Format, open, values_beside};
use fsdp_formats::digest::digest;
use fsdp_formats::internals::{
    Directory, FileIntegrity, INTEGRITY_FILE, Integrity, Window, block_length, default_threads,
    integrity_beside,
};
use fsdp_formats::reader::OpenOptions;
use fsdp_formats::storage::{Durable, ReadAt};
use fsdp_formats::{FileError, FormatError, Location};
use twox_hash::XxHash3_64;

use super::{Level, verify};

/// Adds an integrity file to a checkpoint, replacing one that is there: to a directory inside it,
/// to a file beside it, as `NAME.integrity`.
///
/// The checkpoint must be readable, metadata and structure: a broken one gets no hashes. Its data
/// is taken as it is.
pub fn add_integrity(
    location: impl Into<Location>,
    progress: Option<&(dyn Fn(u64) + Sync)>,
) -> Result<(), FileError> {
    let location = location.into();
    let path = location.name();
    // Open it without the old hashes, because these may be out of date.
    let checkpoint = open(&location, OpenOptions { verify: false })?;
    if checkpoint.format() == Format::Folder {
        let source = FormatError::Unsupported {
            what: "hashing a folder as a whole, and not each of its parts,".to_owned(),
        };
        return Err(FileError::File {
            path: path.to_owned(),
            source,
        });
    }
    let report = verify(&*checkpoint, Level::Sizes, None)?;
    if let Some(problem) = report.problems.into_iter().next() {
        let source = FormatError::Malformed {
            what: "checkpoint",
            reason: problem.error,
        };
        return Err(FileError::File {
            path: path.to_owned(),
            source,
        });
    }
    let directory = checkpoint.directory();
    // Segments start and end with items, so that reading one item checks little else.
    let mut cuts: BTreeMap<String, BTreeSet<u64>> = BTreeMap::new();
    let own_name = path
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default();
    let is_file = checkpoint.format().is_file();
    let (integrity_at, names) = if is_file {
        let beside = location.split()?.0.join(integrity_beside(own_name));
        (beside, vec![own_name.to_owned(), values_beside(own_name)])
    } else {
        (location.join(INTEGRITY_FILE), directory.names()?)
    };
    let metadata = checkpoint.metadata();
    let has_values = metadata.values().next().is_some();
    let extra = ExtraFiles::of(&*checkpoint)?.files;
    for name in names {
        let is_part = match checkpoint.format() {
            _ if !is_file && extra.contains(&name) => true,
            Format::Dcp => name.ends_with(".metadata"),
            // A values file of another checkpoint may lie there.
            Format::SafetensorsFile => name == own_name || (has_values && directory.has(&name)?),
            _ if is_file => name == own_name,
            _ => name.ends_with(".json") || name == "metadata.pkl",
        };
        if is_part {
            cuts.entry(name).or_default();
        }
    }
    for (_, _, stored) in checkpoint.metadata().stored() {
        let cuts = cuts.entry(stored.relative_path.clone()).or_default();
        if checkpoint.format() == Format::Dcp || stored.length > 0 {
            cuts.insert(stored.offset);
            cuts.insert(stored.offset + stored.length);
        }
        if checkpoint.format() == Format::Dcp
            && stored.length >= LARGE_ITEM
            && stored.transforms.is_empty()
        {
            let file = directory.file(&stored.relative_path)?;
            cuts.extend(
                payload_of(&*file, stored.offset, stored.length)
                    .into_iter()
                    .flatten(),
            );
        }
    }
    // Tensors in files beside the directory's own (those of Lightning and Megatron) have no
    // digests.
    let digested = match checkpoint.parts().first() {
        Some(own) => digest(own.checkpoint, default_threads())?,
        None => digest(&*checkpoint, default_threads())?,
    };
    let mut integrity = Integrity {
        digests: Some(digested),
        ..Integrity::default()
    };
    for (name, cuts) in cuts {
        let file = directory.file(&name)?;
        let hashed =
            hash(&*file, &cuts, progress).map_err(|source| directory.file_error(&name, source))?;
        integrity.files.insert(name, hashed);
    }
    let bytes = integrity
        .encode()
        .map_err(|source| directory.file_error(INTEGRITY_FILE, source))?;
    Durable::new().replace_file(integrity_at, &bytes)
}

/// The length from which items have a segment for their payload.
const LARGE_ITEM: u64 = 32 << 10;

/// Returns where the largest record of an item starts and ends in the file, if the item is a torch
/// archive.
fn payload_of(file: &dyn ReadAt, offset: u64, length: u64) -> Option<[u64; 2]> {
    let item = Window::new(file, offset, length).ok()?;
    let directory = Directory::read(&item).ok()?;
    let (name, record) = directory
        .records
        .iter()
        .max_by_key(|(_, record)| record.length)?;
    let start = offset + directory.data_offset(&item, name, record).ok()?;
    Some([start, start + record.length])
}

/// Hashes a file, with segments between these positions.
fn hash(
    file: &dyn ReadAt,
    cuts: &BTreeSet<u64>,
    progress: Option<&(dyn Fn(u64) + Sync)>,
) -> Result<FileIntegrity, FormatError> {
    let mut integrity = FileIntegrity::default();
    let mut buffer = Vec::new();
    let mut start = 0;
    for end in cuts.iter().copied().chain([file.len()]) {
        let end = end.min(file.len());
        if end <= start {
            continue;
        }
        let block = block_length(end - start);
        let mut hashes = Vec::new();
        for at in (start..end).step_by(block as usize) {
            buffer.resize(block.min(end - at) as usize, 0);
            file.read_exact_at(at, &mut buffer)?;
            hashes.push(XxHash3_64::oneshot(&buffer));
            if let Some(progress) = progress {
                progress(buffer.len() as u64);
            }
        }
        integrity.push(end - start, block, hashes);
        start = end;
    }
    Ok(integrity)
}
