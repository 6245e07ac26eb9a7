//! A step counts whatever state it starts from, and a step that fails loses nothing.

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, linear};
use fsdp_comm::{CommError, ProcessGroup, run_local};
use fsdp_flat::storage::{Contents, release};
use fsdp_nn::algorithm::{
    AdafactorOptions, AdamOptions, AlgorithmError, MuonOptions, ScheduleFreeOptions, SgdOptions,
};
use fsdp_nn::torch::{StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict};
use fsdp_nn::{
    Algorithm, FinishOptions, FsdpConfig, FullyShardedDataParallel, GradScaler, GradScalerOptions,
    NnError, Optimizer, ParamGroup, ShardingStrategy,
};
use fsdp_state::StateValue;

fn options() -> StateDictOptions {
    StateDictOptions {
        strict: false,
        ..StateDictOptions::default()
    }
}

fn model(group: &ProcessGroup) -> FullyShardedDataParallel<Linear> {
    FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| {
        linear(4, 1, scope.vb())
    })
    .unwrap()
}

fn backward(model: &FullyShardedDataParallel<Linear>) {
    let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu).unwrap();
    let loss = model
        .forward(|layer| layer.forward(&x)?.sqr()?.sum_all())
        .unwrap();
    model.backward(&loss).unwrap();
}

fn adamw() -> Algorithm {
    Algorithm::AdamW(AdamOptions::adamw())
}

fn step_of(optimizer: &Optimizer, fqn: &str) -> Option<f32> {
    let state = optimizer.state_of(fqn).unwrap()?;
    Some(state.get("step")?.as_tensor().unwrap().to_scalar().unwrap())
}

fn weights(model: &FullyShardedDataParallel<Linear>) -> Vec<f32> {
    let shards = model
        .parameters()
        .parameter("weight")
        .unwrap()
        .shards()
        .to_vec();
    shards
        .iter()
        .flat_map(|shard| {
            shard
                .tensor
                .flatten_all()
                .unwrap()
                .to_vec1::<f32>()
                .unwrap()
        })
        .collect()
}

#[test]
fn state_without_a_step_counts_from_zero() {
    run_local(1, |group| {
        let (fresh, loaded) = (model(&group), model(&group));
        let mut expected = Optimizer::new(fresh.parameters(), adamw()).unwrap();
        let mut optimizer = Optimizer::new(loaded.parameters(), adamw()).unwrap();
        // A dict without `step`.
        let mut state =
            get_optimizer_state_dict(fresh.parameters(), &[&expected], &options()).unwrap();
        let Some(StateValue::Dict(states)) = state.get_mut("state") else {
            panic!("state is a dict")
        };
        for fqn in ["weight", "bias"] {
            let Some(StateValue::Dict(entries)) = states.get_mut(fqn) else {
                panic!("{fqn} has state")
            };
            assert!(entries.remove("step").is_some());
        }
        let report = set_optimizer_state_dict(
            &state,
            loaded.parameters(),
            &mut [&mut optimizer],
            &options(),
        )
        .unwrap();
        assert_eq!(report.missing, ["state.bias.step", "state.weight.step"]);
        assert_eq!(step_of(&optimizer, "weight"), None);
        for step in 1..=3u8 {
            for (model, optimizer) in [(&fresh, &mut expected), (&loaded, &mut optimizer)] {
                backward(model);
                optimizer.step().unwrap();
                model.parameters().zero_grad();
                assert_eq!(step_of(optimizer, "weight"), Some(f32::from(step)));
            }
        }
        assert_eq!(weights(&loaded), weights(&fresh));
    })
    .unwrap();
}

#[test]
fn a_step_that_fails_keeps_the_state() {
    run_local(1, |group| {
        let model = model(&group);
        let mut optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
        backward(&model);
        optimizer.step().unwrap();
        // The moments of one parameter cannot be reached.
        let state = optimizer.state_of("weight").unwrap().unwrap();
        let moment = state["exp_avg"].as_sharded().unwrap().shards()[0]
            .tensor
            .flatten_all()
            .unwrap();
        let values = moment.to_vec1::<f32>().unwrap();
        release(&moment).unwrap();
        optimizer.step().unwrap_err();
        Contents::new(values).move_into(&moment).unwrap();
        assert_eq!(step_of(&optimizer, "weight"), Some(1.0));
        optimizer.step().unwrap();
        assert_eq!(step_of(&optimizer, "weight"), Some(2.0));
    })
    .unwrap();
}

