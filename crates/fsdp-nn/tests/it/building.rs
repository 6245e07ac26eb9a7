//! A model that cannot be sharded is refused while it is built, with an error that names what is
//! wrong with it.

use std::sync::Mutex;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, linear, linear_no_bias};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_nn::{
    FsdpConfig, FullyShardedDataParallel, MixedPrecision, NnError, Scope, ShardingStrategy, Unit,
};

fn new<M>(
    group: &ProcessGroup,
    config: FsdpConfig,
    build: impl FnOnce(&Scope) -> candle_core::Result<M>,
) -> Result<FullyShardedDataParallel<M>, String> {
    FullyShardedDataParallel::new(group.clone(), config, build).map_err(|error| error.to_string())
}

/// The error of a build on every rank.
fn errors<M>(
    world: usize,
    build: impl Fn(&Scope, usize) -> candle_core::Result<M> + Sync,
) -> Vec<String> {
    run_local(world, |group| {
        let rank = group.rank();
        new(&group, FsdpConfig::default(), |scope| build(scope, rank))
            .err()
            .unwrap()
    })
    .unwrap()
}

fn get(scope: &Scope, name: &str) -> candle_core::Result<Tensor> {
    scope.vb().get(4, name)
}

#[test]
fn a_chain_of_ties_is_a_tie_to_the_parameter_at_its_end() {
    run_local(2, |group| {
        let model = new(&group, FsdpConfig::default(), |scope| {
            scope.tie("b", "c");
            scope.tie("a", "b");
            Ok((get(scope, "a")?, get(scope, "b")?, get(scope, "c")?))
        })
        .unwrap();
        let parameters = model.parameters();
        assert_eq!(parameters.fqns().collect::<Vec<_>>(), ["c"]);
        assert_eq!(
            (parameters.canonical_fqn("a"), parameters.canonical_fqn("b")),
            ("c", "c")
        );
        let values = model
            .forward(|(a, b, c)| Ok(vec![a.clone(), b.clone(), c.clone()]))
            .unwrap();
        let values: Vec<Vec<f32>> = values
            .iter()
            .map(|value| value.to_vec1().unwrap())
            .collect();
        assert_eq!((&values[0], &values[1]), (&values[2], &values[2]));
    })
    .unwrap();
}

#[test]
fn a_tie_that_comes_after_its_alias_is_refused_with_both_names() {
    for error in errors(2, |scope, _| {
        let alias = get(scope, "alias")?;
        scope.tie("alias", "weight");
        Ok((alias, get(scope, "weight")?))
    }) {
        assert!(
            error.contains("`alias`") && error.contains("`weight`"),
            "{error}"
        );
    }
}

#[test]
fn ties_in_a_circle_are_refused() {
    for error in errors(1, |scope, _| {
        scope.tie("a", "b");
        scope.tie("b", "a");
        get(scope, "c")
    }) {
        assert!(error.contains("`a`") && error.contains("`b`"), "{error}");
    }
}

#[test]
fn an_alias_that_is_tied_twice_is_refused() {
    for error in errors(1, |scope, _| {
        scope.tie("a", "b");
        scope.tie("a", "c");
        Ok((get(scope, "b")?, get(scope, "c")?))
    }) {
        assert!(
            error.contains("`a`") && error.contains("`b`") && error.contains("`c`"),
            "{error}"
        );
    }
}

#[test]
fn a_name_tied_to_itself_is_announced_before_it_is_asked_for() {
    run_local(1, |group| {
        let model = new(&group, FsdpConfig::default(), |scope| {
            assert!(!scope.vb().contains_tensor("head"));
            scope.tie("head", "head");
            assert!(scope.vb().contains_tensor("head"));
            get(scope, "head")
        })
        .unwrap();
        assert!(model.parameters().aliases().is_empty());
    })
    .unwrap();
}

