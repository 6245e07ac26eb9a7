//! Checking a checkpoint without loading it, and adding hashes to a foreign one.
//!
//! Levels, each with those before it:
//!
//! | level | what is checked |
//! |---|---|
//! | [`Level::Structure`] | metadata, chunks (inside, disjoint, complete), every path, every key stored |
//! | [`Level::Sizes`] | every file is there and long enough; every item is the tensor or value that the metadata says |
//! | [`Level::Hashes`] | every byte against the integrity file; without one, the zip checksums of DCP items |
//! | [`Level::Deep`] | every element of floating-point tensors: NaN and infinities are counted; that copies of replicated tensors and values are equal |

mod add_integrity;
mod replicas;

use std::path::PathBuf;

use fsdp_layout::TensorBox;
use serde::{Deserialize, Serialize};

use crate::dcp::metadata::{Entry, StorageInfo};
use crate::elements::Census;
use crate::error::FileError;
use crate::formats::checkpoint::{Checkpoint, Format};
use crate::formats::stream::stream;
use crate::plan::validate_chunks;

pub use add_integrity::add_integrity;

/// How much to check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Level {
    /// Metadata only.
    Structure,
    /// And the files' lengths and the items' kinds.
    Sizes,
    /// And every byte that a hash covers.
    Hashes,
    /// And what the numbers are.
    Deep,
}

/// Something that is wrong.
#[derive(Debug)]
pub struct Problem {
    /// The flat key, where one is concerned.
    pub fqn: Option<String>,
    /// The file, relative to the checkpoint, where one is concerned.
    pub file: Option<String>,
    /// The first bad byte in that file, where it is known.
    pub offset: Option<u64>,
    /// The error, with its causes.
    pub error: String,
}

/// The findings of a verification.
#[derive(Debug, Default)]
pub struct Report {
    /// All problems, in the order in which they were found: files in the order of their names.
    pub problems: Vec<Problem>,
    /// `true` if hashes were there to check against.
    pub has_integrity: bool,
    /// Tensors looked at.
    pub tensors: usize,
    /// Values looked at.
    pub values: usize,
    /// Bytes read.
    pub bytes_read: u64,
    /// At [`Level::Deep`]: copies beyond the first of replicated tensors and values, each compared with the first.
    pub replicas: usize,
    /// At [`Level::Deep`]: keys of tensors with NaN or infinities, and how many of each.
    pub not_finite: Vec<(String, Census)>,
}

impl Report {
    /// Returns `true` if all is well. NaN and infinities are not held against a checkpoint.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        self.problems.is_empty()
    }

    fn add(&mut self, fqn: Option<&str>, stored: Option<&StorageInfo>, error: &(dyn std::error::Error + 'static)) {
        self.problems.push(Problem {
            fqn: fqn.map(str::to_owned),
            file: stored.map(|stored| stored.relative_path.clone()),
            offset: corrupt_at(error).or_else(|| stored.map(|stored| stored.offset)),
            error: with_causes(error),
        });
    }
}

/// Returns an error and its causes in one line.
#[must_use]
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

/// Returns where in its file a corrupt block starts.
fn corrupt_at(error: &(dyn std::error::Error + 'static)) -> Option<u64> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(crate::FormatError::Corrupt { offset, .. }) = error.downcast_ref() {
            return Some(*offset);
        }
        next = error.source();
    }
    None
}

/// Verifies an open checkpoint. Problems with what it holds are in the report; an error is returned only if nothing
/// could be checked. `progress` is told of every piece that was read, in bytes.
pub fn verify(
    checkpoint: &dyn Checkpoint,
    level: Level,
    progress: Option<&(dyn Fn(u64) + Sync)>,
) -> Result<Report, FileError> {
    let mut report = Report { has_integrity: checkpoint.directory().has_integrity(), ..Report::default() };
    structure(checkpoint, &mut report);
    if level >= Level::Sizes {
        sizes(checkpoint, &mut report);
    }
    if level >= Level::Hashes {
        hashes(checkpoint, &mut report, progress);
    }
    if level >= Level::Deep {
        deep(checkpoint, &mut report, progress);
        replicas::compare(checkpoint, &mut report, progress);
    }
    report.bytes_read = checkpoint.bytes_read();
    Ok(report)
}

/// Checks the metadata by itself.
fn structure(checkpoint: &dyn Checkpoint, report: &mut Report) {
    for (fqn, entry) in &checkpoint.metadata().entries {
        match entry {
            Entry::Bytes(bytes) => {
                report.values += 1;
                if bytes.stored.is_none() {
                    report.add(Some(fqn), None, &FileError::NotStored { fqn: fqn.clone() });
                }
            }
            Entry::Tensor(tensor) => {
                report.tensors += 1;
                let covered = validate_chunks(&tensor.shape, tensor.chunks.iter().map(|chunk| &chunk.bounds));
                match covered {
                    Err(error) => report.add(Some(fqn), None, &error),
                    Ok(covered) => {
                        let numel = TensorBox::whole(&tensor.shape).numel();
                        if covered != numel {
                            report.add(Some(fqn), None, &crate::plan::ChunkError::Incomplete { covered, numel });
                        }
                    }
                }
                let holds = |chunk: &&crate::dcp::metadata::Chunk| !chunk.bounds.is_empty() && chunk.stored.is_none();
                if tensor.chunks.iter().any(|chunk| holds(&chunk)) {
                    report.add(Some(fqn), None, &FileError::NotStored { fqn: fqn.clone() });
                }
            }
        }
    }
}

