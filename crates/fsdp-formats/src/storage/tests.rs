//! Staging directories, one step at a time. Crashes of whole saves are tested in
//! `tests/it/crash.rs`.

use super::backend::Links;
use super::checked_directory::CheckedDirectory;
use super::sidecar::Sidecar;
use super::*;
use crate::error::FileError;
use std::path::Path;

fn names(parent: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(parent)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn what_is_committed_is_there_and_nothing_else() {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("new/er/checkpoint");
    for (round, content) in [b"one".as_slice(), b"two"].iter().enumerate() {
        let staging = Durable::new().prepare(&target, true).unwrap();
        let file = staging.create("sub/b", 8).unwrap();
        file.write_at(4, b"data").unwrap();
        assert!(file.write_at(5, b"data").is_err());
        file.finish().unwrap();
        assert_eq!(target.exists(), round > 0);
        staging.commit("a", content).unwrap();
        assert_eq!(std::fs::read(target.join("a")).unwrap(), *content);
        assert_eq!(
            std::fs::read(target.join("sub/b")).unwrap(),
            b"\0\0\0\0data"
        );
        assert_eq!(names(target.parent().unwrap()), ["checkpoint"]);
    }
}

/// A hook that writes down the steps.
#[derive(Default)]
struct Recorder(std::sync::Mutex<Vec<(Step, std::path::PathBuf)>>);

impl StepHook for Recorder {
    fn before(&self, step: Step, path: &Path) -> std::io::Result<()> {
        self.0.lock().unwrap().push((step, path.to_owned()));
        Ok(())
    }
}

#[test]
fn new_directories_are_durable_in_their_parents() {
    let parent = tempfile::tempdir().unwrap();
    let recorder = std::sync::Arc::new(Recorder::default());
    let durable = Durable::with_hook(recorder.clone());
    let (outer, inner) = (parent.path().join("runs"), parent.path().join("runs/demo"));
    durable.create_directories(&inner).unwrap();
    // A process that was killed may have made what is there already, and not synced it.
    durable.create_directories(&inner).unwrap();
    let expected = [
        (Step::CreateDirectory, outer.clone()),
        (Step::SyncDirectory, parent.path().to_owned()),
        (Step::CreateDirectory, inner),
        (Step::SyncDirectory, outer.clone()),
        (Step::SyncDirectory, parent.path().to_owned()),
        (Step::SyncDirectory, outer),
    ];
    let mut steps = recorder.0.lock().unwrap().clone();
    steps.retain(|(_, path)| path.starts_with(parent.path()));
    assert_eq!(steps, expected);
}

/// A hook that makes the sync of one directory fail once, with this error.
struct FailOnce(
    std::path::PathBuf,
    std::sync::Mutex<Option<std::io::ErrorKind>>,
);

impl StepHook for FailOnce {
    fn before(&self, step: Step, path: &Path) -> std::io::Result<()> {
        let fails = step == Step::SyncDirectory && path == self.0;
        match self.1.lock().unwrap().take_if(|_| fails) {
            Some(kind) => Err(kind.into()),
            None => Ok(()),
        }
    }
}

#[test]
fn a_directory_above_that_cannot_be_synced_is_no_obstacle_unless_its_disk_fails() {
    let parent = tempfile::tempdir().unwrap();
    let inner = parent.path().join("runs");
    std::fs::create_dir(&inner).unwrap();
    for (kind, is_error) in [
        (std::io::ErrorKind::PermissionDenied, false),
        (std::io::ErrorKind::Other, true),
    ] {
        let hook = FailOnce(parent.path().to_owned(), std::sync::Mutex::new(Some(kind)));
        let durable = Durable::with_hook(std::sync::Arc::new(hook));
        assert_eq!(
            durable.create_directories(&inner).is_err(),
            is_error,
            "{kind:?}"
        );
    }
}

/// A hook that removes what crashes have left of saves to a target, right after the first directory
/// was made.
struct CleanOnce(std::path::PathBuf, std::sync::atomic::AtomicBool);

impl StepHook for CleanOnce {
    fn before(&self, _: Step, _: &Path) -> std::io::Result<()> {
        Ok(())
    }

    fn after(&self, step: Step, _: &Path) -> std::io::Result<()> {
        if step == Step::CreateDirectory && !self.1.swap(true, std::sync::atomic::Ordering::SeqCst)
        {
            assert_eq!(clean_stale(&self.0).unwrap().len(), 1);
        }
        Ok(())
    }
}

#[test]
fn a_save_whose_new_directory_is_taken_for_what_a_crash_has_left_makes_another() {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("c");
    let durable = Durable::with_hook(std::sync::Arc::new(CleanOnce(
        target.clone(),
        Default::default(),
    )));
    durable
        .prepare(&target, false)
        .unwrap()
        .commit("a", b"saved")
        .unwrap();
    assert_eq!(std::fs::read(target.join("a")).unwrap(), b"saved");
    assert_eq!(names(parent.path()), ["c"]);
}

#[test]
fn overwriting_must_be_asked_for() {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("c");
    let slow = Durable::new().prepare(&target, false).unwrap();
    let fast = Durable::new().prepare(&target, false).unwrap();
    fast.commit("a", b"fast").unwrap();
    // Two savers, one target: exactly one wins.
    assert!(matches!(
        slow.commit("a", b"slow"),
        Err(FileError::Exists { .. })
    ));
    assert!(matches!(
        Durable::new().prepare(&target, false),
        Err(FileError::Exists { .. })
    ));
    assert_eq!(std::fs::read(target.join("a")).unwrap(), b"fast");
    assert_eq!(names(parent.path()), ["c"]);
}

fn open(target: &Path) -> Result<CheckedDirectory, FileError> {
    CheckedDirectory::open(&target.into(), false, Links::Refuse)
}

#[test]
fn what_is_being_read_stays_when_it_is_replaced() {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("c");
    Durable::new()
        .prepare(&target, false)
        .unwrap()
        .commit("a", b"old")
        .unwrap();
    let reader = open(&target).unwrap();
    Durable::new()
        .prepare(&target, true)
        .unwrap()
        .commit("a", b"new")
        .unwrap();
    assert_eq!(std::fs::read(target.join("a")).unwrap(), b"new");
    // The reader opens its files only now.
    assert_eq!(reader.read_checked("a", 3).unwrap(), b"old");
    assert_eq!(list_stale(&target).unwrap().len(), 0);
    drop(reader);
    assert_eq!(clean_stale(&target).unwrap().len(), 1);
    assert_eq!(names(parent.path()), ["c"]);
}

#[test]
fn a_reader_finds_the_old_or_the_new_whenever_it_comes() {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("c");
    Durable::new()
        .prepare(&target, false)
        .unwrap()
        .commit("a", b"x")
        .unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    assert_eq!(open(&target).unwrap().read_checked("a", 1).unwrap(), b"x");
                }
            });
        }
        for _ in 0..200 {
            Durable::new()
                .prepare(&target, true)
                .unwrap()
                .commit("a", b"x")
                .unwrap();
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn a_save_in_progress_is_not_stale_and_a_dropped_one_is_gone() {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("c");
    let staging = Durable::new().prepare(&target, false).unwrap();
    assert_eq!(
        list_stale(&target).unwrap(),
        Vec::<std::path::PathBuf>::new()
    );
    assert_eq!(
        Durable::new()
            .join(&target, staging.name())
            .unwrap()
            .directory(),
        staging.directory()
    );
    assert!(Durable::new().join(&target, "tmp-../../x").is_err());
    drop(staging);
    assert_eq!(names(parent.path()), Vec::<String>::new());
    // Nobody holds the lock of a directory that a killed process has left.
    let left = parent.path().join(".c.tmp-0123456789abcdef");
    std::fs::create_dir(&left).unwrap();
    std::fs::create_dir(parent.path().join(".c.tmp-backup")).unwrap();
    assert_eq!(list_stale(&target).unwrap(), std::slice::from_ref(&left));
    assert_eq!(clean_stale(&target).unwrap(), [left]);
    assert_eq!(names(parent.path()), [".c.tmp-backup"]);
}

#[test]
fn the_targets_of_what_saves_and_removals_have_left_are_known_by_its_names() {
    let parent = tempfile::tempdir().unwrap();
    for name in [
        ".step-20.tmp-0123456789abcdef",
        ".step-20.tmp-fedcba9876543210",
        ".epoch=1-step=30.ckpt.old-0123456789abcdef",
        ".c.tmp-backup",
        ".c.lock",
        ".tmp-0123456789abcdef",
        "c.tmp-0123456789abcdef",
        "step-10",
    ] {
        std::fs::create_dir(parent.path().join(name)).unwrap();
    }
    let targets = targets_with_leftovers(parent.path()).unwrap();
    assert!(targets.iter().eq(["epoch=1-step=30.ckpt", "step-20"]));
    assert!(targets_with_leftovers(parent.path().join("nowhere")).is_err());
}

#[test]
fn an_old_checkpoint_without_a_new_one_is_put_back() {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("c");
    let old = parent.path().join(".c.old-0123456789abcdef");
    std::fs::create_dir(&old).unwrap();
    drop(Durable::new().prepare(&target, true).unwrap());
    assert!(target.is_dir() && !old.exists());
}

/// A hook of a file system that cannot exchange directories, and on which nothing can be renamed to
/// this path.
struct NoWayTo(std::path::PathBuf);

impl StepHook for NoWayTo {
    fn before(&self, step: Step, path: &Path) -> std::io::Result<()> {
        match step {
            Step::Exchange => Err(rustix::io::Errno::NOSYS.into()),
            Step::Rename if path == self.0 => Err(std::io::Error::other("the second rename fails")),
            _ => Ok(()),
        }
    }
}

#[test]
fn an_overwrite_that_ends_between_its_renames_puts_back_the_last_version_and_no_older_one() {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("c");
    Durable::new()
        .prepare(&target, false)
        .unwrap()
        .commit("a", b"last")
        .unwrap();
    // The version before that was replaced, and a reader has kept it from being removed.
    std::fs::create_dir(parent.path().join(".c.old-ffffffffffffffff")).unwrap();
    let durable = Durable::with_hook(std::sync::Arc::new(NoWayTo(target.clone())));
    durable
        .prepare(&target, true)
        .unwrap()
        .commit("a", b"new")
        .unwrap_err();
    assert!(!target.exists());
    drop(Durable::new().prepare(&target, true).unwrap());
    assert_eq!(std::fs::read(target.join("a")).unwrap(), b"last");
}

#[test]
fn single_files_replace_files() {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("model.safetensors");
    for content in [b"one", b"two"] {
        let staging = Durable::new().prepare(&target, true).unwrap();
        let file = staging.create_single(content.len() as u64).unwrap();
        file.write_at(0, content).unwrap();
        file.finish().unwrap();
        staging.commit_single().unwrap();
        assert_eq!(std::fs::read(&target).unwrap(), content);
        assert_eq!(names(parent.path()), ["model.safetensors"]);
    }
}

/// Commits a single file with a sidecar, on a disk whose first sync of the directory fails.
fn fail_to_commit_with_sidecar(target: &Path, pending_name: &str) {
    let directory = target.parent().unwrap().to_owned();
    let hook = FailOnce(
        directory,
        std::sync::Mutex::new(Some(std::io::ErrorKind::Other)),
    );
    let durable = Durable::with_hook(std::sync::Arc::new(hook));
    let staging = durable.prepare(target, true).unwrap();
    let file = staging.create_single(3).unwrap();
    file.write_at(0, b"new").unwrap();
    file.finish().unwrap();
    let sidecar = Sidecar {
        name: "model.values.json",
        pending_name,
        bytes: Some(b"{}".as_slice()),
        is_unneeded: &|_| false,
    };
    staging.commit_single_with(sidecar).unwrap_err();
}

#[test]
fn a_commit_that_fails_before_the_file_is_in_its_place_takes_its_sidecar_away() {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("model.safetensors");
    fail_to_commit_with_sidecar(&target, "model.values.json.new-1");
    assert_eq!(names(parent.path()), Vec::<String>::new());
}

#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "the test makes the files of a process that was killed"
)]
fn a_commit_that_fails_leaves_the_sidecar_that_the_old_file_still_has_under_its_pending_name() {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("model.safetensors");
    let pending = parent.path().join("model.values.json.new-1");
    std::fs::write(&target, b"old").unwrap();
    std::fs::write(&pending, b"{}").unwrap();
    fail_to_commit_with_sidecar(&target, "model.values.json.new-1");
    assert_eq!(std::fs::read(&target).unwrap(), b"old");
    assert_eq!(std::fs::read(&pending).unwrap(), b"{}");
}

