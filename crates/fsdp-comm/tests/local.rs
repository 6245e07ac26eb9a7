//! The `local` backend does what every backend must do, and what only threads can.

#[cfg(test)]
mod conformance;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use conformance::{Case, cases};
use fsdp_comm::{CommError, LocalRanks, ProcessGroup, ReduceOp, run_local};

/// Threads of tests need no deep stacks.
const STACK_BYTES: usize = 4 << 20;

fn run(case: &Case, world_size: usize) {
    let ranks = LocalRanks {
        world_size,
        stack_bytes: STACK_BYTES,
        ..LocalRanks::default()
    };
    let outcome = ranks.run(|group| case.run(group));
    match (case.casualty, &outcome) {
        (None, Ok(_)) => {}
        (Some(rank), Err(CommError::RankFailed { failures, .. }))
            if failures.len() == 1 && failures[0].rank == rank => {}
        _ => panic!("`{}` on {world_size} ranks: {outcome:?}", case.name),
    }
}

/// Runs all cases of one file in all their worlds.
fn run_all(prefix: &str) {
    let cases: Vec<Case> = cases()
        .into_iter()
        .filter(|case| case.name.starts_with(prefix))
        .collect();
    assert!(!cases.is_empty());
    for case in cases {
        for world_size in case.worlds.clone() {
            run(&case, world_size);
        }
    }
}

#[test]
fn operations() {
    run_all("operations");
}

#[test]
fn reductions() {
    run_all("reductions");
}

#[test]
fn groups() {
    run_all("groups");
}

#[test]
fn objects() {
    run_all("objects");
}

#[test]
fn invalid_arguments() {
    run_all("invalid");
}

#[test]
fn traffic() {
    run_all("traffic");
}

#[test]
fn mismatches() {
    run_all("mismatch");
}

#[test]
fn ranks_that_leave() {
    run_all("faults: a rank leaves");
}

#[test]
fn ranks_that_panic() {
    run_all("faults: a rank panics");
}

#[test]
fn ranks_that_are_late() {
    run_all("faults: a rank is late");
}

#[test]
fn other_faults() {
    run_all("faults: others");
}

#[test]
fn results_are_in_rank_order() {
    let ranks = run_local(7, |group| group.rank()).unwrap();
    assert_eq!(ranks, [0, 1, 2, 3, 4, 5, 6]);
    assert!(matches!(
        run_local(0, |_| ()),
        Err(CommError::InvalidArgument { .. })
    ));
}

#[test]
fn ranks_of_one_process_are_on_one_host_in_their_sub_groups_too() {
    let on_host = run_local(3, |group| {
        let pair = group.subgroup(&[0, 2]).unwrap();
        (
            group.ranks_on_host(),
            pair.map(|pair| pair.with_label("pair").ranks_on_host()),
        )
    });
    assert_eq!(on_host.unwrap(), [(3, Some(3)), (3, None), (3, Some(3))]);
    assert_eq!(ProcessGroup::alone().ranks_on_host(), 1);
}

#[test]
fn a_panic_is_reported_with_its_message_first_things_first() {
    let error = run_local(3, |group| {
        if group.rank() == 2 {
            panic!("the cause");
        }
        group.barrier().unwrap();
    })
    .unwrap_err();
    let CommError::RankFailed { failures, .. } = &error else {
        panic!("{error:?}")
    };
    assert_eq!(
        (failures[0].rank, &failures[0].message[..]),
        (2, "panicked: the cause")
    );
    assert!(
        failures[1..]
            .iter()
            .all(|failure| failure.message.contains("panicked: the cause")),
        "{error}"
    );
}

#[test]
fn ranks_that_cannot_start_are_an_error_on_those_that_did() {
    let ranks = LocalRanks {
        world_size: 3,
        stack_bytes: usize::MAX / 4,
        ..LocalRanks::default()
    };
    let outcome = ranks.run(|group| group.barrier());
    assert!(
        matches!(outcome, Err(CommError::Start { rank: 0, .. })),
        "{outcome:?}"
    );
}

#[test]
fn a_rank_has_a_deep_stack() {
    fn recurse(depth: usize) -> usize {
        let frame = std::hint::black_box([depth; 64]);
        if depth == 0 {
            0
        } else {
            1 + recurse(depth - 1) + frame[1] - depth
        }
    }
    // Some 100 MiB of frames, where Rust's own threads have 2.
    assert_eq!(run_local(1, |_| recurse(100_000)).unwrap(), [100_000]);
}

#[test]
fn a_group_outlives_the_closure_while_a_thread_holds_it() {
    run_local(2, |group| {
        let worker = group.clone();
        let work = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20 * worker.rank() as u64));
            worker.barrier()
        });
        drop(group);
        work
    })
    .unwrap()
    .into_iter()
    .for_each(|work| work.join().unwrap().unwrap());
}

/// Ranks panic or time out at any point of an operation on memory that they then free, over and
/// over. What the others read must be what was lent; under a sanitizer, a read of freed memory
/// shows.
#[test]
fn ranks_that_fail_midway_never_show_freed_memory() {
    let failed = AtomicUsize::new(0);
    let check = |group: &ProcessGroup, turn: usize| {
        let rank = group.rank();
        let len = 30_000 + turn * 100;
        let input = vec![rank as u64 + 7; len];
        let mut output = vec![0; len * group.world_size()];
        let result = group.all_gather_into(&mut output, &input);
        drop(input);
        let valid =
            |(index, &value): (usize, &u64)| value == (index / len) as u64 + 7 || value == 0;
        assert!(output.iter().enumerate().all(valid));
        if result.is_err() {
            failed.fetch_add(1, Ordering::Relaxed);
        }
    };
    for turn in 0..40 {
        // Deadlines around the time that the operation takes.
        let ranks = LocalRanks {
            world_size: 3,
            stack_bytes: STACK_BYTES,
            deadline: Duration::from_micros(20 * turn as u64),
            ..LocalRanks::default()
        };
        ranks.run(|group| check(&group, turn)).unwrap();
    }
    assert!(
        failed.load(Ordering::Relaxed) > 0,
        "no deadline was too short"
    );
}

/// A reduction that panics on one rank, in the middle of reading others' memory.
#[test]
fn a_rank_that_panics_while_it_reads_leaves_the_others_whole() {
    let ranks = LocalRanks {
        world_size: 3,
        stack_bytes: STACK_BYTES,
        deadline: Duration::from_secs(5),
        ..LocalRanks::default()
    };
    let outcomes = ranks.run(|group| {
        let mut buffer = vec![group.rank() as f32; 100_000];
        let result = catch_unwind(AssertUnwindSafe(|| {
            if group.rank() == 0 {
                let _panics = group;
                panic!("before its turn");
            }
            group.all_reduce(&mut buffer, ReduceOp::Sum)
        }));
        result.map_err(drop)
    });
    let outcomes = outcomes.unwrap();
    assert!(outcomes[0].is_err());
    assert!(
        outcomes[1..]
            .iter()
            .all(|outcome| matches!(outcome, Ok(Err(CommError::RankLeft { rank: 0, .. }))))
    );
}
