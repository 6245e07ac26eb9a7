//! Ranks that call different things: found at the operation where it happens, by all, naming who
//! called what.

use fsdp_comm::{CommError, ProcessGroup, ReduceOp};
use fsdp_layout::DeviceMesh;

use super::{Case, error_of, expendable, same_on_all};

pub(super) fn cases() -> Vec<Case> {
    let mismatch = |&(name, most, one, says): &Kind| {
        Case::new(format!("mismatch: {name}"), 2..=3, move |group| {
            let (rank, victim) = (group.rank(), group.world_size() - 1);
            let failing = expendable(&group);
            let error = error_of(if rank == victim {
                one(&failing)
            } else {
                most(&failing)
            });
            let CommError::Mismatch { calls, .. } = &error else {
                panic!("{error:?}")
            };
            let named: Vec<usize> = calls
                .iter()
                .flat_map(|call| call.ranks.iter().copied())
                .collect();
            assert_eq!(named, (0..=victim).collect::<Vec<_>>(), "{error}");
            let odd = calls
                .iter()
                .find(|call| call.ranks == [victim])
                .expect("the odd one is alone");
            assert!(odd.call.contains(says), "{error}");
            // Over, for everybody, for the same reason.
            assert_eq!(error_of(failing.barrier()), error);
            same_on_all(&group, &error);
        })
    };
    KINDS.iter().map(mismatch).collect()
}

type Call = fn(&ProcessGroup) -> Result<(), CommError>;
/// A kind of mismatch: its name, the call of all ranks but the last, the last rank's, and the
/// error's words for that.
type Kind = (&'static str, Call, Call, &'static str);

fn all_gather<const N: usize>(group: &ProcessGroup) -> Result<(), CommError> {
    group.all_gather_into(&mut vec![0f32; N * group.world_size()], &[1.0; N])
}

fn gather_to(group: &ProcessGroup, root: usize) -> Result<(), CommError> {
    let mut output = vec![0f32; group.world_size()];
    group.gather(
        (group.rank() == root).then_some(&mut output[..]),
        &[1.0],
        root,
    )
}

fn uneven(group: &ProcessGroup, others: usize) -> Result<(), CommError> {
    let mut counts = vec![others; group.world_size()];
    counts[group.rank()] = 2;
    group.all_gather_uneven_into_slices(
        &mut [&mut vec![0f32; counts.iter().sum()]],
        &counts,
        &[1.0; 2],
    )
}

fn all_to_all(group: &ProcessGroup, receive: usize) -> Result<(), CommError> {
    let (sent, received) = (
        vec![2000; group.world_size()],
        vec![receive; group.world_size()],
    );
    let input = vec![0f32; sent.iter().sum()];
    group.all_to_all_uneven(
        &mut vec![0.0; received.iter().sum()],
        &received,
        &input,
        &sent,
    )
}

fn mesh_group(group: &ProcessGroup, shape: [usize; 2], dim: usize) -> Result<(), CommError> {
    let mesh = DeviceMesh::new(&shape, &["replicate", "shard"], group.world_size()).unwrap();
    group.mesh_group(&mesh, dim).map(drop)
}

fn reduce(group: &ProcessGroup, len: usize, op: ReduceOp) -> Result<(), CommError> {
    group.all_reduce(&mut vec![1f32; len], op)
}

fn broadcast_result(group: &ProcessGroup, operation: &str, root: usize) -> Result<(), CommError> {
    group
        .broadcast_result(operation, Ok::<_, String>(Some(1u8)), root)
        .map(drop)
}

