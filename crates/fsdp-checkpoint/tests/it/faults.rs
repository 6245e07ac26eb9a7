//! Failures during a save: every rank gets the error, and the old checkpoint is unchanged.

#![expect(clippy::disallowed_methods, reason = "a file is put in the way")]

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use candle_core::{Device, Tensor};
use fsdp_checkpoint::{
    CheckpointError, Checkpointer, CheckpointerOptions, LoadOptions, SaveOptions,
    latest_checkpoint, list_checkpoints, load, load_whole, save, step_path,
};
use fsdp_comm::{CommError, LocalRanks, ProcessGroup, run_local};
use fsdp_flat::{LocalShard, ShardedTensor};
use fsdp_formats::storage::{Durable, Step, StepHook};
use fsdp_layout::shard::chunk_range;
use fsdp_layout::{ErrorKind, Failure as _, TensorBox};
use fsdp_state::{StateDict, StateValue};

/// Fails the n-th durable step, counted over all ranks.
struct FailAt {
    step: usize,
    taken: AtomicUsize,
}

impl StepHook for FailAt {
    fn before(&self, step: Step, _: &Path) -> io::Result<()> {
        match self.taken.fetch_add(1, Ordering::SeqCst) {
            taken if taken == self.step && step != Step::Remove => {
                Err(io::Error::from_raw_os_error(28))
            }
            _ => Ok(()),
        }
    }
}

const ROWS: usize = 7;

/// Rows of a matrix cut over the ranks, a whole vector that all ranks hold, and a plain value.
fn state(group: &ProcessGroup, start: f32) -> StateDict {
    let rows = chunk_range(ROWS, group.world_size(), group.rank());
    let all = Tensor::arange(start, start + (ROWS * 3) as f32, &Device::Cpu)
        .unwrap()
        .reshape((ROWS, 3))
        .unwrap();
    let shards = (!rows.is_empty()).then(|| LocalShard {
        bounds: TensorBox::new(vec![rows.start, 0], vec![rows.len(), 3]),
        tensor: all.narrow(0, rows.start, rows.len()).unwrap(),
    });
    let sharded =
        ShardedTensor::new(all.dtype(), vec![ROWS, 3], shards.into_iter().collect()).unwrap();
    let mut state = StateDict::new();
    state.insert("matrix", sharded);
    state.insert(
        "vector",
        Tensor::arange(start, start + 4.0, &Device::Cpu).unwrap(),
    );
    state.insert("step", f64::from(start));
    state
}

fn saved_start(path: &Path) -> f64 {
    let state = load_whole(path, &[], &LoadOptions::default()).unwrap();
    let start = state.plain_at(&["step"]).unwrap().as_float().unwrap();
    let matrix = state.get("matrix").and_then(StateValue::as_tensor).unwrap();
    let expected =
        Tensor::arange(start as f32, start as f32 + (ROWS * 3) as f32, &Device::Cpu).unwrap();
    assert_eq!(
        matrix.flatten_all().unwrap().to_vec1::<f32>().unwrap(),
        expected.to_vec1::<f32>().unwrap()
    );
    start
}

fn save_on(
    world: usize,
    path: &Path,
    start: f32,
    durable: Durable,
) -> Vec<Result<(), CheckpointError>> {
    let options = CheckpointerOptions {
        save: SaveOptions {
            overwrite: true,
            ..SaveOptions::default()
        },
        ..CheckpointerOptions::default()
    };
    run_local(world, |group| {
        let checkpointer = Checkpointer::new(path, &group, options.clone())?;
        let mut checkpointer = checkpointer.with_durable(durable.clone());
        checkpointer.save(path, &state(&group, start)).map(|_| ())
    })
    .unwrap()
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect()
}

#[test]
fn each_durable_step_that_fails_leaves_the_old_checkpoint() {
    for world in [1, 2, 4] {
        for overwrite in [false, true] {
            let mut failed = 0;
            for step in 0.. {
                let dir = tempfile::tempdir().unwrap();
                let path = dir.path().join("checkpoint");
                if overwrite {
                    save_on(2, &path, 1.0, Durable::new())
                        .into_iter()
                        .for_each(|saved| saved.unwrap());
                }
                let hook = Arc::new(FailAt {
                    step,
                    taken: AtomicUsize::new(0),
                });
                let outcomes = save_on(world, &path, 100.0, Durable::with_hook(hook.clone()));
                let errors = outcomes.iter().filter(|outcome| outcome.is_err()).count();
                assert!(
                    errors == 0 || errors == world,
                    "step {step}: {errors} of {world} ranks fail: {outcomes:?}"
                );
                if errors == 0 {
                    assert_eq!(saved_start(&path), 100.0);
                    if hook.taken.load(Ordering::SeqCst) <= step {
                        break;
                    }
                    continue;
                }
                failed += 1;
                // Once the rename is done the new one may be there; a mixture never.
                let is_new = path.exists() && saved_start(&path) == 100.0;
                assert!(is_new || path.exists() == overwrite, "step {step}");
                if overwrite && !is_new {
                    assert_eq!(saved_start(&path), 1.0, "step {step}");
                }
                let leftovers = entries(dir.path())
                    .into_iter()
                    .filter(|entry| *entry != path)
                    .count();
                assert!(
                    leftovers <= usize::from(is_new),
                    "step {step} leaves {:?}",
                    entries(dir.path())
                );
                // The next save succeeds.
                save_on(world, &path, 200.0, Durable::new())
                    .into_iter()
                    .for_each(|saved| saved.unwrap());
                assert_eq!(saved_start(&path), 200.0);
            }
            assert!(failed >= 6, "only {failed} steps can fail on {world} ranks");
        }
    }
}

