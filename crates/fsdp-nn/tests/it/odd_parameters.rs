//! Parameters of odd sizes: a single number, no elements, and fewer elements than there are ranks.

use candle_core::{DType, Device, Result, Tensor};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_layout::DeviceMesh;
use fsdp_nn::algorithm::{AdafactorOptions, AdamOptions, Algorithm, ScheduleFreeOptions};
use fsdp_nn::torch::{StateDictOptions, get_state_dict, set_state_dict};
use fsdp_nn::{
    AveragedModel, BackwardPrefetch, FsdpConfig, FullyShardedDataParallel, MixedPrecision,
    Optimizer, Recomputed, Scope, ShardingStrategy, Unit,
};

/// A part of the model that is a unit, or becomes one by its name.
enum Part<M> {
    Unit(Unit<M>),
    Plain(M),
}

impl<M> Part<M> {
    fn build(
        scope: &Scope,
        is_unit: bool,
        name: &str,
        build: impl FnOnce(&Scope) -> Result<M>,
    ) -> Result<Self> {
        let scope = scope.pp(name);
        if is_unit {
            Ok(Part::Unit(scope.unit(build)?))
        } else {
            Ok(Part::Plain(build(&scope)?))
        }
    }

    fn run(&self, f: impl FnOnce(&M) -> Result<Tensor>) -> Result<Tensor> {
        match self {
            Part::Unit(unit) => unit.run(f),
            Part::Plain(module) => f(module),
        }
    }
}

/// A model of parameters of odd sizes, and of one unit that has no elements at all.
struct Odd {
    tiny: Part<Vec<Tensor>>,
    void: Part<Tensor>,
    part: Part<Recomputed<Tensor>>,
    matrix: Tensor,
    nothing: Tensor,
}

fn build(scope: &Scope, is_unit: bool) -> Result<Odd> {
    let init = candle_nn::Init::Randn {
        mean: 0.5,
        stdev: 0.5,
    };
    let tiny = Part::build(scope, is_unit, "tiny", |scope| {
        let vb = scope.vb();
        Ok(vec![
            vb.get_with_hints((), "scale", init)?,
            vb.get_with_hints((0, 3), "rows", init)?,
            vb.get_with_hints(1, "one", init)?,
            vb.get_with_hints((3, 0), "columns", init)?,
            vb.get_with_hints(2, "two", init)?,
        ])
    })?;
    let void = Part::build(scope, is_unit, "void", |scope| {
        scope.vb().get_with_hints((2, 0), "empty", init)
    })?;
    let part = Part::build(scope, is_unit, "part", |scope| {
        Ok(Recomputed::new(scope.vb().get_with_hints(
            (3, 3),
            "weight",
            init,
        )?))
    })?;
    let matrix = scope.vb().get_with_hints((5, 3), "matrix", init)?;
    let nothing = scope.vb().get_with_hints(0, "nothing", init)?;
    Ok(Odd {
        tiny,
        void,
        part,
        matrix,
        nothing,
    })
}

fn forward(model: &Odd, x: &Tensor) -> Result<Tensor> {
    let x = x.matmul(&model.matrix)?;
    let x = model.tiny.run(|t| {
        let x = x.broadcast_mul(&t[0])?.broadcast_add(&t[2])?;
        let more = Tensor::cat(
            &[&t[4], &t[2], &t[1].flatten_all()?, &t[3].flatten_all()?],
            0,
        )?;
        x.broadcast_mul(&more)
    })?;
    let x = model.void.run(|empty| {
        x.broadcast_add(
            &Tensor::cat(
                &[empty, &Tensor::zeros((2, 1), empty.dtype(), &Device::Cpu)?],
                1,
            )?
            .sum_all()?,
        )
    })?;
    let x = model
        .part
        .run(|part| part.run(&[&x], |weight, inputs| inputs[0].matmul(weight)))?;
    let none = Tensor::cat(
        &[&model.nothing, &Tensor::zeros(1, x.dtype(), &Device::Cpu)?],
        0,
    )?
    .sum_all()?;
    x.broadcast_add(&none)?
        .to_dtype(DType::F32)?
        .sqr()?
        .mean_all()
}

/// Returns three algorithms with different kinds of state: tensors of the parameters' shapes, sums
/// over rows and columns, and weights that are exchanged between training and evaluation.
fn algorithms_with_different_state() -> Vec<Algorithm> {
    vec![
        Algorithm::AdamW(AdamOptions {
            amsgrad: true,
            ..AdamOptions::adamw()
        }),
        Algorithm::Adafactor(AdafactorOptions::default()),
        Algorithm::ScheduleFreeAdamW(ScheduleFreeOptions::default()),
    ]
}

