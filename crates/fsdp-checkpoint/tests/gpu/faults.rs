//! Saves of state on GPUs that fail: every rank gets the error, the earlier checkpoint stays, and
//! the next save works.

use std::path::Path;

use fsdp_checkpoint::{
    CheckpointError, Checkpointer, CheckpointerOptions, LoadOptions, SaveReport, list_checkpoints,
    load_whole,
};
use fsdp_comm::run_local;
use fsdp_flat::storage::release;
use fsdp_nn::algorithm::{AdamOptions, Algorithm};

use crate::counts::{counts, fail_copies};
use crate::files::WatchedFiles;
use crate::{LARGE_BYTES, alone, backward, large_run, on_gpu, step};

#[test]
fn a_failure_of_one_rank_is_an_error_on_every_rank_and_the_next_save_works() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    run_local(2, |group| {
        let adamw = Algorithm::AdamW(AdamOptions::adamw());
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        let run = large_run(group.clone(), on_gpu(), &adamw, false);
        checkpointer.save_async(1, &run).unwrap();
        checkpointer.wait().unwrap().unwrap();
        // No directory can be made below a file.
        let pinned = counts().pinned;
        let started = checkpointer.save_async(file.path().join("below"), &run);
        assert!(started.and_then(|_| checkpointer.wait()).is_err());
        checkpointer.save_async(2, &run).unwrap();
        checkpointer.wait().unwrap().unwrap();
        assert_eq!(counts().pinned, pinned, "the memory was given back");
        if group.rank() == 1 {
            let weight = run.model.parameters().parameter("a.weight").unwrap();
            for shard in weight.shards() {
                release(&shard.tensor).unwrap();
            }
        }
        assert!(checkpointer.save(3, &run).is_err());
        let started = checkpointer.save_async(4, &run);
        assert!(started.and_then(|_| checkpointer.wait()).is_err());
        let fresh = large_run(group, on_gpu(), &adamw, false);
        checkpointer.save_async(5, &fresh).unwrap();
        checkpointer.wait().unwrap().unwrap();
    })
    .unwrap();
}

/// Returns the steps of the checkpoints of a run, all of which can be read.
pub(crate) fn readable_steps(dir: &Path) -> Vec<u64> {
    let found = list_checkpoints(dir).unwrap();
    for checkpoint in &found {
        load_whole(&checkpoint.path, &[], &LoadOptions::default()).unwrap();
    }
    found.iter().map(|checkpoint| checkpoint.step).collect()
}

/// Saves, then lets a save fail, and saves again: all on two ranks. `fail` and `mend` are called
/// on rank 0, and `is_known` says if an error is that of the failure.
fn assert_failure_is_everybodys(
    is_in_background: bool,
    fail: &(dyn Fn(&WatchedFiles) + Sync),
    mend: &(dyn Fn(&WatchedFiles) + Sync),
    is_known: &(dyn Fn(&str) -> bool + Sync),
) {
    let dir = tempfile::tempdir().unwrap();
    let files = WatchedFiles::new();
    let saved = |checkpointer: &mut Checkpointer, number: u64, run: &_| {
        if !is_in_background {
            return checkpointer.save(number, run);
        }
        let done: Result<Option<SaveReport>, CheckpointError> = checkpointer
            .save_async(number, run)
            .and_then(|_| checkpointer.wait());
        done.map(|report| report.unwrap())
    };
    run_local(2, |group| {
        let adamw = Algorithm::AdamW(AdamOptions::adamw());
        let location = files.location(dir.path());
        let mut checkpointer =
            Checkpointer::new(location, &group, CheckpointerOptions::default()).unwrap();
        let mut run = large_run(group.clone(), on_gpu(), &adamw, false);
        backward(&run, 1);
        step(&mut run);
        let first = saved(&mut checkpointer, 1, &run).unwrap();
        group.barrier().unwrap();
        if group.rank() == 0 {
            fail(&files);
        }
        group.barrier().unwrap();
        let error = saved(&mut checkpointer, 2, &run).unwrap_err().to_string();
        assert!(is_known(&error), "{error}");
        group.barrier().unwrap();
        if group.rank() == 0 {
            mend(&files);
            assert_eq!(readable_steps(dir.path()), [1], "{error}");
        }
        group.barrier().unwrap();
        let next = saved(&mut checkpointer, 3, &run).unwrap();
        assert_eq!(next.digest, first.digest);
    })
    .unwrap();
    assert_eq!(readable_steps(dir.path()), [1, 3]);
}

#[test]
fn a_copy_that_fails_is_an_error_on_every_rank() {
    let _alone = alone();
    if !fail_copies(0, 0) {
        return;
    }
    for is_in_background in [false, true] {
        // The first copy, one in the middle, and all of them.
        for (after, count) in [(0, 1), (3, 1), (0, u64::MAX)] {
            assert_failure_is_everybodys(
                is_in_background,
                &|_| assert!(fail_copies(after, count)),
                &|_| assert!(fail_copies(0, 0)),
                &|error| error.contains("CUDA_ERROR"),
            );
        }
    }
}

#[test]
fn a_full_disk_is_an_error_on_every_rank() {
    let _alone = alone();
    for is_in_background in [false, true] {
        for space in [0, LARGE_BYTES / 2] {
            assert_failure_is_everybodys(
                is_in_background,
                &|files| files.set_space(space),
                &|files| files.set_space(u64::MAX),
                &|error| error.contains("space"),
            );
        }
    }
}
