//! Units by name pattern: a model whose code knows nothing of units computes and trains as without
//! them, and never holds more than one of them beside the root.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::VarBuilder;
use fsdp_comm::{Operation, ProcessGroup, run_local};
use fsdp_nn::algorithm::AdamOptions;
use fsdp_nn::{
    Algorithm, FsdpConfig, FullyShardedDataParallel, MixedPrecision, Optimizer, ShardingStrategy,
};

use self::models::{Bert, Llama, Shuffled};

const LAYERS: usize = 5;
const WIDTH: usize = 8;

/// Models written as those of candle-transformers are, which know nothing of units.
mod models {
    use candle_core::{Module, Result, Tensor};
    use candle_nn::{Linear, RmsNorm, VarBuilder, linear_no_bias, rms_norm};

    use super::{LAYERS, WIDTH};

    fn linear(vb: VarBuilder<'_>) -> Result<Linear> {
        linear_no_bias(WIDTH, WIDTH, vb)
    }

    struct Block {
        rms_1: RmsNorm,
        attn: Linear,
        rms_2: RmsNorm,
        up: Linear,
        down: Linear,
    }

    impl Block {
        fn load(vb: VarBuilder<'_>) -> Result<Self> {
            let attn = linear(vb.pp("self_attn"))?;
            let (up, down) = (
                linear(vb.pp("mlp.up_proj"))?,
                linear(vb.pp("mlp.down_proj"))?,
            );
            let rms_1 = rms_norm(WIDTH, 1e-5, vb.pp("input_layernorm"))?;
            let rms_2 = rms_norm(WIDTH, 1e-5, vb.pp("post_attention_layernorm"))?;
            Ok(Block {
                rms_1,
                attn,
                rms_2,
                up,
                down,
            })
        }

        fn forward(&self, x: &Tensor) -> Result<Tensor> {
            let x = (self.attn.forward(&self.rms_1.forward_diff(x)?)? + x)?;
            self.down
                .forward(&self.up.forward(&self.rms_2.forward_diff(&x)?)?.tanh()?)?
                + x
        }
    }

    /// A layer uses its parameters in another order than it asks for them.
    pub(super) struct Llama {
        wte: candle_nn::Embedding,
        blocks: Vec<Block>,
        ln_f: RmsNorm,
        lm_head: Linear,
    }

    impl Llama {
        pub(super) fn load(vb: VarBuilder<'_>) -> Result<Self> {
            let wte = candle_nn::embedding(7, WIDTH, vb.pp("model.embed_tokens"))?;
            let lm_head = linear(vb.pp("lm_head"))?;
            let ln_f = rms_norm(WIDTH, 1e-5, vb.pp("model.norm"))?;
            let blocks = (0..LAYERS)
                .map(|i| Block::load(vb.pp(format!("model.layers.{i}"))))
                .collect::<Result<_>>()?;
            Ok(Llama {
                wte,
                blocks,
                ln_f,
                lm_head,
            })
        }

        /// Computes with these blocks, one after the other.
        pub(super) fn forward_through(&self, tokens: &Tensor, blocks: &[usize]) -> Result<Tensor> {
            let mut x = self.wte.forward(tokens)?;
            for &block in blocks {
                x = self.blocks[block].forward(&x)?;
            }
            self.lm_head.forward(&self.ln_f.forward_diff(&x)?)
        }
    }

    impl Module for Llama {
        fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
            self.forward_through(tokens, &[0, 1, 2, 3, 4])
        }
    }

    /// A model that comes to its layers in another order than it has made them in, and to some of
    /// them again.
    pub(super) struct Shuffled(Llama);

    impl Shuffled {
        pub(super) fn load(vb: VarBuilder<'_>) -> Result<Self> {
            Llama::load(vb).map(Shuffled)
        }
    }

    impl Module for Shuffled {
        fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
            self.0.forward_through(tokens, &[4, 1, 3, 3, 0, 4, 2])
        }
    }

    struct Layer {
        query: Linear,
        output: Linear,
    }

    impl Layer {
        fn load(vb: VarBuilder<'_>) -> Result<Self> {
            let output = candle_nn::linear(WIDTH, WIDTH, vb.pp("output"))?;
            Ok(Layer {
                query: linear(vb.pp("attention.query"))?,
                output,
            })
        }

        fn forward(&self, x: &Tensor) -> Result<Tensor> {
            x + self.output.forward(&self.query.forward(x)?.tanh()?)?
        }
    }

    pub(super) struct Bert {
        embeddings: candle_nn::Embedding,
        layers: Vec<Layer>,
        pooler: Linear,
    }

    impl Bert {
        pub(super) fn load(vb: VarBuilder<'_>) -> Result<Self> {
            let embeddings = candle_nn::embedding(7, WIDTH, vb.pp("embeddings"))?;
            let layers = (0..LAYERS)
                .map(|i| Layer::load(vb.pp(format!("encoder.layer.{i}"))))
                .collect::<Result<_>>()?;
            Ok(Bert {
                embeddings,
                layers,
                pooler: linear(vb.pp("pooler"))?,
            })
        }
    }

    impl Module for Bert {
        fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
            let mut x = self.embeddings.forward(tokens)?;
            for layer in &self.layers {
                x = layer.forward(&x)?;
            }
            self.pooler.forward(&x)
        }
    }
}

