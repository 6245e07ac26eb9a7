//! A campaign of damage over every format: bits flipped, files cut, pieces of one file put into
//! another, files swapped.
//!
//! The seed is fixed. Sealed, any change of a file must be found. Without hashes, nothing may panic
//! or take much memory; and where archives have checksums, a checkpoint that `verify` calls sound
//! must hold what it held before.

use std::path::{Path, PathBuf};

use fsdp_formats::checkpoint::open;
use fsdp_formats::internals::INTEGRITY_FILE;
use fsdp_formats::reader::OpenOptions;
use fsdp_tools::convert::{ConvertOptions, OutputFormat, convert};
use fsdp_tools::diff::{DiffOptions, diff};
use fsdp_tools::verify::{Level, VerifyOptions, add_integrity, verify};

use crate::{bounded, fixtures, write_parts};

/// A generator of numbers that are the same in each run.
struct Numbers(u64);

impl Numbers {
    /// Returns a number below `end`.
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % end.max(1) as u64) as usize
    }
}

/// One change of a checkpoint's files.
#[derive(Debug, Clone, Copy)]
enum Damage {
    Flip,
    Cut,
    Splice,
    Swap,
}

const ALL: [Damage; 4] = [Damage::Flip, Damage::Cut, Damage::Splice, Damage::Swap];

fn foreign(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

/// The checkpoints: those whose files all have checksums, and the others.
fn checkpoints() -> Vec<(PathBuf, bool)> {
    let archives = [
        "per_rank/verl",
        "per_rank/tp",
        "per_rank/fsdp1_sharded",
        "torch_checkpointing/tc",
        "deepspeed/zero2",
        "deepspeed/zero3",
        "deepspeed/universal",
        "hfbin",
        "full.pth",
        "numpy_gguf/arrays.npz",
        "numpy_gguf/compressed.npz",
    ];
    let others = ["legacy.pt", "numpy_gguf/one.npy", "numpy_gguf/model.gguf"];
    let mut all: Vec<(PathBuf, bool)> = archives.iter().map(|name| (foreign(name), true)).collect();
    all.extend(others.iter().map(|name| (foreign(name), false)));
    all.push((fixtures().join("variants_ws2/threads2"), false));
    all.extend(
        [
            "torch_checkpointing/kinds",
            "torch_checkpointing/boxes",
            "opaque_tensors/int8",
            "opaque_tensors/conj",
            "mcore",
            "lightning",
            "fsdp_dtensor/hybrid",
        ]
        .map(|name| (foreign(name), false)),
    );
    all
}

/// Checkpoints in the formats that are written here, without hashes, and `true` for those whose
/// files have checksums.
fn written(parent: &Path) -> Vec<(PathBuf, bool)> {
    let source = open(foreign("full.pth"), OpenOptions::default()).unwrap();
    let targets = [
        ("model.safetensors", OutputFormat::SafetensorsFile, false),
        ("model.pt", OutputFormat::Torch, true),
        (
            "hf",
            OutputFormat::SafetensorsDirectory {
                max_file_bytes: 1000,
            },
            false,
        ),
        (
            "shards",
            OutputFormat::SafetensorsShards { ranks: 2 },
            false,
        ),
        ("dcp", OutputFormat::Dcp { ranks: 3 }, false),
        (
            "checkpointing",
            OutputFormat::TorchCheckpointing { ranks: 2 },
            false,
        ),
    ];
    let written = targets.map(|(name, target, has_checksums)| {
        // A file has its values beside it.
        let folder = parent.join(format!("of-{name}"));
        std::fs::create_dir_all(&folder).unwrap();
        let place = folder.join(name);
        convert(&*source, &place, target, ConvertOptions::default()).unwrap();
        let _ = std::fs::remove_file(place.join(INTEGRITY_FILE));
        (place, has_checksums)
    });
    let parts = parent.join("of-parts").join("parts");
    write_parts(&*source, &parts);
    std::fs::remove_file(parts.join(INTEGRITY_FILE)).unwrap();
    [&written[..], &[(parts, false)]].concat()
}

/// Returns all files of a checkpoint that is here: of one that is a file, those beside it too.
fn files_of(place: &Path) -> Vec<PathBuf> {
    let root = if place.is_file() {
        place.parent().unwrap()
    } else {
        place
    };
    let mut files = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path)
            } else {
                files.push(path)
            }
        }
    }
    files.sort();
    files
}

