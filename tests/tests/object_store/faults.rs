//! Stores that fail: at any operation, for good, or only in their answers.

use std::error::Error as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fsdp::checkpoint::{Checkpointer, CheckpointerOptions, Retention};
use fsdp::formats::checkpoint;
use fsdp::formats::checkpoint::Checkpoint as _;
use fsdp::formats::reader::{CheckpointReader, OpenOptions};
use fsdp::formats::storage::Durable;
use fsdp::formats::{FileError, Location};
use fsdp::tools::convert::{ConvertOptions, OutputFormat, convert};
use fsdp_comm::{LocalRanks, run_local};
use fsdp_layout::DType;

use crate::conformance::generation;
use crate::faulty::{Fail, Faulty};
use crate::load::load;
use crate::server::{SECRET, Server};
use crate::state::{State, save};

/// One tensor that takes parts, and small ones.
fn state() -> State {
    let mut state = generation(7);
    state.tensors.insert(
        "large".to_owned(),
        (DType::U8, vec![3, 7 << 20], vec![9; 21 << 20]),
    );
    state
}

fn operations(run: impl Fn(&Location)) -> usize {
    let store = Faulty::new(Fail::Never);
    run(&store.location("run/c"));
    store.operations()
}

/// The error tells the operation and the object, and what the store said.
fn assert_tells(error: &FileError) {
    let text = fsdp::layout::with_causes(error);
    assert!(
        text.contains("memory://test/run/c") && text.contains("the test wants it so"),
        "{text}"
    );
}

#[test]
fn a_failure_at_any_operation_of_a_save_is_an_error_or_harmless() {
    let state = state();
    let count = operations(|target| save(&state, 2, target, &Durable::new()).unwrap());
    assert!(count > 12, "{count} operations");
    for at in 0..count {
        for fail in [Fail::Before(at), Fail::After(at)] {
            let store = Faulty::new(fail);
            let outcome = save(&state, 2, store.location("run/c"), &Durable::new());
            assert_eq!(store.unfinished(), 0, "{fail:?}");
            let healed = Location::with_store(store.healed(), "memory://test", "run/c");
            match outcome {
                // The commit was tried again, or only cleaning up failed.
                Ok(()) => drop(load(&state, 3, &healed)),
                Err(error) => {
                    assert_tells(&error);
                    assert!(
                        !matches!(error, FileError::Exists { .. }),
                        "{fail:?}: {error}"
                    );
                    assert_eq!(store.keys(), Vec::<String>::new(), "{fail:?}");
                    assert!(matches!(
                        CheckpointReader::open(&healed),
                        Err(FileError::NotCommitted { .. })
                    ));
                    save(&state, 1, &healed, &Durable::new()).unwrap();
                }
            }
        }
    }
}

#[test]
fn a_store_that_goes_away_leaves_no_checkpoint_and_the_next_save_cleans_up() {
    let state = generation(3);
    let count = operations(|target| save(&state, 2, target, &Durable::new()).unwrap());
    for at in 0..count {
        let store = Faulty::new(Fail::From(at));
        let outcome = save(&state, 2, store.location("run/c"), &Durable::new());
        let healed = Location::with_store(store.healed(), "memory://test", "run/c");
        let committed = store.keys().iter().any(|key| key.ends_with("/.metadata"));
        assert_eq!(outcome.is_ok(), committed, "{at}: {:?}", store.keys());
        match outcome {
            Ok(()) => drop(load(&state, 1, &healed)),
            Err(error) => {
                assert_tells(&error);
                let unknown = matches!(error, FileError::CommitUnknown { .. });
                assert!(!unknown || error.source().is_some());
                save(&generation(4), 3, &healed, &Durable::new()).unwrap();
                load(&generation(4), 2, &healed);
                // Data of three ranks, `.integrity`, `.metadata`: nothing of the save before.
                assert_eq!(store.keys().len(), 5, "{:?}", store.keys());
            }
        }
    }
}

#[test]
fn a_slow_store_is_waited_for_longer_than_other_collectives() {
    let store = Faulty::new(Fail::Never);
    save(
        &generation(1),
        1,
        store.location("run/step-00000001"),
        &Durable::new(),
    )
    .unwrap();
    // Two lists take longer than the deadline.
    let slow = Faulty::with(store.healed(), Fail::SlowLists(Duration::from_millis(1500)));
    let ranks = LocalRanks {
        world_size: 2,
        deadline: Duration::from_secs(2),
        ..LocalRanks::default()
    };
    let run = ranks.run(|group| {
        let retention = Retention {
            keep_last: 1.try_into().ok(),
            keep_every: None,
        };
        let options = CheckpointerOptions {
            retention,
            ..CheckpointerOptions::default()
        };
        let checkpointer = Checkpointer::new(slow.location("run"), &group, options).unwrap();
        assert_eq!(
            checkpointer.latest().unwrap().map(|latest| latest.step),
            Some(1)
        );
        assert_eq!(checkpointer.prune().unwrap(), []);
    });
    run.unwrap();
}

