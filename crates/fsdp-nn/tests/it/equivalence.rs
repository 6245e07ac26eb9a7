//! A sharded model trains as the same model does in plain candle, whatever the ranks, strategy and
//! mode.

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Linear, Module, linear};
use fsdp_comm::{Operation, ProcessGroup, run_local};
use fsdp_layout::{DeviceMesh, TensorBox};
use fsdp_nn::algorithm::AdamOptions;
use fsdp_nn::{
    Algorithm, FsdpConfig, FullyShardedDataParallel, NnError, Optimizer, Scope, ShardingStrategy,
    Unit,
};

const BATCH: usize = 12;
const STEPS: usize = 8;

struct Block {
    norm: (Tensor, Tensor),
    up: Linear,
    down: Linear,
}

struct Net {
    input: Linear,
    blocks: Vec<Unit<Block>>,
    output: Linear,
}

impl Net {
    fn new(scope: &Scope) -> candle_core::Result<Self> {
        let input = linear(5, 6, scope.pp("input").vb())?;
        let blocks = (0..3)
            .map(|i| {
                scope.pp(format!("blocks.{i}")).unit(|scope| {
                    Ok(Block {
                        norm: (
                            scope
                                .vb()
                                .get_with_hints(6, "norm.weight", candle_nn::init::ONE)?,
                            scope
                                .vb()
                                .get_with_hints(6, "norm.bias", candle_nn::init::ZERO)?,
                        ),
                        up: linear(6, 11, scope.pp("up").vb())?,
                        down: linear(11, 6, scope.pp("down").vb())?,
                    })
                })
            })
            .collect::<candle_core::Result<_>>()?;
        Ok(Net {
            input,
            blocks,
            output: linear(6, 3, scope.pp("output").vb())?,
        })
    }

    fn loss(&self, x: &Tensor, y: &Tensor) -> candle_core::Result<Tensor> {
        let mut h = self.input.forward(x)?;
        for block in &self.blocks {
            h = block.run(|b| {
                // candle's fused layer norm has no backward.
                let normed = candle_nn::ops::layer_norm_slow(&h, &b.norm.0, &b.norm.1, 1e-5)?;
                &h + b.down.forward(&b.up.forward(&normed)?.tanh()?)?
            })?;
        }
        (self.output.forward(&h)? - y)?.sqr()?.mean_all()
    }
}

/// Rows of the global batch of a step that belong to a rank.
fn batch(step: usize, rank: usize, world: usize) -> (Tensor, Tensor) {
    let rows = BATCH / world;
    let value = |i: usize| ((i * 7919 + step * 104_729) % 1000) as f32 / 500.0 - 1.0;
    let x: Vec<f32> = (0..BATCH * 5).map(value).collect();
    let y: Vec<f32> = (0..BATCH * 3).map(|i| value(i + 31)).collect();
    let part = |data: Vec<f32>, width: usize| {
        Tensor::from_vec(data, (BATCH, width), &Device::Cpu)
            .unwrap()
            .narrow(0, rank * rows, rows)
            .unwrap()
    };
    (part(x, 5), part(y, 3))
}

fn algorithm() -> Algorithm {
    Algorithm::AdamW(AdamOptions {
        lr: 1e-2,
        ..AdamOptions::adamw()
    })
}

fn config(strategy: ShardingStrategy, use_orig_params: bool) -> FsdpConfig {
    FsdpConfig {
        strategy,
        use_orig_params,
        seed: 3,
        ..FsdpConfig::default()
    }
}

/// For `HybridShard`, half of the ranks are replicas of the others where that is possible.
fn config_for(world: usize, strategy: ShardingStrategy, use_orig_params: bool) -> FsdpConfig {
    let replicas = if world.is_multiple_of(2) { 2 } else { 1 };
    let mesh = DeviceMesh::new(
        &[replicas, world / replicas],
        &["replicate", "shard"],
        world,
    )
    .unwrap();
    FsdpConfig {
        mesh: Some(mesh),
        ..config(strategy, use_orig_params)
    }
}

/// Losses over the global batch, and every parameter gathered at the end.
type Outcome = (Vec<f32>, Vec<(String, Vec<f32>)>);

