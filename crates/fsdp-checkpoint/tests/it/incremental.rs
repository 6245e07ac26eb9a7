//! Saves that write only what has changed: frozen weights are linked, and no checkpoint needs
//! another one to be whole.

#![expect(
    clippy::disallowed_methods,
    reason = "the tests look at files and remove checkpoints"
)]

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use candle_core::{Device, Tensor};
use fsdp_checkpoint::{
    Checkpointer, CheckpointerOptions, LoadOptions, SaveOptions, SaveReport, load, save,
};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_flat::{LocalShard, ShardedTensor};
use fsdp_formats::checkpoint::open;
use fsdp_formats::reader::OpenOptions;
use fsdp_layout::TensorBox;
use fsdp_state::{StateDict, StateValue};
use fsdp_tools::verify::{Level, VerifyOptions, verify};

const RANKS: usize = 2;
/// Elements of a row: each rank has one of each tensor.
const FROZEN: usize = 300_000;
const TRAINED: usize = 1000;

fn row(group: &ProcessGroup, length: usize, value: f32) -> ShardedTensor {
    let tensor = Tensor::full(value + group.rank() as f32, (1, length), &Device::Cpu).unwrap();
    let bounds = TensorBox::new(vec![group.rank(), 0], vec![1, length]);
    ShardedTensor::new(
        tensor.dtype(),
        vec![RANKS, length],
        vec![LocalShard { bounds, tensor }],
    )
    .unwrap()
}

/// A state of frozen weights, trained ones, and the number of the step.
fn state(group: &ProcessGroup, frozen: f32, step: i64) -> StateDict {
    let mut state = StateDict::new();
    for name in ["base.0", "base.1"] {
        state.insert(name, row(group, FROZEN, frozen));
    }
    state.insert("lora", row(group, TRAINED, step as f32));
    state.insert("step", step);
    state
}

fn checkpointer(run: &Path, group: &ProcessGroup, save: SaveOptions) -> Checkpointer {
    let options = CheckpointerOptions {
        save,
        ..CheckpointerOptions::default()
    };
    Checkpointer::new(run, group, options).unwrap()
}

fn incremental() -> SaveOptions {
    SaveOptions {
        incremental: true,
        ..SaveOptions::default()
    }
}

/// Saves states one after the other, and returns the reports of each rank.
fn saved(directory: &Path, frozen: &[f32], options: &SaveOptions) -> Vec<Vec<SaveReport>> {
    run_local(RANKS, |group| {
        let mut saver = checkpointer(directory, &group, options.clone());
        let saves = frozen.iter().enumerate().map(|(step, &frozen)| {
            let state = state(&group, frozen, step as i64);
            saver
                .save(directory.join(step.to_string()), &state)
                .unwrap()
        });
        saves.collect::<Vec<_>>()
    })
    .unwrap()
}

/// Checks that a checkpoint is whole and holds a state.
fn check(path: &Path, frozen: f32, step: i64) {
    let checkpoint = open(path, OpenOptions::default()).unwrap();
    let report = verify(&*checkpoint, Level::Deep, VerifyOptions::default()).unwrap();
    assert!(
        report.is_ok() && report.digests == 4,
        "{}: {:?}",
        path.display(),
        report.problems
    );
    run_local(1, |group| {
        let mut wanted = StateDict::new();
        for (name, length) in [("base.0", FROZEN), ("lora", TRAINED)] {
            wanted.insert(
                name,
                Tensor::zeros((RANKS, length), candle_core::DType::F32, &Device::Cpu).unwrap(),
            );
        }
        load(path, &mut wanted, &group, &LoadOptions::default()).unwrap();
        let first = |name: &str| {
            let tensor = wanted.get(name).and_then(StateValue::as_tensor).unwrap();
            tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap()[0]
        };
        assert_eq!((first("base.0"), first("lora")), (frozen, step as f32));
    })
    .unwrap();
}

/// Returns the files of a checkpoint by their numbers in the file system, and the bytes that only
/// it has.
fn own_bytes(path: &Path, others: &[&Path]) -> u64 {
    let files = |path: &Path| -> Vec<(u64, u64)> {
        let entries = std::fs::read_dir(path)
            .unwrap()
            .map(|entry| entry.unwrap().metadata().unwrap());
        entries.map(|file| (file.ino(), file.len())).collect()
    };
    let elsewhere: BTreeSet<u64> = others
        .iter()
        .flat_map(|other| files(other))
        .map(|(number, _)| number)
        .collect();
    files(path)
        .into_iter()
        .filter(|(number, _)| !elsewhere.contains(number))
        .map(|(_, length)| length)
        .sum()
}

