//! Damaged and hostile checkpoints: always a typed error, or (unsealed) a plain reading; never a
//! panic, nothing outside.

use std::path::{Path, PathBuf};

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::Checkpoint as _;
use fsdp_formats::checkpoint::open;
use fsdp_formats::internals::INTEGRITY_FILE;
use fsdp_formats::metadata::{Entry, METADATA_FILE, decode, encode};
use fsdp_formats::reader::{CheckpointReader, OpenOptions};
use fsdp_formats::storage::Durable;
use fsdp_layout::{DType, PlainValue};
use fsdp_tools::convert::{ConvertOptions, OutputFormat, convert};
use fsdp_tools::verify::{Level, VerifyOptions, add_integrity, verify};

use crate::state::{State, save};
use crate::{bounded, fixtures, write_parts};

/// Writes a small tensor and a value, saved by two ranks.
fn small(target: &Path) {
    let mut state = State::default();
    state
        .tensors
        .insert("w".to_owned(), (DType::F32, vec![3, 2], (0..24).collect()));
    state.values.insert("step".to_owned(), PlainValue::Int(20));
    save(&state, 2, target, &Durable::new()).unwrap();
}

/// Reads a checkpoint up to the first error.
fn read_until_error(directory: &Path) -> Result<(), FileError> {
    let checkpoint = CheckpointReader::open(directory)?;
    checkpoint
        .metadata()
        .entries
        .iter()
        .try_for_each(|(fqn, entry)| match entry {
            Entry::Tensor(_) => checkpoint.read_tensor(fqn).map(drop),
            Entry::Bytes(_) => checkpoint.read_value(fqn).map(drop),
        })
}

/// Changes one bit of a file in place.
fn flip(file: &Path, bit: usize) {
    use std::os::unix::fs::FileExt as _;
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(file)
        .unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, bit as u64 / 8).unwrap();
    file.write_all_at(&[byte[0] ^ 1 << (bit % 8)], bit as u64 / 8)
        .unwrap();
}

/// Reads everything that a checkpoint holds.
fn read_all(directory: &Path) -> Result<usize, FileError> {
    let checkpoint = CheckpointReader::open(directory)?;
    let mut bytes = 0;
    let mut outcome = Ok(());
    for (fqn, entry) in &checkpoint.metadata().entries {
        // Everything is tried, whatever failed before: no key may panic.
        outcome = outcome.and(match entry {
            Entry::Tensor(_) => checkpoint
                .read_tensor(fqn)
                .map(|tensor| bytes += tensor.len()),
            Entry::Bytes(_) => checkpoint.read_value(fqn).map(drop),
        });
    }
    outcome.map(|()| bytes)
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_file())
        .collect();
    files.sort();
    files
}

/// Copies a directory, one file of which a test then changes again and again.
fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for file in files(from) {
        std::fs::copy(&file, to.join(file.file_name().unwrap())).unwrap();
    }
}

fn overwrite(path: &Path, bytes: &[u8]) {
    use std::io::Write as _;
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .truncate(true)
        .open(path)
        .unwrap();
    file.write_all(bytes).unwrap();
}

#[test]
fn every_flipped_bit_that_is_read_is_found_in_a_sealed_checkpoint() {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("c");
    small(&target);
    assert_eq!(bounded(|| read_all(&target)).unwrap(), 24);
    for file in files(&target) {
        for bit in 0..std::fs::read(&file).unwrap().len() * 8 {
            flip(&file, bit);
            // Small files: every byte lies in a block that some read needs.
            assert!(
                bounded(|| read_until_error(&target)).is_err(),
                "bit {bit} of {}",
                file.display()
            );
            flip(&file, bit);
        }
    }
    assert_eq!(bounded(|| read_all(&target)).unwrap(), 24);
}

#[test]
fn every_prefix_of_every_file_is_an_error() {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("c");
    small(&target);
    for file in files(&target) {
        let whole = std::fs::read(&file).unwrap();
        for end in 0..whole.len() {
            overwrite(&file, &whole[..end]);
            assert!(
                bounded(|| read_all(&target)).is_err(),
                "{end} bytes of {}",
                file.display()
            );
        }
        overwrite(&file, &whole);
    }
}

