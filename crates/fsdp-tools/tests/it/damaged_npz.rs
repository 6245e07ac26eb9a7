//! Archives of NumPy whose bytes have changed: wrong elements are not given out as right ones.

use std::ops::Range;
use std::path::Path;

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::{Checkpoint, open};
use fsdp_formats::reader::OpenOptions;
use fsdp_layout::{ErrorKind, Failure, TensorBox, with_causes};
use fsdp_tools::convert::{ConvertOptions, OutputFormat, convert};
use fsdp_tools::verify::{Level, VerifyOptions, verify};

use crate::foreign::{fixture, opened, refused};

/// The array that is damaged: 3 x 4 elements of 4 bytes.
const KEY: &str = "model.weight";
/// The bytes of its elements.
const ELEMENTS_BYTES: usize = 48;
/// The bytes of its header, which come before.
const HEADER_BYTES: usize = 128;

/// Returns the bytes of an archive.
fn archive(name: &str) -> Vec<u8> {
    std::fs::read(fixture("numpy_gguf").join(name)).unwrap()
}

/// Returns the place of an array in its archive: of its elements, or of all that is stored of its
/// record if that is compressed.
fn place(name: &str, key: &str) -> Range<usize> {
    let arrays = opened(&fixture("numpy_gguf").join(name));
    let tensor = arrays.metadata().tensor(key).unwrap();
    let stored = tensor.chunks[0].stored.as_ref().unwrap();
    stored.offset as usize..(stored.offset + stored.length) as usize
}

/// Returns the position of the array's entry in the directory of an archive.
fn directory_entry(bytes: &[u8]) -> usize {
    let name = format!("{KEY}.npy");
    let mut windows = bytes.windows(name.len());
    let position = windows.rposition(|part| part == name.as_bytes());
    // Before the name come numbers.
    position.unwrap() - 46
}

/// Writes an archive to a file, and converts that.
fn converted(bytes: &[u8], folder: &Path) -> Result<(), FileError> {
    let path = folder.join("changed.npz");
    std::fs::write(&path, bytes).unwrap();
    let source = open(&path, OpenOptions::default())?;
    let options = ConvertOptions {
        overwrite: true,
        ..ConvertOptions::default()
    };
    let to = folder.join("to");
    convert(&*source, &to, OutputFormat::SafetensorsFile, options).map(drop)
}

/// Asserts that no conversion of an archive succeeds, and that the error calls the file damaged and
/// names it and the array.
fn assert_damaged(bytes: &[u8], folder: &Path, what: &str) {
    let error = converted(bytes, folder).unwrap_err();
    let text = with_causes(&error);
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{text}");
    for part in [KEY, "changed.npz", what] {
        assert!(text.contains(part), "`{part}`: {text}");
    }
}

/// Reads the array.
fn read_elements(source: &dyn Checkpoint) -> Result<Vec<u8>, FileError> {
    let mut elements = vec![0; ELEMENTS_BYTES];
    source.read_box(KEY, &TensorBox::whole(&[3, 4]), &mut elements)?;
    Ok(elements)
}

/// Reads one row of the array.
fn read_row(source: &dyn Checkpoint, row: usize) -> Result<(), FileError> {
    let bounds = TensorBox::new(vec![row, 0], vec![1, 4]);
    source.read_box(KEY, &bounds, &mut [0; ELEMENTS_BYTES / 3])
}

#[test]
fn a_changed_byte_of_a_stored_array_is_an_error_that_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = archive("arrays.npz");
    let elements = place("arrays.npz", KEY);
    assert_eq!(elements.len(), ELEMENTS_BYTES);
    converted(&bytes, folder.path()).unwrap();
    for position in elements.step_by(5) {
        let mut changed = bytes.clone();
        changed[position] ^= 1 << (position % 8);
        assert_damaged(&changed, folder.path(), "CRC-32");
    }
}

#[test]
fn a_changed_byte_of_a_compressed_array_is_an_error_that_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = archive("compressed.npz");
    let record = place("compressed.npz", KEY);
    converted(&bytes, folder.path()).unwrap();
    // Each of these bits makes a valid stream of as many bytes, of which some elements are others.
    for bit in [553, 570, 592, 618] {
        let mut changed = bytes.clone();
        changed[record.start + bit / 8] ^= 1 << (bit % 8);
        assert_damaged(&changed, folder.path(), "CRC-32");
    }
}

