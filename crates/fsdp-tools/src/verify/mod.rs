//! Checks checkpoints without loading them, and adds hashes to those that have none.
//!
//! Each level includes the checks of the levels before it:
//!
//! | level | what is checked |
//! |---|---|
//! | [`Level::Structure`] | metadata, chunks (inside, disjoint, complete), every path, every key stored |
//! | [`Level::Sizes`] | every file is there and long enough; every item is the tensor or value that the metadata says |
//! | [`Level::Hashes`] | every byte against the integrity file; without one, the zip checksums of DCP items and of archives of torch and NumPy |
//! | [`Level::Deep`] | every element: counts NaN and infinities, compares digests with the recorded ones, and copies of replicated tensors and values with each other |

mod add_integrity;
mod checksums;
mod report;

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::path::PathBuf;

use fsdp_digest::{Digest, Sum};
use fsdp_formats::FileError;
use fsdp_formats::checkpoint::{Checkpoint, Format, stream};
use fsdp_formats::complete::{check_items, check_metadata};
use fsdp_formats::internals::{
    compare, default_threads, digest_of_opaque, digest_of_quantizer, on_each, tensor_of,
    validate_chunks,
};
use fsdp_formats::metadata::{Entry, StorageInfo};
use fsdp_formats::plan::LoadPlanError;
use fsdp_layout::TensorBox;

use crate::elements::{Census, is_real, parts_of_complex};

pub use self::add_integrity::add_integrity;
pub use self::report::Report;
pub use fsdp_formats::complete::Problem;

/// The depth of a verification. Each level does all that the levels before it do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Checks the metadata only.
    Structure,
    /// Checks the lengths of the files and the kinds of the items.
    Sizes,
    /// Checks every byte that a hash covers.
    Hashes,
    /// Reads the elements: counts NaN and infinities, and compares digests and copies.
    Deep,
}

/// The options of a verification.
#[derive(Clone, Copy, Default)]
pub struct VerifyOptions<'o> {
    /// The number of threads that read and hash, on which the report does not depend. `None` takes
    /// one for each core, up to four.
    pub threads: Option<usize>,
    /// A function that is called with the number of bytes of every piece that was read.
    pub progress: Option<&'o (dyn Fn(u64) + Sync)>,
}

/// Verifies an open checkpoint. Problems with its contents are in the report. An error is returned
/// only if nothing could be checked, or if the checkpoint names files outside of its directory
/// ([`FileError::Path`]).
pub fn verify(
    checkpoint: &dyn Checkpoint,
    level: Level,
    options: VerifyOptions<'_>,
) -> Result<Report, FileError> {
    // Each checkpoint in a trainer's folder is verified by the rules of its own format.
    let parts = checkpoint.parts();
    if !parts.is_empty() {
        let mut total = Report {
            has_integrity: true,
            ..Report::default()
        };
        for part in &parts {
            let report = verify(part.checkpoint, level, options)?;
            total.add_part(report, part);
        }
        return Ok(total);
    }
    let mut verification = Verification {
        checkpoint,
        threads: options.threads.unwrap_or_else(default_threads),
        progress: options.progress,
        report: Report {
            has_integrity: checkpoint.directory().has_integrity(),
            stale_digests: checkpoint.has_stale_digests(),
            tensors: checkpoint.metadata().tensors().count(),
            values: checkpoint.metadata().values().count(),
            ..Report::default()
        },
        named_items: HashSet::new(),
        named_keys: HashSet::new(),
    };
    verification.add_problems(check_metadata(checkpoint));
    if level >= Level::Sizes {
        let findings = check_items(checkpoint, verification.threads)?;
        verification.add_problems(findings.problems);
        verification.report.opaque = findings.opaque;
    }
    if level >= Level::Hashes {
        match checkpoint.format() {
            _ if checkpoint.directory().has_integrity() => verification.check_hashes(),
            Format::Dcp => verification.check_items(),
            // Files of `torch.save` and NumPy archives have checksums inside. Files of other
            // formats have none.
            _ => verification.check_files(),
        }
    }
    if level >= Level::Deep {
        verification.check_elements();
        verification.check_copies();
    }
    verification.report.bytes_read = checkpoint.bytes_read();
    Ok(verification.report)
}

/// A verification of one checkpoint, and what it has found so far.
struct Verification<'v> {
    checkpoint: &'v dyn Checkpoint,
    threads: usize,
    progress: Option<&'v (dyn Fn(u64) + Sync)>,
    report: Report,
    /// The items of which a problem has been reported: their keys, files and offsets.
    named_items: HashSet<(String, String, u64)>,
    /// The keys of which a problem has been reported.
    named_keys: HashSet<String>,
}

