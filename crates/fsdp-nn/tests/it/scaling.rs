//! Losses are scaled as torch scales them, and one rank's overflow skips the step of all.

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, linear, linear_no_bias};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_layout::PlainValue;
use fsdp_nn::algorithm::{AdamOptions, Algorithm, SgdOptions};
use fsdp_nn::{
    FsdpConfig, FullyShardedDataParallel, GradScaler, GradScalerOptions, MixedPrecision, NnError,
    Optimizer, ScalerError, ShardingStrategy, Unit,
};
use fsdp_state::{StateDict, StateValue};

type Model = FullyShardedDataParallel<Linear>;

fn model(group: &ProcessGroup, strategy: ShardingStrategy) -> Model {
    let config = FsdpConfig {
        strategy,
        seed: 1,
        ..FsdpConfig::default()
    };
    FullyShardedDataParallel::new(group.clone(), config, |scope| linear(3, 2, scope.vb())).unwrap()
}

fn backward(model: &Model, scaler: &GradScaler, factor: f64) {
    let x = Tensor::ones((2, 3), DType::F32, &Device::Cpu).unwrap();
    let loss = (model
        .forward(|layer| layer.forward(&x)?.sqr()?.sum_all())
        .unwrap()
        * factor)
        .unwrap();
    model.backward(&scaler.scale(&loss).unwrap()).unwrap();
}

fn state(scaler: &GradScaler) -> Vec<(String, PlainValue)> {
    let state = scaler.state_dict();
    state
        .iter()
        .map(|(key, value)| (key.to_owned(), value.as_plain().unwrap().clone()))
        .collect()
}

fn bits(model: &Model, of: impl Fn(&str) -> fsdp_flat::ShardedTensor) -> Vec<u32> {
    let pieces: Vec<_> = model.parameters().fqns().map(of).collect();
    let shards = pieces.iter().flat_map(|piece| piece.shards());
    let values = shards.flat_map(|shard| {
        shard
            .tensor
            .flatten_all()
            .unwrap()
            .to_vec1::<f32>()
            .unwrap()
    });
    values.map(f32::to_bits).collect()
}

/// The scale and the growth tracker of torch 2.15's `GradScaler("cpu", init_scale=4.0,
/// growth_factor=3.0, backoff_factor=0.25, growth_interval=2)` after each of ten steps, of which
/// the third, the seventh and the eighth have a gradient that is not finite.
const TORCH: [(f64, i64); 10] = [
    (4.0, 1),
    (12.0, 0),
    (3.0, 0),
    (3.0, 1),
    (9.0, 0),
    (9.0, 1),
    (2.25, 0),
    (0.5625, 0),
    (0.5625, 1),
    (1.6875, 0),
];

#[test]
fn the_scale_is_that_of_torch_whatever_rank_overflows() {
    for world in 1..=3 {
        for strategy in [ShardingStrategy::FullShard, ShardingStrategy::NoShard] {
            run_local(world, |group| {
                let model = model(&group, strategy);
                let mut optimizer = Optimizer::new(
                    model.parameters(),
                    Algorithm::Sgd(SgdOptions {
                        lr: 0.01,
                        ..SgdOptions::default()
                    }),
                );
                let optimizer = optimizer.as_mut().unwrap();
                let options = GradScalerOptions {
                    init_scale: 4.0,
                    growth_factor: 3.0,
                    backoff_factor: 0.25,
                    growth_interval: 2,
                    ..GradScalerOptions::default()
                };
                let mut scaler = GradScaler::new(options).unwrap();
                for (step, expected) in TORCH.into_iter().enumerate() {
                    let is_bad = [2, 6, 7].contains(&step);
                    let is_mine = is_bad && group.rank() == step % world;
                    backward(&model, &scaler, if is_mine { f64::INFINITY } else { 1.0 });
                    let before = bits(&model, |fqn| model.parameters().parameter(fqn).unwrap());
                    assert_eq!(scaler.step(optimizer).unwrap(), !is_bad);
                    let after = bits(&model, |fqn| model.parameters().parameter(fqn).unwrap());
                    assert_eq!(before == after, is_bad || before.is_empty(), "step {step}");
                    scaler.update().unwrap();
                    model.parameters().zero_grad();
                    let entry = |key: &str| {
                        state(&scaler)
                            .into_iter()
                            .find(|(name, _)| name == key)
                            .unwrap()
                            .1
                    };
                    let found = (
                        entry("scale").as_float().unwrap(),
                        entry("_growth_tracker").as_int().unwrap(),
                    );
                    assert_eq!(found, expected, "step {step}");
                }
            })
            .unwrap();
        }
    }
}