#[test]
fn a_store_that_cannot_be_written_is_found_before_a_save_and_the_check_leaves_nothing() {
    let check = |store: &Arc<Faulty>| {
        let run = run_local(2, |group| {
            let checkpointer = Checkpointer::new(
                store.location("run"),
                &group,
                CheckpointerOptions::default(),
            );
            checkpointer
                .unwrap()
                .check_writable()
                .map_err(|error| error.to_string())
        });
        let [first, second] = <[_; 2]>::try_from(run.unwrap()).unwrap();
        assert_eq!(first, second);
        first
    };
    let store = Faulty::new(Fail::Never);
    check(&store).unwrap();
    assert_eq!(store.keys(), Vec::<String>::new());
    // Each rank puts an object.
    let failures = (0..store.operations())
        .filter(|&at| check(&Faulty::new(Fail::Before(at))).is_err())
        .count();
    assert!(failures >= 2, "{failures}");
    let error = check(&Faulty::new(Fail::From(0))).unwrap_err();
    assert!(error.contains("the test wants it so"), "{error}");
}

#[test]
fn a_failure_at_any_operation_of_a_conversion_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("c");
    save(&state(), 2, &path, &Durable::new()).unwrap();
    let source = checkpoint::open(&path, OpenOptions::default()).unwrap();
    for target in [
        OutputFormat::SafetensorsFile,
        OutputFormat::SafetensorsShards { ranks: 2 },
        OutputFormat::Torch,
    ] {
        let run = |to: &Location| convert(&*source, to, target, ConvertOptions::default());
        for at in 0..operations(|to| drop(run(to).unwrap())) {
            for fail in [Fail::Before(at), Fail::After(at)] {
                let store = Faulty::new(fail);
                let outcome = run(&store.location("run/c"));
                assert_eq!(store.unfinished(), 0, "{target:?} {fail:?}");
                if let Err(error) = outcome {
                    assert_tells(&error);
                    let keys = store.keys();
                    match error {
                        // It was put in its place, though the store denied it.
                        FileError::CommitUnknown { .. } => {
                            let healed =
                                Location::with_store(store.healed(), "memory://test", "run/c");
                            let there = checkpoint::open(&healed, OpenOptions::default()).unwrap();
                            assert_eq!(
                                there.metadata().entries.len(),
                                source.metadata().entries.len()
                            );
                        }
                        _ => assert_eq!(keys, Vec::<String>::new(), "{target:?} {fail:?}"),
                    }
                }
            }
        }
    }
}

#[test]
fn a_failure_at_any_operation_of_a_load_is_an_error() {
    let state = state();
    let store = Faulty::new(Fail::Never);
    save(&state, 2, store.location("run/c"), &Durable::new()).unwrap();
    let bytes = store.healed();
    for at in 0.. {
        let store = Faulty::with(bytes.clone(), Fail::Before(at));
        let read = || -> Result<Vec<u8>, FileError> {
            let opened = CheckpointReader::open(store.location("run/c"))?;
            opened.read_value("generation")?;
            opened.read_tensor("large")
        };
        match read() {
            Err(error) => assert_tells(&error),
            Ok(bytes) => {
                assert!(bytes == vec![9; 21 << 20]);
                assert!(at > 6, "{at} operations");
                break;
            }
        }
    }
}

#[test]
fn an_answer_that_got_lost_is_not_somebody_elses_checkpoint() {
    let server = Server::start();
    let target = server.location("lost");
    server
        .behaviour
        .lose_an_answer
        .store(true, Ordering::SeqCst);
    save(&generation(1), 2, &target, &Durable::new()).unwrap();
    assert!(!server.behaviour.lose_an_answer.load(Ordering::SeqCst));
    load(&generation(1), 1, &target);
    // A store that is busy is asked again.
    server.behaviour.slow_down.store(true, Ordering::SeqCst);
    save(&generation(2), 1, server.location("busy"), &Durable::new()).unwrap();
    assert!(!server.behaviour.slow_down.load(Ordering::SeqCst));
}

#[test]
fn credentials_are_in_no_message() {
    let server = Server::start();
    let settings = server
        .environment()
        .map(|(key, value)| (key.to_ascii_lowercase(), value));
    let wrong = ("aws_access_key_id".to_owned(), "nobody".to_owned());
    let location = Location::with_settings("s3://bucket/x", settings.into_iter().chain([wrong]));
    let error = CheckpointReader::open(&location).unwrap_err();
    let text = format!(
        "{} {error:?} {location:?}",
        fsdp::layout::with_causes(&error)
    );
    assert!(
        text.contains("s3://bucket/x") && !text.contains(SECRET),
        "{text}"
    );
    let saved = save(&generation(1), 1, &location, &Durable::new()).unwrap_err();
    let FileError::Io { source, .. } = &saved else {
        panic!("{saved:?}")
    };
    assert_eq!(
        source.kind(),
        std::io::ErrorKind::PermissionDenied,
        "{saved:?}"
    );
}
