//! Checks checkpoints without loading them, and adds hashes to those that have none.
//!
//! Each level includes the checks of the levels before it:
//!
//! | level | what is checked |
//! |---|---|
//! | [`Level::Structure`] | metadata, chunks (inside, disjoint, complete), every path, every key stored |
//! | [`Level::Sizes`] | every file is there and long enough; every item is the tensor or value that the metadata says |
//! | [`Level::Hashes`] | every byte against the integrity file; without one, the zip checksums of DCP items and torch archives |
//! | [`Level::Deep`] | every element: counts NaN and infinities, compares digests with the recorded ones, and copies of replicated tensors and values with each other |

mod add_integrity;
mod checksums;
mod report;

use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;

use fsdp_digest::{Digest, Sum};
use fsdp_formats::FileError;
use fsdp_formats::checkpoint::{Checkpoint, Format, PartOf, stream};
use fsdp_formats::complete::{check_items, check_metadata};
use fsdp_formats::internals::{
    compare, default_threads, digest_of_opaque, digest_of_quantizer, on_each, tensor_of,
    validate_chunks,
};
use fsdp_formats::metadata::Entry;
use fsdp_formats::plan::LoadPlanError;
use fsdp_layout::TensorBox;
use serde::{Deserialize, Serialize};

use crate::elements::{Census, parts_of_complex};

pub use self::add_integrity::add_integrity;
pub use self::report::Report;
pub use fsdp_formats::complete::Problem;

/// The depth of a verification. Each level does all that the levels before it do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
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

/// Verifies an open checkpoint. Problems with its contents are in the report. An error is returned
/// only if nothing could be checked, or if the checkpoint names files outside of its directory
/// ([`FileError::Path`]). `progress` is called with the number of bytes of every piece that was
/// read.
pub fn verify(
    checkpoint: &dyn Checkpoint,
    level: Level,
    progress: Option<&(dyn Fn(u64) + Sync)>,
) -> Result<Report, FileError> {
    verify_on_threads(checkpoint, level, default_threads(), progress)
}

/// Does the same as [`verify`], on this number of threads. The report does not depend on it.
pub fn verify_on_threads(
    checkpoint: &dyn Checkpoint,
    level: Level,
    threads: usize,
    progress: Option<&(dyn Fn(u64) + Sync)>,
) -> Result<Report, FileError> {
    let parts = checkpoint.parts();
    if !parts.is_empty() {
        return verify_parts(&parts, level, threads, progress);
    }
    let mut report = Report {
        has_integrity: checkpoint.directory().has_integrity(),
        stale_digests: checkpoint.has_stale_digests(),
        ..Report::default()
    };
    let metadata = checkpoint.metadata();
    report.tensors = metadata.tensors().count();
    report.values = metadata.values().count();
    report.problems = check_metadata(checkpoint);
    if level >= Level::Sizes {
        let findings = check_items(checkpoint, threads)?;
        report.problems.extend(findings.problems);
        report.opaque = findings.opaque;
    }
    if level >= Level::Hashes {
        hashes(checkpoint, &mut report, threads, progress);
    }
    if level >= Level::Deep {
        deep(checkpoint, &mut report, threads, progress);
        copies(checkpoint, &mut report, progress);
    }
    report.bytes_read = checkpoint.bytes_read();
    Ok(report)
}

