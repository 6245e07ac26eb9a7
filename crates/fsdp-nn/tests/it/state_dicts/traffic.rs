//! How much moves: never more collectives than torch has, and no tensor where arithmetic is enough.

use fsdp_comm::{Operation, Traffic};
use fsdp_nn::torch::{
    OptimLoadOptions, StateDictSettings, StateDictType, full_optim_state_dict, load_state_dict,
    optim_state_dict, optim_state_dict_to_load, scatter_full_optim_state_dict,
    sharded_optim_state_dict, state_dict,
};
use fsdp_nn::{Optimizer, ShardingStrategy};
use fsdp_state::StateDict;

use crate::state_dicts::common::*;

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
    [
        Operation::AllGatherObject,
        Operation::BroadcastObject,
        Operation::GatherObject,
        Operation::ScatterObject,
    ]
    .iter()
    .map(|operation| traffic.count(*operation))
    .sum()
}

/// Measures calls on a trained model of `nested`: 12 parameters in 7 units, Adam with two tensors
/// each.
fn measure(
    layout: Layout,
    call: impl Fn(&Model, &mut Optimizer, &StateDict, &StateDict) + Sync,
) -> Vec<Traffic> {
    ranks(layout.world, |group| {
        let model = model(&group, &nested(), layout);
        let mut optimizer = optimizer(model.parameters(), &nested(), &adam(), false);
        train(&model, &mut [&mut optimizer], 0..1);
        let full = optim_state_dict(None, model.parameters(), &optimizer).unwrap();
        let sharded = sharded_optim_state_dict(None, model.parameters(), &optimizer).unwrap();
        let before = group.traffic();
        call(&model, &mut optimizer, &full, &sharded);
        group.traffic().since(&before)
    })
}

const UNITS: u64 = 7;
const PARAMS: u64 = 12;
const STATES: u64 = 2;

/// Small tensors that follow each other by name and take the same collective share it: a gather to
/// rank 0 suits all of them. For all ranks, those that lie on one rank alone are broadcast from
/// there: here one run of them, and one of others, in either half of the names. A collective a unit
/// and entry, as torch has, would be more.
#[test]
fn saving_takes_one_collective_for_small_tensors_in_succession() {
    for use_orig_params in [true, false] {
        for (rank0_only, expected) in [
            (true, &[(Operation::GatherUneven, 1)][..]),
            (
                false,
                &[(Operation::AllGatherUneven, 2), (Operation::Broadcast, 2)],
            ),
        ] {
            let traffic = measure(full_shard(3, use_orig_params), |model, optimizer, _, _| {
                full_optim_state_dict(None, model.parameters(), optimizer, rank0_only).unwrap();
            });
            for traffic in traffic {
                for (operation, count) in expected {
                    assert_eq!(
                        traffic.count(*operation),
                        *count,
                        "{operation:?}, {traffic:?}"
                    );
                }
                let all: u64 = expected.iter().map(|(_, count)| count).sum();
                assert_eq!(tensor_collectives(&traffic), all, "{traffic:?}");
                assert!(all <= UNITS * STATES);
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
            sharded_optim_state_dict(None, parameters, optimizer).unwrap();
            let options = OptimLoadOptions {
                load_directly: true,
                ..Default::default()
            };
            optim_state_dict_to_load(sharded, parameters, optimizer, &options).unwrap();
            parameters.state_dict_type(StateDictSettings::from(StateDictType::Sharded), || {
                let state = state_dict(parameters).unwrap();
                load_state_dict(&state, parameters, true).unwrap();
            });
        });
        for traffic in traffic {
            assert_eq!(
                (traffic.tensor_bytes(), tensor_collectives(&traffic)),
                (0, 0)
            );
        }
    }
}