#[test]
fn units_of_one_scope_need_the_models_own_parameters() {
    let build = |scope: &Scope| -> candle_core::Result<_> {
        let block = scope.pp("block");
        let unit = |name: &str| block.unit(|scope| linear(4, 4, scope.pp(name).vb()));
        Ok((unit("first")?, unit("second")?))
    };
    run_local(2, |group| {
        let flat = FsdpConfig {
            use_orig_params: false,
            ..FsdpConfig::default()
        };
        let error = new(&group, flat, build).err().unwrap();
        assert!(error.contains("`block`"), "{error}");
        let model = new(&group, FsdpConfig::default(), build).unwrap();
        assert_eq!(model.parameters().fqns().count(), 4);
    })
    .unwrap();
}

#[test]
fn ranks_that_build_different_models_are_told_the_first_difference() {
    // Two layers of one size, declared in another order by one rank.
    for error in errors(3, |scope, rank| {
        let names = if rank == 1 { ["x", "y"] } else { ["y", "x"] };
        names
            .map(|name| linear(4, 4, scope.pp(name).vb()))
            .into_iter()
            .collect::<candle_core::Result<Vec<_>>>()
    }) {
        assert!(
            error.contains("`x.weight`") && error.contains("`y.weight`") && error.contains('1'),
            "{error}"
        );
    }
    // Another shape, and another dtype.
    for error in errors(3, |scope, rank| {
        get(scope, "same")?;
        scope.vb().get(if rank == 2 { 5 } else { 4 }, "other")
    }) {
        assert!(
            error.contains("`other`") && error.contains("rank 2 has") && !error.contains("`same`"),
            "{error}"
        );
    }
    for error in errors(2, |scope, rank| {
        let dtype = if rank == 1 { DType::F64 } else { DType::F32 };
        scope.vb().set_dtype(dtype).get(4, "weight")
    }) {
        assert!(
            error.contains("`weight`") && error.contains("rank 1 has") && error.contains("f64"),
            "{error}"
        );
    }
    // Another unit structure, with the same names and shapes.
    for error in errors(2, |scope, rank| {
        let x = scope.pp("x");
        if rank == 0 {
            linear(4, 4, x.vb())
        } else {
            x.unit(|scope| linear(4, 4, scope.vb()))
                .map(|_| linear(4, 4, scope.pp("x").vb()))?
        }
    }) {
        assert!(error.contains("unit"), "{error}");
    }
}

#[test]
fn ranks_with_different_options_are_told_the_first_difference() {
    let build = |scope: &Scope| linear(4, 4, scope.vb());
    let different = run_local(2, |group| {
        let rank = group.rank();
        let strategy = if rank == 0 {
            ShardingStrategy::FullShard
        } else {
            ShardingStrategy::ShardGradOp
        };
        let by_strategy = new(
            &group,
            FsdpConfig {
                strategy,
                ..FsdpConfig::default()
            },
            build,
        )
        .err()
        .unwrap();
        let by_seed = new(
            &group,
            FsdpConfig {
                seed: rank as u64,
                ..FsdpConfig::default()
            },
            build,
        )
        .err()
        .unwrap();
        let requires_grad = std::sync::Arc::new(move |fqn: &str| rank == 0 || fqn != "bias");
        let by_grad = new(
            &group,
            FsdpConfig {
                requires_grad,
                ..FsdpConfig::default()
            },
            build,
        )
        .err()
        .unwrap();
        (by_strategy, by_seed, by_grad)
    })
    .unwrap();
    for (by_strategy, by_seed, by_grad) in different {
        assert!(
            by_strategy.contains("full-shard") && by_strategy.contains("shard-grad-op"),
            "{by_strategy}"
        );
        assert!(by_seed.contains("seed"), "{by_seed}");
        assert!(by_grad.contains("`bias`"), "{by_grad}");
    }
}

#[test]
fn a_rank_that_cannot_build_the_model_is_every_ranks_error() {
    for error in errors(2, |scope, rank| {
        if rank == 1 {
            return Err(candle_core::Error::Msg("there is no such layer".into()));
        }
        linear(4, 4, scope.vb())
    }) {
        assert!(error.contains("there is no such layer"), "{error}");
    }
}

