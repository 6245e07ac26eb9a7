//! Checkpoints in parts: each rank saves what it holds in a directory of its own, and the parts
//! together are one checkpoint.
//!
//! A part is a DCP directory. Its `.metadata` lists the boxes of one rank, with the shapes of the
//! whole tensors, and it has an integrity file of its own. [`plan_part`](crate::plan::plan_part),
//! [`write_rank`](super::writer::write_rank) and [`finish`](super::writer::finish) write it. To
//! send a part to another host, [`PartFiles`] reads it as a sequence of bytes, and [`NewPart`]
//! writes such a sequence as a part. [`join`] makes one checkpoint of all parts.

use crate::error::{FileError, FormatError};
use crate::formats::checkpoint::Checkpoint as _;
use crate::limits::{MAX_INTEGRITY_BYTES, MAX_PICKLE_BYTES, check_limit};
use crate::metadata::{METADATA_FILE, Metadata, encode};
use crate::storage::integrity::INTEGRITY_FILE;
use crate::storage::location::Location;
use crate::storage::read_at::ReadAt as _;
use crate::storage::{Durable, StagedFile, Staging};

use super::reader::CheckpointReader;
use super::writer::{RankWritten, WrittenFile, commit};

/// The number of bytes that are copied at once if a file cannot be linked.
const COPY_BYTES: u64 = 4 << 20;

/// Checks every byte of a part against its hashes.
///
/// # Errors
/// The part is damaged, or has no hashes.
pub fn check(part: impl Into<Location>) -> Result<(), FileError> {
    let reader = CheckpointReader::open(part)?;
    let directory = reader.directory();
    for name in data_files(&reader)? {
        let file = directory.file(&name)?;
        file.verify_whole()
            .map_err(|source| directory.file_error(&name, source))?;
    }
    Ok(())
}

/// Returns the names of a part's data files, which are those that have hashes. A part without
/// hashes is an error.
fn data_files(reader: &CheckpointReader) -> Result<Vec<String>, FileError> {
    let directory = reader.directory();
    if !directory.has_integrity() {
        return Err(FileError::MissingFiles {
            path: reader.path().to_owned(),
            files: vec![INTEGRITY_FILE.to_owned()],
        });
    }
    let mut names = directory.covered();
    names.retain(|name| name != METADATA_FILE);
    Ok(names)
}

/// Joins parts to one checkpoint at `target`, and replaces an existing one. Files are hard links
/// where possible: then the checkpoint needs no space beside its parts, and is still whole when
/// they are removed.
///
/// # Errors
/// Parts that cannot be read, or that have data files of the same name; errors of the storage.
pub fn join(target: impl Into<Location>, parts: &[Location]) -> Result<(), FileError> {
    let target = target.into();
    let staging = Durable::new().prepare(&target, true)?;
    staging.check_replaces_directory()?;
    let mut report = RankWritten::default();
    let mut rank_metadata = Vec::with_capacity(parts.len());
    for part in parts {
        let reader = CheckpointReader::open(part)?;
        for name in data_files(&reader)? {
            if report.files.iter().any(|file| file.name == name) {
                let source = malformed(&format!("two parts have a file `{name}`"));
                return Err(source.in_file(reader.path()));
            }
            // A link needs no space, but works only within one file system.
            if !staging.link(part, &name, &name)? {
                copy_file(&reader, &name, &staging)?;
            }
            let integrity = reader
                .directory()
                .hashes(&name)
                .expect("the data files of a part are those that have hashes")
                .clone();
            report.files.push(WrittenFile { name, integrity });
        }
        rank_metadata.push(reader.metadata().clone());
    }
    let metadata = Metadata::merge(rank_metadata)
        .map_err(|reason| malformed(&reason).in_file(target.name()))?;
    let encoded = encode(&metadata);
    commit(staging, &encoded, &[report], None, None).map(drop)
}

/// Copies a file of a part, and checks its hashes while reading.
fn copy_file(reader: &CheckpointReader, name: &str, staging: &Staging) -> Result<(), FileError> {
    let directory = reader.directory();
    let file = directory.file(name)?;
    let copy = staging.create(name, file.len())?;
    let mut buffer = Vec::new();
    let mut offset = 0;
    while offset < file.len() {
        buffer.resize(COPY_BYTES.min(file.len() - offset) as usize, 0);
        file.read_exact_at(offset, &mut buffer)
            .map_err(|source| directory.file_error(name, source))?;
        copy.write_at(offset, &buffer)?;
        offset += buffer.len() as u64;
    }
    copy.finish()
}