impl Verification<'_> {
    /// Adds a problem with a key, or with the item that is stored for it, unless one of that item
    /// has been reported.
    fn add_problem(
        &mut self,
        fqn: &str,
        stored: Option<&StorageInfo>,
        error: &(dyn std::error::Error + 'static),
    ) {
        // A file that is too short has one problem with each item, whatever is read of it.
        let is_named = stored.is_some_and(|stored| {
            let item = (fqn.to_owned(), stored.relative_path.clone(), stored.offset);
            self.named_items.contains(&item)
        });
        if !is_named {
            self.add_problems(vec![Problem::of_key(fqn, stored, error)]);
        }
    }

    /// Adds problems, and notes of which items and keys they are.
    fn add_problems(&mut self, problems: Vec<Problem>) {
        for problem in problems {
            if let Some(fqn) = &problem.fqn {
                self.named_keys.insert(fqn.clone());
                if let (Some(file), Some(offset)) = (&problem.file, problem.offset) {
                    self.named_items.insert((fqn.clone(), file.clone(), offset));
                }
            }
            self.report.problems.push(problem);
        }
    }

    /// Checks every byte that a hash covers, and reports the first error of each file.
    fn check_hashes(&mut self) {
        let directory = self.checkpoint.directory();
        // Large files are cut, so that threads can share them.
        let mut parts: Vec<(String, Result<Range<u64>, FileError>)> = Vec::new();
        for name in directory.covered() {
            let ranges = directory.file(&name).and_then(|file| {
                file.parts()
                    .map_err(|source| directory.file_error(&name, source))
            });
            match ranges {
                Ok(ranges) => {
                    parts.extend(ranges.into_iter().map(|range| (name.clone(), Ok(range))));
                }
                Err(error) => parts.push((name, Err(error))),
            }
        }
        let checked = on_each(&parts, self.threads, |(name, range)| {
            let Ok(range) = range else { return Ok(()) };
            directory
                .file(name)?
                .verify(range.clone(), self.progress)
                .map_err(|source| directory.file_error(name, source))
        });
        // Report only the first error of each file.
        let mut last_name = None;
        for ((name, range), checked) in parts.into_iter().zip(checked) {
            let Err(error) = range.and(checked) else {
                continue;
            };
            let problem = Problem::of_file(&name, &error);
            // An item that cannot be read has been reported with its key.
            let is_named = self.report.problems.iter().any(|named| {
                named.file == problem.file
                    && named.offset.is_some()
                    && named.offset == problem.offset
            });
            if !is_named && last_name.as_ref() != Some(&name) {
                self.report.problems.push(problem);
                last_name = Some(name);
            }
        }
    }

    /// Compares each copy of what was replicated with the one that a load takes.
    fn check_copies(&mut self) {
        for replica in &self.checkpoint.metadata().replicas {
            self.report.replicas += 1;
            if let Err(error) = compare(self.checkpoint, replica, self.progress) {
                self.add_problem(&replica.fqn, Some(&replica.stored), &error);
            }
        }
    }

    /// Reads every element and value: counts NaN and infinities, and compares digests with the
    /// recorded ones.
    fn check_elements(&mut self) {
        let checkpoint = self.checkpoint;
        let entries: Vec<(&String, &Entry)> = checkpoint.metadata().entries.iter().collect();
        let findings = on_each(&entries, self.threads, |(fqn, entry)| match entry {
            Entry::Tensor(_) => match read_elements(checkpoint, fqn, self.progress) {
                Err(error) if error.opaque_type().is_some() => Ok(ElementFindings {
                    census: None,
                    digest: Some(digest_of_opaque(checkpoint, fqn)?),
                }),
                findings => findings,
            },
            Entry::Bytes(_) => Ok(ElementFindings {
                census: None,
                digest: Some(Digest::of_value(&checkpoint.describe_value(fqn)?)),
            }),
        });
        // Report in the order of the metadata, whichever thread was first.
        for ((fqn, entry), findings) in entries.into_iter().zip(findings) {
            let stored = entry.items().find_map(|(_, stored)| stored);
            // What is wrong with its items has been reported, and is why it cannot be read.
            let is_named = self.named_keys.contains(fqn);
            let ElementFindings { census, digest } = match findings {
                Ok(findings) => findings,
                Err(_) if is_named => continue,
                Err(error) => {
                    let stored = item_of_error(&error, entry).or(stored);
                    self.add_problem(fqn, stored, &error);
                    continue;
                }
            };
            if let Some(census) = census
                && census.nan + census.infinite > 0
            {
                self.report.not_finite.push((fqn.clone(), census));
            }
            if let (Some(recorded), Some(digest)) = (checkpoint.digests(), digest) {
                self.report.digests += 1;
                if recorded.get(fqn) != Some(digest) && !is_named {
                    self.add_problem(fqn, stored, &digest_mismatch(checkpoint, fqn));
                }
            }
        }
        self.check_other_digests();
    }

    /// Checks the recorded digests of what has no entry: only the quantizers of quantized tensors
    /// have such digests.
    fn check_other_digests(&mut self) {
        let checkpoint = self.checkpoint;
        let metadata = checkpoint.metadata();
        let Some(recorded) = checkpoint.digests() else {
            return;
        };
        // A digest without an entry must be that of a quantizer.
        let mut remaining_digests: BTreeMap<&str, Digest> = recorded
            .iter()
            .filter(|(fqn, _)| !metadata.entries.contains_key(*fqn))
            .collect();
        for (fqn, _) in metadata.tensors() {
            match digest_of_quantizer(checkpoint, fqn) {
                Ok(Some((name, digest))) if remaining_digests.get(&*name) == Some(&digest) => {
                    remaining_digests.remove(&*name);
                }
                Ok(_) => {}
                Err(error) => self.add_problem(fqn, None, &error),
            }
        }
        for fqn in remaining_digests.into_keys() {
            self.add_problem(fqn, None, &digest_mismatch(checkpoint, fqn));
        }
    }
}

