//! A run that goes back to an older step and saves again: from then on its newest checkpoint is
//! that of the new branch, nothing of that branch is lost, and nothing of the other is removed.

#![expect(
    clippy::disallowed_methods,
    reason = "a test damages a file on purpose"
)]

use std::path::Path;

use candle_core::{Device, Tensor};
use fsdp_checkpoint::{
    CheckpointError, Checkpointer, CheckpointerOptions, Location, Retention, SaveOptions,
    latest_checkpoint, list_checkpoints, list_newest_first, list_to_resume, prune, save, step_path,
};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_formats::lineage::read_branches;
use fsdp_formats::writer::WriteOptions;
use fsdp_layout::{ErrorKind, Failure as _};
use fsdp_state::{StateDict, StateValue};

fn state(value: f32) -> StateDict {
    let mut state = StateDict::new();
    state.insert("weight", Tensor::full(value, 10, &Device::Cpu).unwrap());
    state
}

fn value(state: &StateDict) -> f32 {
    match state.get("weight") {
        Some(StateValue::Tensor(tensor)) => tensor.to_vec1::<f32>().unwrap()[0],
        other => panic!("{other:?}"),
    }
}

fn keep_last(count: usize) -> Retention {
    Retention {
        keep_last: count.try_into().ok(),
        keep_every: None,
    }
}

/// Starts a process of the run, as a person does: makes a checkpointer, and does something.
fn process<T: Send>(
    run: &Path,
    options: &CheckpointerOptions,
    work: impl Fn(&mut Checkpointer, &ProcessGroup) -> T + Sync,
) -> T {
    let mut outcomes = run_local(2, |group| {
        let mut checkpointer = Checkpointer::new(run, &group, options.clone()).unwrap();
        work(&mut checkpointer, &group)
    })
    .unwrap();
    outcomes.remove(0)
}

fn save_steps(run: &Path, options: &CheckpointerOptions, steps: &[u64]) {
    process(run, options, |checkpointer, _| {
        for &step in steps {
            let report = checkpointer.save(step, &state(step as f32)).unwrap();
            assert_eq!(report.left, None);
        }
    });
}

/// Goes back to step `from`, and saves `to` with another value. Returns the step that was left.
fn go_back(run: &Path, options: &CheckpointerOptions, from: u64, to: u64, new: f32) -> Option<u64> {
    process(run, options, |checkpointer, _| {
        let mut live = state(0.0);
        checkpointer.load(from, &mut live).unwrap();
        checkpointer.save(to, &state(new)).unwrap().left
    })
}

/// Restarts the run: returns the step and the value that it continues from.
fn restart(run: &Path, options: &CheckpointerOptions) -> (u64, f32) {
    process(run, options, |checkpointer, _| {
        let mut live = state(0.0);
        let (latest, report) = checkpointer.load_latest(&mut live).unwrap().unwrap();
        assert!(report.is_clean());
        (latest.step, value(&live))
    })
}

fn steps(run: &Path) -> Vec<u64> {
    let listed = list_checkpoints(run).unwrap();
    listed.iter().map(|checkpoint| checkpoint.step).collect()
}

#[test]
fn a_process_that_goes_back_by_a_snapshot_of_its_own_begins_a_branch() {
    let dir = tempfile::tempdir().unwrap();
    let options = CheckpointerOptions::default();
    let left = process(dir.path(), &options, |checkpointer, _| {
        [10, 20, 15, 17].map(|step| checkpointer.save(step, &state(step as f32)).unwrap().left)
    });
    assert_eq!(left, [None, None, Some(20), None]);
    assert_eq!(restart(dir.path(), &options), (17, 17.0));
    // The same step once more is a replacement.
    let replace = CheckpointerOptions {
        save: SaveOptions {
            overwrite: true,
            ..SaveOptions::default()
        },
        ..CheckpointerOptions::default()
    };
    let left = process(dir.path(), &replace, |checkpointer, _| {
        let mut live = state(0.0);
        checkpointer.load_latest(&mut live).unwrap();
        [30, 30].map(|step| checkpointer.save(step, &state(0.3)).unwrap().left)
    });
    assert_eq!(left, [None, None]);
    assert_eq!(restart(dir.path(), &options), (30, 0.3));
}

