//! A save in the background holds what the state was when it was asked for, and its errors are not
//! lost.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use candle_core::{Device, Tensor};
use fsdp_checkpoint::{
    CheckpointError, Checkpointer, CheckpointerOptions, LoadOptions, LoadReport, Stateful,
    load_whole, step_path,
};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_flat::storage::{HostSliceMut, release};
use fsdp_flat::{LocalShard, ShardedTensor};
use fsdp_formats::checkpoint::{self, Checkpoint};
use fsdp_formats::reader::OpenOptions;
use fsdp_formats::storage::{Durable, Step, StepHook};
use fsdp_layout::TensorBox;
use fsdp_state::{StateDict, StateValue};

/// Makes the state of a rank: one row of a matrix, and a number.
fn state(rank: usize, world: usize, value: f32) -> StateDict {
    let tensor = Tensor::full(value, (1, 1000), &Device::Cpu).unwrap();
    let bounds = TensorBox::new(vec![rank, 0], vec![1, 1000]);
    let matrix = ShardedTensor::new(
        tensor.dtype(),
        vec![world, 1000],
        vec![LocalShard { bounds, tensor }],
    )
    .unwrap();
    let mut state = StateDict::new();
    state.insert("matrix", matrix);
    state.insert("step", f64::from(value));
    state
}

fn overwrite(state: &StateDict, value: f32) {
    for shard in state
        .get("matrix")
        .and_then(StateValue::as_sharded)
        .unwrap()
        .shards()
    {
        HostSliceMut::<f32>::write(&shard.tensor)
            .unwrap()
            .fill(value);
    }
}

fn saved(path: &Path) -> Vec<f32> {
    let state = load_whole(path, &[], &LoadOptions::default()).unwrap();
    let values = state
        .get("matrix")
        .and_then(StateValue::as_tensor)
        .unwrap()
        .flatten_all()
        .unwrap();
    let step = state.plain_at(&["step"]).unwrap().as_float().unwrap();
    let values = values.to_vec1::<f32>().unwrap();
    assert!(values.iter().all(|&value| f64::from(value) == step));
    values
}

/// Holds every durable step up until the gate is opened.
#[derive(Default)]
struct Gate {
    open: Mutex<bool>,
    changed: Condvar,
}

impl StepHook for Gate {
    fn before(&self, _: Step, _: &Path) -> io::Result<()> {
        let open = self.open.lock().unwrap();
        drop(self.changed.wait_while(open, |open| !*open).unwrap());
        Ok(())
    }
}

/// Makes a checkpointer whose files become durable by these operations.
fn checkpointer(run: &Path, group: &ProcessGroup, durable: Durable) -> Checkpointer {
    Checkpointer::new(run, group, CheckpointerOptions::default())
        .unwrap()
        .with_durable(durable)
}

#[test]
fn training_may_change_everything_as_soon_as_the_call_returns() {
    let dir = tempfile::tempdir().unwrap();
    let gate = Arc::new(Gate::default());
    run_local(3, |group| {
        let mut saver = checkpointer(dir.path(), &group, Durable::with_hook(gate.clone()));
        let state = state(group.rank(), 3, 1.0);
        saver.save_async(dir.path().join("first"), &state).unwrap();
        assert!(
            saver.is_saving(),
            "the disk is held up, yet the call has returned"
        );
        overwrite(&state, 7.0);
        // Collectives of training go on meanwhile.
        group.barrier().unwrap();
        *gate.open.lock().unwrap() = true;
        gate.changed.notify_all();
        let report = saver.wait().unwrap().unwrap();
        assert!(report.total_bytes >= 3 * 4000, "{report:?}");
        assert!(saver.wait().unwrap().is_none());
        // The next one waits for nothing, and uses the same buffers.
        saver
            .save_async(
                dir.path().join("second"),
                &self::state(group.rank(), 3, 2.0),
            )
            .unwrap();
        saver
            .save_async(dir.path().join("third"), &self::state(group.rank(), 3, 3.0))
            .unwrap();
    })
    .unwrap();
    for (name, value) in [("first", 1.0), ("second", 2.0), ("third", 3.0)] {
        assert_eq!(saved(&dir.path().join(name)), vec![value; 3000]);
    }
}

