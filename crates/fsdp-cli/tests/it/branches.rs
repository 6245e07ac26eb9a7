//! The commands on a run that has gone back to an older step.

use std::fs;
use std::path::Path;

use fsdp::checkpoint::{Checkpointer, CheckpointerOptions};
use fsdp::comm::run_local;
use fsdp::state::StateDict;
use predicates::prelude::*;
use predicates::str::contains;

use crate::common::fsdp;

/// Returns the names in a directory, sorted.
fn names_in(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_branch_that_the_run_has_left_is_told_and_neither_counts_nor_goes() {
    let run = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        let options = CheckpointerOptions::default();
        let mut checkpointer = Checkpointer::new(run.path(), &group, options).unwrap();
        let mut state = StateDict::new();
        state.insert("step", 0i64);
        for step in [10, 20, 30] {
            checkpointer.save(step, &state).unwrap();
        }
        checkpointer.load(20, &mut state).unwrap();
        assert_eq!(checkpointer.save(25, &state).unwrap().left, Some(30));
    })
    .unwrap();
    let path = run.path().to_str().unwrap();
    let left = contains("step-00000030  dcp").and(contains("hashes, left by the run"));
    fsdp(&["ls", path])
        .assert()
        .success()
        .stdout(left.and(predicates::str::is_match("(?m)step-00000025  .*hashes$").unwrap()));
    fsdp(&["prune", path, "--keep", "1", "--yes"])
        .assert()
        .success()
        .stdout(
            contains("step-00000030  stays: the run has left it")
                .and(contains("step-00000010  removed"))
                .and(contains("step-00000020  removed")),
        );
    assert_eq!(names_in(run.path()), ["step-00000025", "step-00000030"]);
}

#[test]
fn inspect_takes_the_step_from_the_lineage_where_no_key_has_it() {
    let run = tempfile::tempdir().unwrap();
    run_local(1, |group| {
        let options = CheckpointerOptions::default();
        let mut checkpointer = Checkpointer::new(run.path(), &group, options).unwrap();
        let mut state = StateDict::new();
        state.insert("epochs", 3i64);
        checkpointer.save(70, &state).unwrap();
    })
    .unwrap();
    let checkpoint = run.path().join("step-00000070");
    fsdp(&["inspect", checkpoint.to_str().unwrap()])
        .assert()
        .success()
        .stdout(predicates::str::is_match("(?m)^step +70$").unwrap());
}