#[test]
fn whole_tensors_that_every_rank_has_are_cut_without_traffic() {
    for use_orig_params in [true, false] {
        let traffic = measure(
            full_shard(3, use_orig_params),
            |model, optimizer, full, _| {
                let options = OptimLoadOptions {
                    load_directly: true,
                    ..Default::default()
                };
                optim_state_dict_to_load(full, model.parameters(), optimizer, &options).unwrap();
            },
        );
        for traffic in traffic {
            assert_eq!(
                (
                    traffic.tensor_bytes(),
                    tensor_collectives(&traffic),
                    object_collectives(&traffic)
                ),
                (0, 0, 0)
            );
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
    let numel: u64 = nested()
        .params
        .iter()
        .map(|(_, _, shape)| shape.iter().product::<usize>() as u64)
        .sum();
    for (rank, traffic) in traffic.iter().enumerate() {
        assert!(
            tensor_collectives(traffic) <= PARAMS * STATES,
            "{traffic:?}"
        );
        if rank > 0 {
            assert!(
                traffic.tensor_bytes_received <= 4 * STATES * numel.div_ceil(2),
                "{traffic:?}"
            );
        }
    }
    let received: u64 = traffic
        .iter()
        .map(|traffic| traffic.tensor_bytes_received)
        .sum();
    assert!(
        received < 4 * STATES * numel,
        "no rank gets more than its part: {received}"
    );
}

#[test]
fn sharded_state_of_other_units_moves_only_where_it_must() {
    ranks(3, |group| {
        let from = model(&group, &nested(), full_shard(3, true));
        let mut source = optimizer(from.parameters(), &nested(), &adam(), false);
        train(&from, &mut [&mut source], 0..1);
        let sharded = sharded_optim_state_dict(None, from.parameters(), &source).unwrap();
        let to = model(&group, &nested_alt(), full_shard(3, false));
        let mut target = optimizer(to.parameters(), &nested_alt(), &adam(), false);
        let before = group.traffic();
        optim_state_dict_to_load(
            &sharded,
            to.parameters(),
            &mut target,
            &OptimLoadOptions::default(),
        )
        .unwrap();
        let traffic = group.traffic().since(&before);
        assert!(
            tensor_collectives(&traffic) <= PARAMS * STATES,
            "{traffic:?}"
        );
        let numel: u64 = nested()
            .params
            .iter()
            .map(|(_, _, shape)| shape.iter().product::<usize>() as u64)
            .sum();
        assert!(
            traffic.tensor_bytes_received <= 4 * STATES * numel.div_ceil(3) + 64,
            "{traffic:?}"
        );
    });
}

/// The same as for the optimizer: on three ranks two runs of parameters that lie on one rank alone
/// and two of others; each of two shards of a hybrid has a copy, so that none lies on one rank
/// alone.
#[test]
fn a_full_model_takes_one_collective_for_small_parameters_in_succession() {
    for (strategy, world, gathers, broadcasts) in [
        (ShardingStrategy::FullShard, 3, 2, 2),
        (ShardingStrategy::HybridShard, 4, 1, 0),
        (ShardingStrategy::NoShard, 2, 0, 0),
    ] {
        let layout = Layout {
            world,
            strategy,
            use_orig_params: false,
        };
        for traffic in measure(layout, |model, _, _, _| {
            _ = state_dict(model.parameters()).unwrap()
        }) {
            assert_eq!(
                traffic.count(Operation::AllGatherUneven),
                gathers,
                "{strategy}, {traffic:?}"
            );
            assert_eq!(
                traffic.count(Operation::Broadcast),
                broadcasts,
                "{strategy}, {traffic:?}"
            );
            let all = gathers + broadcasts;
            assert!(all <= UNITS);
            assert_eq!(
                (tensor_collectives(&traffic), object_collectives(&traffic)),
                (all, 0)
            );
            assert_eq!(traffic.count(Operation::Agree), 2);
        }
    }
}

#[test]
fn loading_a_full_model_that_every_rank_has_moves_nothing() {
    ranks(3, |group| {
        let model = model(&group, &nested(), full_shard(3, true));
        let state = state_dict(model.parameters()).unwrap();
        let before = group.traffic();
        load_state_dict(&state, model.parameters(), true).unwrap();
        assert_eq!(tensor_collectives(&group.traffic().since(&before)), 0);
    });
}