const STRATEGIES: [ShardingStrategy; 3] = [
    ShardingStrategy::FullShard,
    ShardingStrategy::ShardGradOp,
    ShardingStrategy::NoShard,
];

fn config(strategy: ShardingStrategy) -> FsdpConfig {
    FsdpConfig {
        strategy,
        seed: 4,
        ..FsdpConfig::default()
    }
}

fn tokens(rank: usize, step: usize) -> Tensor {
    let tokens: Vec<u32> = (0..6)
        .map(|i| ((i * 5 + rank * 3 + step) % 7) as u32)
        .collect();
    Tensor::from_vec(tokens, (2, 3), &Device::Cpu).unwrap()
}

type Load<M> = fn(VarBuilder<'static>) -> candle_core::Result<M>;

fn model<M>(
    group: &ProcessGroup,
    config: FsdpConfig,
    load: Load<M>,
) -> FullyShardedDataParallel<M> {
    FullyShardedDataParallel::new(group.clone(), config, |scope| load(scope.vb())).unwrap()
}

/// Losses of a few steps, and this rank's part of each parameter after them.
fn train<M: Module>(model: &FullyShardedDataParallel<M>) -> (Vec<f32>, Vec<Vec<f32>>) {
    let adamw = Algorithm::AdamW(AdamOptions {
        lr: 1e-2,
        ..AdamOptions::adamw()
    });
    let mut optimizer = Optimizer::new(model.parameters(), adamw).unwrap();
    let mut losses = Vec::new();
    for step in 0..3 {
        let tokens = tokens(model.group().rank(), step);
        let loss = model
            .forward(|module| (module.forward(&tokens)? - 0.5)?.sqr()?.mean_all())
            .unwrap();
        model.backward(&loss).unwrap();
        optimizer.step().unwrap();
        model.parameters().zero_grad();
        losses.push(loss.to_scalar().unwrap());
    }
    let parameters = model.parameters();
    let piece = |fqn: &str| {
        let shards = parameters.parameter(fqn).unwrap().shards().to_vec();
        let values = shards.iter().map(|shard| {
            shard
                .tensor
                .flatten_all()
                .unwrap()
                .to_vec1::<f32>()
                .unwrap()
        });
        values.collect::<Vec<_>>().concat()
    };
    (losses, parameters.fqns().map(piece).collect())
}

/// Compares a wrapped model with the same one without units.
fn check<M: Module>(load: Load<M>, pattern: &str) {
    for world in 1..=3 {
        for strategy in STRATEGIES {
            run_local(world, |group| {
                let plain = model(&group, config(strategy), load);
                let wrapped = model(&group, config(strategy).wrap(pattern), load);
                let expected = plain
                    .forward(|module| module.forward(&tokens(0, 0)))
                    .unwrap();
                let found = wrapped
                    .forward(|module| module.forward(&tokens(0, 0)))
                    .unwrap();
                let [found, expected] =
                    [found, expected].map(|x| x.flatten_all().unwrap().to_vec1::<f32>().unwrap());
                assert_eq!(found, expected, "{strategy} on {world}: bit-equal outputs");
                let losses = [&plain, &wrapped].map(|model| train(model).0);
                for (found, expected) in losses[1].iter().zip(&losses[0]) {
                    assert!(
                        (found - expected).abs() < 1e-6,
                        "{strategy} on {world}: {losses:?}"
                    );
                }
            })
            .unwrap();
        }
    }
}

#[test]
fn a_wrapped_llama_computes_and_trains_as_without_units() {
    check(Llama::load, "model.layers.*");
}

#[test]
fn a_wrapped_bert_computes_and_trains_as_without_units() {
    check(Bert::load, "encoder.layer.*");
}

#[test]
fn a_wrapped_model_may_come_to_its_layers_in_any_order_and_again() {
    check(Shuffled::load, "model.layers.*");
}

/// Bytes of the whole parameters whose names begin so.
fn bytes<M>(model: &FullyShardedDataParallel<M>, begins: impl Fn(&str) -> bool) -> usize {
    let parameters = model.parameters();
    let names = parameters.fqns().filter(|fqn| begins(fqn));
    names
        .map(|fqn| 4 * parameters.shape(fqn).unwrap().iter().product::<usize>())
        .sum()
}

/// Checks the memory and the all-gathers of a model that comes to its units so often.
fn check_memory<M: Module>(load: Load<M>, pattern: &str, comes: u64) {
    let prefix = pattern.trim_end_matches('*').to_owned();
    run_local(2, |group| {
        let model = model(
            &group,
            config(ShardingStrategy::FullShard).wrap(pattern),
            load,
        );
        let parameters = model.parameters();
        let shards = parameters.parameter_bytes();
        let root = bytes(&model, |fqn| !fqn.starts_with(&prefix));
        let unit = bytes(&model, |fqn| fqn.starts_with(&format!("{prefix}0.")));
        let loss = |step| {
            model
                .forward(|module| module.forward(&tokens(0, step))?.sqr()?.mean_all())
                .unwrap()
        };
        loss(0);
        let limit = shards + root + unit;
        assert!(
            parameters.peak_parameter_bytes() <= limit,
            "{} of {limit}",
            parameters.peak_parameter_bytes()
        );
        assert!(
            parameters.parameter_bytes() <= shards + root,
            "units are released after a forward"
        );
        let before = group.traffic();
        let loss = loss(1);
        let gathers = group.traffic().since(&before).count(Operation::AllGather);
        assert_eq!(
            gathers, comes,
            "each unit is gathered whenever the forward comes to it"
        );
        let before = group.traffic();
        model.backward(&loss).unwrap();
        let gathers = group.traffic().since(&before).count(Operation::AllGather);
        assert!(gathers <= comes, "{gathers}");
        assert!(
            parameters.peak_parameter_bytes() <= limit,
            "{} of {limit}",
            parameters.peak_parameter_bytes()
        );
        assert_eq!(parameters.parameter_bytes(), shards);
    })
    .unwrap();
}

#[test]
fn a_wrapped_model_holds_at_most_one_unit_beside_the_root() {
    check_memory(Llama::load, "model.layers.*", 5);
    check_memory(Bert::load, "encoder.layer.*", 5);
    check_memory(Shuffled::load, "model.layers.*", 6);
}

#[test]
fn wrapped_adapters_train_in_mixed_precision() {
    run_local(2, |group| {
        let mixed_precision = MixedPrecision {
            param: Some(DType::BF16),
            output: Some(DType::F32),
            ..MixedPrecision::default()
        };
        let requires_grad = Arc::new(|fqn: &str| fqn.contains("mlp"));
        let config = FsdpConfig {
            mixed_precision,
            requires_grad,
            ..config(ShardingStrategy::FullShard)
        };
        let model = model(&group, config.wrap("model.layers.*"), Llama::load);
        let between = model.parameters().parameter_bytes();
        let (losses, _) = train(&model);
        assert!(losses[2] < losses[0], "{losses:?}");
        assert_eq!(model.parameters().parameter_bytes(), between);
    })
    .unwrap();
}

#[test]
fn a_pattern_without_parameters_is_refused() {
    run_local(1, |group| {
        let config = config(ShardingStrategy::FullShard).wrap("transformer.h.*");
        let error = FullyShardedDataParallel::new(group, config, |scope| Llama::load(scope.vb()))
            .err()
            .unwrap();
        assert!(error.to_string().contains("`transformer.h.*`"), "{error}");
    })
    .unwrap();
}

#[test]
fn a_backward_through_wrapped_units_that_have_changed_is_refused() {
    run_local(2, |group| {
        let model = model(
            &group,
            config(ShardingStrategy::FullShard).wrap("model.layers.*"),
            Llama::load,
        );
        let loss = model
            .forward(|module| module.forward(&tokens(0, 0))?.sqr()?.mean_all())
            .unwrap();
        let fqn = "model.layers.2.self_attn.weight";
        let value = model.parameters().parameter(fqn).unwrap();
        model.parameters().set_parameter(fqn, &value).unwrap();
        let error = model.backward(&loss).unwrap_err().to_string();
        assert!(
            error.contains("`model.layers.2`") && error.contains("changed"),
            "{error}"
        );
    })
    .unwrap();
}

#[test]
fn a_wrapped_model_goes_on_after_a_forward_that_fails_or_panics() {
    run_local(2, |group| {
        let model = model(
            &group,
            config(ShardingStrategy::FullShard).wrap("model.layers.*"),
            Llama::load,
        );
        let tokens = tokens(0, 0);
        let shards = model.parameters().parameter_bytes();
        let sum = || -> f32 {
            let output = model
                .forward(|module| module.forward(&tokens)?.sum_all())
                .unwrap();
            output.to_scalar().unwrap()
        };
        let expected = sum();
        let failed = model.forward(|module| {
            module.forward_through(&tokens, &[0, 1])?;
            Err::<Tensor, _>(candle_core::Error::Msg("the model fails".to_owned()))
        });
        assert!(failed.unwrap_err().to_string().contains("the model fails"));
        assert_eq!(sum(), expected);
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            model.forward(|module| -> candle_core::Result<Tensor> {
                module.forward_through(&tokens, &[0, 1, 2])?;
                panic!("the model panics")
            })
        }));
        assert!(panicked.is_err());
        assert_eq!(sum(), expected);
        model.parameters().reshard().unwrap();
        assert_eq!(model.parameters().parameter_bytes(), shards);
    })
    .unwrap();
}