#[test]
fn frozen_weights_are_written_once_and_each_checkpoint_is_whole_without_the_others() {
    let directory = tempfile::tempdir().unwrap();
    let at = |step: usize| directory.path().join(step.to_string());
    let reports = saved(directory.path(), &[5.0, 5.0, 5.0, 5.0], &incremental());
    for of_rank in &reports {
        assert_eq!(of_rank[0].linked_bytes, 0);
        for report in &of_rank[1..] {
            assert!(
                report.linked_bytes * 100 >= report.rank_bytes * 98,
                "{report:?}"
            );
        }
    }
    let first = own_bytes(&at(0), &[]);
    assert!(own_bytes(&at(1), &[&at(0)]) * 50 < first);
    // Removed in any order, the others stay whole.
    for (removed, left) in [(1, &[0, 2, 3][..]), (0, &[2, 3]), (3, &[2])] {
        std::fs::remove_dir_all(at(removed)).unwrap();
        left.iter()
            .for_each(|&step| check(&at(step), 5.0, step as i64));
    }
}

#[test]
fn zeros_of_another_layout_are_not_linked_after_a_save_that_failed() {
    let dir = tempfile::tempdir().unwrap();
    // Zeros of any length have the same sum.
    let zeros = |group: &ProcessGroup, length: usize| {
        let mut state = state(group, 1.0, 0);
        let zeros = Tensor::zeros(length, candle_core::DType::F32, &Device::Cpu).unwrap();
        state.insert("moments", zeros);
        state
    };
    run_local(RANKS, |group| {
        let mut saver = checkpointer(dir.path(), &group, incremental());
        let mut save =
            |name: &str, length: usize| saver.save(dir.path().join(name), &zeros(&group, length));
        save("first", 400_000).unwrap();
        // It is there already, which is found once the new layout has been planned.
        save("first", 800_000).unwrap_err();
        save("second", 800_000).unwrap();
    })
    .unwrap();
    for (name, length) in [("first", 400_000), ("second", 800_000)] {
        let path = dir.path().join(name);
        let checkpoint = open(&*path, OpenOptions::default()).unwrap();
        let report = verify(&*checkpoint, Level::Deep, VerifyOptions::default()).unwrap();
        assert!(report.is_ok(), "{name}: {:?}", report.problems);
        run_local(1, |group| {
            let mut wanted = StateDict::new();
            let ones = Tensor::ones(length, candle_core::DType::F32, &Device::Cpu).unwrap();
            wanted.insert("moments", ones);
            load(&*path, &mut wanted, &group, &LoadOptions::default()).unwrap();
            let moments = wanted
                .get("moments")
                .and_then(StateValue::as_tensor)
                .unwrap();
            assert_eq!(moments.to_vec1::<f32>().unwrap(), vec![0.0; length]);
        })
        .unwrap();
    }
}

#[test]
fn weights_that_change_are_written_again_and_a_plain_save_links_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let at = |step: usize| directory.path().join(step.to_string());
    let frozen = [1.0, 1.0, 2.0, 2.0];
    let reports = saved(directory.path(), &frozen, &incremental());
    assert_eq!(
        reports[1]
            .iter()
            .map(|report| report.linked_bytes > 0)
            .collect::<Vec<_>>(),
        [false, true, false, true]
    );
    frozen
        .iter()
        .enumerate()
        .for_each(|(step, &frozen)| check(&at(step), frozen, step as i64));
    let plain = tempfile::tempdir().unwrap();
    let reports = saved(plain.path(), &[1.0, 1.0], &SaveOptions::default());
    assert!(
        reports
            .concat()
            .iter()
            .all(|report| report.linked_bytes == 0)
    );
}

