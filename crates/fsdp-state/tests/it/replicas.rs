//! Replicas that differ are found, whatever else the ranks hold.

use candle_core::DType;
use fsdp_comm::CommError;
use fsdp_flat::{LocalShard, ShardedTensor};
use fsdp_layout::TensorBox;
use fsdp_state::{StateDict, StateError, StateValue, check_replicas, digest_state_dict};

use crate::ranks::{f32s, one_error, run};

#[test]
fn a_value_that_one_rank_has_too_many_does_not_hide_a_weight_that_differs() {
    let check = |has_more: bool, differs: bool| {
        run(3, |group| {
            let is_one = group.rank() == 1;
            let mut state = StateDict::new();
            state.insert("weight", f32s(&[4], u64::from(is_one && differs)));
            state.insert("bias", f32s(&[2], 7));
            if is_one && has_more {
                state.insert("epoch", 3i64);
            }
            check_replicas(&state, &group)
        })
    };
    for has_more in [false, true] {
        assert!(
            check(has_more, false).iter().all(Result::is_ok),
            "{has_more}"
        );
        let error = one_error(check(has_more, true));
        assert!(
            matches!(&error, StateError::ReplicasDiffer { tensors } if tensors.len() == 1),
            "{error:?}"
        );
        assert_eq!(error.to_string(), "replicas differ: `weight` on rank 1");
    }
}

/// Two tensors: one in two halves with two replicas each, and one in four parts. No two ranks hold
/// the same.
fn dense_and_experts(rank: usize, seed: u64) -> StateDict {
    let part = |parts: usize, part: usize, seed| {
        let tensor = f32s(&[2], seed);
        let bounds = TensorBox::new(vec![2 * part], vec![2]);
        ShardedTensor::new(
            DType::F32,
            vec![2 * parts],
            vec![LocalShard { bounds, tensor }],
        )
        .unwrap()
    };
    [
        ("dense", part(2, rank % 2, seed).into()),
        ("experts", part(4, rank, 7).into()),
    ]
    .into_iter()
    .collect()
}

#[test]
fn replicas_are_compared_also_if_no_two_ranks_hold_the_same_boxes_altogether() {
    assert!(
        run(4, |group| check_replicas(
            &dense_and_experts(group.rank(), 1),
            &group
        ))
        .iter()
        .all(Result::is_ok)
    );
    for wrong in 0..4 {
        let error = one_error(run(4, |group| {
            let seed = if group.rank() == wrong { 2 } else { 1 };
            check_replicas(&dense_and_experts(group.rank(), seed), &group)
        }));
        let (first, second) = (wrong % 2, wrong % 2 + 2);
        assert_eq!(
            error.to_string(),
            format!("replicas differ: `dense` on rank {first}, {second}")
        );
    }
}

/// A tuple with a sharded tensor of two replicas, and a value beside it.
fn tuple(seed: u64, value: i64) -> StateDict {
    let sharded = ShardedTensor::from_whole(&f32s(&[3], seed));
    [(
        "tuple",
        StateValue::Tuple(vec![value.into(), sharded.into()]),
    )]
    .into_iter()
    .collect()
}

#[test]
fn what_a_tuple_with_sharded_tensors_holds_is_compared() {
    assert!(
        run(2, |group| check_replicas(&tuple(1, 1), &group))
            .iter()
            .all(Result::is_ok)
    );
    for (seed, value) in [(2, 1), (1, 2)] {
        let error = one_error(run(3, |group| {
            let (seed, value) = if group.rank() == 2 {
                (seed, value)
            } else {
                (1, 1)
            };
            check_replicas(&tuple(seed, value), &group)
        }));
        assert_eq!(error.to_string(), "replicas differ: `tuple` on rank 2");
    }
}

#[test]
fn a_tuple_with_sharded_tensors_has_no_digest_as_it_cannot_be_saved() {
    let error = one_error(run(2, |group| digest_state_dict(&tuple(1, 1), &group)));
    let StateError::Comm(CommError::RankFailed { failures, .. }) = error else {
        panic!("{error}")
    };
    assert!(
        failures.len() == 2 && failures[0].message.contains("`tuple`"),
        "{failures:?}"
    );
}