#[test]
fn a_run_that_went_back_continues_from_its_new_branch() {
    let dir = tempfile::tempdir().unwrap();
    let options = CheckpointerOptions::default();
    save_steps(dir.path(), &options, &[10, 20, 30]);
    assert_eq!(go_back(dir.path(), &options, 20, 25, 0.25), Some(30));
    assert_eq!(restart(dir.path(), &options), (25, 0.25));
    assert_eq!(steps(dir.path()), [10, 20, 25, 30]);
    let order = list_newest_first(dir.path()).unwrap();
    assert!(
        order
            .iter()
            .map(|checkpoint| checkpoint.step)
            .eq([25, 30, 20, 10])
    );
    assert_eq!(latest_checkpoint(dir.path()).unwrap().unwrap().step, 25);
    // The branch goes on beyond the step that was left, and is the newest at each restart.
    let left = process(dir.path(), &options, |checkpointer, _| {
        let mut live = state(0.0);
        checkpointer.load_latest(&mut live).unwrap();
        let first = checkpointer.save(29, &state(0.29)).unwrap().left;
        (first, checkpointer.save(35, &state(0.35)).unwrap().left)
    });
    assert_eq!(left, (None, None));
    assert_eq!(restart(dir.path(), &options), (35, 0.35));
    // Going back once more, to a step that both branches have.
    assert_eq!(go_back(dir.path(), &options, 10, 12, 0.12), Some(35));
    assert_eq!(restart(dir.path(), &options), (12, 0.12));
    // Going back to the branch that was left makes it live again.
    assert_eq!(go_back(dir.path(), &options, 30, 40, 0.4), Some(12));
    assert_eq!(restart(dir.path(), &options), (40, 0.4));
}

/// A path of a checkpoint of the run is that step, however it is spelled.
#[test]
fn steps_that_are_given_by_their_paths_are_on_the_branch_too() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&run, &link).unwrap();
    let options = CheckpointerOptions::default();
    save_steps(&run, &options, &[10, 20, 30]);
    let left = process(&run, &options, |checkpointer, _| {
        let mut live = state(0.0);
        checkpointer.load(step_path(&link, 20), &mut live).unwrap();
        let spelled = step_path(&run.join("..").join("run"), 25);
        checkpointer.save(spelled, &state(0.25)).unwrap().left
    });
    assert_eq!(left, Some(30));
    assert_eq!(restart(&run, &options), (25, 0.25));
    // The new branch continues the steps up to the one that was loaded.
    let kept = prune(run.as_path(), &keep_last(2)).unwrap();
    assert_eq!(
        kept.iter().map(|removed| removed.step).collect::<Vec<_>>(),
        [10]
    );
    assert_eq!(steps(&run), [20, 25, 30]);
}

#[test]
fn nothing_of_the_live_branch_is_removed_but_by_its_own_rule() {
    let dir = tempfile::tempdir().unwrap();
    let all = CheckpointerOptions::default();
    save_steps(dir.path(), &all, &[10, 20, 30]);
    let two = CheckpointerOptions {
        retention: keep_last(2),
        ..CheckpointerOptions::default()
    };
    go_back(dir.path(), &two, 20, 25, 0.25);
    // Step 10 is the oldest of the branch 10, 20, 25; step 30 does not count.
    assert_eq!(steps(dir.path()), [20, 25, 30]);
    process(dir.path(), &two, |checkpointer, _| {
        let mut live = state(0.0);
        checkpointer.load_latest(&mut live).unwrap();
        checkpointer.save(35, &state(0.35)).unwrap();
        checkpointer.prune().unwrap();
    });
    assert_eq!(steps(dir.path()), [25, 30, 35]);
    // A rule that is applied from outside has the same branch.
    prune(dir.path(), &keep_last(1)).unwrap();
    assert_eq!(steps(dir.path()), [30, 35]);
}

