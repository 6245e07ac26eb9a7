//! Gradients are clipped by their norm over all ranks, and one rank's bad batch is every rank's
//! error.

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, linear};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_layout::DeviceMesh;
use fsdp_nn::algorithm::{AdamOptions, Algorithm};
use fsdp_nn::{
    ClipOptions, FsdpConfig, FullyShardedDataParallel, GradNorm, NnError, OnNonFinite, Optimizer,
    ShardingStrategy, Unit,
};

const BY_LARGEST: ClipOptions = ClipOptions {
    norm: GradNorm::Infinity,
    on_non_finite: OnNonFinite::Error,
};

type Model = FullyShardedDataParallel<Vec<Unit<Linear>>>;

/// A model with gradients of inputs of this scale.
fn model(group: &ProcessGroup, strategy: ShardingStrategy, scale: f32) -> Model {
    let mesh = DeviceMesh::new(&[2, 2], &["replicate", "shard"], group.world_size());
    let config = FsdpConfig {
        strategy,
        seed: 1,
        mesh: mesh
            .ok()
            .filter(|_| strategy == ShardingStrategy::HybridShard),
        ..FsdpConfig::default()
    };
    let model = FullyShardedDataParallel::new(group.clone(), config, |scope| {
        (0..2)
            .map(|i| scope.pp(i).unit(|scope| linear(3, 3, scope.vb())))
            .collect::<candle_core::Result<Vec<_>>>()
    })
    .unwrap();
    let x = Tensor::full(scale, (2, 3), &Device::Cpu).unwrap();
    let loss = model
        .forward(|units| units[1].forward(&units[0].forward(&x)?)?.sqr()?.sum_all())
        .unwrap();
    model.backward(&loss).unwrap();
    assert_eq!(loss.dtype(), DType::F32);
    model
}

/// All gradients, of all ranks.
fn gradients(model: &Model) -> Vec<f32> {
    let parameters = model.parameters();
    let pieces = parameters
        .fqns()
        .map(|fqn| parameters.gradient(fqn).unwrap().unwrap());
    let mine: Vec<f32> = pieces
        .flat_map(|piece| piece.shards().to_vec())
        .flat_map(|shard| {
            shard
                .tensor
                .flatten_all()
                .unwrap()
                .to_vec1::<f32>()
                .unwrap()
        })
        .collect();
    model.group().all_gather_object(&mine).unwrap().concat()
}

fn largest(values: &[f32]) -> f64 {
    values
        .iter()
        .fold(0.0, |largest, value| value.abs().max(largest))
        .into()
}

#[test]
fn the_infinity_norm_is_the_largest_gradient_on_any_rank() {
    for world in 1..=3 {
        for strategy in [ShardingStrategy::FullShard, ShardingStrategy::NoShard] {
            run_local(world, |group| {
                let model = model(&group, strategy, 2.0);
                let expected = largest(&gradients(&model));
                assert_eq!(
                    model.parameters().grad_norm_of(GradNorm::Infinity).unwrap(),
                    expected
                );
                let before = model
                    .parameters()
                    .clip_grad_norm_with(expected / 2.0, BY_LARGEST)
                    .unwrap();
                assert_eq!(before, expected);
                let clipped = largest(&gradients(&model));
                assert!(
                    (clipped * 2.0 / expected - 1.0).abs() < 1e-5,
                    "{clipped} of {expected}"
                );
                // Small ones are left.
                model
                    .parameters()
                    .clip_grad_norm_with(expected, BY_LARGEST)
                    .unwrap();
                assert_eq!(largest(&gradients(&model)), clipped);
            })
            .unwrap();
        }
    }
}

#[test]
fn gradients_of_a_half_type_are_clipped_by_a_factor_that_it_does_not_hold() {
    run_local(2, |group| {
        let config = FsdpConfig {
            dtype: DType::F16,
            ..FsdpConfig::default()
        };
        let model =
            FullyShardedDataParallel::new(group, config, |scope| scope.vb().get(4, "w")).unwrap();
        let x = Tensor::full(40_000f32, 4, &Device::Cpu)
            .unwrap()
            .to_dtype(DType::F16)
            .unwrap();
        model
            .backward(&model.forward(|w| (w * &x)?.sum_all()).unwrap())
            .unwrap();
        // The factor is 1.25e-8. The least positive number of f16 is 6e-8.
        assert_eq!(model.parameters().clip_grad_norm(1e-3).unwrap(), 80_000.0);
        let clipped = model.parameters().grad_norm().unwrap();
        assert!((clipped / 1e-3 - 1.0).abs() < 1e-3, "{clipped}");
    })
    .unwrap();
}

#[test]
fn gradients_that_are_not_finite_on_one_rank_are_every_ranks_error_and_stay_as_they_are() {
    for (scale, norm) in [
        (f32::NAN, GradNorm::L2),
        (f32::NAN, GradNorm::Infinity),
        (1e30, GradNorm::L2),
    ] {
        run_local(3, |group| {
            let scale = if group.rank() == 1 { scale } else { 1.0 };
            let model = model(&group, ShardingStrategy::FullShard, scale);
            let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            let before = bits(gradients(&model));
            let options = ClipOptions {
                norm,
                ..ClipOptions::default()
            };
            let error = model
                .parameters()
                .clip_grad_norm_with(1.0, options)
                .unwrap_err();
            assert_eq!(bits(gradients(&model)), before);
            assert!(
                matches!(error, NnError::NonFiniteGradients { .. }),
                "{error}"
            );
        })
        .unwrap();
    }
}