/// Checks that files are long enough for their items, and that each item is what the metadata says. Reads one element of
/// each chunk.
fn sizes(checkpoint: &dyn Checkpoint, report: &mut Report) {
    for (fqn, entry) in &checkpoint.metadata().entries {
        match entry {
            Entry::Bytes(bytes) => {
                if let Err(error) = checkpoint.read_value(fqn) {
                    report.add(Some(fqn), bytes.stored.as_ref(), &error);
                }
            }
            Entry::Tensor(tensor) => {
                for chunk in tensor.chunks.iter().filter(|chunk| !chunk.bounds.is_empty()) {
                    // The last element: if it is there, so is all before it.
                    let at = chunk.bounds.offsets.iter().zip(&chunk.bounds.sizes).map(|(o, s)| o.saturating_add(s - 1));
                    let last = TensorBox::new(at.collect(), vec![1; chunk.bounds.rank()]);
                    let mut element = vec![0; tensor.properties.dtype.size_in_bytes() as usize];
                    if let Err(error) = checkpoint.read_box(fqn, &last, &mut element) {
                        report.add(Some(fqn), chunk.stored.as_ref(), &error);
                        // A plan error concerns the whole tensor: once is enough.
                        if matches!(error, FileError::LoadPlan(_)) {
                            break;
                        }
                    }
                }
            }
        }
    }
}

/// Checks every byte that a hash or a checksum covers.
fn hashes(checkpoint: &dyn Checkpoint, report: &mut Report, progress: Option<&(dyn Fn(u64) + Sync)>) {
    let directory = checkpoint.directory();
    if !directory.has_integrity() {
        if checkpoint.format() == Format::Dcp {
            add_integrity::check_crcs(checkpoint, report, progress);
        }
        return;
    }
    for name in directory.covered() {
        let verified = directory.file(&name).and_then(|file| {
            let verified = file.verify(progress);
            verified.map_err(|source| directory.file_error(&name, source))
        });
        if let Err(error) = verified {
            report.problems.push(Problem {
                fqn: None,
                file: Some(name),
                offset: corrupt_at(&error),
                error: with_causes(&error),
            });
        }
    }
}

/// Counts NaN and infinities.
fn deep(checkpoint: &dyn Checkpoint, report: &mut Report, progress: Option<&(dyn Fn(u64) + Sync)>) {
    for (fqn, tensor) in checkpoint.metadata().tensors() {
        match census(checkpoint, fqn, progress) {
            Ok(Some(census)) if census.nan + census.infinite > 0 => report.not_finite.push((fqn.to_owned(), census)),
            Ok(_) => {}
            Err(error) => report.add(Some(fqn), tensor.chunks.first().and_then(|chunk| chunk.stored.as_ref()), &error),
        }
    }
}

/// Counts and sums over a whole tensor; `None` where its elements are no real numbers.
pub fn census(
    checkpoint: &dyn Checkpoint,
    fqn: &str,
    progress: Option<&(dyn Fn(u64) + Sync)>,
) -> Result<Option<Census>, FileError> {
    let tensor = crate::formats::lookup::tensor_of(checkpoint.metadata(), fqn)?;
    let dtype = tensor.properties.dtype;
    let mut census = Census::default();
    if !Census::counts(dtype) {
        return Ok(None);
    }
    let whole = TensorBox::whole(&tensor.shape);
    validate_chunks(&tensor.shape, std::iter::empty())
        .map_err(|source| crate::plan::LoadPlanError::Chunks { fqn: fqn.to_owned(), source })?;
    let length = whole.numel() as u64 * dtype.size_in_bytes();
    stream::<FileError>(checkpoint, fqn, dtype, &whole, 0..length, &mut |bytes| {
        census.add(dtype, bytes);
        if let Some(progress) = progress {
            progress(bytes.len() as u64);
        }
        Ok(())
    })?;
    Ok(Some(census))
}

/// Returns the files of a checkpoint that are neither named by its metadata nor its own bookkeeping: leftovers of other saves.
pub fn unknown_files(checkpoint: &dyn Checkpoint) -> Result<Vec<PathBuf>, FileError> {
    let directory = checkpoint.directory();
    if checkpoint.format() != Format::Dcp {
        return Ok(Vec::new());
    }
    let known: std::collections::HashSet<&str> =
        checkpoint.metadata().stored().map(|(_, _, stored)| stored.relative_path.as_str()).collect();
    let names = directory.names()?.into_iter();
    let unknown = names.filter(|name| name.ends_with(".distcp") && !known.contains(name.as_str()));
    Ok(unknown.map(PathBuf::from).collect())
}