#[test]
fn an_invalid_deflate_stream_is_an_error_that_names_the_array() {
    let folder = tempfile::tempdir().unwrap();
    let mut bytes = archive("compressed.npz");
    // Nothing is known of the checksum, so that only the stream can tell.
    let entry = directory_entry(&bytes);
    bytes[entry + 16..entry + 20].fill(0);
    converted(&bytes, folder.path()).unwrap();
    // With each of these bits the stream repeats what comes before its beginning.
    let record = place("compressed.npz", KEY);
    for bit in [575, 652, 695, 901] {
        let mut changed = bytes.clone();
        changed[record.start + bit / 8] ^= 1 << (bit % 8);
        assert_damaged(&changed, folder.path(), "no DEFLATE stream");
        let source = opened(&folder.path().join("changed.npz"));
        let report = verify(&*source, Level::Hashes, VerifyOptions::default()).unwrap();
        let mut problems = report.problems.iter();
        assert!(
            problems.any(|problem| problem.error.contains("`model.weight.npy`")),
            "{:?}",
            report.problems
        );
    }
}

#[test]
fn a_deflate_stream_that_is_cut_short_is_an_error_that_names_the_array() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = archive("compressed.npz");
    let record = place("compressed.npz", KEY);
    let entry = directory_entry(&bytes);
    // The last byte has only the mark of the end: without it all elements are there.
    for length in 1..record.len() as u32 {
        let mut changed = bytes.clone();
        changed[entry + 20..entry + 24].copy_from_slice(&length.to_le_bytes());
        assert_damaged(&changed, folder.path(), "cut short");
    }
}

/// Changes each bit of a part of an archive, and returns the bits, counted from there, with which
/// the array can be read all the same. It must have the same elements then.
fn harmless_bits(name: &str, part: Range<usize>) -> Vec<usize> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("changed.npz");
    let bytes = archive(name);
    let expected = read_elements(&*opened(&fixture("numpy_gguf").join(name))).unwrap();
    let mut harmless = Vec::new();
    for bit in 0..part.len() * 8 {
        let mut changed = bytes.clone();
        changed[part.start + bit / 8] ^= 1 << (bit % 8);
        std::fs::write(&path, &changed).unwrap();
        let read = open(&path, OpenOptions::default()).and_then(|source| read_elements(&*source));
        if let Ok(elements) = read {
            assert_eq!(elements, expected, "bit {bit} of {part:?} in {name}");
            harmless.push(bit);
        }
    }
    harmless
}

#[test]
fn no_changed_bit_of_a_record_gives_other_elements() {
    let elements = place("arrays.npz", KEY);
    let record = elements.start - HEADER_BYTES..elements.end;
    assert_eq!(harmless_bits("arrays.npz", record), [0; 0]);
    // The last two bits come after the end of the stream.
    let record = place("compressed.npz", KEY);
    let bit_count = record.len() * 8;
    assert_eq!(
        harmless_bits("compressed.npz", record),
        [bit_count - 2, bit_count - 1]
    );
}

#[test]
fn an_array_that_is_read_in_parts_is_checked_with_the_last_of_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("changed.npz");
    let mut bytes = archive("arrays.npz");
    bytes[place("arrays.npz", KEY).start] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    let source = opened(&path);
    read_row(&*source, 1).unwrap();
    // A row that is read again does not count as another one.
    read_row(&*source, 1).unwrap();
    read_row(&*source, 2).unwrap();
    read_row(&*source, 0).unwrap_err();
    // From then on it is known.
    read_row(&*source, 1).unwrap_err();
    // To read the last row of a compressed array takes all that comes before it.
    let mut bytes = archive("compressed.npz");
    bytes[place("compressed.npz", KEY).start + 553 / 8] ^= 1 << (553 % 8);
    std::fs::write(&path, &bytes).unwrap();
    let source = opened(&path);
    read_row(&*source, 1).unwrap();
    read_row(&*source, 2).unwrap_err();
}

#[test]
fn a_damaged_header_of_an_array_without_elements_is_an_error_when_the_file_is_opened() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("changed.npz");
    let mut bytes = archive("arrays.npz");
    // A space at the end of the header, which means nothing.
    let space = place("arrays.npz", "empty").start - 10;
    assert_eq!(bytes[space], b' ');
    bytes[space] = b'\t';
    std::fs::write(&path, &bytes).unwrap();
    let error = refused(&path);
    let text = with_causes(&error);
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{text}");
    for part in ["`empty`", "changed.npz", "CRC-32"] {
        assert!(text.contains(part), "`{part}`: {text}");
    }
}