#[test]
fn the_progress_of_a_save_begins_at_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let gate = Arc::new(Gate::default());
    run_local(1, |group| {
        let mut saver = checkpointer(dir.path(), &group, Durable::with_hook(gate.clone()));
        *gate.open.lock().unwrap() = true;
        saver
            .save_async(dir.path().join("first"), &state(0, 1, 1.0))
            .unwrap();
        saver.wait().unwrap();
        assert_eq!(
            (saver.progress().written(), saver.progress().total()),
            (4000, 4000)
        );
        *gate.open.lock().unwrap() = false;
        saver
            .save_async(dir.path().join("second"), &state(0, 1, 2.0))
            .unwrap();
        assert_eq!(saver.progress().written(), 0);
        *gate.open.lock().unwrap() = true;
        gate.changed.notify_all();
    })
    .unwrap();
}

/// Fails every step while it is set.
#[derive(Default)]
struct Broken(AtomicBool);

impl StepHook for Broken {
    fn before(&self, _: Step, _: &Path) -> io::Result<()> {
        if self.0.load(Ordering::SeqCst) {
            Err(io::Error::from_raw_os_error(5))
        } else {
            Ok(())
        }
    }
}

#[test]
fn a_failure_is_the_next_calls_error_on_every_rank_and_then_it_works_again() {
    let dir = tempfile::tempdir().unwrap();
    let broken = Arc::new(Broken(AtomicBool::new(true)));
    run_local(2, |group| {
        let mut saver = checkpointer(dir.path(), &group, Durable::with_hook(broken.clone()));
        let state = state(group.rank(), 2, 4.0);
        saver.save_async(dir.path().join("lost"), &state).unwrap();
        let error = saver
            .save_async(dir.path().join("never-started"), &state)
            .unwrap_err()
            .to_string();
        assert!(error.contains("save"), "{error}");
        group.barrier().unwrap();
        broken.0.store(false, Ordering::SeqCst);
        group.barrier().unwrap();
        saver.save_async(dir.path().join("saved"), &state).unwrap();
        saver.wait().unwrap();
    })
    .unwrap();
    let names: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(names, ["saved"]);
    assert_eq!(saved(&dir.path().join("saved")), vec![4.0; 2000]);
}

#[test]
fn what_cannot_be_copied_on_one_rank_starts_no_save_on_any() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        let mut saver = checkpointer(dir.path(), &group, Durable::new());
        let (lost, whole) = (state(group.rank(), 2, 1.0), state(group.rank(), 2, 2.0));
        if group.rank() == 1 {
            let matrix = lost.get("matrix").and_then(StateValue::as_sharded).unwrap();
            release(&matrix.shards()[0].tensor).unwrap();
        }
        let error = saver
            .save_async(dir.path().join("lost"), &lost)
            .unwrap_err();
        assert!(error.to_string().contains("freed"), "{error}");
        assert!(saver.wait().unwrap().is_none());
        saver.save_async(dir.path().join("whole"), &whole).unwrap();
        saver.wait().unwrap().unwrap();
    })
    .unwrap();
    assert!(!dir.path().join("lost").exists());
    assert_eq!(saved(&dir.path().join("whole")), [2.0; 2000]);
}

/// The caller may be a task of a runtime, whose threads must not block on another one.
#[test]
fn a_rank_may_be_an_async_task() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        runtime.block_on(async {
            let mut saver = checkpointer(dir.path(), &group, Durable::new());
            for step in 1..=2 {
                let state = state(group.rank(), 2, step as f32);
                saver
                    .save_async(dir.path().join(format!("{step}")), &state)
                    .unwrap();
            }
            // The second one is waited for by the drop.
        });
    })
    .unwrap();
    assert_eq!(saved(&dir.path().join("1")), [1.0; 2000]);
    assert_eq!(saved(&dir.path().join("2")), [2.0; 2000]);
}

