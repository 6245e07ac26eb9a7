//! Sharded to whole.

use candle_core::{DType, Device, Tensor};
use fsdp_comm::Operation;
use fsdp_flat::storage::HostBytesMut;
use fsdp_flat::{RawTensor, ShardedTensor};
use fsdp_layout::placement::boxes_of_placements;
use fsdp_layout::{Placement, PlainValue, TensorBox};
use fsdp_state::{
    GatherOptions, KeepOn, StateDict, StateError, StateValue, all_gather_sharded_tensor,
    gather_sharded_tensor, gather_state_dict,
};
use proptest::prelude::*;

use crate::ranks::{
    DTYPES, bits, bits_at, chunks, cut, cuts, f32s, flat_ranges, one_error, run, tensor,
};

fn keep_on(ranks: &[usize]) -> GatherOptions {
    GatherOptions {
        keep_on: KeepOn::Ranks(ranks.to_vec()),
        device: None,
    }
}

/// Makes a dict of two sharded tensors, a whole one, a raw one and a number.
fn state(rank: usize, world_size: usize) -> StateDict {
    let (weight, bias) = (f32s(&[7, 3], 1), tensor(&[5], DType::BF16, 2));
    let mut state = StateDict::new();
    let weight = cut(&weight, &flat_ranges(&[7, 3], world_size)[rank]);
    let bias = cut(&bias, &chunks(&[5], world_size)[rank]);
    // Every other rank has another order.
    if rank.is_multiple_of(2) {
        state.insert("weight", weight);
        state.insert("bias", bias);
    } else {
        state.insert("bias", bias);
        state.insert("weight", weight);
    }
    state.insert("buffer", f32s(&[2], 3));
    state.insert(
        "mask",
        RawTensor::new(fsdp_layout::DType::Bool, vec![2], vec![0, 1]).unwrap(),
    );
    state.insert("rank", rank as i64);
    state
}

#[test]
fn rows_of_four_ranks_are_concatenated_on_all_of_them() {
    let gathered = run(4, |group| {
        let mine = f32s(&[3, 3, 3], group.rank() as u64);
        let bounds = TensorBox::new(vec![3 * group.rank(), 0, 0], vec![3, 3, 3]);
        let flat = mine.flatten_all().unwrap();
        let sharded = ShardedTensor::from_flat(&[12, 3, 3], vec![bounds], &flat).unwrap();
        let state: StateDict = [("dt", StateValue::Sharded(sharded))].into_iter().collect();
        gather_state_dict(&state, &group, &GatherOptions::default()).unwrap()
    });
    let all: Vec<Tensor> = (0..4).map(|rank| f32s(&[3, 3, 3], rank)).collect();
    let expected = bits(&Tensor::cat(&all, 0).unwrap());
    for state in gathered {
        assert_eq!(bits_at(&state, "dt"), expected);
        assert!(
            state
                .get("dt")
                .unwrap()
                .as_tensor()
                .unwrap()
                .device()
                .is_cpu()
        );
    }
}

#[test]
fn only_the_ranks_that_keep_get_something_and_each_keeps_its_own_order_and_plain_values() {
    for world_size in 1..=5 {
        for keeping in [
            vec![0],
            vec![world_size - 1],
            vec![0, world_size / 2],
            vec![],
        ] {
            let gathered = run(world_size, |group| {
                gather_state_dict(&state(group.rank(), world_size), &group, &keep_on(&keeping))
                    .unwrap()
            });
            for (rank, full) in gathered.into_iter().enumerate() {
                if !keeping.contains(&rank) {
                    assert!(full.is_empty());
                    continue;
                }
                assert!(full.keys().eq(state(rank, world_size).keys()));
                assert_eq!(bits_at(&full, "weight"), bits(&f32s(&[7, 3], 1)));
                assert_eq!(bits_at(&full, "bias"), bits(&tensor(&[5], DType::BF16, 2)));
                assert_eq!(bits_at(&full, "buffer"), bits(&f32s(&[2], 3)));
                assert!(
                    matches!(full.get("mask"), Some(StateValue::Raw(mask)) if mask.bytes() == [0, 1])
                );
                assert_eq!(
                    full.plain_at(&["rank"]).and_then(PlainValue::as_int),
                    Some(rank as i64)
                );
            }
        }
    }
}

