//! Replicas that differ are found, whatever else the ranks hold.

use fsdp_comm::CommError;
use fsdp_flat::ShardedTensor;
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
        assert!(check(has_more, false).iter().all(Result::is_ok), "{has_more}");
        let error = one_error(check(has_more, true));
        assert!(matches!(&error, StateError::ReplicasDiffer { tensors } if tensors.len() == 1), "{error:?}");
        assert_eq!(error.to_string(), "replicas differ: `weight` on rank 1");
    }
}

/// A tuple with a sharded tensor of two replicas, and a value beside it.
fn tuple(seed: u64, value: i64) -> StateDict {
    let sharded = ShardedTensor::from_whole(&f32s(&[3], seed));
    [("tuple", StateValue::Tuple(vec![value.into(), sharded.into()]))].into_iter().collect()
}

#[test]
fn what_a_tuple_with_sharded_tensors_holds_is_compared() {
    assert!(run(2, |group| check_replicas(&tuple(1, 1), &group)).iter().all(Result::is_ok));
    for (seed, value) in [(2, 1), (1, 2)] {
        let error = one_error(run(3, |group| {
            let (seed, value) = if group.rank() == 2 { (seed, value) } else { (1, 1) };
            check_replicas(&tuple(seed, value), &group)
        }));
        assert_eq!(error.to_string(), "replicas differ: `tuple` on rank 2");
    }
}

#[test]
fn a_tuple_with_sharded_tensors_has_no_digest_as_it_cannot_be_saved() {
    let error = one_error(run(2, |group| digest_state_dict(&tuple(1, 1), &group)));
    let StateError::Comm(CommError::RankFailed { failures, .. }) = error else { panic!("{error}") };
    assert!(failures.len() == 2 && failures[0].message.contains("`tuple`"), "{failures:?}");
}
