//! How much moves: never more collectives than torch has, and no tensor where arithmetic is enough.

use fsdp_comm::{Operation, Traffic};
use fsdp_nn::fsdp_state::{
    OptimLoadOptions, StateDictSettings, StateDictType, full_optim_state_dict, load_state_dict, optim_state_dict,
    optim_state_dict_to_load, scatter_full_optim_state_dict, sharded_optim_state_dict, state_dict,
};
use fsdp_nn::{Optimizer, ShardingStrategy};
use fsdp_state::StateDict;

use crate::common::*;

/// Collectives that move tensors.
fn tensor_collectives(traffic: &Traffic) -> u64 {
    [
        Operation::AllGather,
        Operation::AllGatherUneven,
        Operation::AllReduce,
        Operation::AllToAllUneven,
        Operation::Broadcast,
        Operation::Gather,
        Operation::GatherUneven,
        Operation::ReduceScatter,
        Operation::Scatter,
        Operation::ScatterUneven,
    ]
    .iter()
    .map(|operation| traffic.count(*operation))
    .sum()
}

fn object_collectives(traffic: &Traffic) -> u64 {
    [Operation::AllGatherObject, Operation::BroadcastObject, Operation::GatherObject, Operation::ScatterObject]
        .iter()
        .map(|operation| traffic.count(*operation))
        .sum()
}

/// Measures calls on a trained model of `nested`: 12 parameters in 7 units, Adam with two tensors each.
fn measure(layout: Layout, call: impl Fn(&Model, &mut Optimizer, &StateDict, &StateDict) + Sync) -> Vec<Traffic> {
    ranks(layout.world, |group| {
        let model = model(&group, &nested(), layout);
        let mut optimizer = optimizer(model.parameters(), &nested(), &adam(), false);
        train(&model, &mut [&mut optimizer], 0..1);
        let full = optim_state_dict(model.parameters(), &optimizer, None).unwrap();
        let sharded = sharded_optim_state_dict(model.parameters(), &optimizer, None).unwrap();
        let before = group.traffic();
        call(&model, &mut optimizer, &full, &sharded);
        group.traffic().since(&before)
    })
}

const UNITS: u64 = 7;
const PARAMS: u64 = 12;
const STATES: u64 = 2;

#[test]
fn saving_takes_one_collective_a_unit_and_entry() {
    for use_orig_params in [true, false] {
        for rank0_only in [true, false] {
            let traffic = measure(full_shard(3, use_orig_params), |model, optimizer, _, _| {
                full_optim_state_dict(model.parameters(), optimizer, None, rank0_only).unwrap();
            });
            for traffic in traffic {
                let operation = if rank0_only { Operation::Gather } else { Operation::AllGather };
                assert_eq!(traffic.count(operation), UNITS * STATES);
                assert_eq!(tensor_collectives(&traffic), UNITS * STATES);
                assert_eq!(object_collectives(&traffic), 1);
                assert_eq!(traffic.count(Operation::Agree), 2);
            }
        }
    }
}

#[test]
fn sharded_reads_and_loads_into_the_same_layout_move_no_tensor_bytes() {
    for use_orig_params in [true, false] {
        let layout = full_shard(4, use_orig_params);
        let traffic = measure(layout, |model, optimizer, _, sharded| {
            let parameters = model.parameters();
            sharded_optim_state_dict(parameters, optimizer, None).unwrap();
            let options = OptimLoadOptions { load_directly: true, ..Default::default() };
            optim_state_dict_to_load(parameters, optimizer, sharded, &options).unwrap();
            parameters.state_dict_type(StateDictSettings::of(StateDictType::Sharded), || {
                let state = state_dict(parameters).unwrap();
                load_state_dict(parameters, &state, true).unwrap();
            });
        });
        for traffic in traffic {
            assert_eq!((traffic.tensor_bytes(), tensor_collectives(&traffic)), (0, 0));
        }
    }
}

#[test]
fn whole_tensors_that_every_rank_has_are_cut_without_traffic() {
    for use_orig_params in [true, false] {
        let traffic = measure(full_shard(3, use_orig_params), |model, optimizer, full, _| {
            let options = OptimLoadOptions { load_directly: true, ..Default::default() };
            optim_state_dict_to_load(model.parameters(), optimizer, full, &options).unwrap();
        });
        for traffic in traffic {
            assert_eq!((traffic.tensor_bytes(), tensor_collectives(&traffic), object_collectives(&traffic)), (0, 0, 0));
        }
    }
}

/// Rank 0's tensors go to the ranks that need them, each rank's part only.
#[test]
fn scattering_sends_each_rank_its_part() {
    let traffic = measure(full_shard(3, true), |model, optimizer, full, _| {
        let full = (model.group().rank() == 0).then_some(full);
        scatter_full_optim_state_dict(full, model.parameters(), optimizer).unwrap();
    });
    let numel: u64 = nested().params.iter().map(|(_, _, shape)| shape.iter().product::<usize>() as u64).sum();
    for (rank, traffic) in traffic.iter().enumerate() {
        assert!(tensor_collectives(traffic) <= PARAMS * STATES, "{traffic:?}");
        if rank > 0 {
            assert!(traffic.tensor_bytes_received <= 4 * STATES * numel.div_ceil(2), "{traffic:?}");
        }
    }
    let received: u64 = traffic.iter().map(|traffic| traffic.tensor_bytes_received).sum();
    assert!(received < 4 * STATES * numel, "no rank gets more than its part: {received}");
}

#[test]
fn sharded_state_of_other_units_moves_only_where_it_must() {
    ranks(3, |group| {
        let from = model(&group, &nested(), full_shard(3, true));
        let mut source = optimizer(from.parameters(), &nested(), &adam(), false);
        train(&from, &mut [&mut source], 0..1);
        let sharded = sharded_optim_state_dict(from.parameters(), &source, None).unwrap();
        let to = model(&group, &nested_alt(), full_shard(3, false));
        let mut target = optimizer(to.parameters(), &nested_alt(), &adam(), false);
        let before = group.traffic();
        optim_state_dict_to_load(to.parameters(), &mut target, &sharded, &OptimLoadOptions::default()).unwrap();
        let traffic = group.traffic().since(&before);
        assert!(tensor_collectives(&traffic) <= PARAMS * STATES, "{traffic:?}");
        let numel: u64 = nested().params.iter().map(|(_, _, shape)| shape.iter().product::<usize>() as u64).sum();
        assert!(traffic.tensor_bytes_received <= 4 * STATES * numel.div_ceil(3) + 64, "{traffic:?}");
    });
}

#[test]
fn a_full_model_takes_one_collective_a_unit() {
    for (strategy, world, expected) in [
        (ShardingStrategy::FullShard, 3, UNITS),
        (ShardingStrategy::HybridShard, 4, UNITS),
        (ShardingStrategy::NoShard, 2, 0),
    ] {
        let layout = Layout { world, strategy, use_orig_params: false };
        for traffic in measure(layout, |model, _, _, _| _ = state_dict(model.parameters()).unwrap()) {
            assert_eq!(traffic.count(Operation::AllGather), expected);
            assert_eq!((tensor_collectives(&traffic), object_collectives(&traffic)), (expected, 0));
        }
    }
}

#[test]
fn loading_a_full_model_that_every_rank_has_moves_nothing() {
    ranks(3, |group| {
        let model = model(&group, &nested(), full_shard(3, true));
        let state = state_dict(model.parameters()).unwrap();
        let before = group.traffic();
        load_state_dict(model.parameters(), &state, true).unwrap();
        assert_eq!(tensor_collectives(&group.traffic().since(&before)), 0);
    });
}
