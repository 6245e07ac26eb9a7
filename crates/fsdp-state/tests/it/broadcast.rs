//! One rank's values in every rank's layout.

use candle_core::{DType, Tensor};
use fsdp_comm::Operation;
use fsdp_flat::{RawTensor, ShardedTensor};
use fsdp_layout::{PlainValue, TensorBox};
use fsdp_state::{
    LoadOptions, StateDict, StateError, StateValue, broadcast_state_dict, copy_state_dict,
};
use proptest::prelude::*;

use crate::ranks::{
    DTYPES, assert_cut, bits, bits_at, chunks, cut, cuts, f32s, flat_ranges, one_error, run, tensor,
};

fn not_strict() -> LoadOptions {
    LoadOptions {
        strict: false,
        ..LoadOptions::default()
    }
}

fn mask(bytes: [u8; 2]) -> RawTensor {
    RawTensor::new(fsdp_layout::DType::Bool, vec![2], bytes.to_vec()).unwrap()
}

/// Makes the dict of the root.
fn full() -> StateDict {
    let mut state = StateDict::new();
    state.insert("step", f32s(&[], 1));
    state.insert("buffer", f32s(&[3], 2));
    state.insert("mask", mask([1, 1]));
    state.insert("weight", f32s(&[5, 3], 3));
    state.insert("lr", 0.5);
    let mut nested = StateDict::new();
    nested.insert("bias", tensor(&[4], DType::F16, 4));
    state.insert("nested", nested);
    state
}

/// Makes the dict that a rank has before, in another order: zeros, chunks of the weight, flat
/// ranges of the bias.
fn local(rank: usize, world_size: usize) -> StateDict {
    let zeros =
        |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &candle_core::Device::Cpu).unwrap();
    let mut state = StateDict::new();
    let mut nested = StateDict::new();
    let bias = flat_ranges(&[4], world_size).swap_remove(rank);
    nested.insert(
        "bias",
        ShardedTensor::zeros(DType::F16, &[4], &bias).unwrap(),
    );
    state.insert("nested", nested);
    let weight = chunks(&[5, 3], world_size).swap_remove(rank);
    state.insert(
        "weight",
        ShardedTensor::zeros(DType::F32, &[5, 3], &weight).unwrap(),
    );
    state.insert("buffer", zeros(&[3], DType::F32));
    state.insert("mask", mask([0, 0]));
    // A plain value takes a 0-dim tensor, as an optimizer's step may be either.
    state.insert("step", 0i64);
    state.insert("lr", 0.1);
    state
}

fn assert_full(loaded: &StateDict, rank: usize, world_size: usize) {
    let full = full();
    let tensor = |key| full.get(key).and_then(StateValue::as_tensor).unwrap();
    let sharded = |state: &StateDict, key| {
        state
            .get(key)
            .and_then(StateValue::as_sharded)
            .unwrap()
            .clone()
    };
    assert_eq!(bits_at(loaded, "step"), bits(tensor("step")));
    assert_eq!(bits_at(loaded, "buffer"), bits(tensor("buffer")));
    assert!(matches!(loaded.get("mask"), Some(StateValue::Raw(mask)) if mask.bytes() == [1, 1]));
    assert_eq!(
        loaded.plain_at(&["lr"]).and_then(PlainValue::as_float),
        Some(0.5)
    );
    assert_cut(
        &sharded(loaded, "weight"),
        tensor("weight"),
        &chunks(&[5, 3], world_size)[rank],
    );
    let bias = full
        .dict("nested")
        .unwrap()
        .get("bias")
        .unwrap()
        .as_tensor()
        .unwrap()
        .clone();
    let nested = loaded.dict("nested").unwrap();
    assert_cut(
        &sharded(nested, "bias"),
        &bias,
        &flat_ranges(&[4], world_size)[rank],
    );
}

