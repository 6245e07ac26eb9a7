//! Any boxes to any boxes.

use candle_core::DType;
use fsdp_comm::Operation;
use fsdp_flat::ShardedTensor;
use fsdp_layout::TensorBox;
use fsdp_state::{
    LoadOptions, Reshard, StateDict, StateError, reshard_sharded_tensor, reshard_sharded_tensors,
    reshard_state_dict,
};
use proptest::prelude::*;

use crate::ranks::{
    DTYPES, assert_cut, chunks, cut, cuts, f32s, flat_ranges, one_error, run, tensor,
};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn any_layout_becomes_any_other_bit_for_bit(
        shape in prop::collection::vec(0usize..7, 0..5),
        world_size in 1usize..=5,
        dtype in 0..DTYPES.len(),
        seed in any::<u64>(),
        wanted in any::<u64>(),
    ) {
        let full = tensor(&shape, DTYPES[dtype], seed);
        let (have, want) = (cuts(&shape, world_size, seed), cuts(&shape, world_size, wanted));
        run(world_size, |group| {
            let sharded = cut(&full, &have[group.rank()]);
            let resharded = reshard_sharded_tensor(&sharded, &want[group.rank()], &group).unwrap();
            assert_cut(&resharded, &full, &want[group.rank()]);
            let traffic = group.traffic();
            assert!(traffic.count(Operation::AllToAllUneven) <= 1);
            // At most what is wanted comes here, and nothing of what is here already.
            let wanted: usize = want[group.rank()].iter().map(TensorBox::numel).sum();
            assert!(traffic.tensor_bytes_received <= (wanted * DTYPES[dtype].size_in_bytes()) as u64);
        });
    }

    #[test]
    fn many_tensors_go_together(
        shapes in prop::collection::vec(prop::collection::vec(0usize..5, 0..4), 0..6),
        world_size in 1usize..=4,
        seed in any::<u64>(),
    ) {
        let tensors: Vec<_> =
            shapes.iter().zip(0u64..).map(|(shape, k)| tensor(shape, DTYPES[k as usize], seed ^ k)).collect();
        let cuts_of = |seed: u64| -> Vec<_> {
            shapes.iter().zip(0u64..).map(|(shape, k)| cuts(shape, world_size, seed.wrapping_add(k))).collect()
        };
        let (have, want) = (cuts_of(seed), cuts_of(seed / 11));
        run(world_size, |group| {
            let (rank, last) = (group.rank(), shapes.len());
            let names: Vec<String> = (0..last).map(|k| format!("t{k}")).collect();
            let sharded: Vec<_> = tensors.iter().zip(&have).map(|(full, have)| cut(full, &have[rank])).collect();
            // Each rank lists them from another one on.
            let order: Vec<usize> = (0..last).map(|k| (k + rank) % last).collect();
            let items: Vec<Reshard<'_>> = order
                .iter()
                .map(|&k| Reshard { name: &names[k], tensor: &sharded[k], boxes: &want[k][rank] })
                .collect();
            let resharded = reshard_sharded_tensors(&items, &group).unwrap();
            assert_eq!(resharded.len(), last);
            for (&k, resharded) in order.iter().zip(&resharded) {
                assert_cut(resharded, &tensors[k], &want[k][rank]);
            }
        });
    }
}

#[test]
fn one_all_to_all_moves_many_tensors_and_only_overlaps() {
    let traffic = run(4, |group| {
        let tensors: Vec<_> = (0..10).map(|k| f32s(&[8, 8], k)).collect();
        let sharded: Vec<_> = tensors
            .iter()
            .map(|full| cut(full, &chunks(&[8, 8], 4)[group.rank()]))
            .collect();
        let column = [TensorBox::new(vec![0, 2 * group.rank()], vec![8, 2])];
        let names: Vec<String> = (0..10).map(|k| k.to_string()).collect();
        let items: Vec<Reshard<'_>> = sharded
            .iter()
            .zip(&names)
            .map(|(tensor, name)| Reshard {
                name,
                tensor,
                boxes: &column,
            })
            .collect();
        let resharded = reshard_sharded_tensors(&items, &group).unwrap();
        for (resharded, full) in resharded.iter().zip(&tensors) {
            assert_cut(resharded, full, &column);
        }
        group.traffic()
    });
    for traffic in traffic {
        assert_eq!(traffic.count(Operation::AllToAllUneven), 1);
        assert_eq!(traffic.tensor_bytes_received, 10 * (8 * 2 - 2 * 2) * 4);
    }
}

