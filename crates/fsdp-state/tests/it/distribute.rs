//! Whole tensors that every rank holds, cut by each rank for itself.

use candle_core::DType;
use fsdp_comm::Operation;
use fsdp_flat::ShardedTensor;
use fsdp_layout::{PlainValue, TensorBox};
use fsdp_state::{
    LoadOptions, StateDict, StateError, StateValue, copy_state_dict, distribute_state_dict,
};

use crate::ranks::{assert_cut, bits, bits_at, chunks, f32s, flat_ranges, one_error, run};

fn zeros(shape: &[usize], boxes: &[TensorBox]) -> StateValue {
    ShardedTensor::zeros(DType::F32, shape, boxes)
        .unwrap()
        .into()
}

#[test]
fn even_and_uneven_tensors_are_sliced_and_keep_their_global_shape() {
    run(2, |group| {
        let (even, uneven) = (f32s(&[2, 2], 1), f32s(&[1, 2], 2));
        let full: StateDict = [
            ("even", even.clone().into()),
            ("uneven", uneven.clone().into()),
        ]
        .into_iter()
        .collect();
        let boxes = |shape: &[usize]| chunks(shape, 2).swap_remove(group.rank());
        let local: StateDict = [
            ("even", zeros(&[2, 2], &boxes(&[2, 2]))),
            ("uneven", zeros(&[1, 2], &boxes(&[1, 2]))),
        ]
        .into_iter()
        .collect();
        let options = LoadOptions::default();
        let mut live = local.clone();
        let (loaded, _) = distribute_state_dict(&full, &local, &group, &options).unwrap();
        for (key, full) in [("even", even), ("uneven", uneven)] {
            let sharded = |state: &StateDict| {
                state
                    .get(key)
                    .and_then(StateValue::as_sharded)
                    .unwrap()
                    .clone()
            };
            assert_cut(&sharded(&loaded), &full, &boxes(full.dims()));
            copy_state_dict(&loaded, &mut live).unwrap();
            assert_cut(&sharded(&local), &full, &boxes(full.dims()));
        }
        assert_eq!(group.traffic().tensor_bytes(), 0);
    });
}

#[test]
fn every_rank_takes_its_part_and_its_own_scalars_and_nothing_moves() {
    run(3, |group| {
        let weight = f32s(&[5, 2], 10);
        let mut full = StateDict::new();
        full.insert("step", f32s(&[], group.rank() as u64));
        full.insert("weight", weight.clone());
        full.insert("rank", group.rank() as i64);
        full.insert("extra", f32s(&[2], 1));
        let boxes = flat_ranges(&[5, 2], 3).swap_remove(group.rank());
        let mut local = StateDict::new();
        local.insert("weight", zeros(&[5, 2], &boxes));
        local.insert("step", f32s(&[], 7));
        local.insert("rank", 0i64);
        local.insert("kept", f32s(&[3], 8));
        let options = LoadOptions {
            strict: false,
            ..LoadOptions::default()
        };
        let (loaded, report) = distribute_state_dict(&full, &local, &group, &options).unwrap();
        assert_eq!(
            (&report.missing[..], &report.unexpected[..]),
            (&["kept".to_owned()][..], &["extra".to_owned()][..])
        );
        assert_cut(
            loaded.get("weight").unwrap().as_sharded().unwrap(),
            &weight,
            &boxes,
        );
        assert_eq!(bits_at(&loaded, "step"), bits_at(&full, "step"));
        assert_eq!(
            loaded.plain_at(&["rank"]).and_then(PlainValue::as_int),
            Some(group.rank() as i64)
        );
        assert_eq!(bits_at(&loaded, "kept"), bits(&f32s(&[3], 8)));
        assert!(loaded.keys().eq(["weight", "step", "rank", "kept"]));
        let traffic = group.traffic();
        assert_eq!(traffic.tensor_bytes() + traffic.object_bytes_sent, 0);
        assert!(
            traffic
                .collectives
                .keys()
                .all(|&operation| operation == Operation::Agree)
        );
    });
}

