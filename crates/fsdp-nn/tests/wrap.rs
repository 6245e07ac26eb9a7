//! Units by name pattern: a model whose code knows nothing of units computes and trains as without them, and never holds
//! more than two of them beside the root.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::VarBuilder;
use fsdp_comm::{Operation, ProcessGroup, run_local};
use fsdp_nn::algorithm::AdamOptions;
use fsdp_nn::{Algorithm, FsdpConfig, FullyShardedDataParallel, MixedPrecision, Optimizer, ShardingStrategy};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use self::models::{Bert, Llama};

const LAYERS: usize = 5;
const WIDTH: usize = 8;

/// Models written as those of candle-transformers are: with a span in each layer, made before its parameters or after them.
mod models {
    use candle_core::{Module, Result, Tensor};
    use candle_nn::VarBuilder;
    use tracing::{Level, Span, span};

    use super::{LAYERS, WIDTH};

    struct Linear {
        inner: candle_nn::Linear,
        span: Span,
    }

    fn linear(vb: VarBuilder<'_>) -> Result<Linear> {
        let inner = candle_nn::linear_no_bias(WIDTH, WIDTH, vb)?;
        Ok(Linear { inner, span: span!(Level::TRACE, "linear") })
    }

    impl Module for Linear {
        fn forward(&self, x: &Tensor) -> Result<Tensor> {
            let _enter = self.span.enter();
            self.inner.forward(x)
        }
    }

    struct RmsNorm {
        inner: candle_nn::RmsNorm,
        span: Span,
    }

    impl RmsNorm {
        fn new(vb: VarBuilder<'_>) -> Result<Self> {
            let span = span!(Level::TRACE, "rms-norm");
            Ok(RmsNorm { inner: candle_nn::rms_norm(WIDTH, 1e-5, vb)?, span })
        }

        fn forward(&self, x: &Tensor) -> Result<Tensor> {
            let _enter = self.span.enter();
            self.inner.forward_diff(x)
        }
    }

    struct Mlp {
        up: Linear,
        down: Linear,
        span: Span,
    }

    impl Mlp {
        fn load(vb: VarBuilder<'_>) -> Result<Self> {
            let span = span!(Level::TRACE, "mlp");
            Ok(Mlp { up: linear(vb.pp("up_proj"))?, down: linear(vb.pp("down_proj"))?, span })
        }

        fn forward(&self, x: &Tensor) -> Result<Tensor> {
            let _enter = self.span.enter();
            self.down.forward(&self.up.forward(x)?.tanh()?)
        }
    }

    struct Block {
        rms_1: RmsNorm,
        attn: Linear,
        rms_2: RmsNorm,
        mlp: Mlp,
        span: Span,
    }

    impl Block {
        fn load(vb: VarBuilder<'_>) -> Result<Self> {
            let span = span!(Level::TRACE, "block");
            let attn = linear(vb.pp("self_attn"))?;
            let mlp = Mlp::load(vb.pp("mlp"))?;
            let rms_1 = RmsNorm::new(vb.pp("input_layernorm"))?;
            let rms_2 = RmsNorm::new(vb.pp("post_attention_layernorm"))?;
            Ok(Block { rms_1, attn, rms_2, mlp, span })
        }

        fn forward(&self, x: &Tensor) -> Result<Tensor> {
            let _enter = self.span.enter();
            let x = (self.attn.forward(&self.rms_1.forward(x)?)? + x)?;
            self.mlp.forward(&self.rms_2.forward(&x)?)? + x
        }
    }