#[test]
fn a_save_over_a_step_that_was_left_is_of_the_new_branch() {
    let dir = tempfile::tempdir().unwrap();
    let options = CheckpointerOptions {
        save: SaveOptions {
            overwrite: true,
            ..SaveOptions::default()
        },
        ..CheckpointerOptions::default()
    };
    save_steps(dir.path(), &options, &[10, 20, 30]);
    assert_eq!(go_back(dir.path(), &options, 10, 20, 0.2), Some(30));
    assert_eq!(restart(dir.path(), &options), (20, 0.2));
    // The newest is saved again: nothing is left.
    assert_eq!(go_back(dir.path(), &options, 20, 20, 0.5), None);
    assert_eq!(restart(dir.path(), &options), (20, 0.5));
}

#[test]
fn a_run_that_begins_anew_in_the_directory_of_an_old_one_continues_from_its_own_steps() {
    let dir = tempfile::tempdir().unwrap();
    let options = CheckpointerOptions::default();
    save_steps(dir.path(), &options, &[10, 20, 30]);
    let left = process(dir.path(), &options, |checkpointer, _| {
        checkpointer.save(5, &state(0.5)).unwrap().left
    });
    assert_eq!(left, Some(30));
    assert_eq!(restart(dir.path(), &options), (5, 0.5));
    prune(dir.path(), &keep_last(1)).unwrap();
    assert_eq!(steps(dir.path()), [5, 10, 20, 30]);
}

#[test]
fn a_background_save_tells_what_it_left_and_is_the_newest() {
    let dir = tempfile::tempdir().unwrap();
    let options = CheckpointerOptions::default();
    save_steps(dir.path(), &options, &[10, 20, 30]);
    let left = process(dir.path(), &options, |checkpointer, _| {
        let mut live = state(0.0);
        checkpointer.load(10, &mut live).unwrap();
        checkpointer.save_async(15, &state(0.15)).unwrap();
        checkpointer.wait().unwrap().unwrap().left
    });
    assert_eq!(left, Some(30));
    assert_eq!(restart(dir.path(), &options), (15, 0.15));
}

/// The branch is recorded beside the digests. A save that could not record it would be lost at the
/// next restart.
#[test]
fn a_new_branch_without_digests_is_the_same_error_on_every_rank_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    save_steps(dir.path(), &CheckpointerOptions::default(), &[10, 20]);
    let options = CheckpointerOptions {
        save: SaveOptions {
            write: WriteOptions {
                digests: false,
                ..WriteOptions::default()
            },
            ..SaveOptions::default()
        },
        ..CheckpointerOptions::default()
    };
    let errors = run_local(3, |group| {
        let mut checkpointer = Checkpointer::new(dir.path(), &group, options.clone()).unwrap();
        let mut live = state(0.0);
        checkpointer.load(10, &mut live).unwrap();
        let error: CheckpointError = checkpointer.save(15, &state(1.0)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        // Another directory has no other branch.
        let elsewhere = dir.path().join("elsewhere");
        checkpointer.save(&elsewhere, &state(1.0)).unwrap();
        error.to_string()
    })
    .unwrap();
    assert!(errors[0].contains("step 15") && errors[0].contains("step 20"));
    assert!(errors.iter().all(|error| *error == errors[0]));
    assert_eq!(steps(dir.path()), [10, 20]);
}

/// Checkpoints of other programs have no lineage, nor have those of `save`.
#[test]
fn checkpoints_without_a_lineage_are_of_the_first_branch() {
    let dir = tempfile::tempdir().unwrap();
    run_local(1, |group| {
        for step in [10, 20, 30] {
            let path = step_path(dir.path(), step);
            save(path, &state(step as f32), &group, &SaveOptions::default()).unwrap();
        }
    })
    .unwrap();
    let options = CheckpointerOptions::default();
    assert_eq!(restart(dir.path(), &options), (30, 30.0));
    assert_eq!(go_back(dir.path(), &options, 20, 25, 0.25), Some(30));
    assert_eq!(restart(dir.path(), &options), (25, 0.25));
    let paths = [20, 25, 30].map(|step| Location::from(step_path(dir.path(), step)));
    let branches = read_branches(&paths.each_ref()).unwrap();
    let numbers = branches
        .iter()
        .map(|branch| branch.as_ref().unwrap().number);
    assert!(numbers.eq([0, 1, 0]));
}