#[test]
fn flips_and_prefixes_of_a_foreign_checkpoint_never_panic() {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("c");
    copy(&fixtures().join("variants_ws2/threads2"), &target);
    for file in files(&target) {
        let whole = std::fs::read(&file).unwrap();
        for bit in (0..whole.len() * 8).step_by(29) {
            flip(&file, bit);
            let _ = bounded(|| read_all(&target));
            flip(&file, bit);
        }
        for end in (0..whole.len()).step_by(17) {
            overwrite(&file, &whole[..end]);
            assert!(
                bounded(|| read_all(&target)).is_err(),
                "{end} bytes of {}",
                file.display()
            );
        }
        overwrite(&file, &whole);
    }
}

/// Writes a small state in every format but DCP's, without hashes.
fn other_formats(parent: &Path) -> Vec<PathBuf> {
    let source = parent.join("source");
    small(&source);
    let source = open(&source, OpenOptions::default()).unwrap();
    let targets = [
        ("m.safetensors", OutputFormat::SafetensorsFile),
        ("m.pt", OutputFormat::Torch),
        (
            "hf",
            OutputFormat::SafetensorsDirectory {
                max_file_bytes: 1000,
            },
        ),
        ("shards", OutputFormat::SafetensorsShards { ranks: 2 }),
    ];
    let made = targets.into_iter().map(|(name, target)| {
        let place = parent.join(name).join(name);
        convert(&*source, &place, target, ConvertOptions::default()).unwrap();
        if place.is_dir() {
            std::fs::remove_file(place.join(INTEGRITY_FILE)).unwrap();
        }
        place
    });
    let mut made: Vec<PathBuf> = made.collect();
    let parts = parent.join("parts").join("parts");
    write_parts(&*source, &parts);
    std::fs::remove_file(parts.join(INTEGRITY_FILE)).unwrap();
    made.push(parts);
    made
}

/// Opens a checkpoint of any format, reads and verifies all of it, and returns `true` if nothing is
/// wrong.
fn is_whole(path: &Path) -> bool {
    let read = || -> Result<bool, FileError> {
        let checkpoint = open(path, OpenOptions::default())?;
        let report = verify(&*checkpoint, Level::Deep, VerifyOptions::default())?;
        let values: Vec<String> = checkpoint
            .metadata()
            .values()
            .map(|(key, _)| key.to_owned())
            .collect();
        values
            .iter()
            .try_for_each(|key| checkpoint.read_value(key).map(drop))?;
        Ok(report.is_ok())
    };
    read().unwrap_or(false)
}

/// Each bit and each prefix of each file of each format: never a panic; where there are hashes,
/// always found.
#[test]
fn flips_and_prefixes_of_every_format() {
    let parent = tempfile::tempdir().unwrap();
    for sealed in [false, true] {
        for place in other_formats(&parent.path().join(sealed.to_string())) {
            if sealed {
                add_integrity(&place, None).unwrap();
            }
            assert!(is_whole(&place));
            for file in files(if place.is_dir() {
                &place
            } else {
                place.parent().unwrap()
            }) {
                let whole = std::fs::read(&file).unwrap();
                for bit in (0..whole.len() * 8).step_by(3) {
                    flip(&file, bit);
                    let found = !bounded(|| is_whole(&place));
                    assert!(found || !sealed, "bit {bit} of {}", file.display());
                    flip(&file, bit);
                }
                for end in 0..whole.len() {
                    overwrite(&file, &whole[..end]);
                    let found = !bounded(|| is_whole(&place));
                    // Without hashes nobody knows how long a values file was.
                    assert!(found || !sealed, "{end} bytes of {}", file.display());
                }
                overwrite(&file, &whole);
            }
            assert!(is_whole(&place));
        }
    }
}

