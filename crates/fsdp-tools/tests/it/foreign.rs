//! The helpers that the tests of other programs' layouts share.

use std::path::{Path, PathBuf};

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::{Checkpoint, open};
use fsdp_formats::reader::OpenOptions;
use fsdp_tools::convert::{ConvertOptions, OutputFormat, convert};
use fsdp_tools::diff::{DiffOptions, diff};
use fsdp_tools::verify::{Level, VerifyOptions, verify};

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

pub(crate) fn opened(path: &Path) -> Box<dyn Checkpoint> {
    open(path, OpenOptions::default()).unwrap()
}

/// Returns the error of opening what is no checkpoint.
pub(crate) fn refused(path: &Path) -> FileError {
    match open(path, OpenOptions::default()) {
        Ok(_) => panic!("{} was opened", path.display()),
        Err(error) => error,
    }
}

/// Lists the differences of two checkpoints.
pub(crate) fn differences(a: &dyn Checkpoint, b: &dyn Checkpoint) -> Vec<String> {
    let mut found = Vec::new();
    diff(a, b, DiffOptions::default(), &mut |key, difference| {
        found.push(format!("{key}: {difference:?}"))
    })
    .unwrap();
    found
}

/// Asserts that a checkpoint is sound, and that every format holds the same after a conversion.
pub(crate) fn assert_converts(source: &dyn Checkpoint) {
    let report = verify(source, Level::Deep, VerifyOptions::default()).unwrap();
    assert!(report.is_ok(), "{:?}", report.problems);
    let parent = tempfile::tempdir().unwrap();
    for (number, target) in [
        OutputFormat::Dcp { ranks: 3 },
        OutputFormat::SafetensorsFile,
        OutputFormat::SafetensorsDirectory {
            max_file_bytes: 200,
        },
        OutputFormat::SafetensorsShards { ranks: 2 },
        OutputFormat::Torch,
    ]
    .into_iter()
    .enumerate()
    {
        let to = parent.path().join(number.to_string());
        convert(
            source,
            &to,
            target,
            ConvertOptions {
                drop_opaque: true,
                ..ConvertOptions::default()
            },
        )
        .unwrap();
        let found = differences(source, &*opened(&to));
        let found: Vec<&String> = found
            .iter()
            .filter(|line| !line.contains("Container"))
            .collect();
        assert_eq!(found, [""; 0], "{target:?}");
    }
}

/// Copies the regular files of a directory.
pub(crate) fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        if entry.path().is_dir() {
            copy(&entry.path(), &to.join(entry.file_name()));
        } else {
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
}

/// Replaces the first place of `old` in a file by `new`, of the same length, as if the file had
/// been written so: without the checksums of what it was.
pub(crate) fn replace(path: &Path, old: &[u8], new: &[u8]) {
    damage(path, old, new);
    let mut bytes = std::fs::read(path).unwrap();
    clear_checksums(&mut bytes);
    std::fs::write(path, bytes).unwrap();
}

/// Clears the checksums of all records of the archives in some bytes, so that none is compared.
pub(crate) fn clear_checksums(bytes: &mut [u8]) {
    const ENTRY: &[u8] = b"PK\x01\x02";
    for start in 0..bytes.len().saturating_sub(20) {
        if bytes[start..].starts_with(ENTRY) {
            bytes[start + 16..start + 20].fill(0);
        }
    }
}

/// Replaces the first place of `old` in a file by `new`, of the same length.
pub(crate) fn damage(path: &Path, old: &[u8], new: &[u8]) {
    assert_eq!(old.len(), new.len());
    let mut bytes = std::fs::read(path).unwrap();
    let at = bytes
        .windows(old.len())
        .position(|part| part == old)
        .unwrap();
    bytes[at..at + new.len()].copy_from_slice(new);
    std::fs::write(path, bytes).unwrap();
}
