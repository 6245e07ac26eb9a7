//! Shards in the host's memory: on a machine without GPUs that is where they are anyway, and
//! nothing changes.

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, linear};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_nn::algorithm::{AdamOptions, Algorithm};
use fsdp_nn::{
    FsdpConfig, FullyShardedDataParallel, MixedPrecision, NnError, Optimizer, ShardingStrategy,
    Unit,
};

/// The bits of all losses of a few steps.
fn train(group: &ProcessGroup, config: FsdpConfig) -> Vec<u32> {
    let model = FullyShardedDataParallel::new(group.clone(), config, |scope| {
        Ok((
            scope.pp("a").unit(|scope| linear(3, 5, scope.vb()))?,
            linear(5, 2, scope.vb().pp("b"))?,
        ))
    });
    let model: FullyShardedDataParallel<(Unit<Linear>, Linear)> = model.unwrap();
    let adamw = Algorithm::AdamW(AdamOptions {
        lr: 0.05,
        ..AdamOptions::adamw()
    });
    let mut optimizer = Optimizer::new(model.parameters(), adamw).unwrap();
    let dtype = model
        .forward(|(_, head)| Ok(head.weight().clone()))
        .unwrap()
        .dtype();
    let x = Tensor::arange(0f32, 6f32, &Device::Cpu)
        .unwrap()
        .reshape((2, 3))
        .unwrap()
        .to_dtype(dtype)
        .unwrap();
    let step = |_| {
        let loss = model
            .forward(|(unit, head)| head.forward(&unit.forward(&x)?.tanh()?)?.sqr()?.mean_all())
            .unwrap();
        model.backward(&loss).unwrap();
        model.parameters().clip_grad_norm(1.0).unwrap();
        optimizer.step().unwrap();
        model.parameters().zero_grad();
        loss.to_dtype(DType::F32)
            .unwrap()
            .to_scalar::<f32>()
            .unwrap()
            .to_bits()
    };
    (0..4).map(step).collect()
}

#[test]
fn a_run_has_the_same_bits_with_it_as_without() {
    let bf16 = MixedPrecision {
        param: Some(DType::BF16),
        ..MixedPrecision::default()
    };
    for world in [1, 2] {
        for strategy in [
            ShardingStrategy::FullShard,
            ShardingStrategy::ShardGradOp,
            ShardingStrategy::NoShard,
        ] {
            for mixed_precision in [MixedPrecision::default(), bf16] {
                let config = FsdpConfig {
                    strategy,
                    mixed_precision,
                    ..FsdpConfig::default()
                };
                let offloaded = FsdpConfig {
                    cpu_offload: true,
                    ..config.clone()
                };
                let [plain, offloaded] = [config, offloaded]
                    .map(|config| run_local(world, |group| train(&group, config.clone())).unwrap());
                assert_eq!(offloaded, plain, "{strategy} on {world}");
            }
        }
    }
}

#[test]
fn ranks_that_differ_in_it_are_refused() {
    run_local(2, |group| {
        let config = FsdpConfig {
            cpu_offload: group.rank() == 1,
            ..FsdpConfig::default()
        };
        let model = FullyShardedDataParallel::new(group, config, |scope| linear(2, 2, scope.vb()));
        let error = model.err().unwrap();
        assert!(
            matches!(error, NnError::DifferentModels { .. })
                && error.to_string().contains("cpu_offload"),
            "{error}"
        );
    })
    .unwrap();
}
