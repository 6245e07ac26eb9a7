//! A save that fails or is killed at any durable step leaves the old checkpoint or the new one,
//! never a mixture.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::Checkpoint as _;
use fsdp_formats::reader::CheckpointReader;
use fsdp_formats::storage::{Durable, Step, StepHook, clean_stale};
use fsdp_layout::{DType, PlainValue};

use crate::crash_at::At;
use crate::state::{State, save};

/// Makes a small state in which every value is the number of its generation.
fn state(generation: u8) -> State {
    let mut state = State::default();
    for name in ["a", "b"] {
        state.tensors.insert(
            name.to_owned(),
            (DType::U8, vec![4, 5000], vec![generation; 20_000]),
        );
    }
    state.values.insert(
        "generation".to_owned(),
        PlainValue::Int(i64::from(generation)),
    );
    state
}

/// Returns the generation at the target, after checking that all of its values are of one.
fn generation(target: &Path) -> Option<u8> {
    if !target.exists() {
        return None;
    }
    let checkpoint = CheckpointReader::open(target).unwrap();
    let PlainValue::Int(generation) = checkpoint.read_value("generation").unwrap() else {
        panic!("not a number")
    };
    for name in ["a", "b"] {
        assert!(
            checkpoint
                .read_tensor(name)
                .unwrap()
                .iter()
                .all(|byte| i64::from(*byte) == generation)
        );
    }
    Some(generation as u8)
}

fn steps_of_a_save(target: &Path) -> usize {
    // Twice, so that the second one overwrites; without exchange, as that takes more steps.
    save(&state(0), 2, target, &Durable::new()).unwrap();
    let hook = Arc::new(At::new(usize::MAX, false, false));
    save(&state(0), 2, target, &Durable::with_hook(hook.clone())).unwrap();
    hook.count.load(Ordering::SeqCst)
}

#[test]
fn a_failure_at_any_step_is_an_error_and_leaves_old_or_new() {
    let parent = tempfile::tempdir().unwrap();
    let (fresh, target) = (parent.path().join("fresh"), parent.path().join("target"));
    let steps = steps_of_a_save(&target);
    assert!(steps >= 15, "only {steps} steps");
    for (overwrite, exchange) in [(false, true), (true, true), (true, false)] {
        for (step, after) in (0..steps + 1).flat_map(|step| [(step, false), (step, true)]) {
            let target = if overwrite { &target } else { &fresh };
            if overwrite {
                save(&state(1), 2, target, &Durable::new()).unwrap();
            } else if fresh.exists() {
                std::fs::rename(&fresh, parent.path().join(format!("done-{step}-{after}")))
                    .unwrap();
            }
            let hook = Arc::new(At::new(step, after, exchange));
            let saved = save(&state(2), 2, target, &Durable::with_hook(hook.clone()));
            assert_eq!(
                saved.is_err(),
                hook.struck.load(Ordering::SeqCst),
                "step {step}, after {after}"
            );
            let found = generation(target);
            match saved {
                // The error tells which one is there.
                Ok(()) | Err(FileError::AfterCommit { .. }) => {
                    assert_eq!(found, Some(2), "step {step}")
                }
                Err(error) => assert_eq!(found, overwrite.then_some(1), "step {step}: {error}"),
            }
            clean_stale(target).unwrap();
        }
    }
    let left: Vec<_> = std::fs::read_dir(parent.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with('.'))
        .collect();
    assert_eq!(left, Vec::<String>::new());
}

/// Not a test by itself: the process that [`a_kill_at_any_step_leaves_old_or_new`] starts and that
/// dies.
#[test]
fn killed_child() {
    let Ok(order) = std::env::var("FSDP_DCP_KILL") else {
        return;
    };
    let mut order = order.split(' ');
    let (step, after) = (
        order.next().unwrap().parse().unwrap(),
        order.next().unwrap() == "after",
    );
    let exchange = order.next().unwrap() == "true";
    let target = order.next().unwrap();
    let hook = Arc::new(At {
        kill: true,
        ..At::new(step, after, exchange)
    });
    save(&state(2), 2, Path::new(target), &Durable::with_hook(hook)).unwrap();
}

#[test]
fn a_kill_at_any_step_leaves_old_or_new() {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("target");
    let steps = steps_of_a_save(&target);
    let cases = (0..steps).flat_map(|step| {
        [
            (step, "before", true),
            (step, "before", false),
            (step, "after", false),
        ]
    });
    let mut lived = 0;
    for (step, when, exchange) in cases {
        save(&state(1), 2, &target, &Durable::new()).unwrap();
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "crash::killed_child"])
            .env(
                "FSDP_DCP_KILL",
                format!("{step} {when} {exchange} {}", target.display()),
            )
            .output()
            .unwrap();
        // A save that can exchange takes fewer steps; one that cannot never comes to the end of
        // that step.
        lived += usize::from(child.status.success());
        assert!(
            !child.status.success() || generation(&target) == Some(2),
            "step {step}, {when}"
        );
        // Without exchange, the old checkpoint may have stepped aside already: the next save puts
        // it back.
        let was_aside = generation(&target).is_none();
        drop(Durable::new().prepare(&target, true).unwrap());
        if was_aside {
            assert!(!exchange && generation(&target) == Some(1));
        }
        assert!(
            matches!(generation(&target), Some(1 | 2)),
            "step {step}, {when}"
        );
        clean_stale(&target).unwrap();
        let left = std::fs::read_dir(parent.path()).unwrap().count();
        assert_eq!(left, 1, "step {step}, {when}");
    }
    assert!(lived <= 5, "{lived} children were not killed");
}

/// Fails the first fsync of a directory after two have changed places.
#[derive(Default)]
struct Unsynced {
    exchanged: AtomicBool,
    struck: AtomicBool,
}

impl StepHook for Unsynced {
    fn before(&self, step: Step, _: &Path) -> io::Result<()> {
        match step {
            Step::Exchange => self.exchanged.store(true, Ordering::SeqCst),
            Step::SyncDirectory
                if self.exchanged.load(Ordering::SeqCst)
                    && !self.struck.swap(true, Ordering::SeqCst) =>
            {
                return Err(io::Error::from_raw_os_error(5));
            }
            _ => {}
        }
        Ok(())
    }
}

#[test]
fn an_overwrite_that_may_not_last_puts_the_old_checkpoint_back() {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("target");
    save(&state(1), 2, &target, &Durable::new()).unwrap();
    let hook = Arc::new(Unsynced::default());
    save(&state(2), 2, &target, &Durable::with_hook(hook.clone())).unwrap_err();
    assert!(
        hook.struck.load(Ordering::SeqCst),
        "the file system cannot exchange directories"
    );
    assert_eq!(generation(&target), Some(1));
}
