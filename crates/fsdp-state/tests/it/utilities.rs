//! Functions that one rank runs on its own state dict.

use candle_core::{DType, Device};
use fsdp_flat::RawTensor;
use fsdp_flat::storage::HostBytesMut;
use fsdp_layout::PlainValue;
use fsdp_state::{
    GatherOptions, KeepOn, StateDict, StateError, StateValue, check_state_dict_similarity,
    copy_state_dict, create_cpu_state_dict, flatten_containers, gather_state_dict,
    iterate_state_dict, offload_state_dict_to_cpu,
};

use crate::ranks::{bits, bits_at, chunks, cut, f32s, flat_ranges, run, tensor};

/// Makes a dict with a value of every kind.
fn mixed(seed: u64) -> StateDict {
    let mut state = StateDict::new();
    state.insert("tensor", f32s(&[5, 2], seed));
    state.insert("bytes", PlainValue::Bytes(b"abc".to_vec()));
    state.insert("scalar", f32s(&[], seed));
    state.insert("empty", f32s(&[0, 3], seed));
    state.insert("float", 3.5 + seed as f64);
    state.insert("eight", tensor(&[3], DType::F8E4M3, seed));
    state.insert(
        "raw",
        RawTensor::new(fsdp_layout::DType::Bool, vec![2], vec![1, seed as u8 % 2]).unwrap(),
    );
    state.insert(
        "sharded",
        cut(&f32s(&[4, 3], seed), &flat_ranges(&[4, 3], 2)[1]),
    );
    let nested = StateDict::from_iter([("x", StateValue::from(f32s(&[2], seed)))]);
    state.insert(
        "list",
        StateValue::List(vec![f32s(&[3], seed).into(), 1i64.into(), nested.into()]),
    );
    state.insert("tuple", StateValue::Tuple(vec![f32s(&[1], seed).into()]));
    state
}

/// Returns all bytes and values, for comparison.
fn contents(state: &StateDict) -> Vec<String> {
    let mut contents = Vec::new();
    iterate_state_dict(state, |path, value| {
        let key = path.flat_key();
        match value {
            StateValue::Sharded(tensor) => {
                for shard in tensor.shards() {
                    contents.push(format!("{key} {} {:?}", shard.bounds, bits(&shard.tensor)));
                }
            }
            StateValue::Tensor(tensor) => {
                contents.push(format!("{key} {:?} {:?}", tensor.shape(), bits(tensor)));
            }
            StateValue::Raw(tensor) => contents.push(format!("{key} {:?}", tensor.bytes())),
            other => contents.push(format!("{key} {other:?}")),
        }
        Ok(value.clone())
    })
    .unwrap();
    contents
}

#[test]
fn a_cpu_dict_is_similar_until_a_size_changes_and_equal_after_the_copy() {
    let state = mixed(1);
    let mut cpu = create_cpu_state_dict(&state).unwrap();
    assert!(check_state_dict_similarity(&state, &cpu) && check_state_dict_similarity(&cpu, &state));
    assert_eq!(bits_at(&cpu, "tensor"), [0; 40]);
    let live = cpu
        .get("tensor")
        .and_then(StateValue::as_tensor)
        .unwrap()
        .clone();
    copy_state_dict(&state, &mut cpu).unwrap();
    assert_eq!(contents(&cpu), contents(&state));
    // The values came into the memory that was there.
    assert_eq!(bits(&live), bits_at(&state, "tensor"));
    copy_state_dict(&mixed(2), &mut cpu).unwrap();
    assert_eq!(contents(&cpu), contents(&mixed(2)));
    assert_eq!(contents(&state), contents(&mixed(1)));

    for change in [
        ("tensor", f32s(&[2, 5], 1).into()),
        ("tensor", tensor(&[5, 2], DType::I32, 1).into()),
        ("tensor", StateValue::from(1.0)),
        (
            "sharded",
            cut(&f32s(&[4, 3], 1), &flat_ranges(&[4, 3], 2)[0]).into(),
        ),
        ("list", StateValue::List(vec![])),
        ("tuple", StateValue::List(vec![f32s(&[1], 1).into()])),
        ("more", StateValue::from(1i64)),
    ] {
        let mut other = mixed(3);
        other.insert(change.0, change.1);
        assert!(!check_state_dict_similarity(&other, &cpu), "{}", change.0);
        let error = copy_state_dict(&other, &mut cpu).unwrap_err();
        assert!(
            matches!(error, StateError::CompanionMismatch { .. }),
            "{error}"
        );
        assert_eq!(contents(&cpu), contents(&mixed(2)), "{error}");
    }
    // Plain values may differ, and so may the order of keys.
    let mut other = StateDict::new();
    for (key, value) in mixed(2).into_iter().collect::<Vec<_>>().into_iter().rev() {
        other.insert(key, value);
    }
    other.insert("float", "text");
    assert!(check_state_dict_similarity(&other, &cpu));
}