#[test]
fn a_wrapped_parameter_that_is_read_between_forwards_is_an_error_and_nobody_waits() {
    run_local(2, |group| {
        let build = |scope: &fsdp_nn::Scope| {
            let layer = candle_nn::linear(WIDTH, WIDTH, scope.vb().pp("layers.0"))?;
            Ok((layer.weight().clone(), layer))
        };
        let config = config(ShardingStrategy::FullShard).wrap("layers.*");
        let model = FullyShardedDataParallel::new(group, config, build).unwrap();
        let x = Tensor::ones((1, WIDTH), DType::F32, &Device::Cpu).unwrap();
        let weight = model
            .forward(|(weight, layer)| layer.forward(&x).map(|_| weight.clone()))
            .unwrap();
        assert!(weight.sum_all().is_err());
        assert!(model.forward(|(weight, _)| weight.sum_all()).is_ok());
    })
    .unwrap();
}

#[test]
fn an_operation_on_weights_of_two_units_comes_to_both() {
    for strategy in [ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp] {
        run_local(2, |group| {
            let build = |scope: &fsdp_nn::Scope| {
                let layer = |index: usize| {
                    candle_nn::linear_no_bias(WIDTH, WIDTH, scope.vb().pp("layers").pp(index))
                };
                Ok([layer(0)?, layer(1)?])
            };
            let product = |layers: &[candle_nn::Linear; 2]| {
                let [a, b] = layers.each_ref().map(|layer| layer.weight());
                // Twice, so that the second operation comes back to the unit that was left.
                (a.matmul(b)? + b.matmul(a)?)?.sqr()?.sum_all()
            };
            let whole =
                FullyShardedDataParallel::new(group.clone(), config(strategy), build).unwrap();
            let wrapped =
                FullyShardedDataParallel::new(group, config(strategy).wrap("layers.*"), build)
                    .unwrap();
            for _ in 0..2 {
                let [expected, found] = [&whole, &wrapped].map(|model| {
                    let loss = model.forward(product).unwrap();
                    model.backward(&loss).unwrap();
                    loss.to_scalar::<f32>().unwrap()
                });
                assert_eq!(found, expected, "{strategy}");
            }
        })
        .unwrap();
    }
}

#[test]
fn a_backward_inside_the_forward_of_a_wrapped_model_computes_the_same_gradients() {
    run_local(2, |group| {
        let config = || config(ShardingStrategy::FullShard).wrap("model.layers.*");
        let models = [(); 2].map(|()| model(&group, config(), Llama::load));
        let tokens = tokens(group.rank(), 0);
        let loss = |module: &Llama| module.forward(&tokens)?.sqr()?.mean_all();
        models[0]
            .backward(&models[0].forward(loss).unwrap())
            .unwrap();
        let output = models[1].forward(|module| {
            models[1].backward(&loss(module)?)?;
            module.forward(&tokens)
        });
        assert_eq!(output.unwrap().dims(), [2, 3, WIDTH]);
        let fqn = "model.layers.1.mlp.up_proj.weight";
        let [first, second] = models.map(|model| {
            let gradient = model.parameters().gradient(fqn).unwrap().unwrap();
            let shard = gradient.shards().first().unwrap();
            shard
                .tensor
                .flatten_all()
                .unwrap()
                .to_vec1::<f32>()
                .unwrap()
        });
        assert_eq!(first, second);
    })
    .unwrap();
}
