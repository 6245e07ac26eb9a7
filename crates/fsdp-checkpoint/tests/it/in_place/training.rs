//! A small model of two units, with a parameter that has no dimensions, and its optimizer.

use candle_core::{Device, Tensor};
use candle_nn::{Init, Linear, Module, linear};
use fsdp_checkpoint::TrainState;
use fsdp_comm::ProcessGroup;
use fsdp_nn::algorithm::{AdamOptions, Algorithm};
use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, Optimizer, ShardingStrategy, Unit};

type Layers = (Unit<Linear>, Linear, Tensor);
pub(crate) type Model = FullyShardedDataParallel<Layers>;
pub(crate) type Run = TrainState<Layers>;

pub(crate) fn adamw() -> Algorithm {
    Algorithm::AdamW(AdamOptions {
        lr: 0.01,
        ..AdamOptions::adamw()
    })
}

pub(crate) fn new_run(
    group: &ProcessGroup,
    use_orig_params: bool,
    algorithm: &Algorithm,
    seed: u64,
) -> Run {
    build(
        group,
        FsdpConfig {
            use_orig_params,
            seed,
            ..FsdpConfig::default()
        },
        algorithm,
    )
}

pub(crate) fn new_run_with(
    group: &ProcessGroup,
    strategy: ShardingStrategy,
    algorithm: &Algorithm,
    seed: u64,
) -> Run {
    build(
        group,
        FsdpConfig {
            strategy,
            seed,
            ..FsdpConfig::default()
        },
        algorithm,
    )
}

pub(crate) fn build(group: &ProcessGroup, config: FsdpConfig, algorithm: &Algorithm) -> Run {
    let model = FullyShardedDataParallel::new(group.clone(), config, |scope| {
        let scale = scope.vb().get_with_hints((), "scale", Init::Const(1.5))?;
        Ok((
            scope.pp("a").unit(|scope| linear(5, 7, scope.vb()))?,
            linear(7, 2, scope.vb().pp("head"))?,
            scale,
        ))
    });
    let model = model.unwrap();
    let optimizer = Optimizer::new(model.parameters(), algorithm.clone()).unwrap();
    TrainState::new(model, vec![optimizer])
}

pub(crate) fn forward(run: &Run, seed: usize) -> Tensor {
    let x: Vec<f32> = (0..10)
        .map(|i| ((i * 37 + seed * 11) % 17) as f32 / 8.0 - 1.0)
        .collect();
    let x = Tensor::from_vec(x, (2, 5), &Device::Cpu).unwrap();
    let loss = |m: &Layers| {
        m.1.forward(&m.0.forward(&x)?.tanh()?)?
            .broadcast_mul(&m.2)?
            .sqr()?
            .mean_all()
    };
    run.model.forward(loss).unwrap()
}

pub(crate) fn evaluate(run: &Run) -> f32 {
    forward(run, 0).to_scalar().unwrap()
}

pub(crate) fn step(run: &mut Run, seed: usize) -> f32 {
    let loss = forward(run, seed);
    run.model.backward(&loss).unwrap();
    run.optimizers[0].step().unwrap();
    run.model.parameters().zero_grad();
    loss.to_scalar().unwrap()
}
