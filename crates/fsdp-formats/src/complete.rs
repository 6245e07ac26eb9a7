//! Checks whether all that a checkpoint names is there, without reading its elements.

use fsdp_layout::{ErrorKind, TensorBox, with_causes};

use crate::error::{FileError, FormatError};
use crate::formats::checkpoint::Checkpoint;
use crate::kind::kind_of;
use crate::metadata::{BytesEntry, Chunk, Entry, Replica, StorageInfo, TensorEntry};
use crate::plan::{validate_chunks, validate_cover};
use crate::threads::on_each;

/// A problem with the contents of a checkpoint.
#[derive(Debug)]
pub struct Problem {
    /// The flat key, where one is concerned.
    pub fqn: Option<String>,
    /// The file, relative to the checkpoint, where one is concerned.
    pub file: Option<String>,
    /// The first bad byte in that file, or else the first byte of the item, where that is known.
    pub offset: Option<u64>,
    /// The error, with its causes.
    pub error: String,
    /// The kind of the error: a file that cannot be read may be sound.
    pub kind: ErrorKind,
}

impl Problem {
    /// Makes the problem with a key, or with the item that is stored for it.
    #[must_use]
    pub fn of_key(
        fqn: &str,
        stored: Option<&StorageInfo>,
        error: &(dyn std::error::Error + 'static),
    ) -> Self {
        let problem = Self::of_file("", error);
        Problem {
            fqn: Some(fqn.to_owned()),
            file: stored.map(|stored| stored.relative_path.clone()),
            offset: problem.offset.or(stored.map(|stored| stored.offset)),
            ..problem
        }
    }

    /// Makes the problem with a file.
    #[must_use]
    pub fn of_file(name: &str, error: &(dyn std::error::Error + 'static)) -> Self {
        Problem {
            fqn: None,
            file: Some(name.to_owned()),
            offset: offset_of_corruption(error),
            error: with_causes(error),
            kind: kind_of(error),
        }
    }
}

/// Returns the offset in its file of the first corrupt block; `None` if that is not the error.
fn offset_of_corruption(error: &(dyn std::error::Error + 'static)) -> Option<u64> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(FormatError::Corrupt { offset, .. }) = error.downcast_ref() {
            return Some(*offset);
        }
        cause = error.source();
    }
    None
}

/// The findings about the items of a checkpoint.
#[derive(Debug, Default)]
pub struct ItemFindings {
    /// The problems, in the order of the keys.
    pub problems: Vec<Problem>,
    /// The keys of values that hold objects of unknown types, and of tensors that are such objects,
    /// with the type of each. They are never built. They are no problems.
    pub opaque: Vec<(String, String)>,
}

/// Returns `true` if a checkpoint's metadata is consistent, and all its files are there with the
/// right sizes. For a trainer's folder, that is so if it is so for each checkpoint in it.
///
/// # Errors
/// Files outside of the checkpoint's directory ([`FileError::Path`]).
pub fn is_complete(checkpoint: &dyn Checkpoint, threads: usize) -> Result<bool, FileError> {
    let parts = checkpoint.parts();
    if parts.is_empty() {
        return Ok(check_metadata(checkpoint).is_empty()
            && check_items(checkpoint, threads)?.problems.is_empty());
    }
    for part in &parts {
        if !is_complete(part.checkpoint, threads)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Checks the metadata alone: every key is stored, and the chunks of each tensor are inside of it,
/// disjoint and complete.
#[must_use]
pub fn check_metadata(checkpoint: &dyn Checkpoint) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (fqn, entry) in &checkpoint.metadata().entries {
        if let Entry::Tensor(tensor) = entry {
            let boxes = tensor.chunks.iter().map(|chunk| &chunk.bounds);
            if let Err(error) = validate_cover(&tensor.shape, boxes) {
                problems.push(Problem::of_key(fqn, None, &error));
            }
        }
        // An empty chunk has no bytes that could be stored.
        let is_missing = entry.items().any(|(bounds, stored)| {
            stored.is_none() && !bounds.is_some_and(|bounds| bounds.is_empty())
        });
        if is_missing {
            let error = FileError::not_stored(fqn);
            problems.push(Problem::of_key(fqn, None, &error));
        }
    }
    problems
}

/// Checks that files are long enough for their items, and that each item is what the metadata says.
/// Reads one element of each chunk, in linear time.
///
/// # Errors
/// Files outside of the checkpoint's directory ([`FileError::Path`]).
pub fn check_items(checkpoint: &dyn Checkpoint, threads: usize) -> Result<ItemFindings, FileError> {
    let entries: Vec<(&String, &Entry)> = checkpoint.metadata().entries.iter().collect();
    let outcomes = on_each(&entries, threads, |(fqn, entry)| {
        let mut item_findings = ItemFindings::default();
        match entry {
            Entry::Bytes(bytes) => check_value(checkpoint, fqn, bytes, &mut item_findings),
            Entry::Tensor(tensor) => check_chunk_ends(checkpoint, fqn, tensor, &mut item_findings),
        }
        .map(|()| item_findings)
    });
    let mut findings = ItemFindings::default();
    for outcome in outcomes {
        let item_findings = outcome?;
        findings.problems.extend(item_findings.problems);
        findings.opaque.extend(item_findings.opaque);
    }
    Ok(findings)
}

/// Reads a value. One that is opaque, or that cannot be read, is added to the findings.
fn check_value(
    checkpoint: &dyn Checkpoint,
    fqn: &str,
    value: &BytesEntry,
    findings: &mut ItemFindings,
) -> Result<(), FileError> {
    if let Err(error) = refuse_paths(checkpoint.read_value(fqn))? {
        match error.opaque_type() {
            Some(opaque_type) => findings.opaque.push((fqn.to_owned(), opaque_type)),
            None => {
                let problem = Problem::of_key(fqn, value.stored.as_ref(), &error);
                findings.problems.push(problem);
            }
        }
    }
    Ok(())
}

/// Reads the last element of each chunk of a tensor: if that is there, the whole chunk is.
fn check_chunk_ends(
    checkpoint: &dyn Checkpoint,
    fqn: &str,
    tensor: &TensorEntry,
    findings: &mut ItemFindings,
) -> Result<(), FileError> {
    // Chunks that do not make up their tensor have been reported, and cannot be read.
    let boxes = tensor.chunks.iter().map(|chunk| &chunk.bounds);
    if validate_chunks(&tensor.shape, boxes).is_err() {
        return Ok(());
    }
    let mut element = vec![0; tensor.properties.dtype.size_in_bytes() as usize];
    let mut opaque_type = None;
    let problems = &mut findings.problems;
    for Chunk { bounds, stored } in &tensor.chunks {
        // Chunks that are stored nowhere have been reported above.
        let Some(stored) = stored else {
            continue;
        };
        if bounds.is_empty() {
            continue;
        }
        let last_index = bounds
            .offsets
            .iter()
            .zip(&bounds.sizes)
            .map(|(offset, size)| offset + size - 1);
        let last_element = TensorBox::new(last_index.collect(), vec![1; bounds.rank()]);
        // Read this chunk alone. An ordinary read would plan over all chunks, for each of them
        // again.
        let chunk_copy = Replica {
            fqn: fqn.to_owned(),
            bounds: Some(bounds.clone()),
            stored: stored.clone(),
        };
        let Err(error) =
            refuse_paths(checkpoint.read_replica(&chunk_copy, &last_element, &mut element))?
        else {
            continue;
        };
        let Some(type_name) = error.opaque_type() else {
            problems.push(Problem::of_key(fqn, Some(stored), &error));
            continue;
        };
        // An opaque tensor cannot be read here, but its bytes must be there, up to the last.
        opaque_type = Some(type_name);
        let last_byte = stored.length.saturating_sub(1);
        if let Err(error) = refuse_paths(checkpoint.read_stored(fqn, stored, last_byte, &mut [0]))?
        {
            problems.push(Problem::of_key(fqn, Some(stored), &error));
        }
    }
    findings
        .opaque
        .extend(opaque_type.map(|type_name| (fqn.to_owned(), type_name)));
    Ok(())
}

/// Turns a path that leads out of the checkpoint, or through a link, into an error of the whole
/// verification. Other errors of the read are returned inside, for the report.
fn refuse_paths<T>(outcome: Result<T, FileError>) -> Result<Result<T, FileError>, FileError> {
    match outcome {
        Err(error @ FileError::Path { .. }) => Err(error),
        outcome => Ok(outcome),
    }
}