/// Changes where the metadata of a foreign checkpoint says its items are.
fn with_paths(directory: &Path, relative_path: &str) {
    let mut metadata = decode(&std::fs::read(directory.join(METADATA_FILE)).unwrap()).unwrap();
    for entry in metadata.entries.values_mut() {
        match entry {
            Entry::Bytes(bytes) => {
                bytes.stored.as_mut().unwrap().relative_path = relative_path.to_owned()
            }
            Entry::Tensor(tensor) => {
                for chunk in &mut tensor.chunks {
                    chunk.stored.as_mut().unwrap().relative_path = relative_path.to_owned();
                }
            }
        }
    }
    overwrite(&directory.join(METADATA_FILE), &encode(&metadata));
}

#[test]
fn paths_that_lead_out_of_the_checkpoint_are_not_opened() {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("c");
    copy(&fixtures().join("variants_ws2/lowestrank"), &target);
    // A whole checkpoint's data outside: were it opened, reading would succeed.
    copy(&target, &parent.path().join("outside"));
    std::os::unix::fs::symlink(parent.path().join("outside"), target.join("linked")).unwrap();
    std::os::unix::fs::symlink("/dev/zero", target.join("zero")).unwrap();
    let fifo = target.join("fifo");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &fifo,
        rustix::fs::FileType::Fifo,
        0o600.into(),
        0,
    )
    .unwrap();
    std::fs::create_dir(target.join("directory")).unwrap();
    for path in [
        "../outside/__0_0.distcp",
        "/etc/hostname",
        "a/../../outside/__0_0.distcp",
        "linked/__0_0.distcp",
        "zero",
        "fifo",
        "directory",
        "C:\\data",
        "",
        "a\0b",
        ".",
        "..",
    ] {
        with_paths(&target, path);
        let checkpoint = CheckpointReader::open(&target).unwrap();
        let error = bounded(|| checkpoint.read_tensor("w")).unwrap_err();
        assert!(matches!(error, FileError::Path { .. }), "{path:?}: {error}");
        assert!(
            matches!(checkpoint.read_value("n.step"), Err(FileError::Path { .. })),
            "{path:?}"
        );
        // Verifying says the same, and does not call the checkpoint damaged.
        let verified = bounded(|| verify(&checkpoint, Level::Sizes, VerifyOptions::default()));
        assert!(matches!(verified, Err(FileError::Path { .. })), "{path:?}");
    }
}

#[test]
fn swapped_missing_and_mixed_data_files_are_found() {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("c");
    small(&target);
    let (a, b) = (target.join("__0_0.distcp"), target.join("__1_0.distcp"));
    let (bytes_a, bytes_b) = (std::fs::read(&a).unwrap(), std::fs::read(&b).unwrap());
    overwrite(&a, &bytes_b);
    overwrite(&b, &bytes_a);
    assert!(bounded(|| read_all(&target)).is_err());
    overwrite(&b, b"");
    overwrite(&a, &bytes_a);
    assert!(bounded(|| read_all(&target)).is_err());
    std::fs::remove_file(&b).unwrap();
    let error = bounded(|| read_all(&target)).unwrap_err();
    assert!(error.to_string().contains("__1_0.distcp"), "{error}");
}

#[test]
fn what_is_no_checkpoint_says_so() {
    let parent = tempfile::tempdir().unwrap();
    for path in [parent.path().join("nothing"), parent.path().to_owned()] {
        assert!(matches!(
            CheckpointReader::open(&path),
            Err(FileError::NotCommitted { .. })
        ));
    }
}

#[test]
fn absurd_shapes_allocate_nothing() {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("c");
    copy(&fixtures().join("variants_ws2/lowestrank"), &target);
    let mut metadata = decode(&std::fs::read(target.join(METADATA_FILE)).unwrap()).unwrap();
    if let Some(Entry::Tensor(tensor)) = metadata.entries.get_mut("rep") {
        tensor.shape = vec![1 << 30, 1 << 20];
        tensor.chunks[0].bounds.sizes = tensor.shape.clone();
    }
    overwrite(&target.join(METADATA_FILE), &encode(&metadata));
    assert!(bounded(|| CheckpointReader::open(&target).unwrap().read_tensor("rep")).is_err());
}
