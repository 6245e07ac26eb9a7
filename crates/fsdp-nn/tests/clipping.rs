//! Gradients are clipped by their norm over all ranks, and one rank's bad batch is every rank's error.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, linear};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, GradNorm, NnError, ShardingStrategy, Unit};

type Model = FullyShardedDataParallel<Vec<Unit<Linear>>>;

/// A model with gradients of inputs of this scale.
fn model(group: &ProcessGroup, strategy: ShardingStrategy, scale: f32) -> Model {
    let config = FsdpConfig { strategy, seed: 1, ..FsdpConfig::default() };
    let model = FullyShardedDataParallel::new(group.clone(), config, |scope| {
        (0..2).map(|i| scope.pp(i).unit(|scope| linear(3, 3, scope.vb()))).collect::<candle_core::Result<Vec<_>>>()
    })
    .unwrap();
    let x = Tensor::full(scale, (2, 3), &Device::Cpu).unwrap();
    let loss = model.forward(|units| units[1].forward(&units[0].forward(&x)?)?.sqr()?.sum_all()).unwrap();
    model.backward(&loss).unwrap();
    assert_eq!(loss.dtype(), DType::F32);
    model
}

/// All gradients, of all ranks.
fn gradients(model: &Model) -> Vec<f32> {
    let parameters = model.parameters();
    let pieces = parameters.fqns().map(|fqn| parameters.gradient(fqn).unwrap().unwrap());
    let mine: Vec<f32> = pieces
        .flat_map(|piece| piece.shards().to_vec())
        .flat_map(|shard| shard.tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap())
        .collect();
    model.group().all_gather_object(&mine).unwrap().concat()
}

fn largest(values: &[f32]) -> f64 {
    values.iter().fold(0.0, |largest, value| value.abs().max(largest)).into()
}

#[test]
fn the_infinity_norm_is_the_largest_gradient_on_any_rank() {
    for world in 1..=3 {
        for strategy in [ShardingStrategy::FullShard, ShardingStrategy::NoShard] {
            run_local(world, |group| {
                let model = model(&group, strategy, 2.0);
                let expected = largest(&gradients(&model));
                assert_eq!(model.parameters().grad_norm_of(GradNorm::Infinity).unwrap(), expected);
                let before = model.parameters().clip_grad_norm_by(GradNorm::Infinity, expected / 2.0).unwrap();
                assert_eq!(before, expected);
                let clipped = largest(&gradients(&model));
                assert!((clipped * 2.0 / expected - 1.0).abs() < 1e-5, "{clipped} of {expected}");
                // Small ones are left.
                model.parameters().clip_grad_norm_by(GradNorm::Infinity, expected).unwrap();
                assert_eq!(largest(&gradients(&model)), clipped);
            })
            .unwrap();
        }
    }
}

#[test]
fn gradients_that_are_not_finite_on_one_rank_are_every_ranks_error_and_stay_as_they_are() {
    for (scale, norm) in [(f32::NAN, GradNorm::L2), (f32::NAN, GradNorm::Infinity), (1e30, GradNorm::L2)] {
        run_local(3, |group| {
            let scale = if group.rank() == 1 { scale } else { 1.0 };
            let model = model(&group, ShardingStrategy::FullShard, scale);
            let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            let before = bits(gradients(&model));
            let error = model.parameters().clip_grad_norm_by(norm, 1.0).unwrap_err();
            assert_eq!(bits(gradients(&model)), before);
            assert!(matches!(error, NnError::NonFiniteGradients { .. }), "{error}");
        })
        .unwrap();
    }
}