/// The memory tier has newer steps than the checkpoints. After going back they must not come back.
#[test]
fn the_memory_tier_does_not_bring_back_a_branch_that_was_left() {
    // With a newer checkpoint beside the step in memory, and without one.
    for (last, saves_to_memory) in [(30, false), (30, true), (20, false), (20, true)] {
        let dir = tempfile::tempdir().unwrap();
        let tier = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        let options = CheckpointerOptions {
            memory_tier: Some(tier.path().into()),
            ..CheckpointerOptions::default()
        };
        process(&run, &options, |checkpointer, _| {
            for step in [10, 20, last] {
                if !checkpointer.location(step).exists().unwrap() {
                    checkpointer.save(step, &state(step as f32)).unwrap();
                }
            }
            checkpointer.save_to_memory(33, &state(33.0)).unwrap();
        });
        assert_eq!(restart(&run, &options), (33, 33.0));
        process(&run, &options, |checkpointer, _| {
            let mut live = state(0.0);
            checkpointer.load(20, &mut live).unwrap();
            if saves_to_memory {
                // The run ends before it saves a checkpoint: the step in memory alone tells that it
                // has gone back.
                checkpointer.save_to_memory(22, &state(0.22)).unwrap();
            } else {
                checkpointer.save(25, &state(0.25)).unwrap();
            }
        });
        let expected = if saves_to_memory {
            (22, 0.22)
        } else {
            (25, 0.25)
        };
        assert_eq!(restart(&run, &options), expected);
        // A checkpoint that follows is the newest too, beyond the step that was left as well.
        for step in [26, 40] {
            process(&run, &options, |checkpointer, _| {
                let mut live = state(0.0);
                checkpointer.load_latest(&mut live).unwrap();
                let next = state(step as f32 / 100.0);
                assert_eq!(checkpointer.save(step, &next).unwrap().left, None);
            });
            assert_eq!(restart(&run, &options), (step, step as f32 / 100.0));
        }
    }
}

#[test]
fn a_run_that_begins_anew_does_not_continue_from_a_step_that_is_in_memory_only() {
    for has_checkpoint in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let tier = tempfile::tempdir().unwrap();
        let options = CheckpointerOptions {
            memory_tier: Some(tier.path().into()),
            ..CheckpointerOptions::default()
        };
        process(dir.path(), &options, |checkpointer, _| {
            if has_checkpoint {
                checkpointer.save(3, &state(3.0)).unwrap();
            }
            checkpointer.save_to_memory(33, &state(33.0)).unwrap();
        });
        let left = process(dir.path(), &options, |checkpointer, _| {
            checkpointer.save(5, &state(0.5)).unwrap().left
        });
        assert_eq!(left, Some(33));
        assert_eq!(restart(dir.path(), &options), (5, 0.5));
    }
}

#[test]
fn a_run_that_loads_nothing_continues_the_checkpoints_before_a_step_that_is_in_memory_only() {
    let dir = tempfile::tempdir().unwrap();
    let tier = tempfile::tempdir().unwrap();
    let options = CheckpointerOptions {
        memory_tier: Some(tier.path().into()),
        ..CheckpointerOptions::default()
    };
    save_steps(dir.path(), &options, &[10, 20, 30]);
    process(dir.path(), &options, |checkpointer, _| {
        checkpointer.load(20, &mut state(0.0)).unwrap();
        checkpointer.save_to_memory(22, &state(0.22)).unwrap();
    });
    let left = process(dir.path(), &options, |checkpointer, _| {
        checkpointer.save(40, &state(0.4)).unwrap().left
    });
    assert_eq!(left, Some(22));
    assert_eq!(restart(dir.path(), &options), (40, 0.4));
    prune(dir.path(), &keep_last(2)).unwrap();
    assert_eq!(steps(dir.path()), [30, 40]);
}

#[test]
fn a_damaged_lineage_of_the_newest_checkpoint_is_found_and_not_passed_over() {
    let dir = tempfile::tempdir().unwrap();
    let options = CheckpointerOptions::default();
    save_steps(dir.path(), &options, &[10, 20, 30]);
    go_back(dir.path(), &options, 20, 35, 0.35);
    let file = step_path(dir.path(), 35).join(".integrity");
    let mut bytes = std::fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let error = process(dir.path(), &options, |checkpointer, _| {
        checkpointer.load_latest(&mut state(0.0)).unwrap_err()
    });
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains("step-00000035"), "{error}");
}