#[test]
fn unscaled_gradients_are_those_of_the_loss_itself() {
    run_local(2, |group| {
        let (plain, scaled) = (
            model(&group, ShardingStrategy::FullShard),
            model(&group, ShardingStrategy::FullShard),
        );
        let off = GradScalerOptions {
            enabled: false,
            ..GradScalerOptions::default()
        };
        backward(&plain, &GradScaler::new(off).unwrap(), 1.0);
        let mut scaler = GradScaler::new(GradScalerOptions::default()).unwrap();
        backward(&scaled, &scaler, 1.0);
        let gradients = |model: &Model| {
            bits(model, |fqn| {
                model.parameters().gradient(fqn).unwrap().unwrap()
            })
        };
        assert!(gradients(&plain).is_empty() || gradients(&scaled) != gradients(&plain));
        assert!(scaler.unscale(scaled.parameters()).unwrap());
        // The scale is a power of two.
        assert_eq!(gradients(&scaled), gradients(&plain));
        assert!(matches!(
            scaler.unscale(scaled.parameters()),
            Err(NnError::Scaler(ScalerError::UnscaledTwice))
        ));
    })
    .unwrap();
}

#[test]
fn one_scaler_unscales_the_gradients_of_each_model_by_itself() {
    run_local(2, |group| {
        let sgd = || {
            Algorithm::Sgd(SgdOptions {
                lr: 0.5,
                ..SgdOptions::default()
            })
        };
        let weights_after = |scaler: &mut GradScaler| {
            let models = [(); 2].map(|()| model(&group, ShardingStrategy::FullShard));
            for model in &models {
                backward(model, scaler, 1.0);
            }
            for model in &models {
                let mut optimizer = Optimizer::new(model.parameters(), sgd()).unwrap();
                assert!(scaler.step(&mut optimizer).unwrap());
            }
            models.map(|model| bits(&model, |fqn| model.parameters().parameter(fqn).unwrap()))
        };
        let options = GradScalerOptions {
            init_scale: 8.0,
            ..GradScalerOptions::default()
        };
        let mut scaler = GradScaler::new(options).unwrap();
        let mut off = GradScaler::new(GradScalerOptions {
            enabled: false,
            ..options
        })
        .unwrap();
        assert_eq!(weights_after(&mut scaler), weights_after(&mut off));
        scaler.update().unwrap();

        // Without an update, a second backward's gradients would be taken for unscaled ones.
        let model = model(&group, ShardingStrategy::FullShard);
        let mut optimizer = Optimizer::new(model.parameters(), sgd()).unwrap();
        backward(&model, &scaler, 1.0);
        scaler.step(&mut optimizer).unwrap();
        model.parameters().zero_grad();
        backward(&model, &scaler, 1.0);
        let error = scaler.step(&mut optimizer).unwrap_err();
        assert!(
            matches!(error, NnError::Scaler(ScalerError::NewGradients)),
            "{error}"
        );
    })
    .unwrap();
}