#[test]
fn gradients_that_are_not_finite_on_one_rank_are_an_error_on_all_and_change_nothing() {
    for strategy in [ShardingStrategy::FullShard, ShardingStrategy::NoShard] {
        for bad in [f64::NAN, f64::INFINITY] {
            run_local(3, |group| {
                let config = FsdpConfig {
                    strategy,
                    ..FsdpConfig::default()
                };
                let model = FullyShardedDataParallel::new(group.clone(), config, |scope| {
                    linear(4, 1, scope.vb())
                });
                let model = model.unwrap();
                let mut optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
                let before = weights(&model);
                let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu).unwrap();
                let scale = if group.rank() == 1 { bad } else { 1.0 };
                let loss = model
                    .forward(|layer| layer.forward(&x)?.sqr()?.sum_all()? * scale)
                    .unwrap();
                model.backward(&loss).unwrap();
                for refused in [
                    model.parameters().clip_grad_norm(1.0),
                    model.parameters().finite_grad_norm(),
                ] {
                    let norm = match refused {
                        Err(NnError::NonFiniteGradients { norm }) => norm,
                        other => panic!("{other:?}"),
                    };
                    assert!(!norm.is_finite());
                }
                // Every rank has learned it, and can leave the step out.
                model.parameters().zero_grad();
                assert_eq!(weights(&model), before);
                backward(&model);
                model.parameters().clip_grad_norm(1.0).unwrap();
                optimizer.step().unwrap();
                assert!(weights(&model).iter().all(|weight| weight.is_finite()));
                // The last rank has no row of its own.
                assert!(before.is_empty() || weights(&model) != before);
            })
            .unwrap();
        }
    }
}

#[test]
fn an_optimizer_of_another_ones_groups_steps_each_parameter_once() {
    run_local(2, |group| {
        let sgd = || {
            Algorithm::Sgd(SgdOptions {
                lr: 0.1,
                ..SgdOptions::default()
            })
        };
        let (one, other) = (model(&group), model(&group));
        let mut first = Optimizer::new(one.parameters(), sgd()).unwrap();
        let mut again =
            Optimizer::with_groups(other.parameters(), first.groups().to_vec()).unwrap();
        for (model, optimizer) in [(&one, &mut first), (&other, &mut again)] {
            backward(model);
            optimizer.step().unwrap();
        }
        assert_eq!(weights(&one), weights(&other));
    })
    .unwrap();
}

#[test]
fn a_step_without_gradients_does_not_count_for_schedule_free_adamw() {
    run_local(2, |group| {
        let algorithm = Algorithm::ScheduleFreeAdamW(ScheduleFreeOptions::default());
        let model = model(&group);
        let mut optimizer = Optimizer::new(model.parameters(), algorithm).unwrap();
        optimizer.train().unwrap();
        let before = format!("{:?}", optimizer.groups()[0].algorithm);
        optimizer.step().unwrap();
        assert_eq!(format!("{:?}", optimizer.groups()[0].algorithm), before);
        backward(&model);
        optimizer.step().unwrap();
        assert_ne!(format!("{:?}", optimizer.groups()[0].algorithm), before);
    })
    .unwrap();
}

#[test]
fn a_backward_that_candle_ran_alone_is_an_error_if_it_left_gradients_behind() {
    run_local(2, |group| {
        let model = model(&group);
        let mut optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
        // The loss reaches the weight only, so the unit's backward is not over.
        let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu).unwrap();
        let loss = model
            .forward(|layer| x.matmul(&layer.weight().t()?)?.sqr()?.sum_all())
            .unwrap();
        loss.backward().unwrap();
        let error = optimizer.step().unwrap_err();
        assert!(matches!(error, NnError::BackwardNotEnded { .. }), "{error}");
    })
    .unwrap();
}

fn bits(model: &FullyShardedDataParallel<Linear>, fqn: &str) -> Vec<u32> {
    let shards = model.parameters().parameter(fqn).unwrap().shards().to_vec();
    let values = shards.iter().flat_map(|shard| {
        let values = shard
            .tensor
            .flatten_all()
            .unwrap()
            .to_dtype(DType::F32)
            .unwrap();
        values.to_vec1::<f32>().unwrap()
    });
    values.map(f32::to_bits).collect()
}

