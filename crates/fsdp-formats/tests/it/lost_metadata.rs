//! A directory that was a checkpoint of a run and has lost its `.metadata` is known as one. Saves
//! in progress and directories of other programs are not taken for it.

use std::path::{Path, PathBuf};

use fsdp_formats::checkpoint::{check_has_metadata, check_replaceable, has_lost_metadata};
use fsdp_formats::lineage::{Branch, read_branches};
use fsdp_formats::storage::Durable;
use fsdp_formats::{FileError, Location};
use fsdp_layout::{DType, ErrorKind, Failure as _};

use crate::state::{State, save};

/// Saves a small checkpoint.
fn save_small(checkpoint: &Path) {
    let mut state = State::default();
    let tensor = (DType::U8, vec![4, 50], vec![7; 200]);
    state.tensors.insert("a".to_owned(), tensor);
    save(&state, 2, checkpoint, &Durable::new()).unwrap();
}

/// Saves a checkpoint of this name, and removes its `.metadata`.
fn save_and_lose_metadata(run: &Path, name: &str) -> PathBuf {
    let checkpoint = run.join(name);
    save_small(&checkpoint);
    std::fs::remove_file(checkpoint.join(".metadata")).unwrap();
    checkpoint
}

/// Returns `true` if a directory has lost its `.metadata`, after comparing the two functions that
/// tell it.
fn has_lost(directory: &Path) -> bool {
    let location = Location::from(directory);
    let has_lost = has_lost_metadata(&location).unwrap();
    match check_has_metadata(&location) {
        Ok(()) => assert!(!has_lost),
        Err(error) => {
            assert!(has_lost && matches!(error, FileError::NotCommitted { .. }));
            assert_eq!(error.kind(), ErrorKind::Incomplete);
        }
    }
    has_lost
}

#[test]
fn a_checkpoint_without_its_metadata_is_known_whatever_is_in_their_place_and_may_be_replaced() {
    let run = tempfile::tempdir().unwrap();
    // The integrity file tells it under any name.
    for name in ["step-00000006", "step-6"] {
        let checkpoint = save_and_lose_metadata(run.path(), name);
        assert!(has_lost(&checkpoint), "{name}");
        check_replaceable(&checkpoint.as_path().into()).unwrap();
        let metadata = checkpoint.join(".metadata");
        std::fs::create_dir(&metadata).unwrap();
        assert!(has_lost(&checkpoint), "{name}");
        check_replaceable(&checkpoint.as_path().into()).unwrap();
        // What is in that directory would be lost.
        std::fs::write(metadata.join("mine"), "precious").unwrap();
        check_replaceable(&checkpoint.as_path().into()).unwrap_err();
        std::fs::remove_dir_all(&metadata).unwrap();
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink("nowhere", &metadata).unwrap();
            assert!(has_lost(&checkpoint), "{name}");
            check_replaceable(&checkpoint.as_path().into()).unwrap();
            std::fs::remove_file(&metadata).unwrap();
        }
        save_small(&checkpoint);
        assert!(!has_lost(&checkpoint), "{name}");
    }
}

#[test]
fn without_an_integrity_file_the_name_and_the_content_tell_that_it_was_a_checkpoint() {
    let run = tempfile::tempdir().unwrap();
    for (name, is_of_run) in [("step-00000006", true), ("step-6", false)] {
        let checkpoint = save_and_lose_metadata(run.path(), name);
        std::fs::remove_file(checkpoint.join(".integrity")).unwrap();
        assert_eq!(has_lost(&checkpoint), is_of_run, "{name}");
        // A file of somebody else tells that the directory is another program's.
        std::fs::write(checkpoint.join("model.bin"), "not ours").unwrap();
        assert!(!has_lost(&checkpoint), "{name}");
        std::fs::remove_dir_all(&checkpoint).unwrap();
        std::fs::create_dir(&checkpoint).unwrap();
        assert_eq!(has_lost(&checkpoint), is_of_run, "{name}, empty");
    }
}

#[test]
fn what_never_was_a_checkpoint_has_lost_nothing() {
    let run = tempfile::tempdir().unwrap();
    let file = run.path().join("step-00000001");
    std::fs::write(&file, "").unwrap();
    assert!(!has_lost(&file));
    assert!(!has_lost(&run.path().join("step-00000002")));
    // A save in progress has another name.
    let target = run.path().join("step-00000003");
    let staging = Durable::new().prepare(&target, false).unwrap();
    let data = staging.create("__0_0.distcp", 1).unwrap();
    data.write_at(0, &[0]).unwrap();
    data.finish().unwrap();
    assert!(!has_lost(&target) && !has_lost(staging.directory()));
}

#[test]
fn a_checkpoint_that_has_lost_its_lineage_with_its_metadata_counts_as_one_of_the_newest_branch() {
    let run = tempfile::tempdir().unwrap();
    let (whole, lost) = (
        run.path().join("step-00000004"),
        run.path().join("step-00000006"),
    );
    save_small(&whole);
    std::fs::create_dir(&lost).unwrap();
    let places = [Location::from(&whole), Location::from(&lost)];
    let branches = read_branches(&places.each_ref()).unwrap();
    assert_eq!(branches, vec![Some(Branch::default()); 2]);
}
