//! Old checkpoints go, but never one that is read, nor the last whole one.

use std::io;
use std::path::Path;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use fsdp_checkpoint::{
    Checkpointer, CheckpointerOptions, Retention, SaveOptions, list_checkpoints, prune, save,
    step_path,
};
use fsdp_comm::run_local;
use fsdp_formats::reader::{CheckpointReader, OpenOptions};
use fsdp_formats::storage::{Durable, Step, StepHook};
use fsdp_formats::{Location, checkpoint};
use fsdp_state::StateDict;

fn save_steps(dir: &Path, steps: &[u64]) {
    run_local(1, |group| {
        for &step in steps {
            let mut state = StateDict::new();
            state.insert(
                "weight",
                Tensor::full(step as f32, 1000, &Device::Cpu).unwrap(),
            );
            save(
                step_path(dir, step),
                &state,
                &group,
                &SaveOptions::default(),
            )
            .unwrap();
        }
    })
    .unwrap();
}

fn steps(dir: &Path) -> Vec<u64> {
    list_checkpoints(dir)
        .unwrap()
        .iter()
        .map(|checkpoint| checkpoint.step)
        .collect()
}

fn last(count: usize) -> Retention {
    Retention {
        keep_last: count.try_into().ok(),
        keep_every: None,
    }
}

#[test]
fn the_last_ones_and_every_nth_stay() {
    let dir = tempfile::tempdir().unwrap();
    save_steps(dir.path(), &[5, 10, 15, 20, 25]);
    assert_eq!(prune(dir.path(), &Retention::default()).unwrap(), []);
    let retention = Retention {
        keep_every: 10.try_into().ok(),
        ..last(1)
    };
    let removed = prune(dir.path(), &retention).unwrap();
    assert_eq!(
        removed
            .iter()
            .map(|checkpoint| checkpoint.step)
            .collect::<Vec<_>>(),
        [5, 15]
    );
    assert_eq!(steps(dir.path()), [10, 20, 25]);
    assert_eq!(prune(dir.path(), &retention).unwrap(), []);
    // Nothing else is left of those that went.
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 3);
}

#[test]
fn a_checkpoint_that_is_read_stays_until_it_is_not() {
    let dir = tempfile::tempdir().unwrap();
    save_steps(dir.path(), &[1, 2, 3]);
    let reader = CheckpointReader::open(step_path(dir.path(), 1)).unwrap();
    prune(dir.path(), &last(1)).unwrap();
    assert_eq!(steps(dir.path()), [1, 3]);
    assert_eq!(reader.read_tensor("weight").unwrap().len(), 4000);
    drop(reader);
    prune(dir.path(), &last(1)).unwrap();
    assert_eq!(steps(dir.path()), [3]);
}

/// Checks that of the steps 1 to 4 of a run that keeps its last one, step 2 stays too until `free`
/// has been called.
fn assert_second_of_four_stays_until(run: &Path, free: impl FnOnce()) {
    prune(run, &last(1)).unwrap();
    assert_eq!(steps(run), [2, 4]);
    free();
    prune(run, &last(1)).unwrap();
    assert_eq!(steps(run), [4]);
}

#[cfg(unix)]
#[test]
fn a_checkpoint_to_which_a_link_leads_stays_until_it_leads_elsewhere() {
    let dir = tempfile::tempdir().unwrap();
    save_steps(dir.path(), &[1, 2, 3, 4]);
    let best = dir.path().join("best");
    std::os::unix::fs::symlink(step_path(dir.path(), 2), &best).unwrap();
    assert_second_of_four_stays_until(dir.path(), || std::fs::remove_file(&best).unwrap());
}

#[test]
fn nothing_goes_while_none_of_those_that_stay_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    save_steps(dir.path(), &[1, 2, 3]);
    let data = step_path(dir.path(), 3).join("__0_0.distcp");
    let file = std::fs::File::options().write(true).open(&data).unwrap();
    file.set_len(file.metadata().unwrap().len() / 2).unwrap();
    assert_eq!(prune(dir.path(), &last(1)).unwrap(), []);
    assert_eq!(steps(dir.path()), [1, 2, 3]);
    // With a whole one among them, the others go.
    prune(dir.path(), &last(2)).unwrap();
    assert_eq!(steps(dir.path()), [2, 3]);
}

/// Breaks every removal off before it begins.
struct NoRemoval;

impl StepHook for NoRemoval {
    fn before(&self, step: Step, _: &Path) -> io::Result<()> {
        if step == Step::Remove {
            Err(io::Error::from_raw_os_error(5))
        } else {
            Ok(())
        }
    }
}

#[test]
fn what_a_broken_off_removal_left_goes_with_the_next_one() {
    let dir = tempfile::tempdir().unwrap();
    save_steps(dir.path(), &[1, 2, 3]);
    let broken = Durable::with_hook(Arc::new(NoRemoval));
    broken
        .remove_checkpoint(step_path(dir.path(), 1))
        .unwrap_err();
    // It is gone all the same, at once and whole.
    assert_eq!(steps(dir.path()), [2, 3]);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 3);
    prune(dir.path(), &last(2)).unwrap();
    assert_eq!(steps(dir.path()), [2, 3]);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
}

#[test]
fn what_is_left_of_a_step_without_leading_zeros_goes_with_the_next_removal() {
    let dir = tempfile::tempdir().unwrap();
    save_steps(dir.path(), &[1, 2, 3]);
    let [old, later] = [2, 4].map(|step| {
        let left = dir
            .path()
            .join(format!(".step-{step}.tmp-0123456789abcdef"));
        std::fs::create_dir(&left).unwrap();
        left
    });
    prune(dir.path(), &last(3)).unwrap();
    assert!(!old.exists() && later.exists());
    assert_eq!(steps(dir.path()), [1, 2, 3]);
}

