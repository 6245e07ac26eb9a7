//! The conformance suite of all backends. A backend's own test runs all of [`cases`] in all of
//! their worlds, each rank as the backend runs ranks, and checks that exactly the
//! [`Case::casualties`] fail.

mod elements;
mod faults;
mod groups;
mod invalid;
mod mismatch;
mod objects;
mod operations;
mod reductions;
mod traffic;

use std::fmt::Debug;
use std::ops::RangeInclusive;
use std::time::Duration;

use fsdp_comm::{CommError, ProcessGroup};

/// Within this, every operation that nothing is wrong with must be done.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

/// One thing that ranks do together. Each panics if what it sees is wrong.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) worlds: RangeInclusive<usize>,
    /// The rank that ends badly, as it should.
    pub(crate) casualty: Option<usize>,
    run: Box<dyn Fn(ProcessGroup) + Sync + Send>,
}

impl Case {
    fn new(
        name: impl Into<String>,
        worlds: RangeInclusive<usize>,
        run: impl Fn(ProcessGroup) + Sync + Send + 'static,
    ) -> Self {
        Case {
            name: name.into(),
            worlds,
            casualty: None,
            run: Box::new(run),
        }
    }

    /// Runs one rank's part.
    pub(crate) fn run(&self, group: ProcessGroup) {
        (self.run)(group.with_deadline(DEADLINE));
    }
}

/// Returns all cases. Their names begin with the name of their file.
pub(crate) fn cases() -> Vec<Case> {
    let files = [
        operations::cases,
        reductions::cases,
        groups::cases,
        objects::cases,
        invalid::cases,
        traffic::cases,
        mismatch::cases,
        faults::cases,
    ];
    files.iter().flat_map(|cases| cases()).collect()
}

/// Returns the error of an operation that must fail.
#[track_caller]
fn error_of<T: Debug>(result: Result<T, CommError>) -> CommError {
    result.expect_err("the operation succeeded")
}

/// Checks that all ranks of the group have the same error.
#[track_caller]
fn same_on_all(group: &ProcessGroup, error: &CommError) {
    for (rank, other) in group
        .all_gather_object(error)
        .unwrap()
        .into_iter()
        .enumerate()
    {
        assert_eq!(other, *error, "on rank {rank} and on rank {}", group.rank());
    }
}

/// Makes a group of all ranks that may fail while `group` goes on.
fn expendable(group: &ProcessGroup) -> ProcessGroup {
    let all: Vec<usize> = (0..group.world_size()).collect();
    group.subgroup(&all).unwrap().unwrap()
}