/// The name and the length in bytes of each file of a part, in the order in which
/// [`PartFiles::read`] concatenates them.
pub type PartList = Vec<(String, u64)>;

/// A part that is read as one sequence of bytes: the contents of its files, one after the other.
#[derive(Debug)]
pub struct PartFiles {
    reader: CheckpointReader,
    files: PartList,
}

impl PartFiles {
    /// Opens a part.
    ///
    /// # Errors
    /// The part cannot be read, or has no hashes.
    pub fn open(part: impl Into<Location>) -> Result<Self, FileError> {
        let reader = CheckpointReader::open(part)?;
        let mut files = Vec::new();
        for name in data_files(&reader)? {
            let length = reader.directory().file(&name)?.len();
            files.push((name, length));
        }
        // The metadata come last, as in every save: with them the part is complete.
        for name in [INTEGRITY_FILE, METADATA_FILE] {
            files.push((name.to_owned(), reader.directory().extra_file(name)?.len()));
        }
        Ok(PartFiles { reader, files })
    }

    /// Returns the files of the part.
    #[must_use]
    pub fn list(&self) -> &PartList {
        &self.files
    }

    /// Fills `dst` with the bytes of the sequence that begin at `offset`, checked against their
    /// hashes. Bytes of `dst` beyond the end of the sequence stay as they are.
    ///
    /// # Errors
    /// The part is damaged, or cannot be read.
    pub fn read(&self, offset: u64, dst: &mut [u8]) -> Result<(), FileError> {
        let directory = self.reader.directory();
        for FileRun {
            file_index,
            file_offset,
            buffer_range,
        } in split_by_file(&self.files, offset, dst.len())
        {
            let (name, _) = &self.files[file_index];
            directory
                .extra_file(name)?
                .read_exact_at(file_offset, &mut dst[buffer_range])
                .map_err(|source| directory.file_error(name, source))?;
        }
        Ok(())
    }
}

/// A part that is being written from the sequence of bytes that [`PartFiles`] reads.
#[derive(Debug)]
pub struct NewPart {
    staging: Staging,
    list: PartList,
    /// The files in the order of `list`; `None` for `.metadata`, whose bytes are kept for the
    /// commit.
    files: Vec<Option<Box<dyn StagedFile>>>,
    metadata: Vec<u8>,
    written_bytes: u64,
}

impl NewPart {
    /// Prepares to write a part with these files, which [`PartFiles::list`] returned on another
    /// rank.
    ///
    /// # Errors
    /// A list without the files that every part has, or with impossible lengths; a target that
    /// exists already; errors of the storage.
    pub fn create(target: impl Into<Location>, list: PartList) -> Result<Self, FileError> {
        let target = target.into();
        check_list(&list).map_err(|source| source.in_file(target.name()))?;
        let staging = Durable::new().prepare(&target, false)?;
        let mut files = Vec::with_capacity(list.len());
        for (name, length) in &list {
            files.push(if name == METADATA_FILE {
                None
            } else {
                Some(staging.create(name, *length)?)
            });
        }
        Ok(NewPart {
            staging,
            list,
            files,
            metadata: Vec::new(),
            written_bytes: 0,
        })
    }

    /// Writes the next bytes of the sequence.
    ///
    /// # Errors
    /// Errors of the storage.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        for FileRun {
            file_index,
            file_offset,
            buffer_range,
        } in split_by_file(&self.list, self.written_bytes, bytes.len())
        {
            match &self.files[file_index] {
                Some(file) => file.write_at(file_offset, &bytes[buffer_range])?,
                None => self.metadata.extend_from_slice(&bytes[buffer_range]),
            }
        }
        self.written_bytes += bytes.len() as u64;
        Ok(())
    }

    /// Commits the part: it appears at the target in one step.
    ///
    /// # Errors
    /// The number of bytes that were written is not that of the list; errors of the storage.
    pub fn commit(self) -> Result<(), FileError> {
        let total: u64 = self.list.iter().map(|(_, length)| length).sum();
        // A part that lacks bytes would be found damaged only when it is needed.
        if self.written_bytes != total {
            return Err(FileError::NotCommitted {
                path: self.staging.directory().to_owned(),
                reason: "the staging directory lacks bytes of a part that was to be copied",
            });
        }
        self.files
            .into_iter()
            .flatten()
            .try_for_each(|file| file.finish())?;
        self.staging.commit(METADATA_FILE, &self.metadata)
    }
}

