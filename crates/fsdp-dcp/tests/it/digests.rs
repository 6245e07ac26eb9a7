//! Digests that are recorded with what is saved: they are the state's own, conversions keep them, and `verify` compares them.

use std::path::Path;

use fsdp_dcp::FileError;
use fsdp_dcp::checkpoint::{Checkpoint, open};
use fsdp_dcp::convert::{ConvertOptions, OutputFormat, convert};
use fsdp_dcp::digest::digest;
use fsdp_dcp::internals::{INTEGRITY_FILE, Integrity};
use fsdp_dcp::reader::OpenOptions;
use fsdp_dcp::storage::Durable;
use fsdp_dcp::verify::{Level, add_integrity, verify};
use fsdp_digest::{Digest, StateDigest};
use fsdp_layout::PlainValue;

use crate::fixtures::dcp_fixtures;
use crate::sample::sample;
use crate::state::save;
use crate::truth::fixtures;

fn opened(path: &Path) -> Box<dyn Checkpoint> {
    open(path, OpenOptions::default()).unwrap()
}

/// Opens a checkpoint, and checks that its recorded digests are those of what it holds.
fn recorded(path: &Path) -> StateDigest {
    let checkpoint = opened(path);
    let recorded = checkpoint.digests().unwrap().clone();
    assert_eq!(recorded.differing(&digest(&*checkpoint, 2).unwrap()), Vec::<String>::new(), "{}", path.display());
    let report = verify(&*checkpoint, Level::Deep, None).unwrap();
    assert!(report.is_ok(), "{}: {:?}", path.display(), report.problems);
    assert_eq!(report.digests, recorded.len());
    recorded
}

const FORMATS: [(&str, OutputFormat); 4] = [
    ("dcp", OutputFormat::Dcp { ranks: 3 }),
    ("one.safetensors", OutputFormat::SafetensorsFile),
    ("hf", OutputFormat::SafetensorsDirectory { max_file_bytes: 10_000 }),
    ("shards", OutputFormat::SafetensorsShards { ranks: 3 }),
];

#[test]
fn a_save_records_the_digests_of_its_state_at_any_number_of_ranks() {
    let directory = tempfile::tempdir().unwrap();
    let state = sample([300, 401]);
    let mut all = Vec::new();
    for ranks in 1..=4 {
        let path = directory.path().join(ranks.to_string());
        save(&state, ranks, &path, &Durable::new()).unwrap();
        all.push(recorded(&path));
    }
    assert!(all.iter().all(|digests| *digests == all[0]));
    assert_eq!(all[0].len(), state.tensors.len() + state.values.len());
}

#[test]
fn conversions_of_any_checkpoint_to_any_format_record_its_digests() {
    let directory = tempfile::tempdir().unwrap();
    for fixture in dcp_fixtures() {
        let source = opened(&fixtures().join(&fixture).join("dcp"));
        assert!(source.digests().is_none());
        for (name, format) in FORMATS {
            let path = directory.path().join(format!("{fixture}-{name}"));
            convert(&*source, &path, format, ConvertOptions { drop_opaque: true, ..Default::default() }).unwrap();
            let first = recorded(&path);
            // On from there, where all is kept.
            let again = directory.path().join("again");
            let options = ConvertOptions { overwrite: true, ..Default::default() };
            convert(&*opened(&path), &again, OutputFormat::Dcp { ranks: 2 }, options).unwrap();
            assert_eq!(recorded(&again), first, "{fixture} {name}");
        }
    }
}

#[test]
fn sealing_records_digests() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("c.pt");
    let source = opened(&fixtures().join("misc_ws2/dcp"));
    convert(&*source, &path, OutputFormat::Torch, ConvertOptions::default()).unwrap();
    assert!(opened(&path).digests().is_none());
    add_integrity(&path, None).unwrap();
    assert_eq!(recorded(&path), digest(&*opened(&path), 1).unwrap());
}

/// Records another digest of a name, as if other state had been saved under the same hashes.
fn change_digest(path: &Path, name: &str) {
    let file = path.join(INTEGRITY_FILE);
    let mut integrity = Integrity::decode(&std::fs::read(&file).unwrap()).unwrap();
    let digests = integrity.digests.as_mut().unwrap();
    assert!(digests.insert(name, Digest::of_value(&PlainValue::None)).is_some());
    std::fs::write(&file, integrity.encode().unwrap()).unwrap();
}

#[test]
fn state_that_is_not_what_its_digests_say_is_found_where_all_hashes_are_right() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("c");
    let state = sample([300, 401]);
    save(&state, 2, &path, &Durable::new()).unwrap();
    for name in [state.tensors.keys().next().unwrap(), "step"] {
        change_digest(&path, name);
    }
    let checkpoint = opened(&path);
    assert!(verify(&*checkpoint, Level::Hashes, None).unwrap().is_ok());
    let report = verify(&*checkpoint, Level::Deep, None).unwrap();
    let mut names: Vec<&str> = report.problems.iter().filter_map(|problem| problem.fqn.as_deref()).collect();
    names.sort_unstable();
    let mut expected = [state.tensors.keys().next().unwrap(), "step"];
    expected.sort_unstable();
    assert_eq!(names, expected);
    // It is not passed on in another layout or format, where it would be hard to find.
    for (name, format) in FORMATS {
        let copy = directory.path().join(name);
        let error = convert(&*checkpoint, &copy, format, ConvertOptions::default()).unwrap_err();
        assert!(matches!(&error, FileError::Digests { names, .. } if *names == expected), "{error}");
        assert!(!copy.exists());
    }
}