/// Trains a model for some steps, and returns its losses, the norms of its gradients, and its
/// parameters at the end.
fn train(
    group: &ProcessGroup,
    config: FsdpConfig,
    has_units: bool,
    algorithm: &Algorithm,
) -> Vec<f32> {
    let dtype = config.mixed_precision.param.unwrap_or(DType::F32);
    let model =
        FullyShardedDataParallel::new(group.clone(), config, |scope| build(scope, has_units))
            .unwrap();
    let parameters = model.parameters();
    let mut optimizer = Optimizer::new(parameters, algorithm.clone()).unwrap();
    optimizer.train().unwrap();
    let mut average = AveragedModel::new(parameters, 0.9).unwrap();
    let mut losses = Vec::new();
    for step in 0..3 {
        let x = Tensor::arange(0f32, 10., &Device::Cpu)
            .unwrap()
            .reshape((2, 5))
            .unwrap();
        let x = ((x * 0.1).unwrap() + f64::from(step) * 0.1)
            .unwrap()
            .to_dtype(dtype)
            .unwrap();
        model
            .no_sync(|model| {
                model
                    .backward(&model.forward(|m| forward(m, &x))?)
                    .map(|_| ())
            })
            .unwrap();
        let loss = model.forward(|m| forward(m, &x)).unwrap();
        model.backward(&loss).unwrap();
        for fqn in parameters.fqns() {
            assert!(parameters.has_gradient(fqn).unwrap(), "{fqn}");
        }
        losses.push(loss.to_scalar::<f32>().unwrap());
        losses.push(parameters.clip_grad_norm(1.0).unwrap() as f32);
        optimizer.step().unwrap();
        parameters.zero_grad();
        average.update().unwrap();
    }
    average.swap().unwrap();
    average.swap().unwrap();
    for full_state_dict in [true, false] {
        let options = StateDictOptions {
            full_state_dict,
            ..StateDictOptions::default()
        };
        let (saved, optim) = get_state_dict(parameters, &[&optimizer], &options).unwrap();
        set_state_dict(&saved, &optim, parameters, &mut [&mut optimizer], &options).unwrap();
    }
    let whole = parameters.summon_full_params().unwrap();
    for (_, tensor) in whole.iter() {
        losses.extend(tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap());
    }
    losses
}

#[test]
fn parameters_of_odd_sizes_train_alike_on_any_ranks() {
    for algorithm in algorithms_with_different_state() {
        for use_orig_params in [true, false] {
            // It needs matrices, and refuses FlatParameters.
            if !use_orig_params && matches!(algorithm, Algorithm::Adafactor(_)) {
                continue;
            }
            let alone = run_local(1, |group| {
                train(
                    &group,
                    FsdpConfig {
                        use_orig_params,
                        ..FsdpConfig::default()
                    },
                    true,
                    &algorithm,
                )
            })
            .unwrap()
            .remove(0);
            for (world, strategy, prefetch, has_units) in [
                (2, ShardingStrategy::NoShard, None, true),
                (2, ShardingStrategy::NoShard, None, false),
                (3, ShardingStrategy::FullShard, None, true),
                (3, ShardingStrategy::FullShard, None, false),
                (
                    5,
                    ShardingStrategy::ShardGradOp,
                    Some(BackwardPrefetch::Pre),
                    true,
                ),
                (5, ShardingStrategy::ShardGradOp, None, false),
                (
                    7,
                    ShardingStrategy::FullShard,
                    Some(BackwardPrefetch::Post),
                    true,
                ),
                (6, ShardingStrategy::HybridShard, None, true),
                (6, ShardingStrategy::HybridShard, None, false),
            ] {
                for param in [None, Some(DType::BF16)] {
                    let mesh = (strategy == ShardingStrategy::HybridShard)
                        .then(|| DeviceMesh::new(&[2, 3], &["replicate", "shard"], 6).unwrap());
                    let found = run_local(world, |group| {
                        let mixed_precision = MixedPrecision {
                            param,
                            ..MixedPrecision::default()
                        };
                        let config = FsdpConfig {
                            use_orig_params,
                            strategy,
                            mesh: mesh.clone(),
                            mixed_precision,
                            backward_prefetch: prefetch,
                            ..FsdpConfig::default()
                        };
                        train(&group, config, has_units, &algorithm)
                    })
                    .unwrap();
                    for found in found {
                        assert_eq!(found.len(), alone.len());
                        for (at, (found, alone)) in found.iter().zip(&alone).enumerate() {
                            let tolerance = if param.is_some() { 0.1 } else { 1e-4 };
                            assert!(
                                (found - alone).abs() <= tolerance * alone.abs().max(1.0),
                                "{algorithm:?} {use_orig_params} {world} {strategy} {has_units} {param:?} {at}: {found} {alone}"
                            );
                        }
                    }
                }
            }
        }
    }
}