    /// Spans come before the parameters of a layer, and norms after what follows them.
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
            let ln_f = RmsNorm::new(vb.pp("model.norm"))?;
            let blocks = (0..LAYERS).map(|i| Block::load(vb.pp(format!("model.layers.{i}")))).collect::<Result<_>>()?;
            Ok(Llama { wte, blocks, ln_f, lm_head })
        }
    }

    impl Module for Llama {
        fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
            let mut x = self.wte.forward(tokens)?;
            for block in &self.blocks {
                x = block.forward(&x)?;
            }
            self.lm_head.forward(&self.ln_f.forward(&x)?)
        }
    }

    struct Layer {
        query: Linear,
        /// Without a span of its own.
        output: candle_nn::Linear,
        span: Span,
    }

    impl Layer {
        fn load(vb: VarBuilder<'_>) -> Result<Self> {
            let query = linear(vb.pp("attention.query"))?;
            let output = candle_nn::linear(WIDTH, WIDTH, vb.pp("output"))?;
            Ok(Layer { query, output, span: span!(Level::TRACE, "layer") })
        }

        fn forward(&self, x: &Tensor) -> Result<Tensor> {
            let _enter = self.span.enter();
            x + self.output.forward(&self.query.forward(x)?.tanh()?)?
        }
    }

    /// Spans come after the parameters of a layer.
    pub(super) struct Bert {
        embeddings: candle_nn::Embedding,
        layers: Vec<Layer>,
        pooler: Linear,
        span: Span,
    }

    impl Bert {
        pub(super) fn load(vb: VarBuilder<'_>) -> Result<Self> {
            let embeddings = candle_nn::embedding(7, WIDTH, vb.pp("embeddings"))?;
            let layers =
                (0..LAYERS).map(|i| Layer::load(vb.pp(format!("encoder.layer.{i}")))).collect::<Result<_>>()?;
            let span = span!(Level::TRACE, "encoder");
            Ok(Bert { embeddings, layers, pooler: linear(vb.pp("pooler"))?, span })
        }
    }

    impl Module for Bert {
        fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
            let mut x = self.embeddings.forward(tokens)?;
            {
                let _enter = self.span.enter();
                for layer in &self.layers {
                    x = layer.forward(&x)?;
                }
            }
            self.pooler.forward(&x)
        }
    }
}

const STRATEGIES: [ShardingStrategy; 3] =
    [ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard];

fn config(strategy: ShardingStrategy) -> FsdpConfig {
    FsdpConfig { strategy, seed: 4, ..FsdpConfig::default() }
}

fn tokens(rank: usize, step: usize) -> Tensor {
    let tokens: Vec<u32> = (0..6).map(|i| ((i * 5 + rank * 3 + step) % 7) as u32).collect();
    Tensor::from_vec(tokens, (2, 3), &Device::Cpu).unwrap()
}