/// Checks that an error says what does not suit the parameters.
fn assert_refused(what: &str, error: &NnError) {
    match (what, error) {
        ("eps", NnError::Algorithm(AlgorithmError::VanishingEps { .. })) => {}
        ("matrix", NnError::Algorithm(AlgorithmError::NotAMatrix { .. })) => {}
        ("flat", NnError::Algorithm(AlgorithmError::FlatParameters { .. })) => {}
        _ => panic!("{what}: {error}"),
    }
}

#[test]
fn an_algorithm_that_cannot_update_its_parameters_is_refused_by_a_step_and_by_a_load() {
    run_local(2, |group| {
        let adamw = |eps| {
            Algorithm::AdamW(AdamOptions {
                eps,
                ..AdamOptions::adamw()
            })
        };
        let build = |config: FsdpConfig| {
            FullyShardedDataParallel::new(group.clone(), config, |scope| linear(4, 1, scope.vb()))
                .unwrap()
        };
        let flat = FsdpConfig {
            use_orig_params: false,
            ..FsdpConfig::default()
        };
        for (what, config, algorithm) in [
            (
                "eps",
                FsdpConfig {
                    dtype: DType::F16,
                    ..FsdpConfig::default()
                },
                adamw(1e-8),
            ),
            (
                "matrix",
                FsdpConfig::default(),
                Algorithm::Muon(MuonOptions::default()),
            ),
            (
                "flat",
                flat,
                Algorithm::Adafactor(AdafactorOptions::default()),
            ),
        ] {
            let model = build(config);
            let mut optimizer = Optimizer::new(model.parameters(), adamw(1e-3)).unwrap();
            let x = Tensor::ones(
                (2, 4),
                model.parameters().dtype("weight").unwrap(),
                &Device::Cpu,
            )
            .unwrap();
            let loss = model
                .forward(|layer| layer.forward(&x)?.sqr()?.sum_all())
                .unwrap();
            model.backward(&loss).unwrap();
            let before = bits(&model, "weight");
            optimizer.groups_mut()[0].algorithm = algorithm;
            assert_refused(what, &optimizer.step().unwrap_err());
            assert_eq!(bits(&model, "weight"), before, "{what}");
            assert!(optimizer.is_fresh(), "{what}");
        }
        // torch's own `eps` from a checkpoint.
        let saved = model(&group);
        let other = Optimizer::new(saved.parameters(), adamw(1e-8)).unwrap();
        let half = build(FsdpConfig {
            dtype: DType::F16,
            ..FsdpConfig::default()
        });
        let mut optimizer = Optimizer::new(half.parameters(), adamw(1e-3)).unwrap();
        assert_refused(
            "eps",
            &optimizer
                .load_state_dict(&other.state_dict().unwrap())
                .unwrap_err(),
        );
        let state = get_optimizer_state_dict(saved.parameters(), &[&other], &options()).unwrap();
        let error =
            set_optimizer_state_dict(&state, half.parameters(), &mut [&mut optimizer], &options())
                .unwrap_err();
        assert!(error.to_string().contains("eps"), "{error}");
        assert_eq!(optimizer.groups()[0].algorithm, adamw(1e-3));
    })
    .unwrap();
}

#[test]
fn a_group_of_other_parameters_in_the_place_of_an_optimizers_own_is_refused() {
    run_local(2, |group| {
        let model = model(&group);
        let mut optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
        backward(&model);
        let before = weights(&model);
        optimizer.groups_mut()[0] = ParamGroup::new(adamw(), ["bias"]);
        let error = optimizer.step().unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("parameter group 0 has been replaced by one of other parameters"),
            "{error}"
        );
        assert_eq!(weights(&model), before);
        // One of the same parameters is a change of hyperparameters.
        optimizer.groups_mut()[0] = ParamGroup::new(adamw(), ["weight", "bias"]);
        optimizer.step().unwrap();
        assert!(before.is_empty() || weights(&model) != before);
    })
    .unwrap();
}

