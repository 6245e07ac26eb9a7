//! The report of a verification.

use fsdp_formats::checkpoint::PartOf;
use fsdp_formats::complete::Problem;
use fsdp_formats::{FileError, FormatError, Location};

use crate::elements::Census;

/// The findings of a verification.
#[derive(Debug, Default)]
pub struct Report {
    /// All problems, in the order in which they were found: files in the order of their names.
    pub problems: Vec<Problem>,
    /// `true` if hashes were there to check against.
    pub has_integrity: bool,
    /// At [`Level::Sizes`](super::Level::Sizes) and above: keys of values that hold objects of
    /// unknown types, and of tensors that are such objects. They are never built. With the type of
    /// each. They are no problems.
    pub opaque: Vec<(String, String)>,
    /// Tensors looked at.
    pub tensors: usize,
    /// Values looked at.
    pub values: usize,
    /// Bytes read.
    pub bytes_read: u64,
    /// At [`Level::Deep`](super::Level::Deep): further copies of replicated tensors and values,
    /// each compared with the first copy.
    pub replicas: usize,
    /// At [`Level::Deep`](super::Level::Deep): tensors and values whose digests were compared with
    /// the recorded ones.
    pub digests: usize,
    /// `true` if there are recorded digests, but of what the file held before another program wrote
    /// it again. They are not compared with anything.
    pub stale_digests: bool,
    /// At [`Level::Deep`](super::Level::Deep): keys of tensors with NaN or infinities, and how many
    /// of each.
    pub not_finite: Vec<(String, Census)>,
}

impl Report {
    /// Returns `true` if all is well. NaN and infinities are not held against a checkpoint.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        self.problems.is_empty()
    }

    /// Returns the first problem of the checkpoint at a location as an error, if there is one.
    pub(crate) fn into_result(self, location: &Location) -> Result<(), FileError> {
        let Some(problem) = self.problems.into_iter().next() else {
            return Ok(());
        };
        Err(FileError::File {
            path: location.name().to_owned(),
            source: FormatError::malformed("checkpoint", problem.error),
        })
    }

    /// Adds the findings about one of several checkpoints, with the keys and files that they have
    /// in the whole.
    pub(super) fn add_part(&mut self, report: Report, part: &PartOf<'_>) {
        for problem in report.problems {
            self.problems.push(Problem {
                fqn: problem.fqn.map(|fqn| key_in_whole(fqn, part)),
                file: problem.file.map(|file| {
                    if part.is_directory {
                        format!("{}/{file}", part.path)
                    } else {
                        file
                    }
                }),
                ..problem
            });
        }
        for (fqn, object_type) in report.opaque {
            self.opaque.push((key_in_whole(fqn, part), object_type));
        }
        for (fqn, census) in report.not_finite {
            self.not_finite.push((key_in_whole(fqn, part), census));
        }
        // The whole has hashes only if all of its parts do.
        self.has_integrity &= report.has_integrity;
        self.stale_digests |= report.stale_digests;
        self.tensors += report.tensors;
        self.values += report.values;
        self.bytes_read += report.bytes_read;
        self.replicas += report.replicas;
        self.digests += report.digests;
    }
}

/// Returns the key that a key of a part has in the whole.
fn key_in_whole(fqn: String, part: &PartOf<'_>) -> String {
    match part.keys.get(&fqn) {
        Some(key) => key.clone(),
        None => fqn,
    }
}