fn train(group: ProcessGroup, config: FsdpConfig) -> Result<Outcome, NnError> {
    let (rank, world) = (group.rank(), group.world_size());
    let model = FullyShardedDataParallel::new(group.clone(), config, Net::new)?;
    let mut optimizer = Optimizer::new(model.parameters(), algorithm())?;
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let (x, y) = batch(step, rank, world);
        let loss = model.forward(|net| net.loss(&x, &y))?;
        model.backward(&loss)?;
        optimizer.step()?;
        model.parameters().zero_grad();
        let mut mean = [loss.to_scalar::<f32>()?];
        group.all_reduce(&mut mean, fsdp_comm::ReduceOp::Avg)?;
        losses.push(mean[0]);
    }
    let mut params = Vec::new();
    for fqn in model.parameters().fqns() {
        let mine = model.parameters().parameter(fqn)?;
        let shards: Vec<(TensorBox, Vec<f32>)> = mine
            .shards()
            .iter()
            .map(|s| Ok((s.bounds.clone(), s.tensor.flatten_all()?.to_vec1()?)))
            .collect::<candle_core::Result<_>>()?;
        let whole = TensorBox::whole(mine.shape());
        let mut values = vec![f32::NAN; whole.numel()];
        for (bounds, data) in group.all_gather_object(&shards)?.into_iter().flatten() {
            for run in fsdp_layout::boxes::copy_runs(&bounds, &bounds, &whole) {
                values[run.dst..run.dst + run.len]
                    .copy_from_slice(&data[run.src..run.src + run.len]);
            }
        }
        params.push((fqn.to_owned(), values));
    }
    Ok((losses, params))
}

/// The same model without sharding, started from `initial` values, trained with candle's own
/// autograd.
fn train_plain(initial: &[(String, Vec<f32>)]) -> Vec<f32> {
    let vars = candle_nn::VarMap::new();
    let vb = candle_nn::VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let net = Net::new(&Scope::plain(vb)).unwrap();
    let named: Vec<(String, Var)> = vars
        .data()
        .lock()
        .unwrap()
        .iter()
        .map(|(k, v)| (k.clone(), v.clone()))
        .collect();
    for (name, var) in &named {
        let values = &initial.iter().find(|(fqn, _)| fqn == name).unwrap().1;
        var.set(&Tensor::from_slice(values, var.dims(), &Device::Cpu).unwrap())
            .unwrap();
    }
    let mut states: Vec<(Vec<f32>, Vec<f32>)> = named
        .iter()
        .map(|(_, var)| (vec![0.0; var.elem_count()], vec![0.0; var.elem_count()]))
        .collect();
    (0..STEPS)
        .map(|step| {
            let (x, y) = batch(step, 0, 1);
            let loss = net.loss(&x, &y).unwrap();
            let grads = loss.backward().unwrap();
            for ((_, var), (m, v)) in named.iter().zip(&mut states) {
                let grad = grads
                    .get(var)
                    .unwrap()
                    .flatten_all()
                    .unwrap()
                    .to_vec1::<f32>()
                    .unwrap();
                let mut param = var.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                algorithm()
                    .update((step + 1) as f32, false, &mut param, &grad, &mut [m, v])
                    .unwrap();
                var.set(&Tensor::from_vec(param, var.dims(), &Device::Cpu).unwrap())
                    .unwrap();
            }
            loss.to_scalar::<f32>().unwrap()
        })
        .collect()
}

fn initial_values() -> Vec<(String, Vec<f32>)> {
    let model = |group| {
        FullyShardedDataParallel::new(group, config(ShardingStrategy::NoShard, true), Net::new)
    };
    run_local(1, |group| {
        let model = model(group).unwrap();
        let params = model.parameters();
        let value = |fqn: &str| {
            params
                .parameter(fqn)
                .unwrap()
                .to_whole()
                .unwrap()
                .flatten_all()
                .unwrap()
                .to_vec1()
                .unwrap()
        };
        params
            .fqns()
            .map(|fqn| (fqn.to_owned(), value(fqn)))
            .collect()
    })
    .unwrap()
    .remove(0)
}

fn assert_close(a: &[f32], b: &[f32], tolerance: f32, what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert!(
            (a - b).abs() <= tolerance * b.abs().max(1e-3),
            "{what}, element {i}: {a} and {b}"
        );
    }
}

#[test]
fn every_strategy_mode_and_world_trains_like_plain_candle() {
    let plain = train_plain(&initial_values());
    assert!(
        plain[STEPS - 1] < 0.9 * plain[0],
        "the reference learns: {plain:?}"
    );
    let mut reference: Option<Outcome> = None;
    for world in [1, 2, 3, 4] {
        for strategy in ShardingStrategy::ALL {
            for use_orig_params in [true, false] {
                let what =
                    format!("{strategy} on {world} ranks, use_orig_params {use_orig_params}");
                let outcomes = run_local(world, |group| {
                    train(group, config_for(world, strategy, use_orig_params))
                })
                .unwrap();
                for outcome in outcomes {
                    let (losses, params) =
                        outcome.unwrap_or_else(|error| panic!("{what}: {error}"));
                    assert_close(&losses, &plain, 1e-4, &what);
                    let reference = reference.get_or_insert_with(|| (losses, params.clone()));
                    for ((fqn, values), (_, expected)) in params.iter().zip(&reference.1) {
                        assert_close(values, expected, 1e-3, &format!("{what}, {fqn}"));
                    }
                }
            }
        }
    }
}