#[test]
fn boxes_that_stay_do_not_move_and_replicas_serve_their_neighbours() {
    run(4, |group| {
        let full = f32s(&[4, 2], 1);
        let mine = &flat_ranges(&[4, 2], 4)[group.rank()];
        let same = reshard_sharded_tensor(&cut(&full, mine), mine, &group).unwrap();
        assert_cut(&same, &full, mine);
        assert_eq!(group.traffic().tensor_bytes(), 0);
    });
    let sent = run(4, |group| {
        let full = f32s(&[4, 2], 1);
        // Two replicas on ranks 0 and 2; ranks 1 and 3 want it whole.
        let whole = vec![TensorBox::whole(&[4, 2])];
        let none = Vec::new();
        let (have, want) = if group.rank() % 2 == 0 {
            (&whole, &none)
        } else {
            (&none, &whole)
        };
        let resharded = reshard_sharded_tensor(&cut(&full, have), want, &group).unwrap();
        assert_cut(&resharded, &full, want);
        group.traffic().tensor_bytes_sent
    });
    assert_eq!(sent, [32, 0, 32, 0]);
}

#[test]
fn elements_that_nobody_wants_may_be_on_no_rank() {
    let full = f32s(&[4], 1);
    let (low, high) = (
        vec![TensorBox::new(vec![0], vec![2])],
        vec![TensorBox::new(vec![2], vec![2])],
    );
    run(2, |group| {
        let have = if group.rank() == 0 { &low[..] } else { &[] };
        let want = if group.rank() == 1 { &low[..] } else { &[] };
        assert_cut(
            &reshard_sharded_tensor(&cut(&full, have), want, &group).unwrap(),
            &full,
            want,
        );
    });
    let error = one_error(run(2, |group| {
        let have = if group.rank() == 0 { &low[..] } else { &[] };
        let outcome = reshard_sharded_tensor(&cut(&full, have), &high, &group);
        assert_eq!(group.traffic().tensor_bytes(), 0);
        outcome
    }));
    let StateError::NotCovered {
        rank: 0, missing, ..
    } = error
    else {
        panic!("{error}")
    };
    assert_eq!(missing, high[0]);
}

#[test]
fn a_state_dict_is_resharded_into_a_template_with_more_and_fewer_names() {
    let full = f32s(&[6, 2], 1);
    run(3, |group| {
        let rank = group.rank();
        let mut state = StateDict::new();
        state.insert("weight", cut(&full, &chunks(&[6, 2], 3)[rank]));
        state.insert("whole", cut(&full, &flat_ranges(&[6, 2], 3)[rank]));
        state.insert("lr", 0.5);
        state.insert("gone", cut(&full, &chunks(&[6, 2], 3)[rank]));
        let mut local = StateDict::new();
        local.insert("whole", f32s(&[6, 2], 2));
        local.insert(
            "weight",
            ShardedTensor::zeros(DType::F32, &[6, 2], &flat_ranges(&[6, 2], 3)[rank]).unwrap(),
        );
        local.insert("lr", 0.1);
        let options = LoadOptions {
            strict: false,
            ..LoadOptions::default()
        };
        let (loaded, report) = reshard_state_dict(&state, &local, &group, &options).unwrap();
        assert_eq!(report.unexpected, ["gone"]);
        assert!(report.missing.is_empty() && report.mismatched.is_empty());
        assert_cut(
            loaded.get("weight").unwrap().as_sharded().unwrap(),
            &full,
            &flat_ranges(&[6, 2], 3)[rank],
        );
        assert_eq!(
            crate::ranks::bits_at(&loaded, "whole"),
            crate::ranks::bits(&full)
        );
        assert_eq!(
            loaded
                .plain_at(&["lr"])
                .and_then(fsdp_layout::PlainValue::as_float),
            Some(0.5)
        );
    });
}

#[test]
fn two_tensors_of_one_name_are_refused() {
    let error = one_error(run(2, |group| {
        let full = f32s(&[4], 1);
        let sharded = cut(&full, &chunks(&[4], 2)[group.rank()]);
        let item = Reshard {
            name: "x",
            tensor: &sharded,
            boxes: &[],
        };
        reshard_sharded_tensors(&[item, item], &group)
    }));
    assert!(
        error.to_string().contains("duplicated flatten key `x`"),
        "{error}"
    );
}

#[test]
fn a_tensor_with_a_dimension_of_0_may_have_others_whose_product_overflows() {
    run(2, |group| {
        let shape = vec![1 << 40, 1 << 40, 0];
        let tensor = ShardedTensor::new(DType::F32, shape.clone(), Vec::new()).unwrap();
        assert_eq!(
            reshard_sharded_tensor(&tensor, &[], &group)
                .unwrap()
                .shape(),
            shape
        );
    });
}