#[test]
fn a_load_waits_for_the_save_before_it_and_a_run_that_goes_back_continues_from_what_it_loaded() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        let mut state = state(group.rank(), 2, 1.0);
        checkpointer.save(1, &state).unwrap();
        checkpointer.save_async(2, &state).unwrap();
        let (newest, _) = checkpointer.load_latest(&mut state).unwrap().unwrap();
        assert_eq!(newest.step, 2);
        checkpointer.save_async(3, &state).unwrap();
        checkpointer.load(1, &mut state).unwrap();
        checkpointer.save(4, &state).unwrap();
        let saved = checkpoint::open(step_path(dir.path(), 4), OpenOptions::default()).unwrap();
        assert_eq!(
            saved.lineage().unwrap().parent.map(|parent| parent.step),
            Some(1)
        );
    })
    .unwrap();
}

/// A state whose description takes this long.
struct Slow(StateDict);

const SLOWNESS: Duration = Duration::from_millis(30);

impl Stateful for Slow {
    fn state_dict(&self) -> Result<StateDict, CheckpointError> {
        std::thread::sleep(SLOWNESS);
        Ok(self.0.clone())
    }

    fn load_state_dict(
        &mut self,
        checkpoint: &dyn Checkpoint,
        group: &ProcessGroup,
        options: &LoadOptions,
    ) -> Result<LoadReport, CheckpointError> {
        self.0.load_state_dict(checkpoint, group, options)
    }
}

#[test]
fn a_save_in_the_background_returns_the_time_of_the_whole_call() {
    let dir = tempfile::tempdir().unwrap();
    run_local(1, |group| {
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        let stall = checkpointer.save_async(1, &Slow(state(0, 1, 1.0))).unwrap();
        assert!(stall >= SLOWNESS, "{stall:?}");
        checkpointer.wait().unwrap();
    })
    .unwrap();
}

/// Panics at the first durable step.
struct Panics;

impl StepHook for Panics {
    fn before(&self, step: Step, _: &Path) -> io::Result<()> {
        panic!("a test panics in a save, at {step:?}");
    }
}

/// The deadline only bounds how long the test takes if the others wait for the rank.
#[test]
fn a_panic_in_the_save_of_one_rank_is_the_same_error_on_all() {
    for panicking_rank in [0, 1] {
        let dir = tempfile::tempdir().unwrap();
        let messages = run_local(3, |group| {
            let durable = if group.rank() == panicking_rank {
                Durable::with_hook(Arc::new(Panics))
            } else {
                Durable::new()
            };
            let mut saver = checkpointer(dir.path(), &group, durable);
            saver.save_async(1, &state(group.rank(), 3, 1.0)).unwrap();
            saver.wait().unwrap_err().to_string()
        })
        .unwrap();
        for message in &messages {
            assert!(message.contains("panicked"), "{message}");
            assert_eq!(message, &messages[0]);
        }
    }
}

/// A save waits for a rank longer than other operations of the group do, from its beginning on.
#[test]
fn a_rank_may_be_late_to_every_step_of_a_save_and_a_load() {
    let dir = tempfile::tempdir().unwrap();
    let ranks = fsdp_comm::LocalRanks {
        world_size: 2,
        deadline: Duration::from_millis(100),
        ..fsdp_comm::LocalRanks::default()
    };
    let late = |group: &ProcessGroup| {
        if group.rank() == 1 {
            std::thread::sleep(Duration::from_millis(500));
        }
    };
    ranks
        .run(|group| {
            let mut saver = checkpointer(dir.path(), &group, Durable::new());
            let mut state = state(group.rank(), 2, 1.0);
            late(&group);
            saver.check_writable().unwrap();
            late(&group);
            saver.save(1, &state).unwrap();
            late(&group);
            saver.save_async(2, &state).unwrap();
            saver.wait().unwrap();
            late(&group);
            saver.load(2, &mut state).unwrap();
            late(&group);
            saver.load_latest(&mut state).unwrap();
        })
        .unwrap();
}
