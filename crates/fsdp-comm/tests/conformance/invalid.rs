//! Arguments that are wrong on one rank are an error on all, after which the group goes on.

use fsdp_comm::{CommError, ProcessGroup, ReduceOp};
use fsdp_layout::DeviceMesh;

use super::{Case, error_of};

pub(super) fn cases() -> Vec<Case> {
    let mut cases: Vec<Case> = WRONG_CALLS
        .iter()
        .map(|&(name, right, wrong)| {
            Case::new(format!("invalid: {name}"), 2..=3, move |group| {
                let victim = group.world_size() - 1;
                let result = if group.rank() == victim {
                    wrong(&group)
                } else {
                    right(&group)
                };
                let error = error_of(result);
                match &error {
                    CommError::InvalidArgument { .. } => {
                        assert_eq!(group.rank(), victim, "{error}")
                    }
                    CommError::RankFailed { failures, .. } => {
                        assert_ne!(group.rank(), victim);
                        assert_eq!((failures.len(), failures[0].rank), (1, victim), "{error}");
                        assert!(failures[0].message.contains("invalid arguments"), "{error}");
                    }
                    _ => panic!("{error:?}"),
                }
                right(&group).unwrap();
            })
        })
        .collect();
    cases.push(Case::new(
        "invalid: an average of integers",
        1..=2,
        |group| {
            for len in [1, 5000] {
                let error = error_of(group.all_reduce(&mut vec![1i32; len], ReduceOp::Avg));
                assert!(
                    matches!(error, CommError::UnsupportedReduction { .. }),
                    "{error:?}"
                );
                let input = vec![1u8; len * group.world_size()];
                let error =
                    error_of(group.reduce_scatter(&mut vec![1; len], &input, ReduceOp::Avg));
                assert!(
                    matches!(error, CommError::UnsupportedReduction { .. }),
                    "{error:?}"
                );
            }
            group.barrier().unwrap();
        },
    ));
    cases
}

type Call = fn(&ProcessGroup) -> Result<(), CommError>;

fn whole(group: &ProcessGroup, len: usize) -> Vec<f32> {
    vec![0.0; len * group.world_size()]
}

fn root_only<T>(group: &ProcessGroup, value: T) -> Option<T> {
    (group.rank() == 0).then_some(value)
}

