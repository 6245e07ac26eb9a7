//! Parameters that no gradient comes to stay as they are, and a warning names them.

use std::io;
use std::sync::{Arc, Mutex};

use candle_core::{Device, Tensor};
use candle_nn::{Linear, Module, RmsNorm, linear, rms_norm};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_nn::algorithm::AdamOptions;
use fsdp_nn::{
    Algorithm, FsdpConfig, FullyShardedDataParallel, Optimizer, Scope, ShardingStrategy, Unit,
};

/// A block whose fused norm cuts the gradients of what lies before it.
struct Block {
    before: Linear,
    norm: RmsNorm,
    after: Linear,
}

impl Block {
    fn new(scope: &Scope) -> candle_core::Result<Self> {
        Ok(Block {
            before: linear(4, 4, scope.vb().pp("before"))?,
            norm: rms_norm(4, 1e-5, scope.vb().pp("norm"))?,
            after: linear(4, 4, scope.vb().pp("after"))?,
        })
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.after
            .forward(&self.norm.forward(&self.before.forward(x)?)?)
    }
}

type Model = FullyShardedDataParallel<(Unit<Block>, Vec<Linear>)>;

fn model(group: &ProcessGroup, config: FsdpConfig) -> Model {
    FullyShardedDataParallel::new(group.clone(), config, |scope| {
        let experts = (0..2).map(|index| linear(4, 4, scope.vb().pp("experts").pp(index)));
        let experts = experts.collect::<candle_core::Result<Vec<_>>>();
        Ok((scope.pp("block").unit(Block::new)?, experts?))
    })
    .unwrap()
}

/// A loss that uses one of two experts.
fn backward(model: &Model, expert: usize) {
    let x = Tensor::arange(0f32, 8f32, &Device::Cpu)
        .unwrap()
        .reshape((2, 4))
        .unwrap();
    let loss = model.forward(|(block, experts)| {
        experts[expert]
            .forward(&block.forward(&x)?)?
            .sqr()?
            .mean_all()
    });
    model.backward(&loss.unwrap()).unwrap();
}

fn adamw(model: &Model) -> Optimizer {
    let options = AdamOptions {
        lr: 0.01,
        weight_decay: 0.5,
        ..AdamOptions::adamw()
    };
    Optimizer::new(model.parameters(), Algorithm::AdamW(options)).unwrap()
}

/// This rank's part of a parameter.
fn piece(model: &Model, fqn: &str) -> Vec<f32> {
    let shards = model.parameters().parameter(fqn).unwrap().shards().to_vec();
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
fn parameters_without_a_gradient_are_not_decayed() {
    for strategy in [
        ShardingStrategy::FullShard,
        ShardingStrategy::ShardGradOp,
        ShardingStrategy::NoShard,
    ] {
        for use_orig_params in [true, false] {
            for world in [1, 2, 3] {
                run_local(world, |group| {
                    let config = FsdpConfig {
                        strategy,
                        use_orig_params,
                        ..FsdpConfig::default()
                    };
                    let model = model(&group, config);
                    let mut optimizer = adamw(&model);
                    let fqns: Vec<String> = model.parameters().fqns().map(str::to_owned).collect();
                    let before: Vec<Vec<f32>> = fqns.iter().map(|fqn| piece(&model, fqn)).collect();
                    for _ in 0..2 {
                        backward(&model, 0);
                        optimizer.step().unwrap();
                        model.parameters().zero_grad();
                    }
                    for (fqn, before) in fqns.iter().zip(before) {
                        let is_reached =
                            fqn.starts_with("block.after") || fqn.starts_with("experts.0");
                        let changed = piece(&model, fqn) != before;
                        assert_eq!(
                            changed,
                            is_reached && !before.is_empty(),
                            "{strategy} on {world}: {fqn}"
                        );
                        let step = optimizer.state_of(fqn).unwrap().unwrap()["step"]
                            .as_tensor()
                            .unwrap()
                            .to_scalar::<f32>();
                        if use_orig_params {
                            assert_eq!(step.unwrap(), if is_reached { 2.0 } else { 0.0 }, "{fqn}");
                        }
                    }
                })
                .unwrap();
            }
        }
    }
}

#[test]
fn a_gradient_on_one_rank_is_one_on_all() {
    run_local(3, |group| {
        let model = model(&group, FsdpConfig::default());
        let mut optimizer = adamw(&model);
        backward(&model, usize::from(group.rank() == 2));
        for fqn in ["experts.0.weight", "experts.1.weight"] {
            assert!(model.parameters().has_gradient(fqn).unwrap(), "{fqn}");
            let before = piece(&model, fqn);
            optimizer.step().unwrap();
            assert_eq!(piece(&model, fqn) != before, !before.is_empty(), "{fqn}");
        }
        assert!(
            !model
                .parameters()
                .has_gradient("block.before.bias")
                .unwrap()
        );
        // Gradients add up until they are forgotten.
        model.parameters().zero_grad();
        assert!(!model.parameters().has_gradient("experts.0.weight").unwrap());
        backward(&model, 1);
        assert!(!model.parameters().has_gradient("experts.0.weight").unwrap());
        backward(&model, 0);
        assert!(model.parameters().has_gradient("experts.1.weight").unwrap());
        assert!(model.parameters().has_gradient("experts.0.weight").unwrap());
    })
    .unwrap();
}

/// A log in memory.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_warning_names_the_parameters_without_a_gradient_once() {
    let logs = run_local(2, |group| {
        let log = Log::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            let model = model(&group, FsdpConfig::default());
            (0..3).for_each(|_| backward(&model, 0));
        });
        let bytes = log.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    })
    .unwrap();
    let [warned, silent] = logs.as_slice() else {
        panic!("two ranks")
    };
    assert!(silent.is_empty(), "one rank speaks for all: {silent}");
    assert_eq!(warned.matches("WARN").count(), 1, "{warned}");
    for fqn in [
        "block.before.weight",
        "block.before.bias",
        "block.norm.weight",
        "experts.1.weight",
    ] {
        assert!(
            warned.contains(&format!("`{fqn}`")),
            "{fqn} is missing: {warned}"
        );
    }
    assert!(
        !warned.contains("block.after") && !warned.contains("experts.0"),
        "{warned}"
    );
    assert!(warned.contains("fused"), "{warned}");
}
