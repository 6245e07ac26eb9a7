//! Gradients that are sent in half the bytes: those of torch's compression, and moved in half the
//! bytes.

use candle_core::{Device, Tensor};
use candle_nn::{Linear, Module, linear};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_layout::DeviceMesh;
use fsdp_nn::{CommHook, FsdpConfig, FullyShardedDataParallel, NnError, ShardingStrategy};
use half::{bf16, f16};

type Model = FullyShardedDataParallel<Linear>;

fn model(group: &ProcessGroup, strategy: ShardingStrategy) -> Model {
    let world = group.world_size();
    let mesh = DeviceMesh::new(&[world / 2, 2], &["replicate", "shard"], world).unwrap();
    let config = FsdpConfig {
        strategy,
        mesh: Some(mesh),
        cpu_offload: true,
        ..FsdpConfig::default()
    };
    FullyShardedDataParallel::new(group.clone(), config, |scope| linear(4, 4, scope.vb())).unwrap()
}

/// The gradients of this rank, and the bytes that the backward has moved.
fn backward(model: &Model) -> (Vec<f32>, u64) {
    let x: Vec<f32> = (0..8)
        .map(|i| ((i * 5 + model.group().rank() * 3) % 7) as f32 / 3.3 - 1.0)
        .collect();
    let x = Tensor::from_vec(x, (2, 4), &Device::Cpu).unwrap();
    let loss = model
        .forward(|layer| layer.forward(&x)?.sin()?.sum_all())
        .unwrap();
    let parameters = model.parameters();
    let groups = [parameters.shard_group(), parameters.replicate_group()];
    let moved = || {
        groups
            .iter()
            .flatten()
            .map(|group| group.traffic().tensor_bytes())
            .sum::<u64>()
    };
    let before = moved();
    model.backward(&loss).unwrap();
    let moved = moved() - before;
    let pieces: Vec<_> = parameters
        .fqns()
        .map(|fqn| parameters.gradient(fqn).unwrap().unwrap())
        .collect();
    let shards = pieces.iter().flat_map(|piece| piece.shards());
    (
        shards
            .flat_map(|shard| {
                shard
                    .tensor
                    .flatten_all()
                    .unwrap()
                    .to_vec1::<f32>()
                    .unwrap()
            })
            .collect(),
        moved,
    )
}

#[test]
fn gradients_are_rounded_on_their_way_and_take_half_the_bytes() {
    for strategy in ShardingStrategy::ALL {
        for hook in [CommHook::Bf16Compress, CommHook::Fp16Compress] {
            run_local(4, |group| {
                let (plain, plain_bytes) = backward(&model(&group, strategy));
                let hooked = model(&group, strategy);
                hooked.register_comm_hook(hook).unwrap();
                let (found, bytes) = backward(&hooked);
                let (round, unit): (fn(f32) -> f32, f32) = match hook {
                    CommHook::Bf16Compress => (|x| bf16::from_f32(x).to_f32(), 1.0 / 256.0),
                    CommHook::Fp16Compress => (|x| f16::from_f32(x).to_f32(), 1.0 / 2048.0),
                };
                assert!(found.iter().any(|x| *x != 0.0) || found.is_empty());
                let largest = plain.iter().fold(1.0f32, |largest, x| largest.max(x.abs()));
                for (found, plain) in found.iter().zip(&plain) {
                    assert_eq!(
                        round(*found).to_bits(),
                        found.to_bits(),
                        "{strategy}: it is not rounded"
                    );
                    assert!(
                        (found - plain).abs() <= 4.0 * unit * largest,
                        "{strategy}: {found} is not {plain}"
                    );
                }
                // The bytes that tell of parameters without a gradient are not halved.
                assert!(
                    plain_bytes == 0 || bytes < plain_bytes * 2 / 3,
                    "{strategy}: {bytes} of {plain_bytes}"
                );
            })
            .unwrap();
        }
    }
}

#[test]
fn a_model_has_one_hook_which_all_ranks_agree_on() {
    run_local(2, |group| {
        let model = model(&group, ShardingStrategy::FullShard);
        let own = if group.rank() == 0 {
            CommHook::Bf16Compress
        } else {
            CommHook::Fp16Compress
        };
        assert!(matches!(
            model.register_comm_hook(own),
            Err(NnError::DifferentModels { .. })
        ));
        model.register_comm_hook(CommHook::Bf16Compress).unwrap();
        let error = model
            .register_comm_hook(CommHook::Bf16Compress)
            .unwrap_err();
        assert!(
            error.to_string().contains("a communication hook already"),
            "{error}"
        );
    })
    .unwrap();
}

#[test]
fn gradients_that_stay_on_a_rank_are_not_rounded() {
    run_local(1, |group| {
        let build = || {
            FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| {
                linear(4, 4, scope.vb())
            })
            .unwrap()
        };
        let (plain, hooked) = (build(), build());
        hooked.register_comm_hook(CommHook::Bf16Compress).unwrap();
        let (expected, _) = backward(&plain);
        assert!(expected.iter().any(|x| bf16::from_f32(*x).to_f32() != *x));
        assert_eq!(backward(&hooked).0, expected);
    })
    .unwrap();
}