#[test]
fn small_sharded_tensors_share_one_collective_and_no_byte_more_than_needed_moves() {
    let traffic = |options: GatherOptions| {
        run(4, move |group| {
            gather_state_dict(&state(group.rank(), 4), &group, &options).unwrap();
            group.traffic()
        })
    };
    let bytes = 7 * 3 * 4 + 5 * 2;
    for traffic in traffic(GatherOptions::default()) {
        assert_eq!(traffic.count(Operation::AllGatherUneven), 1);
        assert_eq!(traffic.count(Operation::AllGatherObject), 1);
        assert_eq!(
            traffic.count(Operation::Gather) + traffic.count(Operation::AllToAllUneven),
            0
        );
    }
    let all = traffic(keep_on(&[2]));
    for (rank, traffic) in all.iter().enumerate() {
        assert_eq!(traffic.count(Operation::GatherUneven), 1);
        assert_eq!(traffic.count(Operation::AllGatherUneven), 0);
        assert!(rank == 2 || traffic.tensor_bytes_received == 0);
    }
    // Rank 2 has 6 of the 21 elements of the weight, and 1 of the 5 of the bias.
    assert_eq!(all[2].tensor_bytes_received, bytes - 6 * 4 - 2);
    assert_eq!(
        all.iter()
            .map(|traffic| traffic.tensor_bytes_sent)
            .sum::<u64>(),
        bytes - 6 * 4 - 2
    );
}

#[test]
fn replicas_of_a_hybrid_mesh_are_one_tensor_and_what_is_here_does_not_move() {
    let full = f32s(&[5, 4], 9);
    run(4, |group| {
        let coordinate = [group.rank() / 2, group.rank() % 2];
        let boxes = boxes_of_placements(
            &[5, 4],
            &[Placement::Replicate, Placement::Shard(0)],
            &[2, 2],
            &coordinate,
        )
        .unwrap();
        let gathered = all_gather_sharded_tensor(&cut(&full, &boxes), &group, None).unwrap();
        assert_eq!(bits(&gathered), bits(&full));
        let before = group.traffic();
        let whole = cut(&full, &[TensorBox::whole(&[5, 4])]);
        assert_eq!(
            bits(&all_gather_sharded_tensor(&whole, &group, None).unwrap()),
            bits(&full)
        );
        assert_eq!(group.traffic().since(&before).tensor_bytes(), 0);
    });
}

#[test]
fn scalars_empty_tensors_and_more_ranks_than_rows() {
    let full: Vec<Tensor> = [&[][..], &[0, 3], &[3, 0], &[2, 3], &[1]]
        .iter()
        .map(|shape| tensor(shape, DType::I64, 5))
        .collect();
    run(5, |group| {
        for full in &full {
            let boxes = match full.rank() {
                0 => vec![
                    if group.rank() == 3 {
                        vec![TensorBox::whole(&[])]
                    } else {
                        vec![]
                    };
                    5
                ],
                _ => chunks(full.dims(), 5),
            };
            let sharded = cut(full, &boxes[group.rank()]);
            let gathered = all_gather_sharded_tensor(&sharded, &group, None).unwrap();
            assert_eq!(
                (gathered.dims(), bits(&gathered)),
                (full.dims(), bits(full))
            );
            let root = gather_sharded_tensor(&sharded, &group, 1, Some(&Device::Cpu)).unwrap();
            assert_eq!(
                root.map(|root| bits(&root)),
                (group.rank() == 1).then(|| bits(full))
            );
        }
    });
}

#[test]
fn containers_keep_their_kinds() {
    let full = f32s(&[4], 6);
    run(2, |group| {
        let mine = || StateValue::Sharded(cut(&full, &chunks(&[4], 2)[group.rank()]));
        let inner: StateDict = [("x", mine())].into_iter().collect();
        let list = StateValue::List(vec![mine(), 3i64.into(), inner.into()]);
        let state: StateDict = [
            ("list", list),
            ("tuple", StateValue::Tuple(vec![mine()])),
            ("empty", StateDict::new().into()),
        ]
        .into_iter()
        .collect();
        let gathered = gather_state_dict(&state, &group, &GatherOptions::default()).unwrap();
        let whole = |value: &StateValue| assert_eq!(bits(value.as_tensor().unwrap()), bits(&full));
        let Some(StateValue::List(list)) = gathered.get("list") else {
            panic!("no list")
        };
        whole(&list[0]);
        whole(list[2].as_dict().unwrap().get("x").unwrap());
        let Some(StateValue::Tuple(tuple)) = gathered.get("tuple") else {
            panic!("no tuple")
        };
        whole(&tuple[0]);
        assert!(gathered.dict("empty").unwrap().is_empty());
    });
}