#[test]
fn a_checkpoint_before_that_was_replaced_or_removed_is_not_linked() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    run_local(RANKS, |group| {
        let mut saver = checkpointer(directory.path(), &group, incremental());
        let mut saved = |name: &str, frozen, step| {
            saver
                .save(at(name), &state(&group, frozen, step))
                .unwrap()
                .linked_bytes
        };
        saved("a", 3.0, 0);
        group.barrier().unwrap();
        if group.rank() == 0 {
            std::fs::remove_dir_all(at("a")).unwrap();
        }
        group.barrier().unwrap();
        assert_eq!(saved("b", 3.0, 1), 0);
        // Another state takes its place.
        let other = SaveOptions {
            overwrite: true,
            ..SaveOptions::default()
        };
        save(at("b"), &state(&group, 4.0, 1), &group, &other).unwrap();
        assert_eq!(saved("c", 3.0, 2), 0);
        assert!(saved("d", 3.0, 3) > 0);
    })
    .unwrap();
    check(&at("c"), 3.0, 2);
    check(&at("d"), 3.0, 3);
}

/// Goes on from step 1 of a run in a process of its own, with other values of the trained tensor,
/// and saves step 2. Returns the bytes that each rank linked.
fn resumed(run: &Path, after_load: impl Fn(&ProcessGroup, &mut StateDict) + Sync) -> Vec<u64> {
    run_local(RANKS, |group| {
        let mut checkpoints = checkpointer(run, &group, incremental());
        let mut state = state(&group, 0.0, 0);
        checkpoints.load(1u64, &mut state).unwrap();
        state.insert("lora", row(&group, TRAINED, 2.0));
        after_load(&group, &mut state);
        group.barrier().unwrap();
        checkpoints.save(2u64, &state).unwrap().linked_bytes
    })
    .unwrap()
}

/// Saves step 1 of a run that begins anew.
fn begun(run: &Path, frozen: f32, overwrite: bool) {
    run_local(RANKS, |group| {
        let save = SaveOptions {
            overwrite,
            ..incremental()
        };
        let mut checkpoints = checkpointer(run, &group, save);
        checkpoints.save(1u64, &state(&group, frozen, 1)).unwrap();
    })
    .unwrap();
}

#[test]
fn a_process_that_goes_on_from_a_checkpoint_links_what_has_not_changed_since() {
    let directory = tempfile::tempdir().unwrap();
    let at = |step: &str| directory.path().join(step);
    begun(directory.path(), 5.0, false);
    let linked = resumed(directory.path(), |_, _| {});
    assert_eq!(linked, vec![(2 * FROZEN * 4) as u64; RANKS]);
    let (first, second) = (at("step-00000001"), at("step-00000002"));
    assert!(own_bytes(&second, &[&first]) * 20 < own_bytes(&first, &[]));
    std::fs::remove_dir_all(&first).unwrap();
    check(&second, 5.0, 2);
}

#[test]
fn a_process_that_goes_on_writes_what_one_rank_alone_has_changed() {
    let directory = tempfile::tempdir().unwrap();
    begun(directory.path(), 5.0, false);
    let linked = resumed(directory.path(), |group, state| {
        if group.rank() == 1 {
            for name in ["base.0", "base.1"] {
                state.insert(name, row(group, FROZEN, 7.0));
            }
        }
    });
    assert_eq!(linked, [0, 0]);
    check(&directory.path().join("step-00000002"), 5.0, 2);
}

#[test]
fn a_process_that_goes_on_does_not_link_what_has_taken_the_place_of_its_parent() {
    let directory = tempfile::tempdir().unwrap();
    begun(directory.path(), 5.0, false);
    let linked = resumed(directory.path(), |group, _| {
        group.barrier().unwrap();
        if group.rank() == 0 {
            // Another run saves there: the frozen weights are the same, and yet it is not the
            // parent.
            let other = std::thread::scope(|scope| {
                scope
                    .spawn(|| {
                        run_local(RANKS, |group| {
                            let options = SaveOptions {
                                overwrite: true,
                                ..SaveOptions::default()
                            };
                            let mut state = state(&group, 5.0, 1);
                            state.insert("step", 77i64);
                            save(
                                directory.path().join("step-00000001"),
                                &state,
                                &group,
                                &options,
                            )
                            .unwrap();
                        })
                        .unwrap();
                    })
                    .join()
            });
            other.unwrap();
        }
    });
    assert_eq!(linked, [0, 0]);
    check(&directory.path().join("step-00000002"), 5.0, 2);
}