#[test]
fn every_rank_gets_its_part_of_the_roots_values_in_its_own_layout() {
    for world_size in 1..=5 {
        let root = world_size - 1;
        run(world_size, |group| {
            let local = local(group.rank(), world_size);
            // The state dicts of the other ranks are ignored.
            let brought = if group.rank() == root {
                Some(full())
            } else {
                Some(StateDict::new())
            };
            let options = LoadOptions::default();
            let (loaded, report) =
                broadcast_state_dict(brought.as_ref(), &local, root, &group, &options).unwrap();
            assert!(report.is_clean());
            assert!(loaded.keys().eq(local.keys()));
            assert_full(&loaded, group.rank(), world_size);
            // The local tensors are untouched, until they are copied into.
            assert_eq!(bits_at(&local, "buffer"), [0; 12]);
            let traffic = group.traffic();
            assert_eq!(traffic.count(Operation::AllGatherObject), 1);
            let tensors = [Operation::Broadcast, Operation::ScatterUneven]
                .map(|operation| traffic.count(operation));
            assert!(tensors.iter().sum::<u64>() <= 4, "{tensors:?}");
        });
    }
}

#[test]
fn the_root_sends_each_rank_its_boxes_and_no_more() {
    let sent = run(4, |group| {
        let weight = f32s(&[8, 2], 1);
        let full: StateDict = [("weight", StateValue::Tensor(weight))]
            .into_iter()
            .collect();
        let boxes = &chunks(&[8, 2], 4)[group.rank()];
        let local: StateDict = [(
            "weight",
            ShardedTensor::zeros(DType::F32, &[8, 2], boxes)
                .unwrap()
                .into(),
        )]
        .into_iter()
        .collect();
        broadcast_state_dict(Some(&full), &local, 1, &group, &LoadOptions::default()).unwrap();
        group.traffic().tensor_bytes_sent
    });
    assert_eq!(sent, [0, 6 * 2 * 4, 0, 0]);
}

#[test]
fn strict_names_what_is_missing_and_unexpected_on_every_rank_before_anything_moves() {
    let change = |state: &mut StateDict| {
        state.remove("lr");
        state.remove("weight");
        state.insert("extra", f32s(&[9], 5));
        state.insert("another", 5i64);
    };
    let brought = |rank: usize| {
        let mut full = full();
        change(&mut full);
        (rank == 0).then_some(full)
    };
    let error = one_error(run(3, |group| {
        let local = local(group.rank(), 3);
        let outcome = broadcast_state_dict(
            brought(group.rank()).as_ref(),
            &local,
            0,
            &group,
            &LoadOptions::default(),
        );
        assert_eq!(group.traffic().tensor_bytes(), 0);
        group.barrier().unwrap();
        outcome
    }));
    let message = error.to_string();
    let StateError::Incompatible { report, .. } = error else {
        panic!("{error}")
    };
    assert_eq!(report.missing, ["lr", "weight"]);
    assert_eq!(report.unexpected, ["another", "extra"]);
    assert!(
        message.contains("missing key(s) `lr`, `weight`; unexpected key(s) `another`, `extra`"),
        "{message}"
    );

    let loaded = run(3, |group| {
        let local = local(group.rank(), 3);
        let brought = brought(group.rank());
        let before = local
            .get("weight")
            .and_then(StateValue::as_sharded)
            .unwrap()
            .clone();
        let (loaded, report) =
            broadcast_state_dict(brought.as_ref(), &local, 0, &group, &not_strict()).unwrap();
        assert_eq!(
            loaded.plain_at(&["lr"]).and_then(PlainValue::as_float),
            Some(0.1)
        );
        let weight = loaded
            .get("weight")
            .and_then(StateValue::as_sharded)
            .unwrap();
        assert_cut(
            weight,
            &Tensor::zeros((5, 3), DType::F32, &candle_core::Device::Cpu).unwrap(),
            &before.boxes(),
        );
        assert!(!loaded.contains_key("extra"));
        assert_eq!(bits_at(&loaded, "buffer"), bits(&f32s(&[3], 2)));
        (report, group.traffic().tensor_bytes_sent)
    });
    assert!(
        loaded
            .iter()
            .all(|(report, _)| report.missing == ["lr", "weight"])
    );
    assert!(
        loaded
            .iter()
            .all(|(report, _)| report.unexpected == ["another", "extra"])
    );
    // To two ranks the buffer and the mask, and of the bias what the root does not keep: nothing of
    // `extra`.
    assert_eq!(loaded[0].1, 2 * (12 + 2) + 2 * 2);
}