#[test]
fn results_share_memory_with_nothing() {
    run(2, |group| {
        let state = state(group.rank(), 2);
        let gathered = gather_state_dict(&state, &group, &GatherOptions::default()).unwrap();
        let again = gather_state_dict(&state, &group, &GatherOptions::default()).unwrap();
        for key in ["weight", "bias", "buffer"] {
            let tensor = gathered.get(key).and_then(StateValue::as_tensor).unwrap();
            HostBytesMut::write(tensor).unwrap().fill(0xa5);
        }
        assert_eq!(bits_at(&again, "weight"), bits(&f32s(&[7, 3], 1)));
        assert_eq!(bits_at(&again, "buffer"), bits_at(&state, "buffer"));
        assert_eq!(bits_at(&state, "buffer"), bits(&f32s(&[2], 3)));
    });
}

#[test]
fn elements_on_no_rank_are_one_error_that_names_their_box() {
    let full = f32s(&[6, 2], 7);
    let error = one_error(run(3, |group| {
        let rows = |start, len| TensorBox::new(vec![start, 0], vec![len, 2]);
        let boxes = [vec![rows(0, 2)], vec![rows(3, 1)], vec![rows(4, 2)]];
        let before = group.traffic();
        let outcome = gather_sharded_tensor(&cut(&full, &boxes[group.rank()]), &group, 2, None);
        assert_eq!(group.traffic().since(&before).tensor_bytes(), 0);
        group.barrier().unwrap();
        outcome
    }));
    let StateError::NotCovered {
        rank: 2,
        missing,
        shape,
        ..
    } = error
    else {
        panic!("{error}")
    };
    assert_eq!(
        (missing, shape),
        (TensorBox::new(vec![2, 0], vec![1, 2]), vec![6, 2])
    );
}

#[test]
fn a_subgroup_gathers_by_itself() {
    let full = f32s(&[5], 8);
    run(4, |group| {
        let Some(pair) = group.subgroup(&[1, 3]).unwrap() else {
            return;
        };
        let sharded = cut(&full, &chunks(&[5], 2)[pair.rank()]);
        assert_eq!(
            bits(&all_gather_sharded_tensor(&sharded, &pair, None).unwrap()),
            bits(&full)
        );
        let nothing = cut(&full, &[]);
        let lost = all_gather_sharded_tensor(
            if pair.rank() == 0 { &sharded } else { &nothing },
            &pair,
            None,
        );
        assert!(matches!(lost, Err(StateError::NotCovered { rank: 1, .. })));
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn any_cut_of_any_tensor_gathers_to_the_original_bits(
        shape in prop::collection::vec(0usize..6, 0..4),
        world_size in 1usize..=5,
        dtype in 0..DTYPES.len(),
        seed in any::<u64>(),
        keep in any::<u8>(),
    ) {
        let full = tensor(&shape, DTYPES[dtype], seed);
        let cuts = cuts(&shape, world_size, seed);
        let keep_on = if keep % 3 == 0 {
            KeepOn::All
        } else {
            KeepOn::Ranks((0..world_size).filter(|rank| keep >> rank & 1 == 1).collect())
        };
        let gathered = run(world_size, |group| {
            let state: StateDict = [("x", cut(&full, &cuts[group.rank()]).into())].into_iter().collect();
            let options = GatherOptions { keep_on: keep_on.clone(), device: None };
            gather_state_dict(&state, &group, &options).unwrap()
        });
        for (rank, state) in gathered.iter().enumerate() {
            prop_assert_eq!(state.len(), usize::from(keep_on.contains(rank)));
            if keep_on.contains(rank) {
                prop_assert_eq!(bits_at(state, "x"), bits(&full));
            }
        }
    }
}
