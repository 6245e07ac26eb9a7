//! A rank that leaves, panics, stays away or gives up, at every operation: an error on all others
//! that names it.

use std::thread;
use std::time::{Duration, Instant};

use fsdp_comm::{CommError, ProcessGroup, ReduceOp};
use fsdp_layout::DeviceMesh;

use super::{Case, DEADLINE, error_of, expendable, same_on_all};

/// The rank that is at fault.
const VICTIM: usize = 1;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = vec![
        Case::new(
            "faults: others: a sub-group without the rank that left goes on",
            3..=4,
            |group| survivors_go_on(&group),
        ),
        Case::new(
            "faults: others: a group is shrunk without the rank that left",
            2..=4,
            |group| shrunk_group_goes_on(&group),
        ),
        Case::new(
            "faults: others: a group is shrunk again without the next rank that left",
            3..=4,
            |group| shrunk_twice(&group),
        ),
        Case::new("faults: others: abort", 2..=4, |group| abort(&group)),
        Case::new("faults: others: everyone is late", 2..=3, |group| {
            everyone_is_late(&group)
        }),
    ];
    for &(name, call) in OPERATIONS {
        for len in [5, 50_000] {
            cases.push(Case::new(
                format!("faults: a rank leaves before {name} of {len}"),
                3..=3,
                move |group| {
                    call(&group, len).unwrap();
                    if group.rank() == VICTIM {
                        return;
                    }
                    let error = error_of(call(&group, len).and_then(|()| group.barrier()));
                    assert!(
                        matches!(error, CommError::RankLeft { rank: VICTIM, .. }),
                        "{error:?}"
                    );
                    assert_eq!(error_of(call(&group, len)), error);
                },
            ));
            let mut case = Case::new(
                format!("faults: a rank panics before {name} of {len}"),
                3..=3,
                move |group| {
                    if group.rank() == VICTIM {
                        group.barrier().unwrap();
                        panic!("as it should");
                    }
                    group.barrier().unwrap();
                    let error = error_of(call(&group, len));
                    assert!(
                        matches!(error, CommError::RankLeft { rank: VICTIM, .. }),
                        "{error:?}"
                    );
                },
            );
            case.casualty = Some(VICTIM);
            cases.push(case);
            cases.push(Case::new(
                format!("faults: a rank is late for {name} of {len}"),
                3..=3,
                move |group| {
                    late(&group, call, len);
                },
            ));
        }
    }
    cases
}

type Call = fn(&ProcessGroup, usize) -> Result<(), CommError>;

/// Every operation in which every rank waits for every other.
const OPERATIONS: &[(&str, Call)] = &[
    ("barrier", |group, _| group.barrier()),
    ("all-gather", |group, len| {
        group.all_gather_into(&mut vec![0f32; len * group.world_size()], &vec![1.0; len])
    }),
    ("all-gather, uneven", |group, len| {
        let counts: Vec<usize> = (0..group.world_size()).map(|rank| len * rank).collect();
        let input = vec![1f32; counts[group.rank()]];
        group.all_gather_uneven_into_slices(
            &mut [&mut vec![0.0; counts.iter().sum()]],
            &counts,
            &input,
        )
    }),
    ("reduce-scatter", |group, len| {
        group.reduce_scatter(
            &mut vec![0f32; len],
            &vec![1.0; len * group.world_size()],
            ReduceOp::Avg,
        )
    }),
    ("all-reduce", |group, len| {
        group.all_reduce(&mut vec![1f32; len], ReduceOp::Sum)
    }),
    ("broadcast", |group, len| {
        group.broadcast(&mut vec![1f32; len], 0)
    }),
    ("gather", |group, len| {
        let mut output = vec![0f32; len * group.world_size()];
        group.gather(
            (group.rank() == 0).then_some(&mut output[..]),
            &vec![1.0; len],
            0,
        )
    }),
    ("scatter", |group, len| {
        let input = vec![0f32; len * group.world_size()];
        group.scatter(
            &mut vec![1.0; len],
            (group.rank() == 0).then_some(&input[..]),
            0,
        )
    }),
    ("all-to-all", |group, len| {
        let counts = vec![len; group.world_size()];
        let input = vec![1f32; len * group.world_size()];
        group.all_to_all_uneven(&mut input.clone(), &counts, &input, &counts)
    }),
    ("all-gather of objects", |group, len| {
        group.all_gather_object(&vec![1u8; len]).map(drop)
    }),
    ("gather of objects", |group, len| {
        group.gather_object(&vec![1u8; len], 0).map(drop)
    }),
    ("scatter of objects", |group, len| {
        group
            .scatter_object(Some(&vec![vec![1u8; len]; group.world_size()]), 0)
            .map(drop)
    }),
    ("broadcast of an object", |group, len| {
        group.broadcast_object(Some(&vec![1u8; len]), 0).map(drop)
    }),
    ("broadcast of a result", |group, len| {
        let value = Ok::<_, String>(Some(vec![1u8; len]));
        group.broadcast_result("commit", value, 0).map(drop)
    }),
    ("agreement", |group, _| {
        group.agree("save", Ok::<_, String>(()))
    }),
    ("sub-group", |group, _| group.subgroup(&[0]).map(drop)),
    ("mesh group", |group, _| {
        let mesh = DeviceMesh::new(&[group.world_size()], &["shard"], group.world_size());
        group.mesh_group(&mesh.unwrap(), 0).map(drop)
    }),
];