/// Damages a sealed checkpoint in rounds. Each change of these files is found, whatever level finds
/// it first.
fn assert_found(place: &Path, files: &[PathBuf], rounds: usize, numbers: &mut Numbers) {
    assert!(is_sound(place, Level::Deep), "{}", place.display());
    for round in 0..rounds {
        let kind = ALL[round % ALL.len()];
        let before = damage(kind, files, numbers);
        if !before.is_empty() {
            let named = before[0].0.display();
            // Each level finds what those before it find.
            let level = if (round / ALL.len()).is_multiple_of(2) {
                Level::Hashes
            } else {
                Level::Deep
            };
            assert!(
                !is_sound(place, level),
                "{kind:?} of {named} in round {round}"
            );
        }
        for (file, bytes) in before {
            std::fs::write(file, bytes).unwrap();
        }
    }
}

/// The folders of trainers, whose parts are sealed by themselves.
fn folders() -> [(PathBuf, bool); 2] {
    ["folders/trainer", "folders/accelerate"].map(|name| (foreign(name), false))
}

/// Copies a file, or a directory with what is below it, and returns its files.
fn copy(from: &Path, to: &Path) -> Vec<PathBuf> {
    if from.is_file() {
        std::fs::copy(from, to).unwrap();
        return vec![to.to_owned()];
    }
    std::fs::create_dir_all(to).unwrap();
    let mut files = Vec::new();
    let mut entries: Vec<PathBuf> = std::fs::read_dir(from)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    entries.sort();
    for entry in entries {
        files.extend(copy(&entry, &to.join(entry.file_name().unwrap())));
    }
    files
}

/// Damages files, and returns what to put back, or nothing if no byte has changed.
fn damage(kind: Damage, files: &[PathBuf], numbers: &mut Numbers) -> Vec<(PathBuf, Vec<u8>)> {
    let first = &files[numbers.below(files.len())];
    let second = &files[numbers.below(files.len())];
    let (one, other) = (
        std::fs::read(first).unwrap(),
        std::fs::read(second).unwrap(),
    );
    let mut changed = one.clone();
    match kind {
        Damage::Flip => {
            let bit = numbers.below(one.len() * 8);
            changed[bit / 8] ^= 1 << (bit % 8);
        }
        Damage::Cut => changed.truncate(numbers.below(one.len())),
        Damage::Splice => {
            let length = numbers.below(one.len().min(other.len()).min(200)) + 1;
            let (to, from) = (
                numbers.below(one.len() - length + 1),
                numbers.below(other.len() - length + 1),
            );
            changed[to..to + length].copy_from_slice(&other[from..from + length]);
        }
        Damage::Swap => changed.clone_from(&other),
    }
    let mut before = Vec::new();
    if changed != one {
        std::fs::write(first, &changed).unwrap();
        before.push((first.clone(), one.clone()));
        if matches!(kind, Damage::Swap) {
            std::fs::write(second, &one).unwrap();
            before.push((second.clone(), other));
        }
    }
    before
}

/// Returns `true` if a checkpoint opens, and `verify` finds nothing.
fn is_sound(path: &Path, level: Level) -> bool {
    bounded(|| {
        let Ok(checkpoint) = open(path, OpenOptions::default()) else {
            return false;
        };
        verify(&*checkpoint, level, VerifyOptions::default()).is_ok_and(|report| report.is_ok())
    })
}