#[test]
fn a_rank_that_dies_is_an_error_on_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("checkpoint");
    save_on(3, &path, 1.0, Durable::new())
        .into_iter()
        .for_each(|saved| saved.unwrap());
    for dying in 0..3 {
        let ranks = LocalRanks {
            world_size: 3,
            deadline: Duration::from_secs(5),
            ..LocalRanks::default()
        };
        let outcomes = ranks.run(|group| {
            if group.rank() == dying {
                return None;
            }
            let options = SaveOptions {
                overwrite: true,
                ..SaveOptions::default()
            };
            Some(save(&path, &state(&group, 9.0), &group, &options))
        });
        for outcome in outcomes.unwrap().into_iter().flatten() {
            match outcome {
                Err(CheckpointError::Comm(CommError::RankLeft { rank, .. })) => {
                    assert_eq!(rank, dying)
                }
                other => panic!("rank {dying} died, but: {other:?}"),
            }
        }
        assert_eq!(saved_start(&path), 1.0);
        assert_eq!(entries(dir.path()), std::slice::from_ref(&path));
    }
}

#[test]
fn ranks_that_disagree_save_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("checkpoint");
    let outcomes = run_local(2, |group| {
        let mut state = state(&group, 1.0);
        let shape = if group.rank() == 0 { 4 } else { 5 };
        state.insert(
            "vector",
            Tensor::zeros(shape, candle_core::DType::F32, &Device::Cpu).unwrap(),
        );
        save(&path, &state, &group, &SaveOptions::default())
            .map(|_| ())
            .map_err(|error| error.to_string())
    })
    .unwrap();
    for outcome in outcomes {
        let message = outcome.unwrap_err();
        assert!(
            message.contains("`vector`") && message.contains("rank"),
            "{message}"
        );
    }
    assert_eq!(entries(dir.path()), Vec::<PathBuf>::new());
}

#[test]
fn ranks_that_save_to_different_places_are_told_so_and_save_nothing() {
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let errors = run_local(2, |group| {
        let path = dirs[group.rank()].path().join("checkpoint");
        save(path, &state(&group, 1.0), &group, &SaveOptions::default()).unwrap_err()
    })
    .unwrap();
    for error in errors {
        let message = error.to_string();
        assert!(
            message.contains("on rank 1")
                && message.contains("all ranks must save to the same place"),
            "{message}"
        );
        assert!(
            message.contains(dirs[1].path().to_str().unwrap()),
            "{message}"
        );
        assert_eq!(error.kind(), ErrorKind::Usage);
    }
    assert!(dirs.iter().all(|dir| entries(dir.path()).is_empty()));
}

#[test]
fn ranks_that_save_different_steps_are_told_so_and_save_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let errors = run_local(2, |group| {
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        let step = 20 + 10 * group.rank() as u64;
        checkpointer
            .save(step, &state(&group, 1.0))
            .unwrap_err()
            .to_string()
    })
    .unwrap();
    for message in errors {
        assert!(
            message.contains("step 20") && message.contains("step 30"),
            "{message}"
        );
    }
    assert!(entries(dir.path()).is_empty());
}

#[test]
fn a_directory_that_cannot_be_written_is_found_before_a_save_and_on_every_rank() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("file"), "not a directory").unwrap();
    let check = |run: &Path, durable: Durable| {
        let outcomes = run_local(2, |group| {
            Checkpointer::new(run, &group, CheckpointerOptions::default())
                .unwrap()
                .with_durable(durable.clone())
                .check_writable()
                .map_err(|error| error.to_string())
        });
        let [first, second] = <[_; 2]>::try_from(outcomes.unwrap()).unwrap();
        assert_eq!(first, second);
        first
    };
    let error = check(&dir.path().join("file/run"), Durable::new()).unwrap_err();
    assert!(
        error.contains("Not a directory") && error.contains("file/run"),
        "{error}"
    );
    // Each step fails once, until none is left.
    let run = dir.path().join("new/run");
    let fails_at = |step| {
        check(
            &run,
            Durable::with_hook(Arc::new(FailAt {
                step,
                taken: AtomicUsize::new(0),
            })),
        )
    };
    let failures = (0..).take_while(|&step| fails_at(step).is_err()).count();
    assert!(failures > 4, "{failures}");
    assert!(entries(&run).is_empty());
}