fn late(group: &ProcessGroup, call: Call, len: usize) {
    const SHORT: Duration = Duration::from_millis(120);
    let failing = expendable(group).with_deadline(SHORT);
    let started = Instant::now();
    if group.rank() == VICTIM {
        // It comes after all others have given up.
        group.barrier().unwrap();
    }
    let error = error_of(call(&failing, len));
    if group.rank() != VICTIM {
        group.barrier().unwrap();
    }
    let CommError::Timeout {
        missing, deadline, ..
    } = &error
    else {
        panic!("{error:?}")
    };
    assert_eq!((&missing[..], *deadline), (&[VICTIM][..], SHORT));
    assert!(
        started.elapsed() < DEADLINE,
        "the deadline did not end the operation"
    );
    assert_eq!(error_of(failing.barrier()), error);
    same_on_all(group, &error);
}

/// Lets ranks come one after the other, each after the deadline; all must have one error.
fn everyone_is_late(group: &ProcessGroup) {
    let failing = expendable(group).with_deadline(Duration::from_millis(20));
    thread::sleep(Duration::from_millis(60) * group.rank() as u32);
    let error = error_of(failing.barrier());
    let missing: Vec<usize> = (1..group.world_size()).collect();
    assert!(
        matches!(&error, CommError::Timeout { missing: named, .. } if *named == missing),
        "{error:?}"
    );
    same_on_all(group, &error);
}

fn survivors_go_on(group: &ProcessGroup) {
    let others: Vec<usize> = (0..group.world_size())
        .filter(|&rank| rank != VICTIM)
        .collect();
    let Some(survivors) = group.subgroup(&others).unwrap() else {
        return;
    };
    let error = error_of(group.barrier());
    assert!(
        matches!(error, CommError::RankLeft { rank: VICTIM, .. }),
        "{error:?}"
    );
    same_on_all(&survivors, &error);
    let mut buffer = vec![1u32; 5000];
    survivors.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
    assert_eq!(buffer, vec![others.len() as u32; 5000]);
    let last = survivors.subgroup(&[0, 1]).unwrap();
    assert_eq!(
        last.map(|group| group.barrier()),
        (survivors.rank() < 2).then_some(Ok(()))
    );
}

/// Shrinks a group whose next operation fails because the victim has left. Returns `None` if the
/// backend cannot.
fn shrink_after_loss(group: &ProcessGroup, victim: usize) -> Option<ProcessGroup> {
    let global_rank = group.global_ranks()[victim];
    let error = error_of(group.barrier());
    assert!(
        matches!(error, CommError::RankLeft { rank, .. } if rank == global_rank),
        "{error:?}"
    );
    if group.backend_name() == "mpi" {
        let error = error_of(group.shrink(&[victim]));
        assert!(
            matches!(error, CommError::BackendUnavailable { .. }),
            "{error:?}"
        );
        return None;
    }
    let rest = group.shrink(&[victim]).unwrap();
    // The group itself has failed all the same, and is shrunk to the same ranks only once.
    assert_eq!(error_of(group.barrier()), error);
    let again = error_of(group.shrink(&[victim]));
    assert!(
        matches!(again, CommError::InvalidArgument { .. }),
        "{again:?}"
    );
    Some(rest)
}

fn shrunk_group_goes_on(group: &ProcessGroup) {
    if group.rank() == VICTIM {
        return;
    }
    for mistake in [&[][..], &[group.rank()], &[group.world_size()]] {
        let error = error_of(group.shrink(mistake));
        assert!(
            matches!(error, CommError::InvalidArgument { .. }),
            "{error:?}"
        );
    }
    let Some(rest) = shrink_after_loss(group, VICTIM) else {
        return;
    };
    let others: Vec<usize> = (0..group.world_size())
        .filter(|&rank| rank != VICTIM)
        .collect();
    assert_eq!(rest.global_ranks(), others);
    assert_eq!(others[rest.rank()], group.rank());
    let mut buffer = vec![rest.rank() as u32; 5000];
    rest.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
    let sum = others.len() * (others.len() - 1) / 2;
    assert_eq!(buffer, vec![sum as u32; 5000]);
    // It is a group like any other.
    let first = rest.subgroup(&[0]).unwrap();
    assert_eq!(first.is_some(), rest.rank() == 0);
    let mesh = DeviceMesh::new(&[others.len()], &["shard"], others.len()).unwrap();
    rest.mesh_group(&mesh, 0).unwrap().barrier().unwrap();
}

/// Ranks 1 and 2 leave, one after the other.
fn shrunk_twice(group: &ProcessGroup) {
    if group.rank() == VICTIM {
        return;
    }
    let Some(rest) = shrink_after_loss(group, VICTIM) else {
        return;
    };
    if group.rank() == 2 {
        return;
    }
    let Some(last) = shrink_after_loss(&rest, 1) else {
        return;
    };
    let ranks: Vec<usize> = (0..group.world_size())
        .filter(|rank| ![1, 2].contains(rank))
        .collect();
    assert_eq!(last.all_gather_object(&group.rank()).unwrap(), ranks);
}

fn abort(group: &ProcessGroup) {
    for late in [false, true] {
        let failing = expendable(group);
        if group.rank() == VICTIM {
            failing.abort("cannot go on");
            failing.abort("a second reason that nobody hears");
        } else if late {
            thread::sleep(Duration::from_millis(20));
        }
        let error = error_of(failing.all_reduce(&mut [1f32], ReduceOp::Sum));
        assert_eq!(
            error,
            CommError::Aborted {
                rank: VICTIM,
                message: "cannot go on".to_owned()
            }
        );
        assert_eq!(error_of(failing.barrier()), error);
        same_on_all(group, &error);
    }
}
