//! The end of a step in one call does what the calls one after the other do, bit for bit.

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, linear};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_nn::algorithm::{AdamOptions, Algorithm};
use fsdp_nn::{
    ClipOptions, FinishOptions, FsdpConfig, FullyShardedDataParallel, GradScaler,
    GradScalerOptions, NnError, OnNonFinite, Optimizer, ShardingStrategy,
};

type Model = FullyShardedDataParallel<Linear>;

fn model(group: &ProcessGroup, strategy: ShardingStrategy) -> (Model, Optimizer) {
    let config = FsdpConfig {
        strategy,
        seed: 1,
        ..FsdpConfig::default()
    };
    let model =
        FullyShardedDataParallel::new(group.clone(), config, |scope| linear(3, 2, scope.vb()));
    let model = model.unwrap();
    let adamw = Algorithm::AdamW(AdamOptions::adamw());
    let optimizer = Optimizer::new(model.parameters(), adamw).unwrap();
    (model, optimizer)
}

fn scaler() -> GradScaler {
    let options = GradScalerOptions {
        init_scale: 8.0,
        growth_interval: 2,
        ..GradScalerOptions::default()
    };
    GradScaler::new(options).unwrap()
}

/// Runs a backward whose gradients grow with `factor`, and returns the loss without the scale.
fn backward(model: &Model, scaler: Option<&GradScaler>, factor: f64) -> Tensor {
    let rank = model.group().rank() as f32;
    let x = Tensor::full(1.0 + rank, (2, 3), &Device::Cpu).unwrap();
    let forward = model.forward(|layer| layer.forward(&x)?.sqr()?.sum_all());
    let loss = (forward.unwrap() * factor).unwrap();
    let scaled = scaler.map_or(Ok(loss.clone()), |scaler| scaler.scale(&loss));
    model.backward(&scaled.unwrap()).unwrap();
    loss
}

/// The bits of this rank's parameters.
fn bits(model: &Model) -> Vec<u32> {
    let parameters = model.parameters();
    let pieces = parameters
        .fqns()
        .map(|fqn| parameters.parameter(fqn).unwrap());
    let shards: Vec<_> = pieces.flat_map(|piece| piece.shards().to_vec()).collect();
    let values = shards.iter().flat_map(|shard| {
        shard
            .tensor
            .flatten_all()
            .unwrap()
            .to_vec1::<f32>()
            .unwrap()
    });
    values.map(f32::to_bits).collect()
}

#[test]
fn one_call_has_the_bits_of_several_with_a_loss_scale_and_without() {
    for world in 1..=3 {
        for strategy in [ShardingStrategy::FullShard, ShardingStrategy::NoShard] {
            for has_scaler in [false, true] {
                run_local(world, |group| {
                    let (apart, mut optimizer) = model(&group, strategy);
                    let mut apart_scaler = has_scaler.then(scaler);
                    let (together, stepped) = model(&group, strategy);
                    let mut optimizers = [stepped];
                    let mut together_scaler = has_scaler.then(scaler);
                    for step in 0..5 {
                        // One rank's gradients overflow in the third step.
                        let is_bad = has_scaler && step == 2;
                        let factor = if is_bad && group.rank() == step % world {
                            f64::INFINITY
                        } else {
                            1.0
                        };
                        backward(&apart, apart_scaler.as_ref(), factor);
                        let parameters = apart.parameters();
                        let is_finite = apart_scaler
                            .as_mut()
                            .is_none_or(|scaler| scaler.unscale(parameters).unwrap());
                        let norm = is_finite.then(|| parameters.clip_grad_norm(0.5).unwrap());
                        if is_finite {
                            optimizer.step().unwrap();
                        }
                        if let Some(scaler) = &mut apart_scaler {
                            scaler.update().unwrap();
                        }
                        parameters.zero_grad();

                        let loss = backward(&together, together_scaler.as_ref(), factor);
                        let options = FinishOptions {
                            max_norm: 0.5,
                            losses: &[loss.clone(), loss.clone()],
                            numbers: &[group.rank() as u64 + 7],
                            ..FinishOptions::default()
                        };
                        let scaler = together_scaler.as_mut();
                        let finished = together
                            .parameters()
                            .finish_step(&mut optimizers, scaler, &options)
                            .unwrap();
                        assert_eq!(finished.is_skipped, is_bad);
                        assert_eq!((!is_bad).then_some(finished.grad_norm), norm);
                        let own_loss = f64::from(loss.to_scalar::<f32>().unwrap());
                        assert_eq!(
                            finished.losses[group.rank()].to_bits(),
                            (2.0 * own_loss).to_bits()
                        );
                        let numbers: Vec<u64> = finished.numbers.concat();
                        assert_eq!(
                            numbers,
                            (0..world as u64).map(|n| n + 7).collect::<Vec<_>>()
                        );
                        assert_eq!(bits(&together), bits(&apart), "step {step}");
                        assert_eq!(together_scaler, apart_scaler);
                        let grad = together.parameters().gradient("weight").unwrap();
                        assert!(grad.is_none());
                    }
                })
                .unwrap();
            }
        }
    }
}

#[test]
fn gradients_that_are_not_finite_are_an_error_or_a_skipped_step_on_every_rank() {
    for on_non_finite in [OnNonFinite::Error, OnNonFinite::Skip] {
        run_local(3, |group| {
            let (model, optimizer) = model(&group, ShardingStrategy::FullShard);
            let mut optimizers = [optimizer];
            let factor = if group.rank() == 1 { f64::NAN } else { 1.0 };
            backward(&model, None, factor);
            let before = bits(&model);
            let options = FinishOptions {
                clip: ClipOptions {
                    on_non_finite,
                    ..ClipOptions::default()
                },
                ..FinishOptions::default()
            };
            let parameters = model.parameters();
            let finished = parameters.finish_step(&mut optimizers, None, &options);
            match on_non_finite {
                OnNonFinite::Skip => assert!(finished.unwrap().is_skipped),
                _ => assert!(matches!(finished, Err(NnError::NonFiniteGradients { .. }))),
            }
            assert_eq!(bits(&model), before);
            assert!(optimizers[0].is_fresh());
        })
        .unwrap();
    }
}

#[test]
fn ranks_that_end_their_steps_differently_get_an_error() {
    for case in 0..3 {
        run_local(2, |group| {
            let (model, optimizer) = model(&group, ShardingStrategy::FullShard);
            let is_other = group.rank() == 1;
            let mut scaler = (case == 0 && is_other).then(scaler);
            backward(&model, None, 1.0);
            let options = FinishOptions {
                max_norm: if case == 1 && is_other { 2.0 } else { 1.0 },
                numbers: if case == 2 && is_other { &[1, 2] } else { &[1] },
                ..FinishOptions::default()
            };
            let before = bits(&model);
            let finished =
                model
                    .parameters()
                    .finish_step(&mut [optimizer], scaler.as_mut(), &options);
            assert!(finished.is_err(), "case {case}");
            assert_eq!(bits(&model), before);
        })
        .unwrap();
    }
}

#[test]
fn an_optimizer_of_another_model_is_refused() {
    run_local(1, |group| {
        let (first, _) = model(&group, ShardingStrategy::FullShard);
        let (_second, other) = model(&group, ShardingStrategy::FullShard);
        backward(&first, None, 1.0);
        let options = FinishOptions::default();
        let finished = first.parameters().finish_step(&mut [other], None, &options);
        assert!(matches!(finished, Err(NnError::ForeignOptimizer)));
        assert_eq!(first.parameters().dtype("weight").unwrap(), DType::F32);
    })
    .unwrap();
}
