//! A transformer of one's own: blocks that are units and keep no activations, fast operations with
//! gradients, half precision for computation. It learns to predict the next token of a counting
//! sequence.
//!
//! ```console
//! cargo run -p fsdp-examples --bin custom-model -- --ranks 4
//! ```

use anyhow::Result;
use candle_core::{D, DType, Device, Module, Tensor};
use candle_nn::{Embedding, Init, Linear, embedding, linear_no_bias};
use clap::Parser;
use fsdp::nn::MixedPrecision;
use fsdp::ops;
use fsdp::prelude::*;

/// Train a small transformer.
#[derive(Parser)]
struct Options {
    /// Number of ranks
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=8))]
    ranks: u8,
    #[arg(long, default_value_t = 30)]
    steps: usize,
    /// Gather and compute in bf16; shards and optimizer state stay in f32
    #[arg(long)]
    bf16: bool,
}

const TOKENS: usize = 17;
const WIDTH: usize = 32;
const HEADS: usize = 4;
const LAYERS: usize = 3;
/// The rows of a step, on all ranks together.
const ROWS: usize = 24;
const TIME: usize = 16;

struct RmsNorm(Tensor);

impl RmsNorm {
    fn new(scope: &Scope) -> candle_core::Result<Self> {
        Ok(RmsNorm(scope.vb().get_with_hints(
            WIDTH,
            "weight",
            Init::Const(1.0),
        )?))
    }
}

impl Module for RmsNorm {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        // candle's fused norm has no backward.
        ops::rms_norm(x, &self.0, 1e-5)
    }
}

struct Block {
    norm_1: RmsNorm,
    qkv: Linear,
    out: Linear,
    norm_2: RmsNorm,
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(scope: &Scope) -> candle_core::Result<Self> {
        let linear =
            |inputs, outputs, name: &str| linear_no_bias(inputs, outputs, scope.vb().pp(name));
        Ok(Block {
            norm_1: RmsNorm::new(&scope.pp("norm_1"))?,
            qkv: linear(WIDTH, 3 * WIDTH, "qkv")?,
            out: linear(WIDTH, WIDTH, "out")?,
            norm_2: RmsNorm::new(&scope.pp("norm_2"))?,
            up: linear(WIDTH, 4 * WIDTH, "up")?,
            down: linear(4 * WIDTH, WIDTH, "down")?,
        })
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let attention =
            ops::packed_attention(&self.qkv.forward(&self.norm_1.forward(x)?)?, HEADS, true)?;
        let x = (x + self.out.forward(&attention)?)?;
        let hidden = ops::gelu(&self.up.forward(&self.norm_2.forward(&x)?)?)?;
        &x + self.down.forward(&hidden)?
    }
}

struct Transformer {
    tokens: Embedding,
    positions: Embedding,
    blocks: Vec<Unit<Recomputed<Block>>>,
    norm: RmsNorm,
    head: Linear,
}

impl Transformer {
    fn new(scope: &Scope) -> candle_core::Result<Self> {
        let mut blocks = Vec::new();
        for index in 0..LAYERS {
            // A block is gathered for its forward and its backward only, and computes its
            // activations again in the backward.
            let layer = scope.pp("blocks").pp(index);
            blocks.push(layer.unit(|scope| Ok(Recomputed::new(Block::new(scope)?)))?);
        }
        Ok(Transformer {
            tokens: embedding(TOKENS, WIDTH, scope.vb().pp("tokens"))?,
            positions: embedding(TIME, WIDTH, scope.vb().pp("positions"))?,
            blocks,
            norm: RmsNorm::new(&scope.pp("norm"))?,
            head: linear_no_bias(WIDTH, TOKENS, scope.vb().pp("head"))?,
        })
    }

    /// Returns the mean loss of rows of tokens, `[rows, TIME + 1]`: each token is the target of
    /// those before it.
    fn loss(&self, rows: &Tensor) -> candle_core::Result<Tensor> {
        let inputs = rows.narrow(1, 0, TIME)?;
        let targets = rows.narrow(1, 1, TIME)?;
        let positions = Tensor::arange(0, TIME as u32, rows.device())?;
        let mut x = self
            .tokens
            .forward(&inputs)?
            .broadcast_add(&self.positions.forward(&positions)?)?;
        for block in &self.blocks {
            x = block.forward(&x)?;
        }
        let scores = self.head.forward(&self.norm.forward(&x)?)?;
        ops::cross_entropy(
            &scores.flatten_to(D::Minus2)?.to_dtype(DType::F32)?,
            &targets.flatten_all()?,
        )
    }
}

/// Returns this rank's rows of a step: token `t` of a row is `start + stride * t`, modulo the
/// number of tokens.
fn rows(group: &ProcessGroup, step: usize) -> candle_core::Result<Tensor> {
    let mut tokens = Vec::new();
    for row in (group.rank()..ROWS).step_by(group.world_size()) {
        let start = row * 5 + step;
        let stride = 1 + row % 3;
        tokens.extend((0..=TIME).map(|t| ((start + stride * t) % TOKENS) as u32));
    }
    let count = tokens.len() / (TIME + 1);
    Tensor::from_vec(tokens, (count, TIME + 1), &Device::Cpu)
}

fn train(group: &ProcessGroup, options: &Options) -> Result<()> {
    let mut config = FsdpConfig::default();
    if options.bf16 {
        config.mixed_precision = MixedPrecision {
            param: Some(DType::BF16),
            reduce: Some(DType::F32),
            ..MixedPrecision::default()
        };
    }
    let model = FullyShardedDataParallel::new(group.clone(), config, Transformer::new)?;
    let adamw = AdamOptions {
        lr: 3e-3,
        ..AdamOptions::adamw()
    };
    let mut optimizer = Optimizer::new(model.parameters(), Algorithm::AdamW(adamw))?;
    for step in 0..options.steps {
        let rows = rows(group, step)?;
        // Ranks may differ by a row: each row counts the same.
        let weight = (rows.dim(0)? * group.world_size()) as f64 / ROWS as f64;
        let loss = model.forward(|transformer| transformer.loss(&rows)? * weight)?;
        model.backward(&loss)?;
        model.parameters().clip_grad_norm(1.0)?;
        optimizer.step()?;
        model.parameters().zero_grad();
        let mut global = [f64::from(loss.to_scalar::<f32>()?)];
        group.all_reduce(&mut global, ReduceOp::Avg)?;
        if group.rank() == 0 && (step % 10 == 0 || step + 1 == options.steps) {
            println!("step {step}: loss {:.4}", global[0]);
        }
    }
    let parameters = model.parameters();
    if group.rank() == 0 {
        let kept = parameters.parameter_bytes();
        let peak = parameters.peak_parameter_bytes();
        println!("each rank keeps about {kept} bytes of parameters, and had at most {peak}");
    }
    Ok(())
}

fn main() -> Result<()> {
    let options = Options::parse();
    let done = run_local(options.ranks.into(), |group| train(&group, &options))?;
    done.into_iter().collect()
}