#[test]
fn an_error_of_one_rank_is_one_of_all_in_a_step_that_communicates() {
    let failed_here = run_local(2, |group| {
        let model = model(&group);
        let groups = vec![
            ParamGroup::new(Algorithm::Muon(MuonOptions::default()), ["weight"]),
            ParamGroup::new(adamw(), ["bias"]),
        ];
        let mut optimizer = Optimizer::with_groups(model.parameters(), groups).unwrap();
        backward(&model);
        optimizer.step().unwrap();
        // One rank has the bias, and cannot reach its moments.
        let state = optimizer.state_of("bias").unwrap().unwrap();
        let shard = state["exp_avg"]
            .as_sharded()
            .unwrap()
            .shards()
            .first()
            .cloned();
        if let Some(shard) = &shard {
            release(&shard.tensor.flatten_all().unwrap()).unwrap();
        }
        let error = optimizer.step().unwrap_err();
        let is_told = matches!(error, NnError::Comm(CommError::RankFailed { .. }));
        assert_eq!(is_told, shard.is_none(), "{error}");
        shard.is_some()
    })
    .unwrap();
    assert_ne!(failed_here[0], failed_here[1]);
}

/// A rank that finds in its checks that it cannot step must not leave the others waiting.
#[test]
fn an_error_in_the_checks_before_a_step_of_whole_matrices_is_an_error_on_every_rank() {
    for whole in [
        Algorithm::Muon(MuonOptions::default()),
        Algorithm::Adafactor(AdafactorOptions::default()),
    ] {
        run_local(2, |group| {
            let model = model(&group);
            let groups = vec![
                ParamGroup::new(whole.clone(), ["weight"]),
                ParamGroup::new(adamw(), ["bias"]),
            ];
            let mut optimizer = Optimizer::with_groups(model.parameters(), groups).unwrap();
            backward(&model);
            let set_rate = |optimizer: &mut Optimizer, lr: f64| {
                let Algorithm::AdamW(options) = &mut optimizer.groups_mut()[1].algorithm else {
                    unreachable!()
                };
                options.lr = lr;
            };
            let before = weights(&model);
            if group.rank() == 1 {
                set_rate(&mut optimizer, -1.0);
            }
            let error = optimizer.step().unwrap_err();
            let is_told = matches!(error, NnError::Comm(CommError::RankFailed { .. }));
            assert_eq!(is_told, group.rank() == 0, "{error}");
            assert!(error.to_string().contains("`lr` = `-1`"), "{error}");
            assert_eq!(weights(&model), before);
            set_rate(&mut optimizer, 1e-3);
            optimizer.step().unwrap();
        })
        .unwrap();
    }
}

#[test]
fn a_muon_step_that_failed_on_another_rank_can_be_made_again_with_the_same_result() {
    run_local(2, |group| {
        let groups = || {
            vec![
                ParamGroup::new(Algorithm::Muon(MuonOptions::default()), ["weight"]),
                ParamGroup::new(adamw(), ["bias"]),
            ]
        };
        let build = || {
            let model =
                FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| {
                    linear(4, 4, scope.vb())
                });
            let model = model.unwrap();
            let optimizer = Optimizer::with_groups(model.parameters(), groups()).unwrap();
            (model, optimizer)
        };
        let ((expected, mut straight), (model, mut optimizer)) = (build(), build());
        for step in 0..3 {
            backward(&expected);
            straight.step().unwrap();
            expected.parameters().zero_grad();

            backward(&model);
            // One rank cannot reach moments of the other group.
            let state = optimizer.state_of("bias").unwrap();
            let moment = state.filter(|_| group.rank() == 1).map(|state| {
                let shards = state["exp_avg"].as_sharded().unwrap().shards();
                shards[0].tensor.flatten_all().unwrap()
            });
            let values = moment.as_ref().map(|moment| {
                let values = moment.to_vec1::<f32>().unwrap();
                release(moment).unwrap();
                values
            });
            if step > 0 {
                optimizer.step().unwrap_err();
            }
            if let (Some(moment), Some(values)) = (moment, values) {
                Contents::new(values).move_into(&moment).unwrap();
            }
            optimizer.step().unwrap();
            model.parameters().zero_grad();
            assert_eq!(
                bits(&model, "weight"),
                bits(&expected, "weight"),
                "step {step}"
            );
        }
    })
    .unwrap();
}

/// Leaves gradients on this rank that the next backward would reduce.
fn backward_without_reduction(model: &FullyShardedDataParallel<Linear>) {
    let unreduced = model.no_sync(|model| {
        backward(model);
        Ok::<(), NnError>(())
    });
    unreduced.unwrap();
}