/// The name of each operation, a right call, and a wrong one.
const WRONG_CALLS: &[(&str, Call, Call)] = &[
    (
        "all-gather, output too long",
        |group| group.all_gather_into(&mut whole(group, 3), &[1.0; 3]),
        |group| group.all_gather_into(&mut whole(group, 4), &[1.0; 3]),
    ),
    (
        "all-gather, slices too short",
        |group| group.all_gather_into_slices(&mut [&mut whole(group, 3000)], &[1.0; 3000]),
        |group| {
            group.all_gather_into_slices(
                &mut [&mut whole(group, 1000), &mut whole(group, 1000)],
                &[1.0; 3000],
            )
        },
    ),
    (
        "all-gather, too few counts",
        |group| {
            group.all_gather_uneven_into_slices(
                &mut [&mut whole(group, 2)],
                &vec![2; group.world_size()],
                &[1.0; 2],
            )
        },
        |group| group.all_gather_uneven_into_slices(&mut [&mut [0.0; 2]], &[2], &[1.0; 2]),
    ),
    (
        "all-gather, counts that overflow",
        |group| {
            group.all_gather_uneven_into_slices(
                &mut [&mut whole(group, 2)],
                &vec![2; group.world_size()],
                &[1.0; 2],
            )
        },
        |group| {
            let mut counts = vec![usize::MAX; group.world_size()];
            counts[group.rank()] = 2;
            group.all_gather_uneven_into_slices(&mut [&mut [0.0; 2]], &counts, &[1.0; 2])
        },
    ),
    (
        "reduce-scatter, input too short",
        |group| group.reduce_scatter(&mut [0.0; 3], &whole(group, 3), ReduceOp::Sum),
        |group| group.reduce_scatter(&mut [0.0; 3], &[1.0; 3], ReduceOp::Sum),
    ),
    (
        "broadcast, no such root",
        |group| group.broadcast(&mut [0.0], 0),
        |group| group.broadcast(&mut [0.0], usize::MAX),
    ),
    (
        "gather, an output that is not on the root",
        |group| group.gather(root_only(group, &mut whole(group, 1)[..]), &[1.0], 0),
        |group| group.gather(Some(&mut whole(group, 1)), &[1.0], 0),
    ),
    (
        "gather, no output on the root",
        |group| {
            let root = group.world_size() - 1;
            group.gather(
                (group.rank() == root).then_some(&mut whole(group, 1)[..]),
                &[1.0],
                root,
            )
        },
        |group| group.gather(None, &[1.0], group.rank()),
    ),
    (
        "scatter, an input that is not on the root",
        |group| group.scatter(&mut [0.0], root_only(group, &whole(group, 1)[..]), 0),
        |group| group.scatter(&mut [0.0], Some(&whole(group, 1)), 0),
    ),
    (
        "scatter, an output that is not as counted",
        |group| {
            let counts = vec![1; group.world_size()];
            group.scatter_uneven_into_slices(
                &mut [&mut [0.0]],
                root_only(group, &whole(group, 1)[..]),
                &counts,
                0,
            )
        },
        |group| {
            let counts = vec![1; group.world_size()];
            group.scatter_uneven_into_slices(&mut [&mut [0.0; 2]], None, &counts, 0)
        },
    ),
    (
        "all-to-all, counts of another size",
        |group| {
            let counts = vec![1; group.world_size()];
            group.all_to_all_uneven(&mut whole(group, 1), &counts, &whole(group, 1), &counts)
        },
        |group| {
            group.all_to_all_uneven(
                &mut whole(group, 1),
                &[1, 1, 1, 1],
                &whole(group, 1),
                &[1, 1, 1, 1],
            )
        },
    ),
    (
        "sub-group, no ranks",
        |group| group.subgroup(&[0]).map(drop),
        |group| group.subgroup(&[]).map(drop),
    ),
    (
        "sub-group, a rank twice",
        |group| group.subgroup(&[0]).map(drop),
        |group| group.subgroup(&[0, 0]).map(drop),
    ),
    (
        "sub-group, no such rank",
        |group| group.subgroup(&[0]).map(drop),
        |group| group.subgroup(&[9]).map(drop),
    ),
    (
        "mesh group, no such dimension",
        |group| {
            let mesh = DeviceMesh::new(&[group.world_size()], &["shard"], group.world_size());
            group.mesh_group(&mesh.unwrap(), 0).map(drop)
        },
        |group| {
            let mesh = DeviceMesh::new(&[group.world_size()], &["shard"], group.world_size());
            group.mesh_group(&mesh.unwrap(), 1).map(drop)
        },
    ),
    (
        "scatter of objects, too few",
        |group| {
            let root = group.world_size() - 1;
            group
                .scatter_object(Some(&vec![1u8; group.world_size()]), root)
                .map(drop)
        },
        |group| group.scatter_object(Some(&[1u8]), group.rank()).map(drop),
    ),
    (
        "broadcast of an object, none on the root",
        |group| {
            group
                .broadcast_object(Some(&1u8), group.world_size() - 1)
                .map(drop)
        },
        |group| group.broadcast_object::<u8>(None, group.rank()).map(drop),
    ),
    (
        "broadcast of a result, neither value nor error on the root",
        |group| {
            let value = Ok::<_, String>(Some(1u8));
            group
                .broadcast_result("commit", value, group.world_size() - 1)
                .map(drop)
        },
        |group| {
            group
                .broadcast_result::<u8, String>("commit", Ok(None), group.rank())
                .map(drop)
        },
    ),
    (
        "broadcast of a result, no such root",
        |group| {
            let value = Ok::<_, String>(Some(1u8));
            group.broadcast_result("commit", value, 0).map(drop)
        },
        |group| {
            let value = Ok::<_, String>(Some(1u8));
            group
                .broadcast_result("commit", value, group.world_size())
                .map(drop)
        },
    ),
];