#[test]
fn shapes_and_dtypes_that_do_not_fit_are_an_error_even_if_not_strict() {
    let error = one_error(run(2, |group| {
        let mut full = full();
        full.insert("weight", f32s(&[3, 5], 3));
        full.insert("buffer", tensor(&[3], DType::F64, 3));
        full.insert("nested", 3i64);
        broadcast_state_dict(
            Some(&full),
            &local(group.rank(), 2),
            0,
            &group,
            &not_strict(),
        )
    }));
    let StateError::Incompatible { report, .. } = error else {
        panic!("{error}")
    };
    let mismatched: Vec<_> = report
        .mismatched
        .iter()
        .map(|m| (m.fqn.as_str(), m.saved.as_str(), m.current.as_str()))
        .collect();
    assert_eq!(
        mismatched,
        [
            ("buffer", "float64 [3]", "float32 [3]"),
            ("weight", "float32 [3, 5]", "float32 [5, 3]")
        ]
    );
    // A value where a dict is wanted is another name.
    assert_eq!(
        (report.missing, report.unexpected),
        (vec!["nested.bias".to_owned()], vec!["nested".to_owned()])
    );
}

#[test]
fn small_tensors_share_one_broadcast_and_a_missing_key_is_everyones_error() {
    let keys: Vec<String> = (0..20).map(|k| format!("p{k}")).collect();
    let names: Vec<&str> = keys.iter().map(String::as_str).collect();
    run(3, |group| {
        let state = |seed: u64| -> StateDict {
            names
                .iter()
                .map(|&key| {
                    (
                        key,
                        StateValue::Tensor(f32s(&[4, 2], seed + key.len() as u64)),
                    )
                })
                .collect()
        };
        let (full, mut local) = (state(1), state(100));
        let (loaded, _) =
            broadcast_state_dict(Some(&full), &local, 0, &group, &not_strict()).unwrap();
        assert_eq!(group.traffic().count(Operation::Broadcast), 1);
        assert_eq!(loaded.len(), 20);
        // Names that the local dict does not have do not move.
        let two: StateDict = ["p3", "p1"]
            .into_iter()
            .map(|key| (key, local.get(key).unwrap().clone()))
            .collect();
        let (chosen, _) =
            broadcast_state_dict(Some(&full), &two, 0, &group, &not_strict()).unwrap();
        assert_eq!(chosen.keys().collect::<Vec<_>>(), ["p3", "p1"]);
        // One rank alone lacks a key.
        let mut less = local.clone();
        if group.rank() == 1 {
            less.remove("p3");
        }
        let error = broadcast_state_dict(Some(&full), &less, 0, &group, &not_strict()).unwrap_err();
        assert!(
            matches!(&error, StateError::KeyMismatch { rank: 1, key, .. } if key == "p3"),
            "{error}"
        );
        copy_state_dict(&loaded, &mut local).unwrap();
        for key in &names {
            assert_eq!(bits_at(&local, key), bits_at(&full, key));
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn any_tensor_goes_from_any_root_into_any_cut(
        shape in prop::collection::vec(0usize..6, 0..4),
        world_size in 1usize..=5,
        dtype in 0..DTYPES.len(),
        seed in any::<u64>(),
    ) {
        let root = seed as usize % world_size;
        let values = tensor(&shape, DTYPES[dtype], seed);
        let cuts = cuts(&shape, world_size, seed / 7);
        run(world_size, |group| {
            let zeros = ShardedTensor::zeros(DTYPES[dtype], &shape, &cuts[group.rank()]).unwrap();
            let local: StateDict = [("x", zeros.into())].into_iter().collect();
            let full: Option<StateDict> =
                (group.rank() == root).then(|| [("x", StateValue::Tensor(values.clone()))].into_iter().collect());
            let (loaded, _) =
                broadcast_state_dict(full.as_ref(), &local, root, &group, &LoadOptions::default()).unwrap();
            assert_cut(loaded.get("x").unwrap().as_sharded().unwrap(), &values, &cuts[group.rank()]);
        });
    }
}

#[test]
fn replicas_get_their_copies_in_rounds() {
    // 56 MiB are wanted from the root, more than fits one round of 32 MiB.
    let (rows, columns) = (2 << 10, 2 << 10);
    let value = Tensor::arange(0u32, (rows * columns) as u32, &candle_core::Device::Cpu).unwrap();
    let value = value.reshape((rows, columns)).unwrap();
    run(5, |group| {
        let full: StateDict = [("p", StateValue::Tensor(value.clone()))]
            .into_iter()
            .collect();
        let half = |k: usize| TensorBox::new(vec![k * rows / 2, 0], vec![rows / 2, columns]);
        let boxes = if group.rank() == 4 {
            vec![half(0)]
        } else {
            vec![half(0), half(1)]
        };
        let zeros = ShardedTensor::zeros(DType::U32, &[rows, columns], &boxes).unwrap();
        let local: StateDict = [("p", zeros.into())].into_iter().collect();
        let (loaded, _) =
            broadcast_state_dict(Some(&full), &local, 1, &group, &LoadOptions::default()).unwrap();
        assert_cut(
            loaded.get("p").unwrap().as_sharded().unwrap(),
            &value,
            &boxes,
        );
        assert_eq!(group.traffic().count(Operation::ScatterUneven), 2);
    });
}

/// The root packs 32 MiB at a time also of a tensor that is larger, in windows of that size.
#[test]
fn replicas_get_their_copies_of_a_large_tensor_in_rounds() {
    let (rows, columns) = (20 << 10, 1 << 10);
    let halves = [0, rows / 2].map(|start| TensorBox::new(vec![start, 0], vec![rows / 2, columns]));
    run(3, |group| {
        let value = Tensor::full(7u32, (rows, columns), &candle_core::Device::Cpu).unwrap();
        let full: StateDict = [("p", StateValue::Tensor(value))].into_iter().collect();
        let boxes: &[TensorBox] = if group.rank() == 0 { &[] } else { &halves };
        let zeros = ShardedTensor::zeros(DType::U32, &[rows, columns], boxes).unwrap();
        let local: StateDict = [("p", zeros.into())].into_iter().collect();
        broadcast_state_dict(Some(&full), &local, 0, &group, &LoadOptions::default()).unwrap();
        // Of the windows of 32, 32 and 16 MiB, two ranks want all.
        assert_eq!(group.traffic().count(Operation::ScatterUneven), 2 + 2 + 1);
    });
}

#[test]
fn the_root_may_itself_be_sharded() {
    let values = f32s(&[4, 2], 3);
    run(2, |group| {
        let parts = cut(&values, &[chunks(&[4, 2], 2).concat()].concat());
        let full: StateDict = [("x", parts.into())].into_iter().collect();
        let zeros =
            ShardedTensor::zeros(DType::F32, &[4, 2], &flat_ranges(&[4, 2], 2)[group.rank()])
                .unwrap();
        let local: StateDict = [("x", zeros.into())].into_iter().collect();
        let (loaded, _) =
            broadcast_state_dict(Some(&full), &local, 0, &group, &LoadOptions::default()).unwrap();
        assert_cut(
            loaded.get("x").unwrap().as_sharded().unwrap(),
            &values,
            &flat_ranges(&[4, 2], 2)[group.rank()],
        );
    });
}