#[test]
fn offloaded_tensors_are_copies_on_the_ranks_that_keep_them() {
    let state = mixed(4);
    for rank in 0..4 {
        let offloaded =
            offload_state_dict_to_cpu(&state, &KeepOn::Ranks(vec![0, 2]), rank).unwrap();
        if rank % 2 == 1 {
            assert!(offloaded.is_empty());
            continue;
        }
        assert_eq!(contents(&offloaded), contents(&state));
        let tensor = offloaded
            .get("tensor")
            .and_then(StateValue::as_tensor)
            .unwrap();
        HostBytesMut::write(tensor).unwrap().fill(7);
        let shard = &offloaded
            .get("sharded")
            .and_then(StateValue::as_sharded)
            .unwrap()
            .shards()[0];
        HostBytesMut::write(&shard.tensor).unwrap().fill(7);
        assert_eq!(contents(&state), contents(&mixed(4)));
    }
}

#[test]
fn a_copy_takes_the_values_of_boxes_in_place() {
    let (full, boxes) = (f32s(&[3, 3], 5), flat_ranges(&[3, 3], 2).swap_remove(0));
    let state = StateDict::from_iter([("dt", StateValue::from(cut(&full, &boxes)))]);
    let companion = create_cpu_state_dict(&state).unwrap();
    let mut copy = companion.clone();
    copy_state_dict(&state, &mut copy).unwrap();
    assert_eq!(contents(&companion), contents(&state));
    assert_eq!(contents(&copy), contents(&state));
    let shard = &copy
        .get("dt")
        .and_then(StateValue::as_sharded)
        .unwrap()
        .shards()[0]
        .tensor;
    HostBytesMut::write(shard).unwrap().fill(1);
    assert_ne!(contents(&companion), contents(&state));
    assert!(matches!(
        copy_state_dict(&state, &mut StateDict::new()),
        Err(StateError::CompanionMismatch { .. })
    ));
}

#[test]
fn a_mapped_value_that_its_companion_cannot_take_is_refused() {
    let state = StateDict::from_iter([("w", StateValue::from(f32s(&[2], 1)))]);
    let mut companion = create_cpu_state_dict(&state).unwrap();
    let half = iterate_state_dict(&state, |_, value| {
        let tensor = value.as_tensor().unwrap();
        Ok(tensor.to_dtype(DType::F16)?.into())
    })
    .unwrap();
    let error = copy_state_dict(&half, &mut companion).unwrap_err();
    assert!(
        matches!(&error, StateError::CompanionMismatch { key, .. } if key == "w"),
        "{error}"
    );
    assert_eq!(bits_at(&companion, "w"), [0; 8]);
}

#[test]
fn an_iteration_sees_leaves_in_container_order_and_ends_with_the_first_error() {
    let state = mixed(1);
    let mut order = Vec::new();
    let mapped = iterate_state_dict(&state, |path, value| {
        order.push(path.flat_key());
        Ok(value.clone())
    })
    .unwrap();
    assert_eq!(
        order,
        [
            "tensor", "bytes", "scalar", "empty", "float", "eight", "raw", "sharded", "list.0",
            "list.1", "list.2.x", "tuple.0"
        ]
    );
    assert_eq!(contents(&mapped), contents(&state));
    assert!(matches!(mapped.get("tuple"), Some(StateValue::Tuple(_))));
    assert!(matches!(mapped.get("list"), Some(StateValue::List(_))));
    let mut seen = 0;
    let failed = iterate_state_dict(&state, |_, value| {
        seen += 1;
        match seen {
            2 => Err(StateError::NoSource { rank: 0 }),
            _ => Ok(value.clone()),
        }
    });
    assert!(failed.is_err());
    assert_eq!(seen, 2);
}

#[test]
fn whole_or_offloaded_is_chosen_apart_from_who_keeps_the_result() {
    let full = f32s(&[5, 2], 6);
    run(3, |group| {
        let sharded = || cut(&full, &chunks(&[5, 2], 3)[group.rank()]);
        let state = StateDict::from_iter([("w", StateValue::from(sharded()))]);
        for keep_on in [KeepOn::All, KeepOn::Ranks(vec![1])] {
            let offloaded = offload_state_dict_to_cpu(&state, &keep_on, group.rank()).unwrap();
            let options = GatherOptions {
                keep_on: keep_on.clone(),
                device: Some(Device::Cpu),
            };
            let whole = gather_state_dict(&state, &group, &options).unwrap();
            if !keep_on.contains(group.rank()) {
                assert!(offloaded.is_empty() && whole.is_empty());
                continue;
            }
            assert_eq!(contents(&offloaded), contents(&state));
            assert_eq!(bits_at(&whole, "w"), bits(&full));
            let tensor = whole.get("w").unwrap().as_tensor().unwrap();
            assert!(tensor.device().same_device(&Device::Cpu));
        }
    });
}

#[test]
fn keys_that_are_no_text_are_written_as_python_writes_them() {
    let keys = [
        (PlainValue::Float(0.5), "0.5"),
        (PlainValue::Float(2.0), "2.0"),
        (PlainValue::Int(3), "3"),
        (PlainValue::Bool(true), "True"),
        (PlainValue::None, "None"),
    ];
    let entries = keys
        .iter()
        .map(|(key, _)| (key.clone(), PlainValue::Int(1)))
        .collect();
    let state = StateDict::from_iter([("d", StateValue::from(PlainValue::Dict(entries)))]);
    let flat = flatten_containers(&state).unwrap();
    let expected: Vec<String> = keys.iter().map(|(_, text)| format!("d.{text}")).collect();
    assert_eq!(
        flat.values.keys().collect::<Vec<_>>(),
        expected.iter().collect::<Vec<_>>()
    );
}
