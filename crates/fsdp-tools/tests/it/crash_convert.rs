//! A conversion that fails at any durable step leaves its source as it was, and its destination
//! whole (the old one or the new one) or absent.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::open;
use fsdp_formats::internals::values_hash;
use fsdp_formats::reader::OpenOptions;
use fsdp_formats::storage::{Durable, Step, StepHook, clean_stale};
use fsdp_layout::{DType, PlainValue};
use fsdp_tools::convert::{ConvertOptions, OutputFormat, convert};
use fsdp_tools::diff::{DiffOptions, diff};
use fsdp_tools::verify::{Level, VerifyOptions, verify};

use crate::crash_at::At;
use crate::state::{State, save};

/// Writes a checkpoint in which every value is the number of its generation.
fn source(target: &Path, generation: u8) {
    let mut state = State::default();
    for name in ["a", "b"] {
        state.tensors.insert(
            name.to_owned(),
            (DType::U8, vec![4, 100], vec![generation; 400]),
        );
    }
    state.values.insert(
        "generation".to_owned(),
        PlainValue::Int(i64::from(generation)),
    );
    save(&state, 2, target, &Durable::new()).unwrap();
}

fn run(from: &Path, to: &Path, target: OutputFormat, durable: &Durable) -> Result<(), FileError> {
    let source = open(from, OpenOptions::default())?;
    let options = ConvertOptions {
        overwrite: true,
        threads: Some(1),
        durable: Some(durable),
        ..ConvertOptions::default()
    };
    convert(&*source, to, target, options).map(drop)
}

/// Returns `true` if two checkpoints hold the same.
fn equal(a: &Path, b: &Path) -> bool {
    let (a, b) = (
        open(a, OpenOptions::default()).unwrap(),
        open(b, OpenOptions::default()).unwrap(),
    );
    let mut differences = 0;
    diff(&*a, &*b, DiffOptions::default(), &mut |_, _| {
        differences += 1
    })
    .unwrap();
    differences == 0
}

fn bytes_of(directory: &Path) -> BTreeMap<std::ffi::OsString, Vec<u8>> {
    let entries = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap());
    entries
        .map(|entry| (entry.file_name(), std::fs::read(entry.path()).unwrap()))
        .collect()
}

fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_failure_at_any_step_leaves_the_source_and_an_old_or_new_destination() {
    // Several hundred conversions: in memory where there is such a place, as every one of them
    // syncs.
    let memory = Path::new("/dev/shm");
    let parent = if memory.is_dir() {
        tempfile::tempdir_in(memory)
    } else {
        tempfile::tempdir()
    }
    .unwrap();
    let (old, new) = (parent.path().join("old"), parent.path().join("new"));
    source(&old, 1);
    source(&new, 2);
    let before = (bytes_of(&old), bytes_of(&new));
    let targets = [
        OutputFormat::Dcp { ranks: 2 },
        OutputFormat::SafetensorsFile,
        OutputFormat::SafetensorsDirectory {
            max_file_bytes: 500,
        },
        OutputFormat::SafetensorsShards { ranks: 2 },
        OutputFormat::Torch,
    ];
    for (number, target) in targets.into_iter().enumerate() {
        for (overwrite, exchange) in [(false, true), (true, true), (true, false)] {
            let mut finished = false;
            for (step, after) in (0..100).flat_map(|step| [(step, false), (step, true)]) {
                if finished {
                    break;
                }
                let place = parent.path().join(format!("{number}"));
                std::fs::create_dir(&place).unwrap();
                let destination = place.join("destination");
                if overwrite {
                    run(&old, &destination, target, &Durable::new()).unwrap();
                }
                let hook = Arc::new(At::new(step, after, exchange));
                let outcome = run(
                    &new,
                    &destination,
                    target,
                    &Durable::with_hook(hook.clone()),
                );
                let case = format!(
                    "{target:?}, step {step}, after {after}, overwrite {overwrite}, exchange {exchange}"
                );
                assert_eq!(
                    outcome.is_err(),
                    hook.struck.load(Ordering::SeqCst),
                    "{case}: {outcome:?}"
                );
                finished = outcome.is_ok();
                assert!(step < 99, "more than a hundred steps");
                drop(Durable::new().prepare(&destination, true).unwrap());
                if destination.exists() {
                    let opened = open(&destination, OpenOptions::default())
                        .unwrap_or_else(|e| panic!("{case}: {e}"));
                    assert!(
                        verify(&*opened, Level::Deep, VerifyOptions::default())
                            .unwrap()
                            .is_ok(),
                        "{case}"
                    );
                    assert!(
                        equal(&destination, &new) || (overwrite && equal(&destination, &old)),
                        "{case}"
                    );
                    assert!(!finished || equal(&destination, &new), "{case}");
                } else {
                    assert!(!overwrite && !finished, "{case}");
                    // Nothing but what the next conversion removes is left, no values either.
                    let left = names(&place);
                    assert!(
                        left.iter().all(|name| name.starts_with('.')),
                        "{case}: {left:?}"
                    );
                }
                // The next conversion finds its way, and leaves nothing but the checkpoint.
                clean_stale(&destination).unwrap();
                run(&new, &destination, target, &Durable::new()).unwrap();
                assert!(equal(&destination, &new), "{case}");
                let values = if target == OutputFormat::SafetensorsFile {
                    Some("destination.values.json")
                } else {
                    None
                };
                assert_eq!(
                    names(&place),
                    ["destination"]
                        .into_iter()
                        .chain(values)
                        .collect::<Vec<_>>(),
                    "{case}"
                );
                std::fs::remove_dir_all(&place).unwrap();
            }
        }
    }
    assert_eq!(before, (bytes_of(&old), bytes_of(&new)));
}

