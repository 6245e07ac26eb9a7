//! Replicas that drift apart are found, and the rank is named.

use candle_core::{Device, Tensor};
use candle_nn::{BatchNorm, ModuleT as _, batch_norm};
use fsdp_checkpoint::{
    CheckpointError, LoadOptions, SaveOptions, Stateful as _, TrainState, check_replicas,
    load_whole, save,
};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_flat::storage::HostSliceMut;
use fsdp_layout::DeviceMesh;
use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, Optimizer, ShardingStrategy};
use fsdp_state::{StateDict, StateError, StateValue};

use crate::in_place::training::{Run, adamw, build, step};

fn run(group: &ProcessGroup, strategy: ShardingStrategy) -> Run {
    let replicas = if strategy == ShardingStrategy::HybridShard {
        2
    } else {
        1
    };
    let mesh = DeviceMesh::new(
        &[replicas, group.world_size() / replicas],
        &["replicate", "shard"],
        group.world_size(),
    );
    let mesh = mesh
        .ok()
        .filter(|_| strategy == ShardingStrategy::HybridShard);
    let mut run = build(
        group,
        FsdpConfig {
            strategy,
            mesh,
            seed: 5,
            ..FsdpConfig::default()
        },
        &adamw(),
    );
    run.values.insert("step", 1i64);
    step(&mut run, 1);
    run
}

/// Flips the lowest bit of the first element that this rank has of a tensor of the run.
fn flip(run: &Run, path: &[&str]) {
    let state = run.state_dict().unwrap();
    let mut value = state.get(path[0]).unwrap().clone();
    for key in &path[1..] {
        let StateValue::Dict(dict) = &value else {
            panic!("{key}")
        };
        value = dict.get(key).unwrap().clone();
    }
    let tensor: Tensor = match value {
        StateValue::Tensor(tensor) => tensor,
        StateValue::Sharded(tensor) => tensor.shards()[0].tensor.clone(),
        other => panic!("{other:?}"),
    };
    let mut elements = HostSliceMut::<f32>::write(&tensor).unwrap();
    elements[0] = f32::from_bits(elements[0].to_bits() ^ 1);
}

/// Returns what differs, which must be the same on all ranks.
fn found(
    ranks: usize,
    strategy: ShardingStrategy,
    flipped: &[usize],
    path: &[&str],
) -> Vec<(String, Vec<usize>)> {
    let found = run_local(ranks, |group| {
        let run = run(&group, strategy);
        check_replicas(&run, &group).unwrap();
        if flipped.contains(&group.rank()) {
            flip(&run, path);
        }
        match check_replicas(&run, &group) {
            Ok(()) => Vec::new(),
            Err(CheckpointError::State(StateError::ReplicasDiffer { tensors })) => tensors
                .into_iter()
                .map(|wrong| (wrong.fqn, wrong.ranks))
                .collect(),
            Err(error) => panic!("{error}"),
        }
    })
    .unwrap();
    assert!(found.iter().all(|others| *others == found[0]), "{found:?}");
    found[0].clone()
}

const WEIGHT: [&str; 2] = ["model", "head.weight"];

#[test]
fn a_flipped_bit_of_one_replica_is_named_with_its_rank() {
    let name = "model.head.weight".to_owned();
    assert_eq!(
        found(3, ShardingStrategy::NoShard, &[1], &WEIGHT),
        [(name.clone(), vec![1])]
    );
    assert_eq!(
        found(2, ShardingStrategy::NoShard, &[1], &WEIGHT),
        [(name.clone(), vec![0, 1])]
    );
    // Ranks 0 and 2 are replicas of each other, and so are 1 and 3.
    assert_eq!(
        found(4, ShardingStrategy::HybridShard, &[0], &WEIGHT),
        [(name, vec![0, 2])]
    );
}

#[test]
fn moments_of_the_optimizer_are_compared_too() {
    let moment = ["optim", "state", "a.bias", "exp_avg_sq"];
    let found = found(3, ShardingStrategy::NoShard, &[2], &moment);
    assert_eq!(
        found,
        [("optim.state.a.bias.exp_avg_sq".to_owned(), vec![2])]
    );
}

#[test]
fn shards_are_no_replicas_but_values_on_all_ranks_are() {
    assert!(found(3, ShardingStrategy::FullShard, &[0], &WEIGHT).is_empty());
    let errors = run_local(3, |group| {
        let mut run = run(&group, ShardingStrategy::FullShard);
        run.values
            .insert("step", if group.rank() == 2 { 7i64 } else { 1 });
        check_replicas(&run, &group).unwrap_err().to_string()
    })
    .unwrap();
    assert!(
        errors
            .iter()
            .all(|error| error == "replicas differ: `step` on rank 2"),
        "{errors:?}"
    );
}

/// Returns the running mean and variance of a run's batch norm.
fn running_statistics(state: &StateDict) -> [Vec<f32>; 2] {
    let model = state.dict("model").unwrap();
    ["running_mean", "running_var"].map(|name| {
        let tensor = model.get(name).and_then(StateValue::as_tensor).unwrap();
        tensor.to_vec1().unwrap()
    })
}

#[test]
fn running_statistics_are_no_replicas_and_those_of_the_lowest_rank_are_saved_together() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("checkpoint");
    let of_ranks = run_local(3, |group| {
        let model = FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| {
            batch_norm(4, 1e-5, scope.vb())
        })
        .unwrap();
        let optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
        let mut run: TrainState<BatchNorm> = TrainState::new(model, vec![optimizer]);
        let x: Vec<f32> = (0..12)
            .map(|i| ((i * 7) % 5 * (group.rank() + 1)) as f32)
            .collect();
        let x = Tensor::from_vec(x, (3, 4), &Device::Cpu).unwrap();
        let loss = |norm: &BatchNorm| norm.forward_t(&x, true)?.sqr()?.sqr()?.mean_all();
        let loss = run.model.forward(loss).unwrap();
        run.model.backward(&loss).unwrap();
        run.optimizers[0].step().unwrap();
        check_replicas(&run, &group).unwrap();
        let state = run.state_dict().unwrap();
        save(path.as_path(), &state, &group, &SaveOptions::default()).unwrap();
        running_statistics(&state)
    })
    .unwrap();
    assert!(of_ranks[0] != of_ranks[1] && of_ranks[1] != of_ranks[2]);
    let saved = load_whole(path.as_path(), &[], &LoadOptions::default()).unwrap();
    assert_eq!(running_statistics(&saved), of_ranks[0]);
}