#[test]
fn torchs_default_scales_gradients_that_are_not_finite_and_tells_the_norm() {
    // `clip_grad_norm_` with a norm of inf multiplies by 0, with NaN by NaN: finite gradients
    // become 0 or NaN.
    for scale in [f32::NAN, 1e30] {
        run_local(3, |group| {
            let scale = if group.rank() == 1 { scale } else { 1.0 };
            let model = model(&group, ShardingStrategy::FullShard, scale);
            let was_finite: Vec<bool> = gradients(&model).into_iter().map(f32::is_finite).collect();
            let options = ClipOptions {
                on_non_finite: OnNonFinite::Scale,
                ..ClipOptions::default()
            };
            let norm = model
                .parameters()
                .clip_grad_norm_with(1.0, options)
                .unwrap();
            assert!(!norm.is_finite(), "{norm}");
            for (found, was_finite) in gradients(&model).into_iter().zip(was_finite) {
                let expected = if was_finite && norm.is_infinite() {
                    0.0
                } else {
                    f32::NAN
                };
                assert!(
                    found == expected || (found.is_nan() && expected.is_nan()),
                    "{found} is not {expected}"
                );
            }
        })
        .unwrap();
    }
}

#[test]
fn a_skipped_step_changes_nothing_on_any_rank_and_the_next_one_goes_on() {
    run_local(3, |group| {
        let bad = if group.rank() == 1 { f32::NAN } else { 1.0 };
        let model = model(&group, ShardingStrategy::FullShard, bad);
        let parameters = model.parameters();
        let adamw = Algorithm::AdamW(AdamOptions::adamw());
        let mut optimizer = Optimizer::new(parameters, adamw).unwrap();
        let values = || {
            let pieces = parameters
                .fqns()
                .map(|fqn| parameters.parameter(fqn).unwrap());
            let shards: Vec<_> = pieces.flat_map(|piece| piece.shards().to_vec()).collect();
            shards
                .iter()
                .map(|shard| format!("{:?}", shard.tensor.flatten_all().unwrap().to_vec1::<f32>()))
                .collect::<Vec<_>>()
        };
        let before = values();
        let options = ClipOptions {
            on_non_finite: OnNonFinite::Skip,
            ..ClipOptions::default()
        };
        assert!(
            !parameters
                .clip_grad_norm_with(1.0, options)
                .unwrap()
                .is_finite()
        );
        optimizer.step().unwrap();
        assert_eq!(values(), before);
        assert!(optimizer.is_fresh(), "the step counted");
        let x = Tensor::ones((2, 3), DType::F32, &Device::Cpu).unwrap();
        let loss = model
            .forward(|units| units[1].forward(&units[0].forward(&x)?)?.sqr()?.sum_all())
            .unwrap();
        model.backward(&loss).unwrap();
        assert!(
            parameters
                .clip_grad_norm_with(1.0, options)
                .unwrap()
                .is_finite()
        );
        optimizer.step().unwrap();
        assert_ne!(values(), before);
    })
    .unwrap();
}

#[test]
fn a_norm_that_no_gradients_can_have_is_refused_and_changes_nothing() {
    run_local(2, |group| {
        let model = model(&group, ShardingStrategy::FullShard, 2.0);
        let before = gradients(&model);
        for max_norm in [-1.0, f64::NEG_INFINITY, f64::NAN] {
            let error = model.parameters().clip_grad_norm(max_norm).unwrap_err();
            assert!(
                error.to_string().contains("cannot be clipped to a norm"),
                "{error}"
            );
        }
        assert_eq!(gradients(&model), before);
        // An infinite one clips nothing.
        model.parameters().clip_grad_norm(f64::INFINITY).unwrap();
        assert_eq!(gradients(&model), before);
    })
    .unwrap();
}

/// Ranks that clip to different norms would go on with different weights.
#[test]
fn ranks_that_clip_differently_all_get_an_error_and_can_go_on() {
    for strategy in [
        ShardingStrategy::FullShard,
        ShardingStrategy::NoShard,
        ShardingStrategy::HybridShard,
    ] {
        for (other_norm, options) in [
            (2.0, ClipOptions::default()),
            (f64::NAN, ClipOptions::default()),
            (1.0, BY_LARGEST),
        ] {
            let messages = run_local(4, |group| {
                let model = model(&group, strategy, 2.0);
                let before = gradients(&model);
                let clip = |max_norm, options| {
                    let parameters = model.parameters();
                    parameters.clip_grad_norm_with(max_norm, options)
                };
                let error = match group.rank() {
                    1 => clip(other_norm, options),
                    _ => clip(1.0, ClipOptions::default()),
                }
                .unwrap_err();
                assert_eq!(gradients(&model), before);
                let norm = clip(1.0, ClipOptions::default()).unwrap();
                assert!(norm > 1.0);
                let clipped = model.parameters().grad_norm().unwrap();
                assert!((clipped - 1.0).abs() < 1e-4, "{clipped}");
                error.to_string()
            })
            .unwrap();
            for message in &messages {
                assert!(message.contains("rank 1 clips"), "{strategy}: {message}");
                assert_eq!(message, &messages[0]);
            }
        }
    }
}