/// Checks that a list of files from another rank has the two files that each part has, and that
/// their lengths are within the limits.
fn check_list(list: &PartList) -> Result<(), FormatError> {
    for (required_name, limit) in [
        (INTEGRITY_FILE, MAX_INTEGRITY_BYTES),
        (METADATA_FILE, MAX_PICKLE_BYTES),
    ] {
        let (_, length) = list
            .iter()
            .find(|(name, _)| name == required_name)
            .ok_or_else(|| malformed(&format!("no `{required_name}`")))?;
        check_limit("file length", *length, limit)?;
    }
    // From here on, positions in the sequence cannot overflow.
    list.iter()
        .try_fold(0u64, |sum, (_, length)| sum.checked_add(*length))
        .map(drop)
        .ok_or_else(|| malformed("its files are longer than any can be"))
}

/// Makes the error of a part that is not what it should be.
fn malformed(reason: &str) -> FormatError {
    FormatError::malformed("part of a checkpoint", reason)
}

/// A range of bytes of the sequence that lies in one file.
struct FileRun {
    /// The position of the file in the list.
    file_index: usize,
    /// The offset of the first byte in the file.
    file_offset: u64,
    /// The range of the bytes in the caller's buffer.
    buffer_range: std::ops::Range<usize>,
}

/// Splits the `length` bytes of the sequence from `offset` by file, and returns a range for each
/// file that has some of them. Bytes beyond the end of the sequence are in no range.
fn split_by_file(list: &PartList, offset: u64, length: usize) -> Vec<FileRun> {
    let end = offset.saturating_add(length as u64);
    let mut runs = Vec::new();
    let mut file_start = 0u64;
    for (file_index, (_, file_length)) in list.iter().enumerate() {
        let file_end = file_start + file_length;
        let run_start = offset.max(file_start);
        let run_end = end.min(file_end);
        if run_start < run_end {
            runs.push(FileRun {
                file_index,
                file_offset: run_start - file_start,
                buffer_range: (run_start - offset) as usize..(run_end - offset) as usize,
            });
        }
        file_start = file_end;
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequence_of_bytes_is_cut_where_files_end() {
        let list = vec![
            ("a".to_owned(), 3),
            ("empty".to_owned(), 0),
            ("b".to_owned(), 4),
        ];
        let cut = |offset, length| -> Vec<(usize, u64, std::ops::Range<usize>)> {
            split_by_file(&list, offset, length)
                .into_iter()
                .map(|run| (run.file_index, run.file_offset, run.buffer_range))
                .collect()
        };
        assert_eq!(cut(0, 7), [(0, 0, 0..3), (2, 0, 3..7)]);
        assert_eq!(cut(2, 3), [(0, 2, 0..1), (2, 0, 1..3)]);
        assert_eq!(cut(4, 100), [(2, 1, 0..3)]);
        assert_eq!(cut(7, 1), []);
    }

    #[test]
    fn a_list_without_hashes_or_of_absurd_lengths_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let list = |lengths: [u64; 3]| {
            let names = ["__0_0.distcp", INTEGRITY_FILE, METADATA_FILE];
            names
                .iter()
                .map(|name| (*name).to_owned())
                .zip(lengths)
                .collect::<PartList>()
        };
        for bad in [
            list([1, 2, 3])[..2].to_vec(),
            list([1, u64::MAX, 1]),
            list([1, 1, u64::MAX]),
            list([u64::MAX, 1, 1]),
        ] {
            NewPart::create(dir.path().join("part"), bad).unwrap_err();
        }
        assert_eq!(
            std::fs::read_dir(dir.path()).unwrap().count(),
            0,
            "nothing was written"
        );
        // Too few bytes are never committed.
        let mut part = NewPart::create(dir.path().join("part"), list([4, 1, 1])).unwrap();
        part.write(&[1, 2, 3, 4, 5]).unwrap();
        part.commit().unwrap_err();
        assert_eq!(
            std::fs::read_dir(dir.path()).unwrap().count(),
            0,
            "nothing is left"
        );
    }
}