#[test]
fn ranks_that_run_different_units_of_one_size_are_told_so() {
    let errors = run_local(2, |group| {
        let model = new(&group, FsdpConfig::default(), |scope| {
            ["x", "y"]
                .map(|name| scope.pp(name).unit(|scope| linear(4, 4, scope.vb())))
                .into_iter()
                .collect()
        });
        let model: FullyShardedDataParallel<Vec<Unit<Linear>>> = model.unwrap();
        let x = Tensor::ones((1, 4), DType::F32, &Device::Cpu).unwrap();
        let rank = model.group().rank();
        model
            .forward(|units| units[rank].forward(&x))
            .unwrap_err()
            .to_string()
    })
    .unwrap();
    for error in errors {
        assert!(
            error.contains("`unit x`") && error.contains("`unit y`"),
            "{error}"
        );
    }
}

#[test]
fn a_parameter_of_two_units_is_refused_where_it_is_asked_for_again() {
    for error in errors(2, |scope, _| {
        let shared = |name: &str| {
            scope
                .pp(name)
                .unit(|_| linear_no_bias(4, 4, scope.pp("shared").vb()))
        };
        Ok((shared("first")?, shared("second")?))
    }) {
        assert!(
            error.contains("`shared.weight`")
                && error.contains("`first`")
                && error.contains("`second`"),
            "{error}"
        );
    }
    // The root's are whole all the time, and an outer unit's while an inner one runs.
    run_local(2, |group| {
        new(&group, FsdpConfig::default(), |scope| {
            let root = linear_no_bias(4, 4, scope.pp("root").vb())?;
            let outer = scope.pp("outer").unit(|outer| {
                let own = linear_no_bias(4, 4, outer.pp("own").vb())?;
                let inner = outer.pp("inner").unit(|_| {
                    Ok((
                        linear_no_bias(4, 4, outer.pp("own").vb())?,
                        linear_no_bias(4, 4, scope.pp("root").vb())?,
                    ))
                })?;
                Ok((own, inner))
            })?;
            Ok((root, outer))
        })
        .unwrap();
    })
    .unwrap();
}

#[test]
fn a_parameter_that_is_asked_for_too_late_is_refused() {
    run_local(1, |group| {
        let kept = Mutex::new(None);
        new(&group, FsdpConfig::default(), |scope| {
            *kept.lock().unwrap() = Some(scope.clone());
            linear(4, 4, scope.vb())
        })
        .unwrap();
        let scope = kept.into_inner().unwrap().unwrap();
        let error = get(&scope, "late").unwrap_err().to_string();
        assert!(error.contains("`late`"), "{error}");
        // A parameter that is there can be looked up.
        scope.vb().get((4, 4), "weight").unwrap();
    })
    .unwrap();
}

#[test]
fn weights_that_are_computed_with_while_the_model_is_built_are_named_as_sharded() {
    for error in errors(2, |scope, _| get(scope, "weight")?.sqr()) {
        assert!(
            error.contains("parameter `weight` is sharded here; ") && !error.contains("F4"),
            "{error}"
        );
    }
    for error in errors(2, |scope, _| {
        scope.vb().get((4, 2), "weight")?.t()?.contiguous()
    }) {
        assert!(
            error.contains("parameter `weight` is sharded here; ") && !error.contains("F4"),
            "{error}"
        );
    }
    // As weight norm does: one of the two.
    for error in errors(2, |scope, _| {
        let (g, v) = (get(scope, "weight_g")?, get(scope, "weight_v")?);
        v.sqr()?.broadcast_mul(&g)
    }) {
        assert!(
            error.contains("parameter `weight_v` or `weight_g` is sharded here; "),
            "{error}"
        );
    }
}

#[test]
fn a_weight_of_another_unit_is_named_as_sharded() {
    run_local(2, |group| {
        let model = new(&group, FsdpConfig::default(), |scope| {
            let kept = Mutex::new(None);
            let first = scope.pp("first").unit(|scope| {
                let weight = get(scope, "weight")?;
                *kept.lock().unwrap() = Some(weight.clone());
                Ok(weight)
            })?;
            let second = scope.pp("second").unit(|scope| get(scope, "weight"))?;
            Ok((first, second, kept.into_inner().unwrap().unwrap()))
        })
        .unwrap();
        let error = model
            .forward(|(_, second, kept)| second.run(|weight| weight + kept))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("parameter `first.weight` is sharded here; "),
            "{error}"
        );
        assert!(
            error.contains("`first`") && error.contains("sharded") && !error.contains("F4"),
            "{error}"
        );
        let error = model
            .forward(|(_, _, kept)| kept.sqr())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("`first`") && error.contains("sharded") && !error.contains("F4"),
            "{error}"
        );
    })
    .unwrap();
}