/// Verifies each checkpoint in a trainer's folder separately, by the rules of its own format.
fn verify_parts(
    parts: &[PartOf<'_>],
    level: Level,
    threads: usize,
    progress: Option<&(dyn Fn(u64) + Sync)>,
) -> Result<Report, FileError> {
    let mut all = Report {
        has_integrity: true,
        ..Report::default()
    };
    for part in parts {
        let report = verify_on_threads(part.checkpoint, level, threads, progress)?;
        all.absorb_part(report, part);
    }
    Ok(all)
}

/// Checks every byte that a hash or a checksum covers.
fn hashes(
    checkpoint: &dyn Checkpoint,
    report: &mut Report,
    threads: usize,
    progress: Option<&(dyn Fn(u64) + Sync)>,
) {
    let directory = checkpoint.directory();
    if !directory.has_integrity() {
        match checkpoint.format() {
            Format::Dcp => checksums::check_items(checkpoint, report, threads, progress),
            // Files of `torch.save` and NumPy archives have checksums inside. Files of other
            // formats have none.
            _ => checksums::check_files(checkpoint, report, threads, progress),
        }
        return;
    }
    // Large files are cut, so that threads can share them.
    let mut parts: Vec<(String, Result<Range<u64>, FileError>)> = Vec::new();
    for name in directory.covered() {
        let file = directory.file(&name);
        match file.and_then(|file| {
            file.parts()
                .map_err(|source| directory.file_error(&name, source))
        }) {
            Ok(of) => parts.extend(of.into_iter().map(|part| (name.clone(), Ok(part)))),
            Err(error) => parts.push((name, Err(error))),
        }
    }
    let found = on_each(&parts, threads, |(name, part)| {
        let Ok(part) = part else { return Ok(()) };
        let verified = directory.file(name)?.verify(part.clone(), progress);
        verified.map_err(|source| directory.file_error(name, source))
    });
    // Report only the first error of each file.
    let mut last = None;
    for ((name, part), found) in parts.into_iter().zip(found) {
        let Err(error) = part.map(drop).and(found) else {
            continue;
        };
        if last.as_ref() == Some(&name) {
            continue;
        }
        report.problems.push(Problem::with_file(&name, &error));
        last = Some(name);
    }
}

/// Compares each copy of what was replicated with the one that a load takes.
fn copies(
    checkpoint: &dyn Checkpoint,
    report: &mut Report,
    progress: Option<&(dyn Fn(u64) + Sync)>,
) {
    for replica in &checkpoint.metadata().replicas {
        report.replicas += 1;
        if let Err(error) = compare(checkpoint, replica, progress) {
            report.add(&replica.fqn, Some(&replica.stored), &error);
        }
    }
}

/// Reads every element and value: counts NaN and infinities, and compares digests with the recorded
/// ones.
fn deep(
    checkpoint: &dyn Checkpoint,
    report: &mut Report,
    threads: usize,
    progress: Option<&(dyn Fn(u64) + Sync)>,
) {
    let entries: Vec<(&String, &Entry)> = checkpoint.metadata().entries.iter().collect();
    let found = on_each(&entries, threads, |(fqn, entry)| match entry {
        Entry::Tensor(_) => match elements(checkpoint, fqn, progress) {
            Err(error) if error.opaque_type().is_some() => {
                Ok((None, Some(digest_of_opaque(checkpoint, fqn)?)))
            }
            found => found,
        },
        // A value that cannot be read has been reported.
        Entry::Bytes(_) => Ok((
            None,
            checkpoint
                .describe_value(fqn)
                .ok()
                .as_ref()
                .map(Digest::of_value),
        )),
    });
    for ((fqn, entry), found) in entries.into_iter().zip(found) {
        let stored = match entry {
            Entry::Tensor(tensor) => tensor
                .chunks
                .first()
                .and_then(|chunk| chunk.stored.as_ref()),
            Entry::Bytes(bytes) => bytes.stored.as_ref(),
        };
        let (census, digest) = match found {
            Ok(found) => found,
            Err(error) => {
                report.add(fqn, stored, &error);
                continue;
            }
        };
        if let Some(census) = census.filter(|census| census.nan + census.infinite > 0) {
            report.not_finite.push((fqn.clone(), census));
        }
        let (Some(recorded), Some(digest)) = (checkpoint.digests(), digest) else {
            continue;
        };
        report.digests += 1;
        if recorded.get(fqn) != Some(digest) {
            report.add(fqn, stored, &wrong_digest(checkpoint, fqn));
        }
    }
    let Some(recorded) = checkpoint.digests() else {
        return;
    };
    let mut others: HashMap<&str, Digest> = recorded
        .iter()
        .filter(|(fqn, _)| !checkpoint.metadata().entries.contains_key(*fqn))
        .collect();
    for (fqn, _) in checkpoint.metadata().tensors() {
        match digest_of_quantizer(checkpoint, fqn) {
            Ok(Some((name, digest))) if others.get(&*name) == Some(&digest) => {
                _ = others.remove(&*name)
            }
            Ok(_) => {}
            Err(error) => report.add(fqn, None, &error),
        }
    }
    let mut others: Vec<&str> = others.into_keys().collect();
    others.sort_unstable();
    others
        .into_iter()
        .for_each(|fqn| report.add(fqn, None, &wrong_digest(checkpoint, fqn)));
}

fn wrong_digest(checkpoint: &dyn Checkpoint, fqn: &str) -> FileError {
    FileError::Digests {
        path: checkpoint.path().to_owned(),
        names: vec![fqn.to_owned()],
    }
}

/// Computes statistics of a whole tensor; `None` if its elements are not real numbers.
pub fn census(
    checkpoint: &dyn Checkpoint,
    fqn: &str,
    progress: Option<&(dyn Fn(u64) + Sync)>,
) -> Result<Option<Census>, FileError> {
    let dtype = tensor_of(checkpoint.metadata(), fqn)?.properties.dtype;
    Ok(elements(checkpoint, fqn, progress)?
        .0
        .filter(|_| Census::counts(dtype)))
}

/// Reads a whole tensor once. Returns the count of its elements, if they are real or complex
/// numbers, and its digest.
fn elements(
    checkpoint: &dyn Checkpoint,
    fqn: &str,
    progress: Option<&(dyn Fn(u64) + Sync)>,
) -> Result<(Option<Census>, Option<Digest>), FileError> {
    let tensor = tensor_of(checkpoint.metadata(), fqn)?;
    let dtype = tensor.properties.dtype;
    let counts = Census::counts(dtype) || parts_of_complex(dtype).is_some();
    if !counts && checkpoint.digests().is_none() {
        return Ok((None, None));
    }
    let (mut census, mut sum, mut at) = (Census::default(), Sum::default(), 0);
    let whole = TensorBox::whole(&tensor.shape);
    validate_chunks(&tensor.shape, std::iter::empty()).map_err(|source| LoadPlanError::Chunks {
        fqn: fqn.to_owned(),
        source,
    })?;
    let length = whole.numel() as u64 * dtype.size_in_bytes();
    stream::<FileError>(checkpoint, fqn, dtype, &whole, 0..length, &mut |bytes| {
        if counts {
            census.add(dtype, bytes);
        }
        sum.add_bytes(at, bytes);
        at += bytes.len() as u64;
        if let Some(progress) = progress {
            progress(bytes.len() as u64);
        }
        Ok(())
    })?;
    Ok((
        counts.then_some(census),
        Some(sum.finish(dtype, &tensor.shape)),
    ))
}

/// Returns the files in a checkpoint's directory that neither its metadata names nor this crate
/// writes: leftovers of other saves.
pub fn unknown_files(checkpoint: &dyn Checkpoint) -> Result<Vec<PathBuf>, FileError> {
    let directory = checkpoint.directory();
    if checkpoint.format() != Format::Dcp {
        return Ok(Vec::new());
    }
    let known: std::collections::HashSet<&str> = checkpoint
        .metadata()
        .stored()
        .map(|(_, _, stored)| stored.relative_path.as_str())
        .collect();
    let names = directory.names()?.into_iter();
    let unknown = names.filter(|name| name.ends_with(".distcp") && !known.contains(name.as_str()));
    Ok(unknown.map(PathBuf::from).collect())
}