#[test]
fn its_state_has_torchs_keys_and_comes_back() {
    let mut scaler = GradScaler::new(GradScalerOptions::default()).unwrap();
    let expected = [
        ("scale", PlainValue::Float(65536.0)),
        ("growth_factor", PlainValue::Float(2.0)),
        ("backoff_factor", PlainValue::Float(0.5)),
        ("growth_interval", PlainValue::Int(2000)),
        ("_growth_tracker", PlainValue::Int(0)),
    ];
    assert_eq!(
        state(&scaler),
        expected.map(|(key, value)| (key.to_owned(), value))
    );
    let mut other = scaler.state_dict();
    other.insert("scale", 8.0);
    other.insert("_growth_tracker", 7i64);
    scaler.load_state_dict(&other).unwrap();
    assert_eq!(scaler.get_scale(), 8.0);
    assert_eq!(
        scaler
            .state_dict()
            .get("_growth_tracker")
            .and_then(StateValue::as_plain),
        Some(&PlainValue::Int(7))
    );
    // Nothing is taken of a state that is wrong.
    for (key, wrong) in [
        ("scale", Some(PlainValue::Float(f64::NAN))),
        ("growth_interval", None),
    ] {
        let mut state = scaler.state_dict();
        match wrong {
            Some(wrong) => drop(state.insert(key, StateValue::Plain(wrong))),
            None => drop(state.remove(key)),
        }
        state.insert("_growth_tracker", 1i64);
        let before = scaler.clone();
        assert!(matches!(
            scaler.load_state_dict(&state),
            Err(NnError::Scaler(_))
        ));
        assert_eq!(scaler, before);
    }
    assert!(matches!(
        scaler.load_state_dict(&StateDict::new()),
        Err(NnError::Scaler(ScalerError::State { .. }))
    ));
    assert!(matches!(
        scaler.update(),
        Err(NnError::Scaler(ScalerError::NothingToUpdate))
    ));
    let zero = GradScalerOptions {
        growth_interval: 0,
        ..GradScalerOptions::default()
    };
    assert!(matches!(
        GradScaler::new(zero),
        Err(NnError::Scaler(ScalerError::OutOfRange { .. }))
    ));
}

/// Trains on gradients that are too small for `f16`, and returns the last loss.
fn train(group: &ProcessGroup, enabled: bool) -> f32 {
    let mixed_precision = MixedPrecision {
        param: Some(DType::F16),
        ..MixedPrecision::default()
    };
    let config = FsdpConfig {
        mixed_precision,
        seed: 2,
        ..FsdpConfig::default()
    };
    let model = FullyShardedDataParallel::new(group.clone(), config, |scope| {
        let layer = |i: usize| scope.pp(i).unit(|scope| linear_no_bias(8, 8, scope.vb()));
        (0..2)
            .map(layer)
            .collect::<candle_core::Result<Vec<Unit<Linear>>>>()
    })
    .unwrap();
    let adam = Algorithm::Adam(AdamOptions {
        lr: 0.01,
        eps: 1e-15,
        ..AdamOptions::default()
    });
    let mut optimizer = Optimizer::new(model.parameters(), adam).unwrap();
    let mut scaler = GradScaler::new(GradScalerOptions {
        enabled,
        ..GradScalerOptions::default()
    })
    .unwrap();
    let x: Vec<f32> = (0..32)
        .map(|i| ((i * 7 + group.rank() * 5) % 13) as f32 / 6.0 - 1.0)
        .collect();
    let x = Tensor::from_vec(x, (4, 8), &Device::Cpu)
        .unwrap()
        .to_dtype(DType::F16)
        .unwrap();
    let mut last = 0.0;
    for _ in 0..30 {
        let loss = model.forward(|layers| {
            let y = layers
                .iter()
                .try_fold(x.clone(), |x, layer| layer.forward(&x)?.tanh())?;
            (y.to_dtype(DType::F32)? - 0.5)?.sqr()?.mean_all()
        });
        let loss = loss.unwrap();
        last = loss.to_scalar::<f32>().unwrap();
        let small = (loss * 1e-7).unwrap();
        model.backward(&scaler.scale(&small).unwrap()).unwrap();
        scaler.step(&mut optimizer).unwrap();
        scaler.update().unwrap();
        model.parameters().zero_grad();
    }
    last
}