#[test]
fn accumulated_gradients_without_communication_equal_one_large_batch() {
    for (strategy, use_orig_params) in [
        (ShardingStrategy::FullShard, true),
        (ShardingStrategy::NoShard, false),
    ] {
        run_local(2, |group| {
            let model = FullyShardedDataParallel::new(
                group.clone(),
                config(strategy, use_orig_params),
                Net::new,
            )
            .unwrap();
            let (x, y) = batch(0, group.rank(), 2);
            let loss = model.forward(|net| net.loss(&x, &y)).unwrap();
            model.backward(&loss).unwrap();
            let whole_norm = model.parameters().grad_norm().unwrap();
            model.parameters().zero_grad();
            let half = |part: usize| {
                let (x, y) = (
                    x.narrow(0, part * 3, 3).unwrap(),
                    y.narrow(0, part * 3, 3).unwrap(),
                );
                (model.forward(|net| net.loss(&x, &y)).unwrap() / 2.0).unwrap()
            };
            let loss = half(0);
            let before = group.traffic();
            model
                .no_sync(|model| model.backward(&loss).map(|_| ()))
                .unwrap();
            let during = group.traffic().since(&before);
            assert_eq!(
                during.count(Operation::ReduceScatter) + during.count(Operation::AllReduce),
                0
            );
            assert!(
                model
                    .parameters()
                    .gradient("input.weight")
                    .unwrap()
                    .is_none()
            );
            model.backward(&half(1)).unwrap();
            let norm = model.parameters().grad_norm().unwrap();
            assert!(
                (norm / whole_norm - 1.0).abs() < 1e-5,
                "{norm} and {whole_norm}"
            );
            let before = model.parameters().clip_grad_norm(norm / 4.0).unwrap();
            assert!((before / norm - 1.0).abs() < 1e-6);
            let clipped = model.parameters().grad_norm().unwrap();
            assert!((clipped * 4.0 / norm - 1.0).abs() < 1e-4);
        })
        .unwrap();
    }
}

#[test]
fn parameters_are_freed_outside_their_unit() {
    run_local(2, |group| {
        let model = FullyShardedDataParallel::new(
            group.clone(),
            config(ShardingStrategy::FullShard, true),
            Net::new,
        )
        .unwrap();
        let params = model.parameters();
        let total: usize = params
            .fqns()
            .map(|fqn| 4 * params.shape(fqn).unwrap().iter().product::<usize>())
            .sum();
        let padding = 4 * 4 * params.fqns().count();
        assert!(params.parameter_bytes() <= total / 2 + padding);
        let between_steps = params.parameter_bytes();
        let (x, y) = batch(0, group.rank(), 2);
        let loss = model.forward(|net| net.loss(&x, &y)).unwrap();
        model.backward(&loss).unwrap();
        assert_eq!(params.parameter_bytes(), between_steps);
        let root = 4 * (5 * 6 + 6 + 6 * 3 + 3);
        let block = 4 * (6 + 6 + 6 * 11 + 11 + 11 * 6 + 6);
        assert_eq!(params.peak_parameter_bytes(), between_steps + root + block);
        // Outside a forward the weights are gone: an error, not garbage.
        let outside = params.parameter("input.weight").unwrap();
        assert!(
            outside.shards().iter().all(|s| s
                .tensor
                .flatten_all()
                .unwrap()
                .to_vec1::<f32>()
                .is_ok())
        );
    })
    .unwrap();
}

/// A parameter that the forward does not use counts as having a zero gradient, and its unit is
/// freed all the same.
#[test]
fn unused_parameters_do_not_keep_their_unit_whole() {
    run_local(2, |group| {
        let model = FullyShardedDataParallel::new(
            group,
            config(ShardingStrategy::FullShard, true),
            |scope| {
                let units = ["a", "b"].map(|name| {
                    scope.pp(name).unit(|scope| {
                        Ok((
                            linear(4, 4, scope.pp("used").vb())?,
                            linear(4, 4, scope.pp("unused").vb())?,
                        ))
                    })
                });
                units.into_iter().collect::<candle_core::Result<Vec<_>>>()
            },
        )
        .unwrap();
        let params = model.parameters();
        let between_steps = params.parameter_bytes();
        let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu).unwrap();
        let loss = model
            .forward(|units| {
                units
                    .iter()
                    .try_fold(x.clone(), |h, unit| unit.run(|m| m.0.forward(&h)))
                    .and_then(|h| h.sum_all())
            })
            .unwrap();
        model.backward(&loss).unwrap();
        assert_eq!(params.parameter_bytes(), between_steps);
        let norm = |fqn: &str| {
            let gradient = params.gradient(fqn).unwrap().unwrap();
            let squares = gradient.shards().iter().map(|s| {
                s.tensor
                    .sqr()
                    .unwrap()
                    .sum_all()
                    .unwrap()
                    .to_scalar::<f32>()
                    .unwrap()
            });
            params
                .group()
                .all_gather_object(&squares.sum::<f32>())
                .unwrap()
                .iter()
                .sum::<f32>()
        };
        assert!(norm("b.used.weight") > 0.0);
        assert_eq!(norm("b.unused.weight"), 0.0);
    })
    .unwrap();
}
