//! Making an integrity file for a checkpoint that has none, from the bytes as they are now.

use std::collections::{BTreeMap, BTreeSet};

use fsdp_formats::checkpoint::{Checkpoint, ExtraFiles, Format, open, values_beside};
use fsdp_formats::digest::digest;
use fsdp_formats::internals::{
    Directory, FileIntegrity, INTEGRITY_FILE, Integrity, Window, block_length, default_threads,
    integrity_beside, parameter_files,
};
use fsdp_formats::reader::OpenOptions;
use fsdp_formats::storage::{Durable, ReadAt};
use fsdp_formats::{FileError, FormatError, Location};
use twox_hash::XxHash3_64;

use super::{Level, VerifyOptions, verify};

/// Adds an integrity file to a checkpoint, replacing one that is there: to a directory inside it,
/// to a file beside it, as `NAME.integrity`; in a trainer's folder to each of its parts.
///
/// The checkpoint must be readable, metadata and structure: a broken one gets no hashes. Its data
/// is taken as it is.
///
/// # Errors
/// A checkpoint that is broken; files that cannot be read or written.
pub fn add_integrity(
    location: impl Into<Location>,
    progress: Option<&(dyn Fn(u64) + Sync)>,
) -> Result<(), FileError> {
    let location = location.into();
    // Open it without the old hashes, because these may be out of date.
    let checkpoint = open(&location, OpenOptions { verify: false })?;
    // All parts are checked before the first gets hashes.
    verify(&*checkpoint, Level::Sizes, VerifyOptions::default())?.into_result(&location)?;
    if checkpoint.format() != Format::Folder {
        let extra_files = ExtraFiles::find(&*checkpoint)?.files;
        return Sealed {
            checkpoint: &*checkpoint,
            location: &location,
            extra_files,
        }
        .add_integrity(progress);
    }
    for part in checkpoint.parts() {
        // Some parts are files directly in the folder. The files beside them are those of others.
        let part_location = match part.path {
            "" => location.clone(),
            path => location.join(path),
        };
        let extra_files = if part.is_directory {
            ExtraFiles::find(part.checkpoint)?.files
        } else {
            Vec::new()
        };
        Sealed {
            checkpoint: part.checkpoint,
            location: &part_location,
            extra_files,
        }
        .add_integrity(progress)?;
    }
    Ok(())
}

/// A checkpoint that gets hashes.
struct Sealed<'s> {
    checkpoint: &'s dyn Checkpoint,
    location: &'s Location,
    /// The files beside its own that are hashed too.
    extra_files: Vec<String>,
}