/// Takes the `.metadata` of the checkpoint of a step away.
fn lose_metadata(run: &Path, step: u64) {
    std::fs::remove_file(step_path(run, step).join(".metadata")).unwrap();
}

/// Returns the steps of a run in the order in which a resume tries them.
fn steps_to_resume(run: &Path) -> Vec<u64> {
    let listed = list_to_resume(run).unwrap();
    listed.iter().map(|checkpoint| checkpoint.step).collect()
}

#[test]
fn a_checkpoint_that_has_lost_its_metadata_is_listed_for_a_resume_and_its_branch_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let options = CheckpointerOptions::default();
    save_steps(dir.path(), &options, &[10, 20, 30]);
    lose_metadata(dir.path(), 30);
    assert_eq!(steps_to_resume(dir.path()), [30, 20, 10]);
    assert_eq!(steps(dir.path()), [10, 20]);
    assert_eq!(restart(dir.path(), &options), (20, 20.0));
    assert_eq!(go_back(dir.path(), &options, 20, 25, 0.25), None);
    assert_eq!(steps_to_resume(dir.path()), [30, 25, 20, 10]);
    assert_eq!(restart(dir.path(), &options), (25, 0.25));
}

#[test]
fn a_run_that_can_only_continue_an_older_branch_leaves_one_without_metadata() {
    let dir = tempfile::tempdir().unwrap();
    let options = CheckpointerOptions::default();
    save_steps(dir.path(), &options, &[10, 20, 30]);
    assert_eq!(go_back(dir.path(), &options, 10, 15, 0.15), Some(30));
    lose_metadata(dir.path(), 15);
    assert_eq!(steps_to_resume(dir.path()), [15, 30, 20, 10]);
    assert_eq!(restart(dir.path(), &options), (30, 30.0));
    assert_eq!(go_back(dir.path(), &options, 30, 40, 0.4), Some(15));
    // From now on it is older than the rest, and no resume finds it again.
    assert_eq!(steps_to_resume(dir.path()), [40, 15, 30, 20, 10]);
}

#[test]
fn a_checkpoint_of_which_nothing_is_left_counts_as_one_of_the_newest_branch() {
    let dir = tempfile::tempdir().unwrap();
    let options = CheckpointerOptions::default();
    save_steps(dir.path(), &options, &[10, 20, 30]);
    go_back(dir.path(), &options, 20, 25, 0.25);
    std::fs::create_dir(step_path(dir.path(), 28)).unwrap();
    assert_eq!(steps_to_resume(dir.path()), [28, 25, 30, 20, 10]);
    assert_eq!(go_back(dir.path(), &options, 25, 26, 0.26), None);
}

#[test]
fn damaged_checkpoints_that_saves_replace_are_not_left_and_whole_ones_are_never_replaced() {
    for (damaged, expected) in [(&[30, 40][..], None), (&[40], Some(30))] {
        let dir = tempfile::tempdir().unwrap();
        let options = CheckpointerOptions::default();
        save_steps(dir.path(), &options, &[10, 20, 30, 40]);
        let places: Vec<Location> = damaged
            .iter()
            .map(|step| step_path(dir.path(), *step).into())
            .collect();
        let left = process(dir.path(), &options, |checkpointer, _| {
            checkpointer.set_damaged(places.clone());
            checkpointer.load(20, &mut state(0.0)).unwrap();
            let left = checkpointer.save(25, &state(0.25)).unwrap().left;
            let saved = checkpointer.save(30, &state(0.3));
            assert_eq!(saved.is_ok(), damaged.contains(&30));
            checkpointer.save(40, &state(0.4)).unwrap();
            // It is whole now.
            checkpointer.save(40, &state(0.5)).unwrap_err();
            left
        });
        assert_eq!(left, expected);
        assert_eq!(restart(dir.path(), &options), (40, 0.4));
        assert_eq!(steps(dir.path()), [10, 20, 25, 30, 40]);
    }
}