/// The parameters are all there: what is missing is candle's.
#[test]
fn an_operation_that_candle_lacks_in_bf16_is_not_blamed_on_sharding() {
    run_local(2, |group| {
        let config = FsdpConfig {
            mixed_precision: MixedPrecision {
                param: Some(DType::BF16),
                ..MixedPrecision::default()
            },
            ..FsdpConfig::default()
        };
        let model = new(&group, config, |scope| {
            let other = scope.pp("other").unit(|scope| get(scope, "weight"))?;
            let conv = scope.pp("conv").unit(|scope| {
                candle_nn::conv2d(3, 2, 3, candle_nn::Conv2dConfig::default(), scope.vb())
            })?;
            Ok((other, conv))
        })
        .unwrap();
        let x = Tensor::ones((1, 3, 8, 8), DType::BF16, &Device::Cpu).unwrap();
        let error = model
            .forward(|(_, conv)| conv.run(|conv| conv.forward(&x)))
            .unwrap_err()
            .to_string();
        assert!(!error.contains("is sharded here"), "{error}");
        assert!(
            error.contains("bf16") && error.contains("convolutions"),
            "{error}"
        );
    })
    .unwrap();
}

#[test]
fn hybrid_sharding_without_a_mesh_says_what_to_set() {
    run_local(4, |group| {
        let config = FsdpConfig {
            strategy: ShardingStrategy::HybridShard,
            ..FsdpConfig::default()
        };
        let error = new(&group, config, |scope| get(scope, "weight"))
            .err()
            .unwrap();
        assert!(error.contains("`FsdpConfig::mesh`"), "{error}");
        assert!(error.contains("DeviceMesh::new(&[2, 2]"), "{error}");
        assert!(!error.contains("[]"), "{error}");
    })
    .unwrap();
}

/// candle adds the stack of calls to its errors if `RUST_BACKTRACE` is set.
#[test]
fn messages_have_candles_error_and_not_its_backtrace() {
    let error = || {
        let inner = candle_core::Error::msg("no such kernel").context("in a test");
        candle_core::Error::WithBacktrace {
            inner: Box::new(inner),
            backtrace: Box::new(std::backtrace::Backtrace::force_capture()),
        }
    };
    let messages = [
        NnError::from(error()).to_string(),
        fsdp_flat::FlatError::from(error()).to_string(),
        fsdp_state::StateError::from(error()).to_string(),
    ];
    for message in messages {
        assert_eq!(message, "in a test: no such kernel");
    }
}

#[test]
fn ranks_whose_buffers_have_different_values_are_told_so() {
    let buffer = |scope: &Scope, name: &str, value: f32| {
        let value = Tensor::full(value, 3, &Device::Cpu)?;
        scope.buffer(name, value, true);
        candle_core::Result::Ok(())
    };
    for error in errors(3, |scope, rank| {
        get(scope, "same")?;
        buffer(scope, "table", 1.0)?;
        buffer(scope, "noise", if rank == 2 { 2.0 } else { 1.0 })
    }) {
        assert!(
            error.contains("`noise`") && error.contains("rank 2 has") && !error.contains("`table`"),
            "{error}"
        );
    }
    // Running statistics are each rank's own, and nobody else sees what is not saved.
    run_local(2, |group| {
        let value = group.rank() as f32;
        new(&group, FsdpConfig::default(), |scope| {
            get(scope, "same")?;
            scope.buffer("scratch", Tensor::full(value, 3, &Device::Cpu)?, false);
            buffer(scope, "norm.running_mean", value)
        })
        .unwrap();
    })
    .unwrap();
}
