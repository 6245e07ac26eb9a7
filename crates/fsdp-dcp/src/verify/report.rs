//! The report of a verification.

use fsdp_layout::ErrorKind;

use crate::elements::Census;
use crate::formats::checkpoint::PartOf;
use crate::kind::kind_of;
use crate::metadata::StorageInfo;

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
    /// The kind of the error: a file that cannot be read may be sound.
    pub kind: ErrorKind,
}

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

    /// Adds the findings about a part of the checkpoint.
    pub(super) fn absorb(&mut self, part: Report) {
        self.problems.extend(part.problems);
        self.opaque.extend(part.opaque);
    }

    /// Adds the findings about one of several checkpoints, with the keys and files that they have
    /// in the whole.
    pub(super) fn absorb_part(&mut self, part: Report, of: &PartOf<'_>) {
        let key = |fqn: String| of.keys.get(&fqn).cloned().unwrap_or(fqn);
        let file = |file: String| {
            if of.is_directory {
                format!("{}/{file}", of.place)
            } else {
                file
            }
        };
        self.problems
            .extend(part.problems.into_iter().map(|problem| Problem {
                fqn: problem.fqn.map(key),
                file: problem.file.map(file),
                ..problem
            }));
        self.has_integrity &= part.has_integrity;
        self.stale_digests |= part.stale_digests;
        self.opaque
            .extend(part.opaque.into_iter().map(|(fqn, of)| (key(fqn), of)));
        self.not_finite.extend(
            part.not_finite
                .into_iter()
                .map(|(fqn, census)| (key(fqn), census)),
        );
        self.tensors += part.tensors;
        self.values += part.values;
        self.bytes_read += part.bytes_read;
        self.replicas += part.replicas;
        self.digests += part.digests;
    }

    /// Adds a problem with a key, or with the item that is stored for it.
    pub(super) fn add(
        &mut self,
        fqn: Option<&str>,
        stored: Option<&StorageInfo>,
        error: &(dyn std::error::Error + 'static),
    ) {
        self.problems.push(Problem {
            fqn: fqn.map(str::to_owned),
            file: stored.map(|stored| stored.relative_path.clone()),
            offset: corrupt_at(error).or_else(|| stored.map(|stored| stored.offset)),
            error: with_causes(error),
            kind: kind_of(error),
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
pub(super) fn corrupt_at(error: &(dyn std::error::Error + 'static)) -> Option<u64> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(crate::FormatError::Corrupt { offset, .. }) = error.downcast_ref() {
            return Some(*offset);
        }
        next = error.source();
    }
    None
}