/// A safetensors file and its values are two files, but one checkpoint.
#[test]
fn a_single_file_and_its_values_stay_together() {
    let parent = tempfile::tempdir().unwrap();
    let (one, two) = (parent.path().join("one"), parent.path().join("two"));
    source(&one, 1);
    source(&two, 2);
    let (a, b) = (
        parent.path().join("a.safetensors"),
        parent.path().join("b.safetensors"),
    );
    run(&one, &a, OutputFormat::SafetensorsFile, &Durable::new()).unwrap();
    run(&two, &b, OutputFormat::SafetensorsFile, &Durable::new()).unwrap();
    // Values of another file are not taken, and missing ones are missed.
    let (values_a, values_b) = (
        parent.path().join("a.values.json"),
        parent.path().join("b.values.json"),
    );
    let bytes = std::fs::read(&values_a).unwrap();
    std::fs::copy(&values_b, &values_a).unwrap();
    assert!(open(&a, OpenOptions::default()).is_err());
    std::fs::remove_file(&values_a).unwrap();
    let Err(FileError::MissingFiles { path, files }) = open(&a, OpenOptions::default()) else {
        panic!("no values")
    };
    assert_eq!((path, files), (a.clone(), vec!["a.values.json".to_owned()]));
    // Killed between two renames.
    std::fs::copy(&values_b, &values_a).unwrap();
    let pending = format!("a.values.json.new-{}", values_hash(&bytes));
    std::fs::write(parent.path().join(pending), bytes).unwrap();
    assert!(equal(&a, &one));
    // A file without values is one, whatever lies beside it.
    let plain = parent.path().join("plain");
    let mut state = State::default();
    state
        .tensors
        .insert("t".to_owned(), (DType::U8, vec![4], vec![7; 4]));
    save(&state, 1, &plain, &Durable::new()).unwrap();
    let opened = open(&plain, OpenOptions::default()).unwrap();
    let options = ConvertOptions::default();
    let fresh = parent.path().join("fresh.safetensors");
    std::fs::copy(&values_b, parent.path().join("fresh.values.json")).unwrap();
    convert(&*opened, &fresh, OutputFormat::SafetensorsFile, options).unwrap();
    assert!(equal(&fresh, &plain) && parent.path().join("fresh.values.json").exists());
    // Nobody's file is replaced unasked, and one that is replaced takes its values with it.
    let other = parent.path().join("other.safetensors");
    std::fs::copy(&values_b, parent.path().join("other.values.json")).unwrap();
    let opened_one = open(&one, OpenOptions::default()).unwrap();
    let refused = convert(&*opened_one, &other, OutputFormat::SafetensorsFile, options);
    assert!(
        matches!(refused, Err(FileError::Exists { path }) if path.ends_with("other.values.json"))
    );
    convert(
        &*opened,
        &b,
        OutputFormat::SafetensorsFile,
        ConvertOptions {
            overwrite: true,
            ..options
        },
    )
    .unwrap();
    assert!(equal(&b, &plain) && !values_b.exists());
}

#[test]
fn values_that_a_killed_conversion_left_go_with_the_next_one_and_files_of_a_like_name_stay() {
    let parent = tempfile::tempdir().unwrap();
    let (one, two, file) = (
        parent.path().join("one"),
        parent.path().join("two"),
        parent.path().join("file"),
    );
    source(&one, 1);
    source(&two, 2);
    run(&one, &file, OutputFormat::SafetensorsFile, &Durable::new()).unwrap();
    // Killed before the commit: the values have the name that only this conversion gives them.
    let bytes = std::fs::read(&file).unwrap();
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let hash = &header.metadata().as_ref().unwrap()["fsdp.values"];
    let left = parent.path().join(format!("file.values.json.new-{hash}"));
    std::fs::rename(parent.path().join("file.values.json"), left).unwrap();
    std::fs::remove_file(&file).unwrap();
    for name in [
        "file.values.json.new",
        "file.values.json.new-notes",
        "file.values.json.bak",
    ] {
        std::fs::write(parent.path().join(name), "mine").unwrap();
    }
    for _ in 0..2 {
        run(&two, &file, OutputFormat::SafetensorsFile, &Durable::new()).unwrap();
        assert!(equal(&file, &two));
        let expected = [
            "file",
            "file.values.json",
            "file.values.json.bak",
            "file.values.json.new",
            "file.values.json.new-notes",
            "one",
            "two",
        ];
        assert_eq!(names(parent.path()), expected);
    }
}