impl Sealed<'_> {
    /// Writes the integrity file, of the bytes as they are now.
    ///
    /// # Errors
    /// Files that cannot be read or written.
    fn add_integrity(&self, progress: Option<&(dyn Fn(u64) + Sync)>) -> Result<(), FileError> {
        // Tensors in files beside the directory's own (those of Lightning and Megatron) have no
        // digests.
        let parts = self.checkpoint.parts();
        let own_checkpoint = parts
            .first()
            .map_or(self.checkpoint, |part| part.checkpoint);
        let digested = digest(own_checkpoint, default_threads())?;
        let mut integrity = Integrity {
            digests: Some(digested),
            ..Integrity::default()
        };
        let directory = self.checkpoint.directory();
        for (name, cuts) in self.find_cuts()? {
            let file = directory.file(&name)?;
            let hashed = hash_file(&*file, &cuts, progress)
                .map_err(|source| directory.file_error(&name, source))?;
            integrity.files.insert(name, hashed);
        }
        let bytes = integrity
            .encode()
            .map_err(|source| directory.file_error(INTEGRITY_FILE, source))?;
        let integrity_location = if self.location.is_file()? {
            let (parent, name) = self.location.split()?;
            parent.join(integrity_beside(name))
        } else {
            self.location.join(INTEGRITY_FILE)
        };
        Durable::new().replace_file(integrity_location, &bytes)
    }

    /// Returns the files that are hashed, and the positions between which each has segments.
    /// Segments start and end with items, so that reading one item checks little else.
    fn find_cuts(&self) -> Result<BTreeMap<String, BTreeSet<u64>>, FileError> {
        let checkpoint = self.checkpoint;
        let directory = checkpoint.directory();
        let format = checkpoint.format();
        let mut cuts: BTreeMap<String, BTreeSet<u64>> = BTreeMap::new();
        if self.location.is_file()? {
            let (_, name) = self.location.split()?;
            cuts.entry(name.to_owned()).or_default();
            // A values file of another checkpoint may lie there.
            let values = values_beside(name);
            if format == Format::SafetensorsFile
                && checkpoint.metadata().values().next().is_some()
                && directory.has(&values)?
            {
                cuts.entry(values).or_default();
            }
        } else {
            for name in directory.names()? {
                let is_own = match format {
                    Format::Dcp => name.ends_with(".metadata"),
                    _ => name.ends_with(".json") || name == "metadata.pkl",
                };
                if is_own || self.extra_files.contains(&name) {
                    cuts.entry(name).or_default();
                }
            }
        }
        if format == Format::DeepSpeedUniversal {
            let files = parameter_files(self.location)?;
            cuts.extend(files.into_iter().map(|file| (file, BTreeSet::new())));
        }
        for (_, _, stored) in checkpoint.metadata().stored() {
            let cuts = cuts.entry(stored.relative_path.clone()).or_default();
            if format == Format::Dcp || stored.length > 0 {
                cuts.insert(stored.offset);
                cuts.insert(stored.offset + stored.length);
            }
            // A read of a part of a large tensor then checks its blocks, and not the whole item.
            if format == Format::Dcp
                && stored.length >= LARGE_ITEM_BYTES
                && stored.transforms.is_empty()
            {
                let file = directory.file(&stored.relative_path)?;
                let payload = find_payload(&*file, stored.offset, stored.length);
                cuts.extend(payload.into_iter().flatten());
            }
        }
        Ok(cuts)
    }
}

/// The length from which items have a segment for their payload.
const LARGE_ITEM_BYTES: u64 = 32 << 10;

/// Returns the positions in the file where the largest record of an item starts and ends; `None` if
/// the item is no torch archive.
fn find_payload(file: &dyn ReadAt, offset: u64, length: u64) -> Option<[u64; 2]> {
    let item = Window::new(file, offset, length).ok()?;
    let directory = Directory::read(&item).ok()?;
    let (name, record) = directory
        .records
        .iter()
        .max_by_key(|(_, record)| record.length)?;
    let start = offset + directory.data_offset(&item, name, record).ok()?;
    Some([start, start + record.length])
}

/// Returns the hashes of a file, with segments between these positions.
fn hash_file(
    file: &dyn ReadAt,
    cuts: &BTreeSet<u64>,
    progress: Option<&(dyn Fn(u64) + Sync)>,
) -> Result<FileIntegrity, FormatError> {
    let mut integrity = FileIntegrity::default();
    let mut buffer = Vec::new();
    let mut start = 0;
    for end in cuts.iter().copied().chain([file.len()]) {
        let end = end.min(file.len());
        // A cut at the start or at the end of the file begins no segment.
        if end <= start {
            continue;
        }
        // The last block of a segment may be shorter.
        let block_bytes = block_length(end - start);
        let mut hashes = Vec::new();
        for block_start in (start..end).step_by(block_bytes as usize) {
            buffer.resize(block_bytes.min(end - block_start) as usize, 0);
            file.read_exact_at(block_start, &mut buffer)?;
            hashes.push(XxHash3_64::oneshot(&buffer));
            if let Some(progress) = progress {
                progress(buffer.len() as u64);
            }
        }
        integrity.push(end - start, block_bytes, hashes);
        start = end;
    }
    Ok(integrity)
}