/// An epoch whose last micro-batches do not make a whole window, say.
#[test]
fn gradients_that_no_backward_has_reduced_are_an_error_at_the_end_of_a_step() {
    for strategy in [ShardingStrategy::FullShard, ShardingStrategy::NoShard] {
        for ways in 0..2 {
            run_local(2, |group| {
                let config = FsdpConfig {
                    strategy,
                    ..FsdpConfig::default()
                };
                let build = |scope: &fsdp_nn::Scope| linear(4, 1, scope.vb());
                let model = FullyShardedDataParallel::new(group.clone(), config, build).unwrap();
                let parameters = model.parameters();
                let mut optimizers = [Optimizer::new(parameters, adamw()).unwrap()];
                let mut scaler = GradScaler::new(GradScalerOptions::default()).unwrap();
                let before = weights(&model);
                if ways == 0 {
                    backward_without_reduction(&model);
                } else if strategy == ShardingStrategy::NoShard {
                    model.set_requires_all_reduce(false);
                    backward(&model);
                    model.set_requires_all_reduce(true);
                } else {
                    return;
                }
                for refused in [
                    optimizers[0].step(),
                    parameters.grad_norm().map(drop),
                    parameters.clip_grad_norm(1.0).map(drop),
                    scaler.unscale(parameters).map(drop),
                    scaler.step(&mut optimizers[0]).map(drop),
                    parameters
                        .finish_step(&mut optimizers, None, &FinishOptions::default())
                        .map(drop),
                ] {
                    let error = refused.unwrap_err();
                    assert!(
                        matches!(error, NnError::GradientsNotReduced { .. }),
                        "{error}"
                    );
                }
                assert_eq!(weights(&model), before);
                // They are still there for the next backward.
                backward(&model);
                optimizers[0].step().unwrap();
                assert!(before.is_empty() || weights(&model) != before);
            })
            .unwrap();
        }
    }
}

#[test]
fn gradients_that_one_rank_has_not_reduced_are_an_error_of_all_where_ranks_communicate() {
    run_local(3, |group| {
        let config = FsdpConfig {
            strategy: ShardingStrategy::NoShard,
            ..FsdpConfig::default()
        };
        let build = |scope: &fsdp_nn::Scope| linear(4, 1, scope.vb());
        let model = FullyShardedDataParallel::new(group.clone(), config, build).unwrap();
        let parameters = model.parameters();
        let mut optimizers = [Optimizer::new(parameters, adamw()).unwrap()];
        let mut scaler = GradScaler::new(GradScalerOptions::default()).unwrap();
        if group.rank() == 1 {
            backward_without_reduction(&model);
        }
        for refused in [
            parameters.clip_grad_norm(1.0).map(drop),
            scaler.unscale(parameters).map(drop),
            parameters
                .finish_step(&mut optimizers, None, &FinishOptions::default())
                .map(drop),
            parameters
                .finish_step(
                    &mut optimizers,
                    Some(&mut scaler),
                    &FinishOptions::default(),
                )
                .map(drop),
        ] {
            let error = refused.unwrap_err();
            assert_eq!(
                matches!(error, NnError::GradientsNotReduced { .. }),
                group.rank() == 1,
                "{error}"
            );
            assert!(
                error.to_string().contains("have not been reduced"),
                "{error}"
            );
        }
        parameters.zero_grad();
        backward(&model);
        parameters
            .finish_step(
                &mut optimizers,
                Some(&mut scaler),
                &FinishOptions::default(),
            )
            .unwrap();
    })
    .unwrap();
}

#[test]
fn a_parameter_that_two_optimizers_hold_is_not_stepped_twice() {
    run_local(2, |group| {
        let model = model(&group);
        let parameters = model.parameters();
        let of = |fqns: &[&str]| {
            let groups = vec![ParamGroup::new(adamw(), fqns.to_vec())];
            Optimizer::with_groups(parameters, groups).unwrap()
        };
        let before = weights(&model);
        backward(&model);
        let mut overlapping = [of(&["weight", "bias"]), of(&["weight"])];
        let finish = |optimizers: &mut [Optimizer]| {
            parameters.finish_step(optimizers, None, &FinishOptions::default())
        };
        let error = finish(&mut overlapping).unwrap_err();
        assert!(error.to_string().contains("`weight`"), "{error}");
        assert_eq!(weights(&model), before);
        finish(&mut [of(&["bias"]), of(&["weight"])]).unwrap();
    })
    .unwrap();
}
