//! The fuzz targets over their seeds: those that are kept in `fuzz/seeds`, and the files that
//! PyTorch wrote.

use std::path::Path;

use crate::targets::TARGETS;
use crate::{bounded, fixtures};

/// Collects all files below a directory.
fn files(directory: &Path, found: &mut Vec<std::path::PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, found)
        } else {
            found.push(path)
        }
    }
}

#[test]
fn every_seed_of_every_target() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds");
    for (name, target) in TARGETS {
        let mut found = Vec::new();
        files(&seeds.join(name), &mut found);
        assert!(found.len() >= 3, "only {} seeds for `{name}`", found.len());
        for seed in found {
            let bytes = std::fs::read(&seed).unwrap();
            bounded(|| target(&bytes));
        }
    }
}

/// Every target gets every kind of file, its own and the others'.
#[test]
fn every_file_that_pytorch_wrote_for_every_target() {
    let mut found = Vec::new();
    files(&fixtures(), &mut found);
    assert!(found.len() > 100);
    for file in found {
        let bytes = std::fs::read(&file).unwrap();
        for (_, target) in TARGETS {
            bounded(|| target(&bytes));
        }
    }
}