#[test]
fn what_a_killed_save_has_left_goes_with_the_next_save_to_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("checkpoint");
    let left = dir.path().join(".checkpoint.tmp-0123456789abcdef");
    std::fs::create_dir(&left).unwrap();
    std::fs::write(left.join("__0_0.distcp"), "half").unwrap();
    save_on(2, &path, 1.0, Durable::new())
        .into_iter()
        .for_each(|saved| saved.unwrap());
    assert_eq!(entries(dir.path()), std::slice::from_ref(&path));
}

#[test]
fn an_existing_checkpoint_is_only_replaced_when_asked() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("checkpoint");
    save_on(2, &path, 1.0, Durable::new())
        .into_iter()
        .for_each(|saved| saved.unwrap());
    let again = run_local(2, |group| {
        save(&path, &state(&group, 2.0), &group, &SaveOptions::default()).map(|_| ())
    })
    .unwrap();
    assert!(again.iter().all(|outcome| {
        outcome
            .as_ref()
            .is_err_and(|error| error.to_string().contains("exists"))
    }));
    assert_eq!(saved_start(&path), 1.0);
}

#[test]
fn a_load_that_fails_changes_nothing_on_any_rank() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("checkpoint");
    save_on(2, &path, 1.0, Durable::new())
        .into_iter()
        .for_each(|saved| saved.unwrap());
    // A byte of rank 1's file is changed; only a rank that reads it can notice.
    let file = path.join("__1_0.distcp");
    let mut bytes = std::fs::read(&file).unwrap();
    let position = bytes
        .windows(4)
        .rposition(|window| window == 20f32.to_le_bytes())
        .unwrap();
    bytes[position] ^= 1;
    edit(&file, &bytes);
    let outcomes = run_local(3, |group| {
        let mut template = state(&group, 50.0);
        let outcome = load(&path, &mut template, &group, &LoadOptions::default());
        let step = template.plain_at(&["step"]).unwrap().as_float().unwrap();
        (outcome.map_err(|error| error.to_string()), step)
    })
    .unwrap();
    for (outcome, step) in outcomes {
        let message = outcome.unwrap_err();
        assert!(message.contains("__1_0.distcp"), "{message}");
        assert_eq!(step, 50.0);
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "the test damages a file on purpose"
)]
fn edit(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn only_committed_steps_are_listed() {
    let dir = tempfile::tempdir().unwrap();
    for step in [20, 3, 100] {
        save_on(1, &step_path(dir.path(), step), 1.0, Durable::new())
            .into_iter()
            .for_each(|saved| saved.unwrap());
    }
    std::fs::create_dir(dir.path().join("step-00000999")).unwrap();
    std::fs::create_dir(dir.path().join(".step-00000200.tmp-1")).unwrap();
    let steps: Vec<u64> = list_checkpoints(dir.path())
        .unwrap()
        .into_iter()
        .map(|found| found.step)
        .collect();
    assert_eq!(steps, [3, 20, 100]);
    assert_eq!(latest_checkpoint(dir.path()).unwrap().unwrap().step, 100);
    let missing = list_checkpoints(dir.path().join("nowhere"));
    assert!(matches!(missing, Err(CheckpointError::Directory { .. })));
}

/// Checks that a save that may overwrite fails on every rank with an error that contains
/// `expected`.
fn assert_not_replaced(path: &Path, expected: &str) {
    let errors = save_on(2, path, 1.0, Durable::new())
        .into_iter()
        .map(|saved| saved.unwrap_err().to_string());
    for error in errors {
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_file_is_not_replaced_by_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("notes");
    std::fs::write(&path, "mine").unwrap();
    assert_not_replaced(&path, "cannot be replaced by a directory");
    assert_eq!(std::fs::read(&path).unwrap(), b"mine");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[cfg(unix)]
#[test]
fn a_symbolic_link_is_not_replaced_by_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let (elsewhere, link) = (dir.path().join("elsewhere"), dir.path().join("checkpoint"));
    std::fs::create_dir(&elsewhere).unwrap();
    for leads_to in [elsewhere.as_path(), Path::new("nowhere")] {
        std::os::unix::fs::symlink(leads_to, &link).unwrap();
        assert_not_replaced(&link, "is a symbolic link, which is never replaced");
        assert_eq!(std::fs::read_link(&link).unwrap(), leads_to);
        std::fs::remove_file(&link).unwrap();
    }
    assert_eq!(entries(dir.path()), [elsewhere]);
}