/// Returns the item that an error of reading a key is about; `None` if it does not tell.
fn item_of_error<'e>(error: &FileError, entry: &'e Entry) -> Option<&'e StorageInfo> {
    let FileError::Item { path, offset, .. } = error else {
        return None;
    };
    entry
        .items()
        .filter_map(|(_, stored)| stored)
        .find(|stored| stored.offset == *offset && path.ends_with(&stored.relative_path))
}

/// Returns the error that a recorded digest is not that of what the checkpoint has.
fn digest_mismatch(checkpoint: &dyn Checkpoint, fqn: &str) -> FileError {
    FileError::Digests {
        path: checkpoint.path().to_owned(),
        names: vec![fqn.to_owned()],
    }
}

/// Returns the statistics of a whole tensor; `None` if its elements are not real numbers.
pub fn compute_census(checkpoint: &dyn Checkpoint, fqn: &str) -> Result<Option<Census>, FileError> {
    let dtype = tensor_of(checkpoint.metadata(), fqn)?.properties.dtype;
    let ElementFindings { census, .. } = read_elements(checkpoint, fqn, None)?;
    Ok(census.filter(|_| is_real(dtype)))
}

/// The findings about the elements of a tensor, or about a value.
#[derive(Default)]
struct ElementFindings {
    /// The count of the elements, if they are real or complex numbers.
    census: Option<Census>,
    /// The digest, if there is one to compare it with.
    digest: Option<Digest>,
}

/// Reads a whole tensor once, and returns what there is to be found out about it. If that is
/// nothing, it is not read.
fn read_elements(
    checkpoint: &dyn Checkpoint,
    fqn: &str,
    progress: Option<&(dyn Fn(u64) + Sync)>,
) -> Result<ElementFindings, FileError> {
    let tensor = tensor_of(checkpoint.metadata(), fqn)?;
    let dtype = tensor.properties.dtype;
    let is_number = is_real(dtype) || parts_of_complex(dtype).is_some();
    if !is_number && checkpoint.digests().is_none() {
        return Ok(ElementFindings::default());
    }
    // One read gives both the count and the digest.
    let mut census = Census::default();
    let mut sum = Sum::default();
    let mut offset = 0;
    let whole = TensorBox::whole(&tensor.shape);
    validate_chunks(&tensor.shape, std::iter::empty()).map_err(|source| LoadPlanError::Chunks {
        fqn: fqn.to_owned(),
        source,
    })?;
    let length = whole.numel() as u64 * dtype.size_in_bytes();
    stream::<FileError>(checkpoint, fqn, &whole, 0..length, &mut |bytes| {
        if is_number {
            census.add(dtype, bytes);
        }
        sum.add_bytes(offset, bytes);
        offset += bytes.len() as u64;
        if let Some(progress) = progress {
            progress(bytes.len() as u64);
        }
        Ok(())
    })?;
    Ok(ElementFindings {
        census: is_number.then_some(census),
        digest: Some(sum.finish(dtype, &tensor.shape)),
    })
}

/// Returns the names of the `.distcp` files in a DCP directory that its metadata does not name:
/// they are leftovers of other saves. Other formats have none.
pub fn find_unknown_files(checkpoint: &dyn Checkpoint) -> Result<Vec<PathBuf>, FileError> {
    if checkpoint.format() != Format::Dcp {
        return Ok(Vec::new());
    }
    let known_names: HashSet<&str> = checkpoint
        .metadata()
        .stored()
        .map(|(_, _, stored)| stored.relative_path.as_str())
        .collect();
    let mut names = checkpoint.directory().names()?;
    names.retain(|name| name.ends_with(".distcp") && !known_names.contains(name.as_str()));
    Ok(names.into_iter().map(PathBuf::from).collect())
}
