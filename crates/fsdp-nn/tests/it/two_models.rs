//! A loss that goes through two sharded models, as that of a generator does through a
//! discriminator.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Linear, Module, linear};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_nn::algorithm::{AdamOptions, Algorithm};
use fsdp_nn::{
    BackwardPrefetch, FsdpConfig, FullyShardedDataParallel, Optimizer, ShardingStrategy, Unit,
};

type Model = FullyShardedDataParallel<(Unit<Linear>, Linear)>;

fn model(group: &ProcessGroup, config: &FsdpConfig, seed: u64) -> Model {
    FullyShardedDataParallel::new(
        group.clone(),
        FsdpConfig {
            seed,
            ..config.clone()
        },
        |scope| {
            Ok((
                scope.pp("hidden").unit(|scope| linear(3, 5, scope.vb()))?,
                linear(5, 3, scope.vb().pp("out"))?,
            ))
        },
    )
    .unwrap()
}

fn forward(model: &Model, x: &Tensor) -> Result<Tensor> {
    Ok(model.forward(|(hidden, out)| out.forward(&hidden.forward(x)?.tanh()?))?)
}

/// Trains a generator and a discriminator by turns, and returns norms of gradients and of
/// parameters.
fn train(group: &ProcessGroup, config: &FsdpConfig) -> Vec<f64> {
    let [generator, discriminator] = [1, 2].map(|seed| model(group, config, seed));
    let optimizer = |model: &Model| {
        Optimizer::new(model.parameters(), Algorithm::AdamW(AdamOptions::adamw())).unwrap()
    };
    let [mut of_generator, mut of_discriminator] = [&generator, &discriminator].map(optimizer);
    let mut norms = Vec::new();
    for step in 0..3 {
        let noise = (Tensor::ones((2, 3), DType::F32, &Device::Cpu).unwrap()
            * (0.3 * f64::from(step + 1)))
        .unwrap();
        // The generator's step. The discriminator gets gradients too, which count for nothing.
        let fake = forward(&generator, &noise).unwrap();
        let loss = forward(&discriminator, &fake)
            .unwrap()
            .sqr()
            .unwrap()
            .mean_all()
            .unwrap();
        generator.backward(&loss).unwrap();
        norms.push(generator.parameters().grad_norm().unwrap());
        of_generator.step().unwrap();
        generator.parameters().zero_grad();
        discriminator.parameters().zero_grad();
        // The discriminator's step.
        let fake = forward(&generator, &noise).unwrap().detach();
        let of_fake = forward(&discriminator, &fake).unwrap();
        let of_real = forward(&discriminator, &noise).unwrap();
        let loss = (of_fake - of_real)
            .unwrap()
            .sqr()
            .unwrap()
            .mean_all()
            .unwrap();
        discriminator.backward(&loss).unwrap();
        norms.push(discriminator.parameters().grad_norm().unwrap());
        assert_eq!(generator.parameters().grad_norm().unwrap(), 0.0);
        of_discriminator.step().unwrap();
        discriminator.parameters().zero_grad();
    }
    norms
}

#[test]
fn a_loss_through_another_model_trains_as_on_one_rank() {
    let alone = run_local(1, |group| train(&group, &FsdpConfig::default()))
        .unwrap()
        .remove(0);
    for strategy in [
        ShardingStrategy::FullShard,
        ShardingStrategy::ShardGradOp,
        ShardingStrategy::NoShard,
    ] {
        for backward_prefetch in [
            None,
            Some(BackwardPrefetch::Pre),
            Some(BackwardPrefetch::Post),
        ] {
            let config = FsdpConfig {
                strategy,
                backward_prefetch,
                ..FsdpConfig::default()
            };
            for found in run_local(3, |group| train(&group, &config)).unwrap() {
                for (found, alone) in found.iter().zip(&alone) {
                    assert!(
                        (found - alone).abs() <= 1e-5 * alone,
                        "{config:?}: {found} {alone}"
                    );
                }
            }
        }
    }
}