const KINDS: &[Kind] = &[
    (
        "one operation on different objects",
        |group| all_gather::<3>(&group.with_label("unit x")),
        |group| all_gather::<3>(&group.with_label("unit y")),
        "all_gather on `unit y` of 3 float32",
    ),
    (
        "a skipped operation",
        |group| {
            group.barrier()?;
            all_gather::<3>(group)
        },
        all_gather::<3>,
        "all_gather of 3 float32",
    ),
    (
        "an added operation",
        all_gather::<3>,
        |group| {
            group.barrier()?;
            all_gather::<3>(group)
        },
        "barrier",
    ),
    (
        "operations in another order",
        |group| {
            group.broadcast(&mut [0u8; 9000], 0)?;
            reduce(group, 3, ReduceOp::Sum)
        },
        |group| {
            reduce(group, 3, ReduceOp::Sum)?;
            group.broadcast(&mut [0u8; 9000], 0)
        },
        "all_reduce(sum) of 3 float32",
    ),
    (
        "another operation of the same size",
        |group| reduce(group, 5000, ReduceOp::Sum),
        |group| group.broadcast(&mut [0f32; 5000], 0),
        "broadcast from 0 of 5000 float32",
    ),
    (
        "another dtype of the same width",
        |group| group.broadcast(&mut [0f32; 4], 0),
        |group| group.broadcast(&mut [0i32; 4], 0),
        "int32",
    ),
    (
        "another size",
        all_gather::<3000>,
        all_gather::<2999>,
        "all_gather of 2999 float32",
    ),
    (
        "nothing against something",
        all_gather::<1>,
        all_gather::<0>,
        "all_gather of 0 float32",
    ),
    (
        "another size of a broadcast",
        |group| group.broadcast(&mut [0f32; 4], 0),
        |group| group.broadcast(&mut [0f32; 5], 0),
        "of 5 float32",
    ),
    (
        "another root of a broadcast",
        |group| group.broadcast(&mut [0f32; 4], 0),
        |group| group.broadcast(&mut [0f32; 4], 1),
        "broadcast from 1",
    ),
    (
        "another root of a gather",
        |group| gather_to(group, 0),
        |group| gather_to(group, 1),
        "gather to 1",
    ),
    (
        "another reduction",
        |group| reduce(group, 4, ReduceOp::Sum),
        |group| reduce(group, 4, ReduceOp::Max),
        "all_reduce(max)",
    ),
    (
        "another reduction of much",
        |group| reduce(group, 40_000, ReduceOp::Avg),
        |group| reduce(group, 40_000, ReduceOp::Sum),
        "all_reduce(sum)",
    ),
    (
        "other counts",
        |group| uneven(group, 2),
        |group| uneven(group, 3),
        "all_gather_uneven of [3, ",
    ),
    (
        "counts of an all-to-all that do not fit",
        |group| all_to_all(group, 2000),
        |group| all_to_all(group, 1999),
        "receiving [1999, ",
    ),
    (
        "other ranks of a sub-group",
        |group| group.subgroup(&[0]).map(drop),
        |group| group.subgroup(&[1]).map(drop),
        "subgroup of [1]",
    ),
    (
        "another mesh",
        |group| mesh_group(group, [1, group.world_size()], 0),
        |group| mesh_group(group, [group.world_size(), 1], 0),
        "mesh_group",
    ),
    (
        "another dimension of a mesh",
        |group| mesh_group(group, [1, group.world_size()], 0),
        |group| mesh_group(group, [1, group.world_size()], 1),
        "mesh_group",
    ),
    (
        "agreement on something else",
        |group| group.agree("save", Ok::<_, String>(())),
        |group| group.agree("load", Ok::<_, String>(())),
        "agree on `load`",
    ),
    (
        "agreement with and without a schema",
        |group| group.agree("save", Ok::<_, String>(())),
        |group| group.agree_on("save", 0, Ok::<_, String>(())),
        "agree on `save`",
    ),
    (
        "an object against a tensor",
        all_gather::<2>,
        |group| group.all_gather_object(&[1f32; 2]).map(drop),
        "all_gather_object",
    ),
    (
        "another root of an object",
        |group| group.broadcast_object(Some(&1u8), 0).map(drop),
        |group| group.broadcast_object(Some(&1u8), 1).map(drop),
        "broadcast_object from 1",
    ),
    (
        "broadcasts of results from different roots",
        |group| broadcast_result(group, "commit", 0),
        |group| broadcast_result(group, "commit", 1),
        "broadcast_result on `commit` from 1",
    ),
    (
        "broadcasts of different results",
        |group| broadcast_result(group, "prepare", 0),
        |group| broadcast_result(group, "commit", 0),
        "broadcast_result on `commit` from 0",
    ),
];