/// Lets another conversion to the same target run, as far as it can, before each rename.
struct Meanwhile<F>(Mutex<Option<F>>);

impl<F: FnOnce() -> JoinHandle<()> + Send> StepHook for Meanwhile<F> {
    fn before(&self, step: Step, path: &Path) -> std::io::Result<()> {
        if step == Step::Rename && path.ends_with("target") {
            let start = self.0.lock().unwrap().take();
            if let Some(other) = start.map(|start| start()) {
                // It ends soon, or waits for this conversion.
                let end = Instant::now() + Duration::from_millis(500);
                while !other.is_finished() && Instant::now() < end {
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
        }
        Ok(())
    }
}

#[test]
fn of_two_conversions_to_one_target_one_wins_whole() {
    let parent = tempfile::tempdir().unwrap();
    let (old, one, two) = (
        parent.path().join("old"),
        parent.path().join("one"),
        parent.path().join("two"),
    );
    let target = parent.path().join("target");
    for (generation, path) in [(0, &old), (1, &one), (2, &two)] {
        source(path, generation);
    }
    run(
        &old,
        &target,
        OutputFormat::SafetensorsFile,
        &Durable::new(),
    )
    .unwrap();
    let other = (two.clone(), target.clone());
    let (done, end) = std::sync::mpsc::channel();
    let start = move || {
        std::thread::spawn(move || {
            run(
                &other.0,
                &other.1,
                OutputFormat::SafetensorsFile,
                &Durable::new(),
            )
            .unwrap();
            done.send(()).unwrap();
        })
    };
    let hook = Arc::new(Meanwhile(Mutex::new(Some(start))));
    run(
        &one,
        &target,
        OutputFormat::SafetensorsFile,
        &Durable::with_hook(hook),
    )
    .unwrap();
    end.recv().unwrap();
    assert!(equal(&target, &one) || equal(&target, &two));
    assert_eq!(
        names(parent.path()),
        ["old", "one", "target", "target.values.json", "two"]
    );
}

#[test]
fn a_file_does_not_replace_a_directory_nor_the_reverse() {
    let parent = tempfile::tempdir().unwrap();
    let (from, directory, file) = (
        parent.path().join("from"),
        parent.path().join("d"),
        parent.path().join("f"),
    );
    source(&from, 1);
    source(&directory, 2);
    std::fs::write(&file, "mine").unwrap();
    let before = bytes_of(&directory);
    for (to, target) in [
        (&directory, OutputFormat::SafetensorsFile),
        (&directory, OutputFormat::Torch),
        (&file, OutputFormat::Dcp { ranks: 2 }),
        (
            &file,
            OutputFormat::SafetensorsDirectory {
                max_file_bytes: 500,
            },
        ),
        (&file, OutputFormat::SafetensorsShards { ranks: 2 }),
    ] {
        let refused = run(&from, to, target, &Durable::new());
        assert!(
            matches!(refused, Err(FileError::NotReplaceable { .. })),
            "{target:?}: {refused:?}"
        );
    }
    assert_eq!(
        (bytes_of(&directory), std::fs::read(&file).unwrap()),
        (before, b"mine".to_vec())
    );
    assert_eq!(names(parent.path()), ["d", "f", "from"]);
}

#[test]
#[cfg(unix)]
fn a_symbolic_link_is_never_replaced() {
    let parent = tempfile::tempdir().unwrap();
    let (from, directory, link) = (
        parent.path().join("from"),
        parent.path().join("directory"),
        parent.path().join("link"),
    );
    source(&from, 1);
    source(&directory, 2);
    std::os::unix::fs::symlink("directory", &link).unwrap();
    let before = bytes_of(&directory);
    for place in [link.clone(), parent.path().join("link/")] {
        for target in [OutputFormat::Dcp { ranks: 2 }, OutputFormat::Torch] {
            let refused = run(&from, &place, target, &Durable::new());
            assert!(
                matches!(refused, Err(FileError::Irreplaceable { .. })),
                "{}, {target:?}: {refused:?}",
                place.display()
            );
        }
    }
    assert_eq!(
        (std::fs::read_link(&link).unwrap(), bytes_of(&directory)),
        (std::path::PathBuf::from("directory"), before)
    );
    assert_eq!(names(parent.path()), ["directory", "from", "link"]);
}