#[test]
fn a_step_without_leading_zeros_is_found_opened_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        let state: StateDict = [("step", 20i64.into())].into_iter().collect();
        for name in ["step-20", "step-3"] {
            save(
                dir.path().join(name),
                &state,
                &group,
                &SaveOptions::default(),
            )
            .unwrap();
        }
        let options = CheckpointerOptions {
            retention: last(1),
            ..CheckpointerOptions::default()
        };
        let mut checkpointer = Checkpointer::new(dir.path(), &group, options).unwrap();
        let (found, _) = checkpointer
            .load_latest(&mut state.clone())
            .unwrap()
            .unwrap();
        assert_eq!(
            (found.step, found.path),
            (20, Location::from(dir.path().join("step-20")))
        );
        let removed = checkpointer.prune().unwrap();
        assert_eq!(removed.len(), 1);
        assert_eq!(
            (removed[0].step, &removed[0].path),
            (3, &Location::from(dir.path().join("step-3")))
        );
    })
    .unwrap();
}

#[test]
fn a_run_that_goes_back_keeps_what_it_saves_then() {
    let dir = tempfile::tempdir().unwrap();
    save_steps(dir.path(), &[800, 900, 1000]);
    run_local(1, |group| {
        let options = CheckpointerOptions {
            retention: last(2),
            ..CheckpointerOptions::default()
        };
        let mut checkpointer = Checkpointer::new(dir.path(), &group, options).unwrap();
        let weight = Tensor::zeros(1000, candle_core::DType::F32, &Device::Cpu).unwrap();
        let mut state: StateDict = [("weight", weight.into())].into_iter().collect();
        checkpointer.load(800u64, &mut state).unwrap();
        for step in [850u64, 860] {
            checkpointer.save(step, &state).unwrap();
        }
        // Dropping the checkpointer waits for the removal.
    })
    .unwrap();
    // The two newest of the run as it is now; later steps are of the branch that it has left, and
    // are not touched.
    assert_eq!(steps(dir.path()), [850, 860, 900, 1000]);
}

#[test]
fn a_run_that_goes_back_keeps_what_it_continues_from() {
    let dir = tempfile::tempdir().unwrap();
    save_steps(dir.path(), &[700, 800, 900, 1000]);
    run_local(1, |group| {
        let options = CheckpointerOptions {
            retention: last(2),
            ..CheckpointerOptions::default()
        };
        let mut checkpointer = Checkpointer::new(dir.path(), &group, options).unwrap();
        let weight = Tensor::zeros(1000, candle_core::DType::F32, &Device::Cpu).unwrap();
        let mut state: StateDict = [("weight", weight.into())].into_iter().collect();
        checkpointer.load(800u64, &mut state).unwrap();
        assert_eq!(checkpointer.prune().unwrap(), []);
        checkpointer.save(dir.path().join("best"), &state).unwrap();
        // Dropping the checkpointer waits for the removal after the save.
    })
    .unwrap();
    assert_eq!(steps(dir.path()), [700, 800, 900, 1000]);
}

#[test]
fn a_checkpoint_with_files_of_others_stays_until_they_are_gone() {
    let dir = tempfile::tempdir().unwrap();
    save_steps(dir.path(), &[1, 2, 3, 4]);
    let scores = step_path(dir.path(), 2).join("scores");
    std::fs::create_dir(&scores).unwrap();
    // Files that frameworks keep beside a checkpoint, such as `config.json`, are removed with it.
    std::fs::copy(
        step_path(dir.path(), 1).join(".metadata"),
        step_path(dir.path(), 1).join("config.json"),
    )
    .unwrap();
    assert_second_of_four_stays_until(dir.path(), || std::fs::remove_dir(&scores).unwrap());
}

#[test]
fn a_prune_beside_that_of_a_save_is_no_error() {
    let dir = tempfile::tempdir().unwrap();
    run_local(1, |group| {
        let options = CheckpointerOptions {
            retention: last(1),
            ..CheckpointerOptions::default()
        };
        let mut checkpointer = Checkpointer::new(dir.path(), &group, options).unwrap();
        let state: StateDict = [("step", 1i64.into())].into_iter().collect();
        for step in 1..=50u64 {
            checkpointer.save(step, &state).unwrap();
            checkpointer.prune().unwrap();
        }
    })
    .unwrap();
    assert_eq!(steps(dir.path()), [50]);
}

#[test]
fn a_checkpoint_after_one_of_another_program_names_no_parent() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        let mut state: StateDict = [("step", 20i64.into())].into_iter().collect();
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        let parent =
            |step| checkpoint::open(step_path(dir.path(), step), OpenOptions::default()).unwrap();
        let parent = |step| {
            parent(step)
                .lineage()
                .unwrap()
                .parent
                .map(|parent| parent.step)
        };
        checkpointer.save(1, &state).unwrap();
        checkpointer.save(2, &state).unwrap();
        assert_eq!(parent(2), Some(1));
        // Without its digests and its lineage it is like one of torch.
        group.barrier().unwrap();
        let foreign = dir.path().join("foreign");
        if group.rank() == 0 {
            std::fs::create_dir(&foreign).unwrap();
            for name in [".metadata", "__0_0.distcp"] {
                std::fs::copy(step_path(dir.path(), 1).join(name), foreign.join(name)).unwrap();
            }
        }
        group.barrier().unwrap();
        checkpointer.load(foreign.as_path(), &mut state).unwrap();
        checkpointer.save(3, &state).unwrap();
        assert_eq!(parent(3), None);
    })
    .unwrap();
}