#[test]
fn gradients_that_f16_loses_train_a_model_all_the_same() {
    let [lost, scaled] =
        [false, true].map(|enabled| run_local(2, |group| train(&group, enabled)).unwrap()[0]);
    assert!(
        scaled < 0.5 * lost,
        "{scaled} with a scaler, {lost} without"
    );
}

#[test]
fn a_scale_that_fell_as_far_as_it_can_is_saved_and_loaded() {
    run_local(1, |group| {
        let model = model(&group, ShardingStrategy::NoShard);
        let options = GradScalerOptions {
            init_scale: 1e-30,
            backoff_factor: 1e-30,
            ..GradScalerOptions::default()
        };
        let mut scaler = GradScaler::new(options).unwrap();
        for _ in 0..2 {
            backward(&model, &scaler, f64::INFINITY);
            assert!(!scaler.unscale(model.parameters()).unwrap());
            scaler.update().unwrap();
        }
        let mut again = GradScaler::new(GradScalerOptions::default()).unwrap();
        again.load_state_dict(&scaler.state_dict()).unwrap();
        assert_eq!(state(&again), state(&scaler));
    })
    .unwrap();
}

#[test]
fn a_count_of_steps_from_a_file_may_be_the_largest_there_is() {
    run_local(1, |group| {
        let model = model(&group, ShardingStrategy::NoShard);
        let mut scaler = GradScaler::new(GradScalerOptions::default()).unwrap();
        let mut saved = scaler.state_dict();
        saved.insert("_growth_tracker", i64::from(u32::MAX));
        scaler.load_state_dict(&saved).unwrap();
        let scale = scaler.get_scale();
        backward(&model, &scaler, 1.0);
        assert!(scaler.unscale(model.parameters()).unwrap());
        scaler.update().unwrap();
        assert_eq!(scaler.get_scale(), 2.0 * scale);
    })
    .unwrap();
}

/// torch too looks at the gradients of each optimizer by themselves.
#[test]
fn of_two_optimizers_only_that_whose_gradients_are_not_finite_is_skipped() {
    for use_orig_params in [true, false] {
        for ranks in [1, 2, 3] {
            run_local(ranks, |group| {
                let config = FsdpConfig {
                    use_orig_params,
                    ..FsdpConfig::default()
                };
                let model = FullyShardedDataParallel::new(group, config, |scope| {
                    let get = |name: &str| {
                        let scope = scope.pp(name);
                        scope.unit(|scope| scope.vb().get((2, 3), "weight"))
                    };
                    Ok((get("a")?, get("b")?))
                })
                .unwrap();
                let parameters = model.parameters();
                let sgd = || Algorithm::Sgd(SgdOptions::default());
                let mut optimizers = ["a.weight", "b.weight"].map(|fqn| {
                    let group = fsdp_nn::ParamGroup::new(sgd(), [fqn]);
                    Optimizer::with_groups(parameters, vec![group]).unwrap()
                });
                let mut scaler = GradScaler::new(GradScalerOptions::default()).unwrap();
                for (factors, expected) in [
                    ([1.0, f64::INFINITY], [true, false]),
                    ([f64::INFINITY, 1.0], [false, true]),
                    ([1.0, 1.0], [true, true]),
                    ([f64::INFINITY; 2], [false, false]),
                ] {
                    let before = scaler.get_scale();
                    let loss = model
                        .forward(|(a, b)| {
                            let a = a.run(|weight| weight.sum_all()? * factors[0])?;
                            let b = b.run(|weight| weight.sum_all()? * factors[1])?;
                            a + b
                        })
                        .unwrap();
                    model.backward(&scaler.scale(&loss).unwrap()).unwrap();
                    let stepped = [0, 1].map(|index| scaler.step(&mut optimizers[index]).unwrap());
                    assert_eq!(stepped, expected, "{factors:?} on {ranks} ranks");
                    scaler.update().unwrap();
                    let has_fallen = scaler.get_scale() < before;
                    assert_eq!(has_fallen, expected.contains(&false));
                    parameters.zero_grad();
                }
            })
            .unwrap();
        }
    }
}