#[test]
fn any_damage_to_a_sealed_checkpoint_is_found() {
    let parent = tempfile::tempdir().unwrap();
    let mut numbers = Numbers(0x5eed_0001);
    for (number, (source, _)) in checkpoints().into_iter().enumerate() {
        let path = parent.path().join(number.to_string());
        let mut files = copy(&source, &path);
        files.retain(|file| !file.ends_with("config.json"));
        add_integrity(&path, None).unwrap();
        assert_found(&path, &files, 60, &mut numbers);
    }
    for (place, _) in written(parent.path()) {
        let files = files_of(&place);
        add_integrity(&place, None).unwrap();
        assert_found(&place, &files, 60, &mut numbers);
    }
}

#[test]
fn any_damage_to_a_sealed_part_of_a_folder_is_found() {
    let parent = tempfile::tempdir().unwrap();
    let mut numbers = Numbers(0x5eed_0003);
    for (number, (source, _)) in folders().into_iter().enumerate() {
        let path = parent.path().join(number.to_string());
        copy(&source, &path);
        let folder = open(&path, OpenOptions::default()).unwrap();
        let mut files = Vec::new();
        // JSON has no hashes, and no checksums.
        for part in folder
            .parts()
            .iter()
            .filter(|part| !part.path.ends_with(".json"))
        {
            let place = path.join(part.path);
            files.extend(if place.is_dir() {
                files_of(&place)
            } else {
                vec![place.clone()]
            });
            add_integrity(&place, None).unwrap();
        }
        drop(folder);
        assert_found(&path, &files, 120, &mut numbers);
    }
}

#[test]
fn damage_without_hashes_never_panics_and_what_is_called_sound_is_what_it_was() {
    let parent = tempfile::tempdir().unwrap();
    let mut numbers = Numbers(0x5eed_0002);
    let sources = checkpoints()
        .into_iter()
        .chain(folders())
        .chain(written(parent.path()));
    for (number, (source, has_checksums)) in sources.enumerate() {
        // One that is a file has what lies beside it in a folder of its own.
        let folder = parent.path().join(number.to_string());
        let path = folder.join(source.file_name().unwrap());
        let files = match source
            .parent()
            .filter(|of| source.is_file() && of.starts_with(parent.path()))
        {
            Some(of) => copy(of, &folder),
            None => {
                std::fs::create_dir_all(&folder).unwrap();
                copy(&source, &path)
            }
        };
        let original = open(&source, OpenOptions::default()).unwrap();
        for round in 0..80 {
            let kind = ALL[round % ALL.len()];
            let before = damage(kind, &files, &mut numbers);
            let named = before
                .first()
                .map_or_else(String::new, |(file, _)| file.display().to_string());
            // Files that take each other's place may be a checkpoint too: nothing in them tells
            // whose they are.
            let is_deeply_sound = is_sound(&path, Level::Deep);
            for level in [Level::Structure, Level::Sizes, Level::Hashes] {
                assert!(
                    is_sound(&path, level) || !is_deeply_sound,
                    "{level:?}: {kind:?} of {named} in round {round}"
                );
            }
            if is_deeply_sound && has_checksums && !matches!(kind, Damage::Swap) {
                let now = open(&path, OpenOptions::default()).unwrap();
                let mut found = Vec::new();
                let mut add = |key: &str, difference| found.push(format!("{key}: {difference:?}"));
                diff(&*original, &*now, DiffOptions::default(), &mut add).unwrap();
                assert_eq!(found, [""; 0], "{kind:?} of {named} in round {round}");
            }
            let to = parent.path().join("to");
            bounded(|| {
                let Ok(checkpoint) = open(&path, OpenOptions::default()) else {
                    return;
                };
                let options = ConvertOptions {
                    overwrite: true,
                    drop_opaque: true,
                    threads: Some(1),
                    ..Default::default()
                };
                let _ = convert(&*checkpoint, &to, OutputFormat::SafetensorsFile, options);
            });
            for (file, bytes) in before {
                std::fs::write(file, bytes).unwrap();
            }
        }
    }
}