type Load<M> = fn(VarBuilder<'static>) -> candle_core::Result<M>;

fn model<M>(group: &ProcessGroup, config: FsdpConfig, load: Load<M>) -> FullyShardedDataParallel<M> {
    FullyShardedDataParallel::new(group.clone(), config, |scope| load(scope.vb())).unwrap()
}

/// Losses of a few steps, and this rank's part of each parameter after them.
fn train<M: Module>(model: &FullyShardedDataParallel<M>) -> (Vec<f32>, Vec<Vec<f32>>) {
    let adamw = Algorithm::AdamW(AdamOptions { lr: 1e-2, ..AdamOptions::adamw() });
    let mut optimizer = Optimizer::new(model.parameters(), adamw).unwrap();
    let mut losses = Vec::new();
    for step in 0..3 {
        let tokens = tokens(model.group().rank(), step);
        let loss = model.forward(|module| (module.forward(&tokens)? - 0.5)?.sqr()?.mean_all()).unwrap();
        model.backward(&loss).unwrap();
        optimizer.step().unwrap();
        model.parameters().zero_grad();
        losses.push(loss.to_scalar().unwrap());
    }
    let parameters = model.parameters();
    let piece = |fqn: &str| {
        let shards = parameters.parameter(fqn).unwrap().shards().to_vec();
        let values = shards.iter().map(|shard| shard.tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap());
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
                let expected = plain.forward(|module| module.forward(&tokens(0, 0))).unwrap();
                let found = wrapped.forward(|module| module.forward(&tokens(0, 0))).unwrap();
                let [found, expected] = [found, expected].map(|x| x.flatten_all().unwrap().to_vec1::<f32>().unwrap());
                assert_eq!(found, expected, "{strategy} on {world}: bit-equal outputs");
                let losses = [&plain, &wrapped].map(|model| train(model).0);
                for (found, expected) in losses[1].iter().zip(&losses[0]) {
                    assert!((found - expected).abs() < 1e-6, "{strategy} on {world}: {losses:?}");
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

/// Bytes of the whole parameters whose names begin so.
fn bytes<M>(model: &FullyShardedDataParallel<M>, begins: impl Fn(&str) -> bool) -> usize {
    let parameters = model.parameters();
    let names = parameters.fqns().filter(|fqn| begins(fqn));
    names.map(|fqn| 4 * parameters.shape(fqn).unwrap().iter().product::<usize>()).sum()
}

fn check_memory<M: Module>(load: Load<M>, pattern: &str) {
    let prefix = pattern.trim_end_matches('*').to_owned();
    run_local(2, |group| {
        let model = model(&group, config(ShardingStrategy::FullShard).wrap(pattern), load);
        let parameters = model.parameters();
        let shards = parameters.parameter_bytes();
        let root = bytes(&model, |fqn| !fqn.starts_with(&prefix));
        let unit = bytes(&model, |fqn| fqn.starts_with(&format!("{prefix}0.")));
        let loss = |step| model.forward(|module| module.forward(&tokens(0, step))?.sqr()?.mean_all()).unwrap();
        loss(0);
        let limit = shards + root + 2 * unit;
        assert!(parameters.peak_parameter_bytes() <= limit, "{} of {limit}", parameters.peak_parameter_bytes());
        assert!(parameters.parameter_bytes() <= shards + root, "units are released after a forward");
        let before = group.traffic();
        let loss = loss(1);
        let gathers = group.traffic().since(&before).count(Operation::AllGather);
        assert!(
            gathers <= LAYERS as u64 + 2,
            "each unit is gathered once, but one that an outer span touches: {gathers}"
        );
        let before = group.traffic();
        model.backward(&loss).unwrap();
        let gathers = group.traffic().since(&before).count(Operation::AllGather);
        assert!(gathers <= LAYERS as u64 + 1, "{gathers}");
        assert!(parameters.peak_parameter_bytes() <= limit, "{} of {limit}", parameters.peak_parameter_bytes());
        assert_eq!(parameters.parameter_bytes(), shards);
    })
    .unwrap();
}

#[test]
fn a_wrapped_model_holds_at_most_two_units_beside_the_root() {
    check_memory(Llama::load, "model.layers.*");
    check_memory(Bert::load, "encoder.layer.*");
}

#[test]
fn wrapped_adapters_train_in_mixed_precision() {
    run_local(2, |group| {
        let mixed_precision =
            MixedPrecision { param: Some(DType::BF16), output: Some(DType::F32), ..MixedPrecision::default() };
        let requires_grad = Arc::new(|fqn: &str| fqn.contains("mlp"));
        let config = FsdpConfig { mixed_precision, requires_grad, ..config(ShardingStrategy::FullShard) };
        let model = model(&group, config.wrap("model.layers.*"), Llama::load);
        let between = model.parameters().parameter_bytes();
        let (losses, _) = train(&model);
        assert!(losses[2] < losses[0], "{losses:?}");
        assert_eq!(model.parameters().parameter_bytes(), between);
    })
    .unwrap();
}

/// Counts the spans of a model that are entered.
#[derive(Default)]
struct Entered(AtomicUsize);

impl Subscriber for Entered {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.name() == "block"
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(7)
    }

    fn enter(&self, span: &Id) {
        assert_eq!(span.into_u64(), 7);
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn the_programs_own_subscriber_still_sees_the_spans() {
    run_local(2, |group| {
        let entered = Arc::new(Entered::default());
        tracing::subscriber::with_default(Arc::clone(&entered), || {
            let model = model(&group, config(ShardingStrategy::FullShard).wrap("model.layers.*"), Llama::load);
            model.forward(|module| module.forward(&tokens(0, 0))).unwrap();
        });
        assert_eq!(entered.0.load(Ordering::Relaxed), LAYERS);
    })
    .unwrap();
}

#[test]
fn a_pattern_without_parameters_is_refused() {
    run_local(1, |group| {
        let config = config(ShardingStrategy::FullShard).wrap("transformer.h.*");
        let error = FullyShardedDataParallel::new(group, config, |scope| Llama::load(scope.vb())).err().unwrap();
        assert!(error.to_string().contains("`transformer.h.*`"), "{error}");
    })
    .unwrap();
}

#[test]
fn a_wrapped_unit_that_nothing_tells_of_is_refused() {
    let errors = run_local(2, |group| {
        let config = config(ShardingStrategy::FullShard).wrap("layers.*");
        let build = FullyShardedDataParallel::new(group, config, |scope| {
            let layer = |index: usize| candle_nn::linear(2, 2, scope.vb().pp("layers").pp(index));
            (0..2).map(layer).collect::<candle_core::Result<Vec<_>>>()
        });
        build.err().unwrap().to_string()
    })
    .unwrap();
    for error in errors {
        assert!(error.contains("`layers.0`") && error.contains("Scope::unit"), "{error}");
    }
}

#[test]
fn a_backward_through_wrapped_units_that_have_changed_is_refused() {
    run_local(2, |group| {
        let model = model(&group, config(ShardingStrategy::FullShard).wrap("model.layers.*"), Llama::load);
        let loss = model.forward(|module| module.forward(&tokens(0, 0))?.sqr()?.mean_all()).unwrap();
        let fqn = "model.layers.2.self_attn.weight";
        let value = model.parameters().parameter(fqn).unwrap();
        model.parameters().set_parameter(fqn, &value).unwrap();
        let error = model.backward(&loss).unwrap_err().to_string();
        assert!(error.contains("`model.layers.2`") && error.contains("changed"), "{error}");
    })
    .unwrap();
}