#[test]
fn only_the_keys_that_are_asked_for_are_taken() {
    run(2, |group| {
        let mut full = StateDict::new();
        full.insert("a.x", f32s(&[2], 1));
        full.insert("ab", f32s(&[2], 2));
        full.insert("extra", f32s(&[2], 3));
        let mut local = StateDict::new();
        local.insert("a.x", f32s(&[2], 7));
        local.insert("ab", f32s(&[2], 8));
        local.insert("mine", f32s(&[2], 9));
        let only = |keys: &[&str], strict| LoadOptions {
            only: Some(keys.iter().map(|&key| key.to_owned()).collect()),
            strict,
            ..LoadOptions::default()
        };
        let (loaded, report) =
            distribute_state_dict(&full, &local, &group, &only(&["a"], true)).unwrap();
        assert!(report.is_clean(), "{report:?}");
        assert_eq!(bits_at(&loaded, "a.x"), bits_at(&full, "a.x"));
        for key in ["ab", "mine"] {
            assert_eq!(bits_at(&loaded, key), bits_at(&local, key));
        }
        // A key that only the target has is missing, and so is one that nobody has.
        for key in ["mine", "x"] {
            let (_, report) =
                distribute_state_dict(&full, &local, &group, &only(&[key], false)).unwrap();
            assert_eq!(report.missing, [key]);
            assert!(distribute_state_dict(&full, &local, &group, &only(&[key], true)).is_err());
        }
    });
}

#[test]
fn whole_tensors_that_differ_between_ranks_are_an_error_that_names_them() {
    let error = one_error(run(3, |group| {
        let full: StateDict = [
            ("a", f32s(&[3], 1).into()),
            (
                "b",
                f32s(&[3], if group.rank() == 2 { 9 } else { 2 }).into(),
            ),
        ]
        .into_iter()
        .collect();
        let boxes = chunks(&[3], 3).swap_remove(group.rank());
        let local: StateDict = [("a", zeros(&[3], &boxes)), ("b", zeros(&[3], &boxes))]
            .into_iter()
            .collect();
        distribute_state_dict(&full, &local, &group, &LoadOptions::default())
    }));
    let StateError::DifferingOnRanks {
        rank: 2,
        key,
        reference: 0,
        ..
    } = error
    else {
        panic!("{error}")
    };
    assert_eq!(key, "b");
}

#[test]
fn what_fails_on_one_rank_changes_nothing_on_any() {
    let error = one_error(run(3, |group| {
        let full: StateDict = [
            ("a", f32s(&[3], 1).into()),
            (
                "b",
                f32s(&[if group.rank() == 2 { 4 } else { 3 }], 2).into(),
            ),
        ]
        .into_iter()
        .collect();
        let boxes = chunks(&[3], 3).swap_remove(group.rank());
        let local: StateDict = [("a", zeros(&[3], &boxes)), ("b", zeros(&[3], &boxes))]
            .into_iter()
            .collect();
        let outcome = distribute_state_dict(&full, &local, &group, &LoadOptions::default());
        for (_, value) in &local {
            assert_eq!(
                bits(&value.as_sharded().unwrap().shards()[0].tensor),
                [0; 4]
            );
        }
        outcome
    }));
    let StateError::ValueMismatch { rank: 2, key, .. } = error else {
        panic!("{error}")
    };
    assert_eq!(key, "b");
}

#[test]
fn strict_refuses_names_that_only_one_side_has_on_every_rank() {
    let error = one_error(run(2, |group| {
        let full: StateDict = [("a", f32s(&[1], 1).into())].into_iter().collect();
        let local: StateDict = [("b", f32s(&[1], 1).into())].into_iter().collect();
        distribute_state_dict(&full, &local, &group, &LoadOptions::default())
    }));
    let StateError::Incompatible { report, .. } = error else {
        panic!("{error}")
    };
    assert_eq!(
        (report.missing, report.unexpected),
        (vec!["b".to_owned()], vec!["a".to_owned()])
    );
}