#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "the test makes a file to be replaced"
)]
fn what_replaces_something_private_is_private() {
    use std::os::unix::fs::PermissionsExt as _;
    let parent = tempfile::tempdir().unwrap();
    let (file, directory) = (parent.path().join("file"), parent.path().join("directory"));
    std::fs::write(&file, b"old").unwrap();
    std::fs::create_dir(&directory).unwrap();
    for (path, mode) in [(&file, 0o600), (&directory, 0o700)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    Durable::new().replace_file(&file, b"new").unwrap();
    Durable::new()
        .prepare(&directory, true)
        .unwrap()
        .commit("a", b"new")
        .unwrap();
    for (path, mode) in [(&file, 0o600), (&directory, 0o700)] {
        assert_eq!(
            path.metadata().unwrap().permissions().mode() & 0o777,
            mode,
            "{}",
            path.display()
        );
    }
}

#[test]
fn names_in_a_staging_directory_stay_inside() {
    let parent = tempfile::tempdir().unwrap();
    let staging = Durable::new()
        .prepare(parent.path().join("c"), false)
        .unwrap();
    for name in ["../x", "/x", "a/../x", "", "a//b", "a\\b", "."] {
        assert!(
            matches!(staging.write(name, b""), Err(FileError::Path { .. })),
            "{name}"
        );
    }
}

#[test]
fn what_does_not_fit_the_disk_takes_nothing_of_it() {
    let parent = tempfile::tempdir().unwrap();
    let staging = Durable::new()
        .prepare(parent.path().join("c"), false)
        .unwrap();
    let refused = staging.create("file", 1 << 60).unwrap_err();
    let FileError::Io { source, .. } = refused else {
        panic!("{refused}")
    };
    assert_eq!(source.kind(), std::io::ErrorKind::StorageFull);
    assert_eq!(
        std::fs::metadata(staging.directory().join("file"))
            .unwrap()
            .len(),
        0
    );
}
