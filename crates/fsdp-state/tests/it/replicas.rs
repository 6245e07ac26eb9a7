//! Replicas that differ are found, whatever else the ranks hold.

use fsdp_state::{StateDict, StateError, check_replicas};

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
